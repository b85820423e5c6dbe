// Vectors of columns for the kernels for CPU devices. Comes after linear.h.

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

// Weights are fetched PREFETCH_BYTES (tuned; 0 for not at all) ahead: by default a page, where a core's own
// prefetching stops. One token is 1.6 times faster so.
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

// Vectors in a row block.
#define VECTORS (LANES / WIDTH)

#if BITS <= 8
#define load_zero8(p, i) convert_float8(*(__global const uchar8 *)((p) + (i)))

static inline wide_float zero_points(__global const uchar *zeros, size_t index, int asymmetric) {
  return asymmetric ? load_wide(load_zero8, zeros, index) : (wide_float)(MIDDLE);
}
#endif
