// The common part of the linear kernels with int8 activations. Follows linear.h; BITS is 4 or 8.
//
// Inputs are rounded for each block of a row: scale = max|x| / 127, code = x * (127 / max|x|) to the nearest
// integer, halves to the even one. Four codes make a word, the first in the lowest bits. With BITS = 4 the
// even inputs of each eight precede the odd ones, the order that masking a word of weights gives.
#define QUADS (WORD_INPUTS / 4)
#if BITS == 4
#define QUAD(q, h) (((q) >> (4 * (h))) & 0x0f0f0f0f)
#else
#define QUAD(q, h) (q)
#endif

// The product of a block: `sum` of codes times codes, less the zero point's share of the inputs' sum, times both scales.
// Exact up to the scales, as no sum reaches 2^24. A minimum has its share in place of the zero point.
#ifdef MINIMUMS
#define BLOCK_PRODUCT(sum, zero, scale, input_scale, input_sum)                                              \
  (FMA(zero, input_sum, (sum) * (scale)) * (input_scale))
#else
#define BLOCK_PRODUCT(sum, zero, scale, input_scale, input_sum)                                              \
  (FMA(-(zero), input_sum, sum) * ((scale) * (input_scale)))
#endif

// x_codes is [tokens][columns / 4] and x_blocks [tokens][columns / block], the scale and the sum of a block's
// codes; both start with the first token to compute and have memory for seven tokens after the last. The other
// arguments are those of LINEAR_ARGUMENTS.
#define INT8_ARGUMENTS                                                                                       \
  WEIGHTS, __global const half *restrict scales, __global const zero_t *restrict zeros,                      \
      __global const uint *restrict x_codes, __global const float2 *restrict x_blocks,                       \
      __global out_t *restrict y, __global const int4 *restrict tiles, int columns, int rows, int block,     \
      int asymmetric, int weight_columns, int first_column, int first_token, int tokens, int token_step
