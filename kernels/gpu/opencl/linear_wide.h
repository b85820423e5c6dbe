// The common part of the linear kernels for CPU devices: vectors of columns. Follows linear.h.

#ifdef __AVX512F__
#define WIDTH 16
typedef float16 wide_float;
typedef uint16 wide_uint;
typedef uint16 loose_uint16 __attribute__((aligned(4)));
#define load_words(p, i) (*(__global const loose_uint16 *)((p) + (i)))
#define codes_to_float(q) convert_float16(as_int16(q))
#define load_wide(load8, p, i) (float16)(load8(p, i), load8(p, (i) + 8))
#else
#define WIDTH 8
typedef float8 wide_float;
typedef uint8 wide_uint;
#define load_words(p, i) load_uint8(p, i)
#define codes_to_float(q) convert_float8(as_int8(q))
#define load_wide(load8, p, i) load8(p, i)
#endif

// Distance of the weights' prefetch (tuned; 0 for none): by default a page, where a core's own prefetching stops. It
// makes one token 1.6 times faster.
#ifndef PREFETCH_BYTES
#define PREFETCH_BYTES 4096
#endif
#if PREFETCH_BYTES > 0 && defined(__clang__) && (defined(__x86_64__) || defined(__aarch64__))
#define PREFETCH_WORDS(p) __builtin_prefetch((const char *)(size_t)(p) + PREFETCH_BYTES)
#else
#define PREFETCH_WORDS(p)
#endif
// Words in a cache line.
#define LINE_WORDS 16

// Write the first `valid` columns.
static inline void store_columns(wide_float value, __global out_t *y, int valid) {
  const float8 *parts = (const float8 *)&value;
  for (int p = 0; p < WIDTH / 8; p++, y += 8, valid -= 8) {
    if (valid >= 8) {
      store_out8(parts[p], y, 0);
    } else {
      const float *lanes = (const float *)&parts[p];
      for (int c = 0; c < valid; c++) store_out(lanes[c], y, c);
    }
  }
}

// Vectors in a row tile.
#define VECTORS (LANES / WIDTH)

#if BITS <= 8
#ifdef MINIMUMS
#define load_zero8 load_half8
#else
#define load_zero8(p, i) convert_float8(*(__global const uchar8 *)((p) + (i)))
#endif

// Zero points or minimums.
static inline wide_float zero_points(__global const zero_t *zeros, size_t index, int asymmetric) {
  return asymmetric ? load_wide(load_zero8, zeros, index) : (wide_float)(MIDDLE);
}

// The weight of code 0.
static inline wide_float offsets(wide_float scale, __global const zero_t *zeros, size_t index, int asymmetric) {
  const wide_float zero = zero_points(zeros, index, asymmetric);
#ifdef MINIMUMS
  return zero;
#else
  return -scale * zero;
#endif
}
#endif

#ifdef TOKENS
// Kernels for a few tokens: TOKENS = 1, 2, 4 or 8 share one pass over the weights; token_step is the same.
//
// A work-item computes a whole row tile: its weights are one contiguous stream, which a core reads 1.7 times faster
// than two halves of 128 bytes in every 256. It computes PART vectors at a time, whose sums stay in registers: there
// are 16, or 32 with 16-wide vectors.
#ifdef PART_COLUMNS
#define PART (PART_COLUMNS / WIDTH)
#elif TOKENS * VECTORS <= WIDTH
#define PART VECTORS
#else
#define PART (WIDTH / TOKENS)
#endif
#else
// Kernels for many tokens. Tuned (kernels/gpu/parameters.py):
//   ITEMS           work-items of a row tile: 1 or 2
//   DEPTH           inputs that are dequantised at a time; a multiple of every block
//   MAX_TOKEN_STEP  largest token_step: weights are dequantised once for so many tokens, whose sums stay in a
//                   near cache
//   STRIP           tokens of the inner loop, an even number. By default twice as many sums hide the latency of
//                   the additions and fit in 16 registers, four times as many in 32.
#ifndef ITEMS
#define ITEMS 2
#endif
#ifndef DEPTH
#define DEPTH 128
#endif
#ifndef MAX_TOKEN_STEP
#define MAX_TOKEN_STEP 128
#endif
#ifndef STRIP
#define STRIP (WIDTH / 2)
#endif
// Columns of a work-item.
#define ITEM_COLUMNS (LANES / ITEMS)
// Columns computed at a time: two vectors.
#define PAIR (2 * WIDTH)
// Tokens, rounded up to whole strips.
#define WHOLE_STRIPS(count) (((count) + STRIP - 1) / STRIP * STRIP)
#endif
