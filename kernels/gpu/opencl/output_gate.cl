// out = x * sigmoid(gate) of each head, where the gate is a member of a linear, which may have a bias. With BY_HEAD the
// gate has one element for each head, and no bias. With SILU x is float and multiplied by silu(gate), with NORMED also by
// weight / rms(x); with GATE_FIRST that norm is of the product with the gate. Follows common.h, rounding.h, glue.h and
// gates.h.
// Grid: a work-group for each head; tokens.

#ifdef SILU
typedef float gated_t;
#define load_gated load_float
#define load_gated8 load_float8
#define GATED(value, gate) ((value) * (gate) * sigmoid_8(gate))
#else
typedef act_t gated_t;
#define load_gated load_act
#define load_gated8 load_act8
#define GATED(value, gate) ((value) * sigmoid_8(gate))
#endif

// rows and leading: columns of the linear and those of them in a; before and leading_before: those before the gate. Weights
// of a head lie `weight_step` behind those of the head before.
GROUP_SIZE __kernel void output_gate(__global const gated_t *x, __global const act_t *a, __global const act_t *b,
                                     __global const float *bias, __global const float *weight, __global act_t *out,
                                     int rows, int leading, int before, int leading_before, int split, int heads,
                                     int head_dim, int weight_step, int has_bias, float epsilon) {
  const size_t token = get_global_id(1);
  const int lane = get_local_id(0), start = get_group_id(0) * head_dim;
  member_row gates = {a + token * leading + leading_before,
                      b + token * COLUMNS_OF_B(rows, leading) + COLUMNS_OF_B(before, leading_before), split};
  x += token * heads * head_dim + start;
  out += token * heads * head_dim + start;
  weight += get_group_id(0) * weight_step;
#ifdef NORMED
  __local float sums[WG];
  float8 squares = 0.0f;
  for (int i = lane * 8; i < head_dim; i += WG * 8) {
    LOAD_PART(load_gated8, load_gated, x, i, min(8, head_dim - i), value)
#ifdef GATE_FIRST
    const float8 gate = load_member(gates, start + i, min(8, head_dim - i));
    value = GATED(value, gate);
#endif
    squares = FMA(value, value, squares);
  }
  const float factor = 1.0f / sqrt(group_sum(sum8(squares), sums) / head_dim + epsilon);
#endif
  for (int i = lane * 8; i < head_dim; i += WG * 8) {
    const int count = min(8, head_dim - i);
    LOAD_PART(load_gated8, load_gated, x, i, count, value)
#ifdef BY_HEAD
    const float8 gate = load_member(gates, get_group_id(0), 1).s0;
#else
    float8 gate = load_member(gates, start + i, count);
    if (has_bias) {
      LOAD_PART(load_float8, load_float, bias, before + start + i, count, shift)
      gate += shift;
    }
#endif
    value = GATED(value, gate);
#ifdef NORMED
    LOAD_PART(load_float8, load_float, weight, i, count, scale)
    value *= factor * scale;
#endif
    STORE_PART(store_act8, store_act, value, out, i, count)
  }
}
