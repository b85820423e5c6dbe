// Products of float inputs on the matrix unit. Follows matrix_parts.h and matrix.h.
//
// Without ASYMMETRIC codes have no zero points but the middle, which is taken off before they are multiplied.

typedef ushort input_t;
typedef float input_block_t;
typedef wide_float sums_t;
#define INPUT_ROW(columns) PART_ROW(columns)
#define INPUTS_OF_BLOCK (BLOCK * PARTS)
#define INPUT_TILES PARTS
#define INPUT_TILE_BYTES (2 * DEPTH)
// Rows of a block's weights: pairs of inputs of WIDTH columns.
#define TILE_INPUTS 2
#define WORD_ROWS (WORD_INPUTS / TILE_INPUTS)

#if BITS == 4
// The upper halves of the codes as floats. Of 16 bits the lowest five choose one, so that a code needs no mask.
typedef short lanes_i16 __attribute__((__vector_size__(64)));
#ifndef ASYMMETRIC
#define CODE_VALUES                                                                                          \
  0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, \
      0x40c0, 0x40e0
#else
#define CODE_VALUES                                                                                          \
  0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, \
      0x4160, 0x4170
#endif
static inline wide_uint row_of_word(wide_uint q, int row) {
  const lanes_i16 values = {CODE_VALUES, CODE_VALUES};
  const lanes_i16 codes = __builtin_astype(q >> (wide_uint)(4 * row), lanes_i16);
  return __builtin_astype(__builtin_ia32_permvarhi512(values, codes), wide_uint);
}
#else
#ifndef ASYMMETRIC
#define ORIGIN 128.0f
#else
#define ORIGIN 0.0f
#endif
static inline wide_uint value_bits(wide_uint code) {
  return __builtin_astype(codes_to_float(code & (wide_uint)(255u)) - ORIGIN, wide_uint);
}
static inline wide_uint row_of_word(wide_uint q, int row) {
  return value_bits(q >> (wide_uint)(8 * row)) >> (wide_uint)(16u) | value_bits(q >> (wide_uint)(8 * row + 16));
}
#endif

#if PARTS == 2
#define LOAD_INPUTS(source, stride) TILE_LOAD(4, source, stride) TILE_LOAD(5, (source) + DEPTH, stride)
#define MULTIPLY_INPUTS MULTIPLY_PART(4) MULTIPLY_PART(5)
#else
#define LOAD_INPUTS(source, stride)                                                                          \
  TILE_LOAD(4, source, stride) TILE_LOAD(5, (source) + DEPTH, stride) TILE_LOAD(6, (source) + 2 * DEPTH, stride)
#define MULTIPLY_INPUTS MULTIPLY_PART(4) MULTIPLY_PART(5) MULTIPLY_PART(6)
#endif
#define MULTIPLY_PART(part)                                                                                  \
  __builtin_ia32_tdpbf16ps(0, part, 2);                                                                      \
  __builtin_ia32_tdpbf16ps(1, part, 3);

// A block's sum times its scale is added to a total; with ASYMMETRIC the zero point has its share of the inputs' sum.
#ifndef ASYMMETRIC
#define ADD_BLOCK(total, sum, scale, zero, input) FMA(sum, scale, total)
#elif defined(MINIMUMS)
#define ADD_BLOCK(total, sum, scale, zero, input) FMA((wide_float)(input), zero, FMA(sum, scale, total))
#else
#define ADD_BLOCK(total, sum, scale, zero, input) FMA(FMA((wide_float)(input), -(zero), sum), scale, total)
#endif
