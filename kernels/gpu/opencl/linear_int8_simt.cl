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

// The product of a block is the sum of codes times codes, less the zero point's share, times both scales. Exact up to
// the scales, as no sum reaches 2^24.

// ---- a few tokens ---------------------------------------------------------------------------------------

#ifdef TOKENS

#define CLEAR_TOTAL(t) float total##t = 0.0f;
#define CLEAR_SUM(t) int sum##t = 0;
// Sixteen inputs are four words of codes.
#define ADD_QUADS(t)                                                                                         \
  {                                                                                                          \
    const uint4 input = vload4(0, x_codes + (t * stride + (b * BLOCK + k) / 4));                                           \
    sum##t += DOT4(quads.x, input.x) + DOT4(quads.y, input.y);                                               \
    sum##t += DOT4(quads.z, input.z) + DOT4(quads.w, input.w);                                               \
  }
#define ADD_BLOCK(t)                                                                                         \
  {                                                                                                          \
    const float2 input = x_blocks[t * blocks + b];                                                           \
    total##t = FMA(FMA(-zero, input.y, (float)sum##t), scale * input.x, total##t);                           \
  }

__kernel __attribute__((reqd_work_group_size(LANES, SLICES, 1))) void linear_int8_simt_few(INT8_ARGUMENTS) {
  __local float partial[PARTIAL_FLOATS];
  const uint lane = get_local_id(0), slice = get_local_id(1);
  const int4 tile = tiles[get_group_id(0)];
  const uint token = get_group_id(1) * TOKENS;
  const uint count = min((uint)TOKENS, tokens - token);
  // Rows past the last token are read, but their sums are not stored.
  const uint stride = (uint)columns / 4, blocks = (uint)columns / BLOCK;
  weights += first_weight(tile.x, weight_columns, first_column) + lane;
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK) + lane;
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
  x_codes += (size_t)token * stride;
  x_blocks += (size_t)token * blocks;
  REPEAT(TOKENS, CLEAR_TOTAL)
  for (uint b = slice; b < blocks; b += SLICES) {
    const uint group = b * LANES;
    const float scale = load_half(scales, group), zero = ZERO(group);
    __global const weight_t *source = weights + b * (BLOCK / WORD_INPUTS * LANES);
    REPEAT(TOKENS, CLEAR_SUM)
    for (uint k = 0; k < BLOCK; k += 16, source += 16 / WORD_INPUTS * LANES) {
#if BITS == 4
      const uint q0 = source[0], q1 = source[LANES];
      const uint4 quads = (uint4)(QUAD(q0, 0), QUAD(q0, 1), QUAD(q1, 0), QUAD(q1, 1));
#else
      const uint4 quads = (uint4)(source[0], source[LANES], source[2 * LANES], source[3 * LANES]);
#endif
      REPEAT(TOKENS, ADD_QUADS)
    }
    REPEAT(TOKENS, ADD_BLOCK)
  }
  STORE_SLICES(partial)
}
#else

// ---- many tokens ----------------------------------------------------------------------------------------

#define CLEAR_SUMS(r)                                                                                        \
  float4 total##r = 0.0f;                                                                                    \
  int4 sum##r = 0;
#define STORED(r) total##r
#define ADD_QUAD(r, input)                                                                                   \
  sum##r += (int4)(DOT4(value.x, input), DOT4(value.y, input), DOT4(value.z, input), DOT4(value.w, input));
#define ADD_BLOCK(r)                                                                                         \
  {                                                                                                          \
    const float2 input = block_inputs[strip * ITEM_TOKENS + r];                                              \
    const float4 product = FMA(zero, (float4)(-input.y), convert_float4(sum##r));                            \
    total##r = FMA(product, scale * input.x, total##r);                                                      \
    sum##r = 0;                                                                                              \
  }

__kernel __attribute__((reqd_work_group_size(ITEMS_X, ITEMS_Y, 1))) void linear_int8_simt_many(
    INT8_ARGUMENTS) {
  __local uint4 inputs[DEPTH / 4 * TILE_TOKENS / 4];
  __local uint4 values[DEPTH / 4 * LANES / 4];
  __local float2 block_inputs[TILE_TOKENS];
  __local uint *input_slots = (__local uint *)inputs, *value_slots = (__local uint *)values;
  const uint column = get_local_id(0), strip = get_local_id(1);
  const uint item = strip * ITEMS_X + column;
  const int4 tile = tiles[get_group_id(0)];
  const uint token = get_group_id(1) * token_step;
  const uint count = min((uint)token_step, tokens - token);
  const uint stride = (uint)columns / 4, blocks = (uint)columns / BLOCK;
  x_codes += (size_t)token * stride;
  x_blocks += (size_t)token * blocks;
  weights += first_weight(tile.x, weight_columns, first_column);
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK) + column * 4;
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
  REPEAT(ITEM_TOKENS, CLEAR_SUMS)
  for (uint start = 0; start < columns; start += DEPTH) {
    barrier(CLK_LOCAL_MEM_FENCE);
    // Rows past the last one repeat it: nothing beyond the inputs is read, and their sums are not stored.
    SPREAD(i, TILE_TOKENS * DEPTH / 16) {
      const uint t = i / (DEPTH / 16), k = i % (DEPTH / 16) * 4;
      const uint4 codes = vload4(0, x_codes + (min(t, count - 1) * stride + start / 4 + k));
      __local uint *slot = input_slots + k * TILE_TOKENS + t;
      slot[0] = codes.x;
      slot[TILE_TOKENS] = codes.y;
      slot[2 * TILE_TOKENS] = codes.z;
      slot[3 * TILE_TOKENS] = codes.w;
    }
    SPREAD(i, LANES * DEPTH / WORD_INPUTS) {
      const uint lane = i % LANES, word = i / LANES;
      const uint q = weights[(start / WORD_INPUTS + word) * LANES + lane];
      __local uint *slot = value_slots + word * QUADS * LANES + lane;
      slot[0] = QUAD(q, 0);
#if BITS == 4
      slot[LANES] = QUAD(q, 1);
#endif
    }
    // The block's own numbers are needed once a block, not once a step.
    const uint b = start / BLOCK;
    if (start % BLOCK == 0)
      SPREAD(i, TILE_TOKENS) block_inputs[i] = x_blocks[min(i, count - 1) * blocks + b];
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (uint k = 0; k < DEPTH / 4; k++) {
      const uint4 value = values[k * (LANES / 4) + column];
      const uint4 input = inputs[(k * TILE_TOKENS + strip * ITEM_TOKENS) / 4];
      ADD_QUAD(0, input.x)
      ADD_QUAD(1, input.y)
      ADD_QUAD(2, input.z)
      ADD_QUAD(3, input.w)
#if ITEM_TOKENS == 8
      const uint4 more = inputs[(k * TILE_TOKENS + strip * ITEM_TOKENS) / 4 + 1];
      ADD_QUAD(4, more.x)
      ADD_QUAD(5, more.y)
      ADD_QUAD(6, more.z)
      ADD_QUAD(7, more.w)
#endif
    }
    if ((start + DEPTH) % BLOCK == 0) {
      const float4 scale = SCALE4(b * LANES), zero = ZERO4(b * LANES);
      REPEAT(ITEM_TOKENS, ADD_BLOCK)
    }
  }
  y += (size_t)(first_token + token) * rows + tile.y;
  REPEAT(ITEM_TOKENS, STORE_ROW)
}
#endif
