// Codes of NPU_CODES bits (8 or 16) at the edges of integer NPU graphs, with the bits of kernels/formats/edge_codes.py.
// Follows common.h, rounding.h and glue.h. Rows of inputs are whole eights; rows of outputs need not be.
//
//   factors   one float a token: the largest magnitude of its input, or 1
//   counts    two words of an operator: codes at the end of their range, and tokens; with -DCLAMPED inputs do not count

#define ZERO_CODE (1 << (NPU_CODES - 1))
#define LARGEST_CODE (2 * ZERO_CODE - 1)
// A token whose largest magnitude is smaller becomes zeros.
#define SMALLEST_FACTOR 0x1p-100f

#if defined(__clang__)
#define FLOATS_OF_CODES(v) __builtin_convertvector(v, float8)
#define CODES_OF_INTS(v) __builtin_convertvector(v, code8_t)
#else
#define FLOATS_OF_CODES(v) convert_float8(v)
#if NPU_CODES == 8
#define CODES_OF_INTS(v) convert_uchar8(v)
#else
#define CODES_OF_INTS(v) convert_ushort8(v)
#endif
#endif

// Eight codes, and the same at the alignment of one.
#if NPU_CODES == 8
typedef uchar8 code8_t;
#else
typedef ushort8 code8_t;
#endif
typedef code8_t loose_code8_t __attribute__((aligned(NPU_CODES / 8)));

// The largest value of the work-items of the group.
static inline float group_max(float value, __local float *values) {
#if WG > 1
  int lane = get_local_id(0);
  barrier(CLK_LOCAL_MEM_FENCE);
  values[lane] = value;
  for (int width = WG / 2; width > 0; width /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < width)
      values[lane] = values[lane] > values[lane + width] ? values[lane] : values[lane + width];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  value = values[0];
#endif
  return value;
}

static inline void count_ends(int8 at_end, __global uint *counts) {
  int4 halves = at_end.lo + at_end.hi;
  int2 quarters = halves.lo + halves.hi;
  int ends = quarters.x + quarters.y;  // comparisons of vectors give -1
  if (ends)
    atomic_add(counts, (uint)-ends);
}

// Write the codes of a row of inputs. A work-item reads what it has written itself, if the group wrote the row as runs of
// eight in turn. steps: codes in the range from 0 to the factor; with per_token the factor is the row's largest magnitude.
static inline void write_codes(__global const act_t *x, int columns, float steps, int per_token, __global code_t *codes,
                               __global float *factor, __global uint *counts, __local float *values) {
  int lane = get_local_id(0);
  float top = 1.0f;
  if (per_token) {
    float8 largest = 0.0f;
    for (int i = lane * 8; i < columns; i += WG * 8) {
      const float8 size = as_float8(as_int8(load_act8(x, i)) & 0x7fffffff);
      largest = size > largest ? size : largest;
    }
    const float4 four = largest.lo > largest.hi ? largest.lo : largest.hi;
    const float2 two = four.lo > four.hi ? four.lo : four.hi;
    top = group_max(two.x > two.y ? two.x : two.y, values);
    top = top > SMALLEST_FACTOR ? top : 0.0f;
  }
  if (lane == 0)
    *factor = top;
  const float scale = top > 0.0f ? quotient(steps, top) : 0.0f;
  int8 outside = 0;
  for (int i = lane * 8; i < columns; i += WG * 8) {
    float8 value = load_act8(x, i) * scale;
    const int8 low = value < -(float)ZERO_CODE, high = value > ZERO_CODE - 1.0f;
    outside += low + high;
    value = low ? (float8)-(float)ZERO_CODE : high ? (float8)(ZERO_CODE - 1.0f) : value;
    *(__global code8_t *)(codes + i) = CODES_OF_INTS(ROUND8(value) + ZERO_CODE);
  }
#ifdef CLAMPED
  const int counted = 0;
#else
  // Rounding may exceed the largest magnitude of a token by a part of a step.
  const int counted = !per_token;
#endif
  if (counted)
    count_ends(outside, counts);
}
