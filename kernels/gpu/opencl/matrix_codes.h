// Products of int8 inputs on the matrix unit. Follows linear_int8.h and matrix.h.

typedef uchar input_t;
typedef float2 input_block_t;
typedef int16 sums_t;
#if BLOCK < 64
#define DEPTH BLOCK
#else
#define DEPTH 64
#endif
#define INPUT_ROW(columns) (columns)
#define INPUTS_OF_BLOCK BLOCK
#define INPUT_TILES 1
#define INPUT_TILE_BYTES DEPTH
// Rows of a block's weights: four inputs of WIDTH columns.
#define TILE_INPUTS 4
#define WORD_ROWS QUADS

static inline wide_uint row_of_word(wide_uint q, int row) { return QUAD(q, row); }

#define LOAD_INPUTS(source, stride) TILE_LOAD(4, source, stride)
#define MULTIPLY_INPUTS                                                                                      \
  __builtin_ia32_tdpbsud(0, 4, 2);                                                                           \
  __builtin_ia32_tdpbsud(1, 4, 3);

// As linear_int8_vector.cl, to the bit.
#define ADD_BLOCK(total, sum, scale, zero, input)                                                            \
  ((total) + BLOCK_PRODUCT(convert_float16(sum), zero, scale, (wide_float)((input).x), (wide_float)((input).y)))
