// Rounding of activations to int8, within the kernels that write them or in a kernel of its own. Follows common.h.
//
//   CODE_BITS    bits of the linear's weights, 4 or 8; undefined for no rounding
//   CODE_BLOCK   inputs that share a scale, in kernels that round their output
//
// The codes and their order are those of linear_int8.h.

// The quotient, rounded correctly. Division may be 2.5 units off on a GPU, and inputs of halves often lie halfway between
// two codes: a factor that is a unit too small gives the other code.
static inline float quotient(float a, float b) {
  const float near = a / b;
#if defined(__x86_64__) && !defined(PLAIN)
  return near;
#else
  // The remainder has no error that matters, so that its own quotient may be a few units off.
  return near + fma(-near, b, a) / b;
#endif
}

#ifdef CODE_BITS
// The last arguments of kernels that round their output.
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

// A block with a smaller maximum becomes zeros: its factor would exceed the range of floats.
#define SMALLEST 0x1p-118f

// Values that a work-group has in local memory, or those in memory.
#ifdef LOCAL_VALUES
typedef __local const float *rounded_values;
#define load_rounded8(p, i) vload8(0, (p) + (i))
#else
typedef __global const act_t *rounded_values;
#define load_rounded8(p, i) load_act8(p, i)
#endif

// Round the block at x, and write its codes, its scale and the sum of its codes.
static inline void round_block(rounded_values x, __global uchar *codes, __global float2 *result,
                               int block) {
  float8 largest = 0.0f;
  // Comparisons and masks, because fmax() and fabs() are slow library calls on PoCL 3.
  for (int k = 0; k < block; k += 8) {
    const float8 size = as_float8(as_int8(load_rounded8(x, k)) & 0x7fffffff);
    largest = size > largest ? size : largest;
  }
  const float4 four = largest.lo > largest.hi ? largest.lo : largest.hi;
  const float2 two = four.lo > four.hi ? four.lo : four.hi;
  const float top = two.x > two.y ? two.x : two.y;
  const float factor = top > SMALLEST ? quotient(127.0f, top) : 0.0f;
  int8 sums = 0;
  for (int k = 0; k < block; k += 8) {
    const int8 code = ROUND8(load_rounded8(x, k) * factor);
    sums += code;
    store_codes(code, codes + k);
  }
  const int4 halves = sums.lo + sums.hi;
  const int2 quarters = halves.lo + halves.hi;
  *result = (float2)(top / 127.0f, (float)(quarters.x + quarters.y));
}

#if defined(CODE_BLOCK) && !defined(LOCAL_VALUES)
// Wait until the work-group has written its values. Every work-item must call this.
static inline void wait_for_values(void) {
#if WG > 1
  barrier(CLK_GLOBAL_MEM_FENCE);
#endif
}

// Round block `number` of the values, counted over all rows.
static inline void round_written(__global const act_t *values, __global uchar *codes,
                                 __global float2 *code_blocks, size_t number) {
  round_block(values + number * CODE_BLOCK, codes + number * CODE_BLOCK, code_blocks + number, CODE_BLOCK);
}
#endif
#elif defined(NPU_CODES)
// A code of an integer NPU graph (codes.h), and the last arguments of kernels that write such codes.
#if NPU_CODES == 8
typedef uchar code_t;
#else
typedef ushort code_t;
#endif
#define CODE_ARGUMENTS                                                                                                 \
  , __global code_t *codes, __global float *factors, __global uint *counts, int count_place, float code_steps,        \
      int per_token
#else
#define CODE_ARGUMENTS
#endif
