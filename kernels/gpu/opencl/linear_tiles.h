// The common part of the linear kernels for GPUs. Follows linear.h.
//
//   BLOCK        inputs that share a scale, of quantised weights
//   ASYMMETRIC   zeros are read, of MINIMUMS too
//
// The defines replace the arguments `block` and `asymmetric`. Phone-class GPUs divide and multiply 64-bit integers in
// software and keep arrays in memory that the compiler does not unroll, so indices below the start of a tile are
// 32-bit and unsigned, and what a work-item sums has a name of its own for each token instead of an array.

#if BITS <= 8
#ifdef MINIMUMS
#define ZERO(index) load_half(zeros, index)
#elif defined(ASYMMETRIC)
#define ZERO(index) (float)zeros[index]
#else
#define ZERO(index) (float)MIDDLE
#endif
// The numbers of a block that turn codes into values: a code times `unit` plus `shift`, and the factor of their sum. With
// minimums each weight has its own scale, since one of zero cannot divide the minimum.
#ifdef MINIMUMS
#define LOAD_BLOCK(group)                                                                                    \
  const float unit = load_half(scales, group), shift = ZERO(group), scale = 1.0f;
#else
#define LOAD_BLOCK(group)                                                                                    \
  const float unit = 1.0f, shift = -ZERO(group), scale = load_half(scales, group);
#endif
// Four codes of a word as values. A mask without a shift leaves the code times 2^(BITS i), which the exact factor undoes.
#if BITS == 4
#define CODES_LOW(q) convert_float4((uint4)(q) & (uint4)(0xfu, 0xf0u, 0xf00u, 0xf000u))
#define CODES_HIGH(q) convert_float4((uint4)(q) & (uint4)(0xf0000u, 0xf00000u, 0xf000000u, 0xf0000000u))
#define FACTORS_LOW (float4)(1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f)
#define FACTORS_HIGH (float4)(0x1p-16f, 0x1p-20f, 0x1p-24f, 0x1p-28f)
#define VALUES_HIGH(q) FMA(CODES_HIGH(q), FACTORS_HIGH * unit, (float4)shift)
#else
#define CODES_LOW(q) convert_float4((uint4)(q) & (uint4)(0xffu, 0xff00u, 0xff0000u, 0xff000000u))
#define FACTORS_LOW (float4)(1.0f, 0x1p-8f, 0x1p-16f, 0x1p-24f)
#endif
#define VALUES_LOW(q) FMA(CODES_LOW(q), FACTORS_LOW * unit, (float4)shift)
#endif

static inline float across(float4 value) { return (value.x + value.y) + (value.z + value.w); }

#ifdef TOKENS
// Kernels for a few tokens: TOKENS = 1, 2, 4 or 8 share one pass over the weights; token_step is the same.

// Tuned: work-items that share a column, each with every SLICES-th block of inputs.
#ifndef SLICES
#define SLICES 4
#endif
// Rows of a tile that a work-group computes, and its tiles.
#ifndef ROWS
#define ROWS LANES
#endif
#ifndef TILES
#define TILES 1
#endif
#define ITEMS (ROWS * SLICES * TILES)
// A work-item's place in its work-group, its row of the tile, and its slice of the inputs.
#if ROWS == LANES
#define TILE_OF_GROUP get_group_id(0)
#define FIND_LANE const uint lane = row;
#else
#define TILE_OF_GROUP (get_group_id(0) / (LANES / ROWS))
#define FIND_LANE const uint lane = (uint)get_group_id(0) % (LANES / ROWS) * ROWS + row;
#endif
#if TILES == 1
#define OWN_TILE tiles[TILE_OF_GROUP]
#define FIND_SLICE const uint slice = part;
#else
#define OWN_TILE tiles[TILE_OF_GROUP * TILES + part / SLICES]
#define FIND_SLICE const uint slice = part % SLICES;
#endif
#define OWN_ITEM (part * ROWS + row)
#define FIND_ITEM                                                                                            \
  const uint row = get_local_id(0), part = get_local_id(1);                                                  \
  FIND_LANE                                                                                                  \
  FIND_SLICE
// Floats that the slices' sums take.
#define PARTIAL_FLOATS (ITEMS * TOKENS)
#ifndef ENDING
#define BEGIN_ENDING
#define ENDING_ARGUMENTS
#define KEEP_PARTIAL(t) partial[(slice * TOKENS + t) * ROWS + row] = total##t;
// Adds the slices' sums total0, total1, ... up through local memory and stores them.
#define STORE_SLICES(partial)                                                                                \
  REPEAT(TOKENS, KEEP_PARTIAL)                                                                               \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
  y += (size_t)(first_token + token) * rows + tile.y;                                                        \
  if (lane < (uint)tile.z)                                                                                         \
    for (uint t = slice; t < count; t += SLICES) {                                                           \
      float total = 0.0f;                                                                                    \
      for (uint s = 0; s < SLICES; s++) total += partial[(s * TOKENS + t) * ROWS + row];                       \
      store_out(total, y, t * rows + lane);                                                                  \
    }
#endif
#else
// Kernels for many tokens. A work-group computes TILE_TOKENS x LANES outputs, each work-item ITEM_TOKENS x 4 of
// them. token_step is TILE_TOKENS. Both are tuned, and so is DEPTH, the inputs staged at a time; every block is a
// multiple of it. There are at least LANES work-items.
#ifndef TILE_TOKENS
#define TILE_TOKENS 64
#endif
#ifndef ITEM_TOKENS
#define ITEM_TOKENS 16
#endif
#ifndef DEPTH
#define DEPTH 16
#endif
#define ITEMS_X (LANES / 4)
#define ITEMS_Y (TILE_TOKENS / ITEM_TOKENS)
#define ITEMS (ITEMS_X * ITEMS_Y)
// The columns of a work-item lie ITEMS_X apart, so that neighbours read and write side by side.
#define FOUR_COLUMNS(of, index)                                                                              \
  (float4)(of(index), of((index) + ITEMS_X), of((index) + 2 * ITEMS_X), of((index) + 3 * ITEMS_X))
#define ZERO4(index) FOUR_COLUMNS(ZERO, index)
#define SCALE_OF(index) load_half(scales, index)
#define SCALE4(index) FOUR_COLUMNS(SCALE_OF, index)
// Turns of a work-item at `runs` pieces of work that all share: at least one, which some may sit out.
#define TURNS(runs) ((runs) > ITEMS ? (runs) / ITEMS : 1)

// Stores the sums of one token: every `step`-th column, those below `valid`.
static inline void store_row(float4 sums, __global out_t *y, int valid, int step) {
  if (valid > 0) store_out(sums.x, y, 0);
  if (valid > step) store_out(sums.y, y, step);
  if (valid > 2 * step) store_out(sums.z, y, 2 * step);
  if (valid > 3 * step) store_out(sums.w, y, 3 * step);
}
#define STORE_ROW(r)                                                                                         \
  if (strip * ITEM_TOKENS + r < count)                                                                       \
    store_row(STORED(r), y + (strip * ITEM_TOKENS + r) * rows, tile.z - (int)column, COLUMN_STEP);
#endif
