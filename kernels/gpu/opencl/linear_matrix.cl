// Linear layers for CPUs with a matrix unit: a work-item multiplies the inputs of `token_step` tokens with a row tile, up
// to 16 tokens at a time. Follows matrix_floats.h or matrix_codes.h. TOKENS is the 16, or fewer if there are no more.

// Write a block of two vectors of columns as tiles of the matrix unit.
static inline void unpack(wide_uint (*values)[BLOCK / TILE_INPUTS], __global const weight_t *source) {
  UNROLL for (int w = 0; w < BLOCK / WORD_INPUTS; w++, source += LANES)
    UNROLL for (int v = 0; v < 2; v++) {
      const wide_uint q = load_words(source, WIDTH * v);
      PREFETCH_WORDS(source + WIDTH * v);
      UNROLL for (int row = 0; row < WORD_ROWS; row++) values[v][w * WORD_ROWS + row] = row_of_word(q, row);
    }
}

// Add the sums of a block to the totals of two vectors of columns, whose scales and zero points begin at `group`.
static inline void add_sums(wide_float (*totals)[TOKENS], sums_t (*sums)[TOKENS], __global const half *scales,
                            __global const zero_t *zeros, size_t group, int asymmetric,
                            __global const input_block_t *input, int blocks, int last) {
  UNROLL for (int v = 0; v < 2; v++) {
    const wide_float scale = load_wide(load_half8, scales, group + WIDTH * v);
    const wide_float zero = zero_points(zeros, group + WIDTH * v, asymmetric);
    (void)zero;  // centred codes need none
    UNROLL for (int t = 0; t < TOKENS; t++)
      totals[v][t] = ADD_BLOCK(totals[v][t], sums[v][t], scale, zero, input[min(t, last) * blocks]);
  }
}

// Multiply a block of two vectors of columns with the inputs, and store the sums.
#if BLOCK == DEPTH
#define LOAD_ONCE LOAD_INPUTS(inputs, stride)
#define LOAD_EACH(k)
#else
#define LOAD_ONCE
#define LOAD_EACH(k) LOAD_INPUTS(inputs + (k) * (INPUTS_OF_BLOCK / BLOCK), stride)
#endif
#define MULTIPLY(values, sums)                                                                               \
  TILE_ZERO(0) TILE_ZERO(1)                                                                                  \
  for (int k = 0; k < BLOCK; k += DEPTH) {                                                                   \
    TILE_LOAD(2, (values)[0] + k / TILE_INPUTS, 64)                                                          \
    TILE_LOAD(3, (values)[1] + k / TILE_INPUTS, 64)                                                          \
    LOAD_EACH(k)                                                                                             \
    MULTIPLY_INPUTS                                                                                          \
  }                                                                                                          \
  TILE_STORE(0, (sums)[0])                                                                                   \
  TILE_STORE(1, (sums)[1])
#define ADD_SUMS(pair, b)                                                                                    \
  add_sums(totals[pair], sums[pair], scales, zeros, group + (size_t)(b) * LANES + 2 * WIDTH * (pair),        \
           asymmetric, x_blocks + (b), blocks, each - 1)

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_matrix_tiles(
    WEIGHTS, __global const half *restrict scales, __global const zero_t *restrict zeros,
    __global const input_t *restrict x, __global const input_block_t *restrict x_blocks, __global out_t *restrict y,
    __global const int4 *restrict tiles, int columns, int rows, int block, int asymmetric, int weight_columns,
    int first_column, int first_token, int tokens, int token_step) {
#ifdef GROUPED
  FIND_PLACE(int, get_group_id(0))
#else
  const int4 tile = tiles[get_group_id(0)];
  const int token = get_group_id(1) * token_step;
  const int count = min(token_step, tokens - token);
#endif
  const int blocks = columns / BLOCK;
  const size_t row = INPUT_ROW(columns), stride = row * sizeof(input_t);
  x += token * row;
  x_blocks += (size_t)token * blocks;
  y += (size_t)(first_token + token) * rows + tile.y;
  weights += first_weight(tile.x, weight_columns, first_column);
  const size_t group = first_group(tile.x, weight_columns, first_column, BLOCK);
  // Equal turns read the fewest rows behind the last token.
  const int turns = (count + 15) / 16, each = (count + turns - 1) / turns;
  tile_shapes_t shapes = {1};
  for (int t = 0; t < FIRST_INPUTS + INPUT_TILES; t++) {
    shapes.row_bytes[t] = t < FIRST_INPUTS ? 4 * WIDTH : INPUT_TILE_BYTES;
    shapes.rows[t] = t == 2 || t == 3 ? DEPTH / TILE_INPUTS : each;
  }
  TILE_SHAPES(&shapes)
  // A tile waits until what it reads has left the store buffer. So the next columns are unpacked before the present ones
  // are multiplied, and sums are added behind the next product: 0.32 ms for a token and 0.40 for 16 in place of 0.38 and
  // 0.47, at 2560 x 2048 on one core.
  wide_uint values[2][2][BLOCK / TILE_INPUTS];
  sums_t sums[2][2][TOKENS];
  wide_float totals[2][2][TOKENS];
  for (int t = 0; t < TOKENS; t++)
    UNROLL for (int v = 0; v < 4; v++) sums[v / 2][v % 2][t] = 0;
  for (int left = count; left > 0; left -= each, x += each * row, x_blocks += each * blocks) {
    UNROLL for (int t = 0; t < TOKENS; t++)
      UNROLL for (int v = 0; v < 4; v++) totals[v / 2][v % 2][t] = 0.0f;
    __global const weight_t *words = weights;
    __global const input_t *inputs = x;
    unpack(values[0], words);
    for (int b = 0; b < blocks; b++, inputs += INPUTS_OF_BLOCK) {
      LOAD_ONCE
      unpack(values[1], words + 2 * WIDTH);
      MULTIPLY(values[0], sums[0])
      if (b > 0) ADD_SUMS(1, b - 1);
      // Behind the last block the first one is unpacked again, for nothing.
      words = b + 1 < blocks ? words + BLOCK / WORD_INPUTS * LANES : weights;
      unpack(values[0], words);
      MULTIPLY(values[1], sums[1])
      ADD_SUMS(0, b);
    }
    ADD_SUMS(1, blocks - 1);
    for (int t = 0; t < min(each, left); t++, y += rows)
      UNROLL for (int v = 0; v < 4; v++)
        store_columns(totals[v / 2][v % 2][t], y + WIDTH * v, tile.z - WIDTH * v);
  }
  TILES_FREE()
}
