// Puts the parts of the context together, one work-group per token and head. Follows attention.h.

GROUP_SIZE __kernel void attention_join(__global const float *partial, __global act_t *out, int parts) {
  size_t row = get_group_id(0);
  __global const float *source = partial + row * parts * PARTIAL_COLUMNS;
  float best = NO_SCORE;
  for (int part = 0; part < parts; ++part)
    best = max(best, source[part * PARTIAL_COLUMNS + HEAD_DIM]);
  for (int d = (int)get_local_id(0) * 8; d < HEAD_DIM; d += WG * 8) {
    float8 sum = 0.0f;
    float total = 0.0f;
    for (int part = 0; part < parts; ++part) {
      __global const float *one = source + part * PARTIAL_COLUMNS;
      float weight = exp2_8((float8)(one[HEAD_DIM] - best)).s0;
      LOAD_PART(load_float8, load_float, one, d, HEAD_DIM - d, value)
      sum = FMA(value, (float8)weight, sum);
      total = FMA(one[HEAD_DIM + 1], weight, total);
    }
    sum = sum / total;
    STORE_PART(store_act8, store_act, sum, out + row * HEAD_DIM, d, HEAD_DIM - d)
  }
}
