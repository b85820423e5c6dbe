// cutoffs[token] = mean + deviations * standard deviation of the first of two members, one work-group per token.
// Follows common.h, rounding.h and glue.h.

GROUP_SIZE __kernel void gate_cutoff(__global const act_t *a, __global const act_t *b, __global float *cutoffs,
                                     int gate_split, int up_split, int columns, float deviations) {
  __local float sums[WG];
  size_t token = get_group_id(0);
  int lane = get_local_id(0), a_columns = gate_split + up_split;
  member_row gates = {a + token * a_columns, b + token * COLUMNS_OF_B(2 * columns, a_columns), gate_split};
  float8 total = 0.0f, squares = 0.0f;
  for (int i = lane * 8; i < columns; i += WG * 8)
    total += load_member(gates, i, min(8, columns - i));
  float mean = group_sum(sum8(total), sums) / columns;
  for (int i = lane * 8; i < columns; i += WG * 8) {
    float8 value = load_member(gates, i, min(8, columns - i)) - mean;
    squares = FMA(value, value, squares);
  }
  // Each zero behind the last column has added the square of the mean.
  int padding = -columns & 7;
  float variance = max(group_sum(sum8(squares), sums) - padding * mean * mean, 0.0f) / columns;
  if (lane == 0)
    cutoffs[token] = mean + deviations * sqrt(variance);
}
