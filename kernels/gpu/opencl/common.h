// The common part of all kernels, first in the list of sources.
//
// OpenCL C 1.2 without cl_khr_fp16: half is a storage type only, arithmetic is float.
//   act_t                     element of an activation row: half with -DACT_HALF, else float
//   load_act(p, i)            float   from act_t element i        (p: __global act_t pointer)
//   load_act8(p, i)           float8  from elements i .. i+7      (element alignment suffices)
//   store_act(v, p, i)        float   into element i
//   store_act8(v, p, i)       float8  into elements i .. i+7
//   load_half[8], store_half[8], load_float8, store_float8, load_uint8: the same for a fixed type
//   load_char8(p, i)          float8  from the signed bytes i .. i+7
//   store_char8(v, p, i)      float8  rounded, into them; within -127.5 .. 127.5
//   ROUND8(v)                 int8    the nearest integers, halves to the even one
//   BYTES8(v)                 uchar8  the lowest bits of integers
//   FMA(a, b, c), UNROLL, sum8(v), max8(v)
// -DWHOLE_EIGHTS promises that eight elements start at a multiple of their size, and in glue.h that rows and segments are
// whole eights; -DHAS_HALF that the device has cl_khr_fp16. -DPLAIN avoids processor-specific instructions (kernels/gpu/variants.py).

#ifdef PLAIN
#undef __AVX2__
#undef __AVX512BW__
#undef __AVX512F__
#undef __AVX512VNNI__
#undef __F16C__
#endif

// A bare a*b+c contracts to one instruction; fma() and mad() are slow library calls on PoCL 3.
#pragma OPENCL FP_CONTRACT ON
#define FMA(a, b, c) ((a) * (b) + (c))
// PoCL does not unroll on its own; GEMM is six times slower without.
#define UNROLL _Pragma("unroll")

// DO(0) to DO(count - 1), not within each other: what they name can be no array, which GPUs keep in memory if a compiler
// does not unroll the loop over it.
#define REPEAT_1(DO) DO(0)
#define REPEAT_2(DO) REPEAT_1(DO) DO(1)
#define REPEAT_3(DO) REPEAT_2(DO) DO(2)
#define REPEAT_4(DO) REPEAT_3(DO) DO(3)
#define REPEAT_5(DO) REPEAT_4(DO) DO(4)
#define REPEAT_6(DO) REPEAT_5(DO) DO(5)
#define REPEAT_7(DO) REPEAT_6(DO) DO(6)
#define REPEAT_8(DO) REPEAT_7(DO) DO(7)
#define REPEAT_9(DO) REPEAT_8(DO) DO(8)
#define REPEAT_10(DO) REPEAT_9(DO) DO(9)
#define REPEAT_11(DO) REPEAT_10(DO) DO(10)
#define REPEAT_12(DO) REPEAT_11(DO) DO(11)
#define REPEAT_13(DO) REPEAT_12(DO) DO(12)
#define REPEAT_14(DO) REPEAT_13(DO) DO(13)
#define REPEAT_15(DO) REPEAT_14(DO) DO(14)
#define REPEAT_16(DO) REPEAT_15(DO) DO(15)
#define REPEAT_17(DO) REPEAT_16(DO) DO(16)
#define REPEAT_18(DO) REPEAT_17(DO) DO(17)
#define REPEAT_19(DO) REPEAT_18(DO) DO(18)
#define REPEAT_20(DO) REPEAT_19(DO) DO(19)
#define REPEAT_21(DO) REPEAT_20(DO) DO(20)
#define REPEAT_22(DO) REPEAT_21(DO) DO(21)
#define REPEAT_23(DO) REPEAT_22(DO) DO(22)
#define REPEAT_24(DO) REPEAT_23(DO) DO(23)
#define REPEAT_25(DO) REPEAT_24(DO) DO(24)
#define REPEAT_26(DO) REPEAT_25(DO) DO(25)
#define REPEAT_27(DO) REPEAT_26(DO) DO(26)
#define REPEAT_28(DO) REPEAT_27(DO) DO(27)
#define REPEAT_29(DO) REPEAT_28(DO) DO(28)
#define REPEAT_30(DO) REPEAT_29(DO) DO(29)
#define REPEAT_31(DO) REPEAT_30(DO) DO(30)
#define REPEAT_32(DO) REPEAT_31(DO) DO(31)
#define REPEAT_COUNT(count, DO) REPEAT_##count(DO)
#define REPEAT(count, DO) REPEAT_COUNT(count, DO)

