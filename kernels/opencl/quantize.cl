// Rounding of activations to int8: a work-item rounds `span` blocks of one token.

// Write the codes of eight inputs.
static inline void store_codes(int8 code, __global uchar *codes) {
#if BITS == 4
  const int8 ordered = code.s02461357;
#else
  const int8 ordered = code;
#endif
  *(__global uchar8 *)codes = BYTES8(ordered);
}

// A block whose largest value is below is all zeros: its factor would exceed the range of floats.
#define SMALLEST 0x1p-118f

__kernel void quantize_activations(
    __global const act_t *restrict x, __global uchar *restrict x_codes, __global float2 *restrict x_blocks,
    int columns, int block, int first_token, int span) {
  const int token = get_global_id(1);
  const int blocks = columns / block;
  const int first = get_global_id(0) * span;
  x += (size_t)(first_token + token) * columns;
  x_codes += (size_t)token * columns;
  x_blocks += (size_t)token * blocks;
  for (int b = first; b < min(first + span, blocks); b++) {
    float8 largest = 0.0f;
    for (int k = b * block; k < (b + 1) * block; k += 8) {
      // Comparisons and masks, because fmax() and fabs() are slow library calls on PoCL 3.
      const float8 size = as_float8(as_int8(load_act8(x, k)) & 0x7fffffff);
      largest = size > largest ? size : largest;
    }
    const float top = max8(largest);
    const float factor = top > SMALLEST ? 127.0f / top : 0.0f;
    int8 sums = 0;
    for (int k = b * block; k < (b + 1) * block; k += 8) {
      const int8 code = ROUND8(load_act8(x, k) * factor);
      sums += code;
      store_codes(code, x_codes + k);
    }
    const int4 halves = sums.lo + sums.hi;
    const int2 quarters = halves.lo + halves.hi;
    x_blocks[b] = (float2)(top / 127.0f, (float)(quarters.x + quarters.y));
  }
}
