// The common part of the linear kernels for GPUs. Follows linear.h.

#if BITS <= 8
static inline float zero_point(__global const uchar *zeros, size_t index, int asymmetric) {
  return asymmetric ? (float)zeros[index] : (float)MIDDLE;
}
#endif

#ifdef TOKENS
// Kernels for a few tokens: TOKENS = 1, 2, 4 or 8 share one pass over the weights; token_step is the same.

// Tuned: work-items that share a column, each with every SLICES-th block of inputs.
#ifndef SLICES
#define SLICES 4
#endif
// Adds the slices' sums up and stores them.
#define STORE_SLICES                                                                                         \
  UNROLL for (int t = 0; t < TOKENS; t++) partial[slice][t][lane] = totals[t];                               \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
  if (lane < tile.z)                                                                                         \
    for (int t = slice; t < count; t += SLICES) {                                                            \
      float total = 0.0f;                                                                                    \
      for (int s = 0; s < SLICES; s++) total += partial[s][t][lane];                                         \
      store_out(total, y + (size_t)(first_token + token + t) * rows + tile.y, lane);                         \
    }
#else
// Kernels for many tokens. A work-group computes TILE_TOKENS x LANES outputs, each work-item ITEM_TOKENS x 4 of
// them. token_step is TILE_TOKENS. Both are tuned, and so is DEPTH, the inputs staged at a time; every block is a
// multiple of it.
#ifndef TILE_TOKENS
#define TILE_TOKENS 32
#endif
#ifndef ITEM_TOKENS
#define ITEM_TOKENS 4
#endif
#ifndef DEPTH
#define DEPTH 16
#endif
#define ITEMS_X (LANES / 4)
#define ITEMS_Y (TILE_TOKENS / ITEM_TOKENS)
#endif