#if defined(__clang__) && defined(__x86_64__) && defined(__F16C__)
// PoCL on x86 does not inline vload and vstore, so vectors are accessed through pointers of element alignment, and half
// is converted by the processor's instruction.
typedef float8 loose_float8 __attribute__((aligned(4)));
typedef uint8 loose_uint8 __attribute__((aligned(4)));
typedef short8 loose_short8 __attribute__((aligned(2)));
typedef char8 loose_char8 __attribute__((aligned(1)));
typedef short half_bits8 __attribute__((__vector_size__(16)));
typedef float half_values8 __attribute__((__vector_size__(32)));
#define load_float8(p, i) (*(__global const loose_float8 *)((p) + (i)))
#define load_uint8(p, i) (*(__global const loose_uint8 *)((p) + (i)))
#define store_float8(v, p, i) (*(__global loose_float8 *)((p) + (i)) = (v))
static inline float8 half8_to_float8(short8 bits) {
  return __builtin_astype(__builtin_ia32_vcvtph2ps256(__builtin_astype(bits, half_bits8)), float8);
}
static inline short8 float8_to_half8(float8 value) {
  return __builtin_astype(__builtin_ia32_vcvtps2ph256(__builtin_astype(value, half_values8), 0), short8);
}
#define load_half8(p, i) half8_to_float8(*(__global const loose_short8 *)((p) + (i)))
#define load_half(p, i) half8_to_float8((short8)(((__global const short *)(p))[i])).s0
#define store_half8(v, p, i) (*(__global loose_short8 *)((p) + (i)) = float8_to_half8(v))
#define store_half(v, p, i) (((__global short *)(p))[i] = float8_to_half8((float8)(v)).s0)
// The processor's conversion rounds halves to the even integer by default.
#define ROUND8(v) __builtin_astype(__builtin_ia32_cvtps2dq256(__builtin_astype(v, half_values8)), int8)
#define BYTES8(v) __builtin_convertvector(v, uchar8)
#define load_char8(p, i) __builtin_convertvector(*(__global const loose_char8 *)((p) + (i)), float8)
#define store_char8(v, p, i) (*(__global loose_char8 *)((p) + (i)) = __builtin_convertvector(ROUND8(v), char8))
#else
#ifdef WHOLE_EIGHTS
// One access for eight elements; without the alignment a compiler may split it into eight.
#define load_float8(p, i) (*(__global const float8 *)((p) + (i)))
#define store_float8(v, p, i) (*(__global float8 *)((p) + (i)) = (v))
#define load_char8(p, i) convert_float8(*(__global const char8 *)((p) + (i)))
#define store_char8(v, p, i) (*(__global char8 *)((p) + (i)) = convert_char8_rte(v))
#else
#define load_char8(p, i) convert_float8(vload8(0, (p) + (i)))
#define store_char8(v, p, i) vstore8(convert_char8_rte(v), 0, (p) + (i))
#define load_float8(p, i) vload8(0, (p) + (i))
#define store_float8(v, p, i) vstore8(v, 0, (p) + (i))
#endif
#define load_uint8(p, i) vload8(0, (p) + (i))
#if defined(WHOLE_EIGHTS) && defined(HAS_HALF)
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define load_half8(p, i) convert_float8(*(__global const half8 *)((p) + (i)))
#define store_half8(v, p, i) (*(__global half8 *)((p) + (i)) = convert_half8_rte(v))
#else
#define load_half8(p, i) vload_half8(0, (p) + (i))
#define store_half8(v, p, i) vstore_half8_rte(v, 0, (p) + (i))
#endif
#define load_half(p, i) vload_half(i, p)
#define store_half(v, p, i) vstore_half_rte(v, i, p)
#define ROUND8(v) convert_int8_rte(v)
#define BYTES8(v) convert_uchar8((v) & 255)
#endif

#ifdef ACT_HALF
typedef half act_t;
#define load_act(p, i) load_half(p, i)
#define load_act8(p, i) load_half8(p, i)
#define store_act(v, p, i) store_half(v, p, i)
#define store_act8(v, p, i) store_half8(v, p, i)
#else
typedef float act_t;
#define load_act(p, i) ((p)[i])
#define load_act8(p, i) load_float8(p, i)
#define store_act(v, p, i) ((p)[i] = (v))
#define store_act8(v, p, i) store_float8(v, p, i)
#endif

static inline float sum8(float8 value) {
  float4 half_sum = value.lo + value.hi;
  float2 quarter = half_sum.lo + half_sum.hi;
  return quarter.x + quarter.y;
}

static inline float max8(float8 value) {
  float4 upper = fmax(value.lo, value.hi);
  float2 pair = fmax(upper.lo, upper.hi);
  return fmax(pair.x, pair.y);
}
