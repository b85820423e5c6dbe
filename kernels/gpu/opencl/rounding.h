// Rounding of activations to int8, for the kernels that do it and those that write what is rounded. Follows
// common.h.
//
//   CODE_BITS    bits of the weights that meet the codes, 4 or 8; nothing is rounded without
//   CODE_BLOCK   inputs that share a scale, in the kernels that round what they write
//
// The codes and their order are those of linear_int8.h.

#ifdef CODE_BITS
// What the kernels that round what they write take in addition, after their other arguments.
#define CODE_ARGUMENTS , __global uchar *codes, __global float2 *code_blocks

// Write the codes of eight inputs.
static inline void store_codes(int8 code, __global uchar *codes) {
#if CODE_BITS == 4
  const int8 ordered = code.s02461357;
#else
  const int8 ordered = code;
#endif
  *(__global uchar8 *)codes = BYTES8(ordered);
}

// A block whose largest value is below is all zeros: its factor would exceed the range of floats.
#define SMALLEST 0x1p-118f

// Round the block that starts at x, and write its codes, and its scale with the sum of the codes.
static inline void round_block(__global const act_t *x, __global uchar *codes, __global float2 *result,
                               int block) {
  float8 largest = 0.0f;
  // Comparisons and masks, because fmax() and fabs() are slow library calls on PoCL 3.
  for (int k = 0; k < block; k += 8) {
    const float8 size = as_float8(as_int8(load_act8(x, k)) & 0x7fffffff);
    largest = size > largest ? size : largest;
  }
  const float4 four = largest.lo > largest.hi ? largest.lo : largest.hi;
  const float2 two = four.lo > four.hi ? four.lo : four.hi;
  const float top = two.x > two.y ? two.x : two.y;
  const float factor = top > SMALLEST ? 127.0f / top : 0.0f;
  int8 sums = 0;
  for (int k = 0; k < block; k += 8) {
    const int8 code = ROUND8(load_act8(x, k) * factor);
    sums += code;
    store_codes(code, codes + k);
  }
  const int4 halves = sums.lo + sums.hi;
  const int2 quarters = halves.lo + halves.hi;
  *result = (float2)(top / 127.0f, (float)(quarters.x + quarters.y));
}

#ifdef CODE_BLOCK
// Wait until the work-group has written its part of the values. Every work-item must come here.
static inline void wait_for_values(void) {
#if WG > 1
  barrier(CLK_GLOBAL_MEM_FENCE);
#endif
}

// Round block `number` of the values, counted through all rows.
static inline void round_written(__global const act_t *values, __global uchar *codes,
                                 __global float2 *code_blocks, size_t number) {
  round_block(values + number * CODE_BLOCK, codes + number * CODE_BLOCK, code_blocks + number, CODE_BLOCK);
}
#endif
#else
#define CODE_ARGUMENTS
#endif
