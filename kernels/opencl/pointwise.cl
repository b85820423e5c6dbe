// The gated activation and the join of the logits. Follows common.h and layers.h.
// Grid: work-items over runs of `span` columns (a multiple of 8), tokens.

// out = silu(gate) * up of the two members gate and up.
GROUP_SIZE __kernel void gated_activation(__global const act_t *a, __global const act_t *b,
                                          __global act_t *out, int gate_split, int up_split, int columns,
                                          int span) {
  size_t token = get_global_id(1);
  int a_columns = gate_split + up_split;
  __global const act_t *a_row = a + token * a_columns;
  __global const act_t *b_row = b + token * (2 * columns - a_columns);
  member_row gates = {a_row, b_row, gate_split};
  member_row ups = {a_row + gate_split, b_row + (columns - gate_split), up_split};
  __global act_t *target = out + token * columns;
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  for (int i = begin; i < end; i += 8) {
    int count = min(8, columns - i);
    float8 gate = load_member(gates, i, count);
    float8 up = load_member(ups, i, count);
    // The exponential of minus the magnitude cannot overflow.
    float8 small = exp2_8((gate < 0.0f ? gate : -gate) * 1.44269504f);
    float8 value = gate * (gate < 0.0f ? small : (float8)1.0f) / (1.0f + small) * up;
    STORE_PART(store_act8, store_act, value, target, i, count)
  }
}

// Puts the two segments of the head's output together as float.
GROUP_SIZE __kernel void join_logits(__global const act_t *a, __global const act_t *b, __global float *out,
                                     int split, int columns, int span) {
  size_t row = get_global_id(1);
  member_row logits = {a + row * split, b + row * (columns - split), split};
  __global float *target = out + row * columns;
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  for (int i = begin; i < end; i += 8) {
    int count = min(8, columns - i);
    float8 value = load_member(logits, i, count);
    STORE_PART(store_float8, store_float, value, target, i, count)
  }
}
