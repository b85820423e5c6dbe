// The common part of the linear kernels: weight layout and arguments. Follows common.h.
//
// Defines: BITS = 4, 8, 16 or 32, the bits of a weight. OUT_FLOAT = 1 writes float where act_t is half.
//
// Weights: row tiles of 64 rows. BITS 4 or 8: uint [row tile][k / WORD_INPUTS][64], the first input in the
// lowest bits. BITS 16 or 32: half or float [row tile][k][64]. Scales half and zero points uchar
// [row tile][k / block][64].
//
// tiles: one entry per row tile in use: (row tile, its first output column, columns in use, 0).
//
// A launch may take a range of inputs: `columns` of the weight_columns of the layout, from first_column on.
#define LANES 64

#if BITS == 4
typedef uint weight_t;
#define WORD_INPUTS 8
#define MIDDLE 8
#elif BITS == 8
typedef uint weight_t;
#define WORD_INPUTS 4
#define MIDDLE 128
#elif BITS == 16
typedef half weight_t;
#define WORD_INPUTS 1
#define load_weight8(p, i) load_half8(p, i)
#define load_weight(p, i) load_half(p, i)
#else
typedef float weight_t;
#define WORD_INPUTS 1
#define load_weight8(p, i) load_float8(p, i)
#define load_weight(p, i) ((p)[i])
#endif
#define CODE_MASK ((1u << (BITS & 15)) - 1u)

#if defined(OUT_FLOAT) || !defined(ACT_HALF)
typedef float out_t;
#define store_out(v, p, i) ((p)[i] = (v))
#define store_out8(v, p, i) store_float8(v, p, i)
#else
typedef half out_t;
#define store_out(v, p, i) store_half(v, p, i)
#define store_out8(v, p, i) store_half8(v, p, i)
#endif

// Offset of a row tile's weights at the first input of the launch.
static inline size_t first_weight(uint row_tile, uint weight_columns, uint first_column) {
  return ((size_t)row_tile * (weight_columns / WORD_INPUTS) + first_column / WORD_INPUTS) * LANES;
}

// Offset of its scales and zero points there.
static inline size_t first_group(uint row_tile, uint weight_columns, uint first_column, uint block) {
  return ((size_t)row_tile * (weight_columns / block) + first_column / block) * LANES;
}

// x is [tokens][columns] and y [tokens][rows], both from first_token on. Float weights use no block, scales or zeros;
// zeros are read if asymmetric is not 0. Second grid dimension: steps of token_step tokens.
#define LINEAR_ARGUMENTS                                                                                     \
  __global const weight_t *restrict weights, __global const half *restrict scales,                           \
      __global const uchar *restrict zeros, __global const act_t *restrict x, __global out_t *restrict y,    \
      __global const int4 *restrict tiles, int columns, int rows, int block, int asymmetric,                 \
      int weight_columns, int first_column, int first_token, int tokens, int token_step
