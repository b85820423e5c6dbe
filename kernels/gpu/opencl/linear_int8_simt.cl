// Linear layers with int8 activations for GPUs: a column for each work-item, tiles staged in local memory.
// With -DINTEGER_DOT the device multiplies four pairs of bytes at once.

#ifdef INTEGER_DOT
#define DOT4(codes, input) dot_4x8packed_us_int(codes, input)
#else
static inline int DOT4(uint codes, uint input) {
  const uchar4 c = as_uchar4(codes);
  const char4 i = as_char4(input);
  return c.x * i.x + c.y * i.y + c.z * i.z + c.w * i.w;
}
#endif

// The product of a block: `sum` of codes times codes, less the zero point's share, times both scales. Exact
// up to the scales, as no sum reaches 2^24.
static inline float block_product(int sum, float zero, float scale, float2 input) {
  return FMA(-zero, input.y, (float)sum) * (scale * input.x);
}

// ---- a few tokens ---------------------------------------------------------------------------------------

#ifdef TOKENS

__kernel __attribute__((reqd_work_group_size(LANES, SLICES, 1))) void linear_int8_simt_few(INT8_ARGUMENTS) {
  __local float partial[SLICES][TOKENS][LANES];
  const int lane = get_local_id(0), slice = get_local_id(1);
  const int4 tile = tiles[get_group_id(0)];
  const int token = get_group_id(1) * TOKENS;
  const int count = min(TOKENS, tokens - token);
  const int blocks = columns / block;
  weights += first_weight(tile.x, weight_columns, first_column) + lane;
  const size_t groups = first_group(tile.x, weight_columns, first_column, block) + lane;
  // Rows past the last token are read, but their sums are not stored.
  const size_t stride = columns / 4;
  x_codes += token * stride;
  x_blocks += (size_t)token * blocks;
  float totals[TOKENS];
  UNROLL for (int t = 0; t < TOKENS; t++) totals[t] = 0.0f;
  for (int b = slice; b < blocks; b += SLICES) {
    __global const weight_t *source = weights + (size_t)b * (block / WORD_INPUTS) * LANES;
    const size_t group = groups + (size_t)b * LANES;
    int sums[TOKENS];
    UNROLL for (int t = 0; t < TOKENS; t++) sums[t] = 0;
    int quad = b * block / 4;
    for (int k = 0; k < block; k += WORD_INPUTS, source += LANES, quad += QUADS) {
      const uint q = *source;
      UNROLL for (int h = 0; h < QUADS; h++)
        UNROLL for (int t = 0; t < TOKENS; t++) sums[t] += DOT4(QUAD(q, h), x_codes[t * stride + quad + h]);
    }
    const float scale = load_half(scales, group), zero = zero_point(zeros, group, asymmetric);
    UNROLL for (int t = 0; t < TOKENS; t++)
      totals[t] += block_product(sums[t], zero, scale, x_blocks[t * blocks + b]);
  }
  STORE_SLICES
}
#else

// ---- many tokens ----------------------------------------------------------------------------------------

__kernel __attribute__((reqd_work_group_size(ITEMS_X, ITEMS_Y, 1))) void linear_int8_simt_many(
    INT8_ARGUMENTS) {
  __local uint inputs[DEPTH / 4][TILE_TOKENS];
  __local uint values[DEPTH / 4][LANES];
  const int column = get_local_id(0), strip = get_local_id(1);
  const int item = strip * ITEMS_X + column;
  const int4 tile = tiles[get_group_id(0)];
  const int token = get_group_id(1) * token_step;
  const int count = min(token_step, tokens - token);
  const int blocks = columns / block;
  x_codes += (size_t)token * (columns / 4);
  x_blocks += (size_t)token * blocks;
  weights += first_weight(tile.x, weight_columns, first_column);
  const size_t groups = first_group(tile.x, weight_columns, first_column, block);
  float totals[ITEM_TOKENS][4];
  int sums[ITEM_TOKENS][4];
  UNROLL for (int r = 0; r < ITEM_TOKENS; r++)
    UNROLL for (int c = 0; c < 4; c++) {
      totals[r][c] = 0.0f;
      sums[r][c] = 0;
    }
  for (int start = 0; start < columns; start += DEPTH) {
    barrier(CLK_LOCAL_MEM_FENCE);
    // Rows past the last one repeat it: nothing beyond the inputs is read, and their sums are not stored.
    for (int i = item; i < TILE_TOKENS * DEPTH / 4; i += ITEMS_X * ITEMS_Y) {
      const int t = i / (DEPTH / 4), k = i % (DEPTH / 4);
      inputs[k][t] = x_codes[(size_t)min(t, count - 1) * (columns / 4) + start / 4 + k];
    }
    for (int i = item; i < LANES * DEPTH / WORD_INPUTS; i += ITEMS_X * ITEMS_Y) {
      const int lane = i % LANES, word = i / LANES;
      const uint q = weights[(size_t)(start / WORD_INPUTS + word) * LANES + lane];
      UNROLL for (int h = 0; h < QUADS; h++) values[word * QUADS + h][lane] = QUAD(q, h);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (int k = 0; k < DEPTH / 4; k++)
      UNROLL for (int r = 0; r < ITEM_TOKENS; r++)
        UNROLL for (int c = 0; c < 4; c++)
          sums[r][c] += DOT4(values[k][column * 4 + c], inputs[k][strip * ITEM_TOKENS + r]);
    if ((start + DEPTH) % block == 0) {
      const int b = start / block;
      const size_t group = groups + (size_t)b * LANES + column * 4;
      UNROLL for (int r = 0; r < ITEM_TOKENS; r++) {
        const float2 input = x_blocks[(size_t)min(strip * ITEM_TOKENS + r, count - 1) * blocks + b];
        UNROLL for (int c = 0; c < 4; c++) {
          const float zero = zero_point(zeros, group + c, asymmetric);
          totals[r][c] += block_product(sums[r][c], zero, load_half(scales, group + c), input);
          sums[r][c] = 0;
        }
      }
    }
  }
  y += (size_t)(first_token + token) * rows + tile.y;
  for (int r = 0; r < ITEM_TOKENS; r++) {
    const int t = strip * ITEM_TOKENS + r;
    for (int c = 0; c < 4; c++)
      if (t < count && column * 4 + c < tile.z) store_out(totals[r][c], y + (size_t)t * rows, column * 4 + c);
  }
}
#endif
