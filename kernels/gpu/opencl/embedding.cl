// Rows of a weight in the layout of linear.h, gathered by token id into the float residual stream.
// Each work-item writes `span` inputs of one token; span is a multiple of 16. The buffers hold the rows from
// `first_row` to `end_row` of the table; tokens of other rows are left to other launches. With -DBLOCK the scale block
// is known when compiling.
#ifdef BLOCK
#define SCALE_BLOCK BLOCK
#else
#define SCALE_BLOCK block
#endif

__kernel void embedding(
    __global const weight_t *restrict weights, __global const half *restrict scales,
    __global const zero_t *restrict zeros, __global const int *restrict tokens, __global float *restrict y,
    int columns, int table_rows, int first_row, int end_row, int block, int asymmetric, int span, float factor) {
  const int first = get_global_id(0) * span, token = get_global_id(1);
  if (first >= columns) return;
  const int table_row = clamp(tokens[token], 0, table_rows - 1), row = table_row - first_row;
  if (row < 0 || table_row >= end_row) return;
  const size_t row_tile = (uint)row / LANES;
  const uint lane = (uint)row % LANES;
  y += (size_t)token * columns;
  weights += row_tile * ((uint)columns / WORD_INPUTS) * LANES + lane;
#if BITS <= 8
  for (int k = first; k < min(first + span, columns); k += WORD_INPUTS) {
    const size_t group = (row_tile * ((uint)columns / SCALE_BLOCK) + (uint)k / SCALE_BLOCK) * LANES + lane;
    const float scale = load_half(scales, group);
#ifdef MINIMUMS
    const float offset = load_half(zeros, group);
#else
    const float offset = -scale * (asymmetric ? (float)zeros[group] : (float)MIDDLE);
#endif
    const uint q = weights[(uint)k / WORD_INPUTS * LANES];
    UNROLL for (int i = 0; i < WORD_INPUTS; i++)
      y[k + i] = FMA((float)((q >> (BITS * i)) & CODE_MASK), scale, offset) * factor;
  }
#else
  for (int k = first; k < min(first + span, columns); k++)
    y[k] = load_weight(weights, (uint)k * LANES) * factor;
#endif
}
