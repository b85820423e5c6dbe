// out = sigmoid(x . weight) * values, one work-group per token; values are a linear's output of one member, as wide as
// x. Follows common.h, rounding.h and glue.h.

GROUP_SIZE __kernel void token_gate(__global const act_t *x, __global const float *weight, __global const act_t *a,
                                    __global const act_t *b, __global act_t *out, int split, int columns) {
  __local float sums[WG];
  size_t token = get_group_id(0);
  int lane = get_local_id(0);
  float8 products = 0.0f;
  for (int i = lane * 8; i < columns; i += WG * 8) {
    int count = min(8, columns - i);
    LOAD_PART(load_act8, load_act, x + token * columns, i, count, value)
    LOAD_PART(load_float8, load_float, weight, i, count, factor)
    products = FMA(value, factor, products);
  }
  float score = group_sum(sum8(products), sums);
  float share = 1.0f / (1.0f + exp(-score));
  member_row values = {a + token * split, b + token * COLUMNS_OF_B(columns, split), split};
  for (int i = lane * 8; i < columns; i += WG * 8) {
    int count = min(8, columns - i);
    float8 value = load_member(values, i, count) * share;
    STORE_PART(store_act8, store_act, value, out + token * columns, i, count)
  }
}
