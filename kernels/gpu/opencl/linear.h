// The common part of the linear kernels: weight layout and arguments. Follows common.h.
//
// Defines: BITS = 4, 8, 16 or 32, the bits of a weight. OUT_FLOAT = 1 writes float where act_t is half.
//
// Weights: row tiles of 64 rows. BITS 4 or 8: uint [row tile][k / WORD_INPUTS][64], the first input in the
// lowest bits. BITS 16 or 32: half or float [row tile][k][64]. Scales half and zero points uchar
// [row tile][k / block][64]. With -DMINIMUMS half minimums take the place of zero points: a weight is its code times the
// scale, plus the minimum.
//
// tiles: one entry per row tile in use: (row tile, its first output column, columns in use, 0).
//
// A launch may take a range of inputs: `columns` of the weight_columns of the layout, from first_column on.
//
// With -DWEIGHT_IMAGE the words of BITS 4 or 8 are the texels of an image over their buffer, which a GPU reads through
// the cache of its texture units.
//
// With -DGROUPED a launch multiplies each row with the weights of one expert of a layer; rows of an expert are neighbours.
// `tiles` are the row tiles of one expert, of which there are `expert_tiles`, and the weights hold `experts` of them from
// first_expert on. `places` has an entry for each step of rows: (expert, first row, rows, 0). Work-groups of experts in
// other buffers leave at once, and so do idle ones, whose expert is negative. Second grid dimension: the entries.
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
#ifdef HAS_HALF
// A constant index is a part of the address; vload_half takes ten instructions for it on Mesa.
#define load_weight(p, i) (float)(p)[i]
#else
#define load_weight(p, i) load_half(p, i)
#endif
#else
typedef float weight_t;
#define WORD_INPUTS 1
#define load_weight8(p, i) load_float8(p, i)
#define load_weight(p, i) ((p)[i])
#endif
#define CODE_MASK ((1u << (BITS & 15)) - 1u)

#ifdef MINIMUMS
typedef half zero_t;
#else
typedef uchar zero_t;
#endif

// The argument of the weights, a place among them, and the word that lies `offset` behind a place.
#ifdef WEIGHT_IMAGE
#ifdef GROUPED
#define WEIGHTS PLACES, __read_only image1d_buffer_t weights
#else
#define WEIGHTS __read_only image1d_buffer_t weights
#endif
typedef uint weight_place;
#define PLACE(offset) (uint)(offset)
#define WORD(place, offset) read_imageui(weights, (int)((place) + (offset))).x
#else
#ifdef GROUPED
#define WEIGHTS PLACES, __global const weight_t *restrict weights
#else
#define WEIGHTS __global const weight_t *restrict weights
#endif
typedef __global const weight_t *weight_place;
#define PLACE(offset) (weights + (offset))
#define WORD(place, offset) (place)[offset]
#endif

#ifdef GROUPED
// In front of the weights.
#define PLACES __global const int4 *restrict places, int first_expert, int experts, int expert_tiles
// The row tile of a work-group, its first token, and its tokens.
#define FIND_PLACE(number, index)                                                                            \
  const int4 place = places[get_group_id(1)];                                                                \
  if (place.x < first_expert || place.x >= first_expert + experts) return;                                   \
  int4 tile = tiles[index];                                                                                  \
  tile.x += (place.x - first_expert) * expert_tiles;                                                         \
  const number token = place.y, count = place.z;
#endif

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

// Inputs of a kernel that makes them the normed ones itself (linear_endings.h) are floats.
#ifdef NORMED
typedef float in_t;
#define load_in8(p, i) load_float8(p, i)
#else
typedef act_t in_t;
#define load_in8(p, i) load_act8(p, i)
#endif

// x is [tokens][columns] and y [tokens][rows], both from first_token on. Float weights use no block, scales or zeros;
// zeros are read if asymmetric is not 0. Second grid dimension: steps of token_step tokens.
#define LINEAR_ARGUMENTS                                                                                     \
  WEIGHTS, __global const half *restrict scales, __global const zero_t *restrict zeros,                      \
      __global const in_t *restrict x, __global out_t *restrict y, __global const int4 *restrict tiles,      \
      int columns, int rows, int block, int asymmetric, int weight_columns, int first_column,                \
      int first_token, int tokens, int token_step
