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

// Sixteen inputs are four words of codes. Rows of codes are multiples of them, which one access reads.
#define CODE_VECTORS(p) ((__global const uint4 *)(p))

// ---- a few tokens ---------------------------------------------------------------------------------------

#ifdef TOKENS

// The words of sixteen inputs of a column.
#if BITS == 4
#define LOAD_QUADS                                                                                           \
  const uint q0 = WORD(source, 0), q1 = WORD(source, LANES);                                                 \
  const uint4 quads = (uint4)(QUAD(q0, 0), QUAD(q0, 1), QUAD(q1, 0), QUAD(q1, 1));
#else
#define LOAD_QUADS                                                                                           \
  const uint4 quads =                                                                                        \
      (uint4)(WORD(source, 0), WORD(source, LANES), WORD(source, 2 * LANES), WORD(source, 3 * LANES));
#endif
#define QUADS_ROWS (16 / WORD_INPUTS * LANES)

#if TOKENS <= 2
#define STAGED_WORDS 0
#define CLEAR_TOTAL(t) float total##t = 0.0f;
#define CLEAR_SUM(t) int sum##t = 0;
#define ADD_QUADS(t)                                                                                         \
  {                                                                                                          \
    const uint4 input = inputs[t * vectors];                                                                 \
    sum##t += DOT4(quads.x, input.x) + DOT4(quads.y, input.y);                                               \
    sum##t += DOT4(quads.z, input.z) + DOT4(quads.w, input.w);                                               \
  }
#define ADD_BLOCK(t)                                                                                         \
  {                                                                                                          \
    const float2 input = x_blocks[t * blocks + b];                                                           \
    total##t += BLOCK_PRODUCT((float)sum##t, zero, scale, input.x, input.y);                                 \
  }
#else
// The tokens of a word of inputs are staged as a vector, and so are the sums: an address for each token would take
// more registers than the sums.
#define STAGED_INPUTS 256
#define STAGED_BLOCKS (STAGED_INPUTS / BLOCK)
// The words of the inputs, and behind them the scales and the sums of their blocks.
#define STAGED_WORDS (TOKENS * (STAGED_INPUTS / 4 + 2 * STAGED_BLOCKS))
#define VECTOR_OF(type, count) type##count
#define VECTOR(type, count) VECTOR_OF(type, count)
typedef VECTOR(float, TOKENS) tokens_t;
typedef VECTOR(int, TOKENS) sums_t;
typedef VECTOR(uint, TOKENS) words_t;
#define CONVERT_SUMS VECTOR(convert_float, TOKENS)
#define DOTS(q, v) (int4)(DOT4(q, v.x), DOT4(q, v.y), DOT4(q, v.z), DOT4(q, v.w))
#if TOKENS == 8
#define ADD_QUAD(q, v)                                                                                       \
  {                                                                                                          \
    const words_t four = v;                                                                                  \
    sums.lo += DOTS(q, four.lo);                                                                            \
    sums.hi += DOTS(q, four.hi);                                                                            \
  }
#else
#define ADD_QUAD(q, v)                                                                                       \
  {                                                                                                          \
    const words_t four = v;                                                                                  \
    sums += DOTS(q, four);                                                                                  \
  }
#endif
#define total0 totals.s0
#define total1 totals.s1
#define total2 totals.s2
#define total3 totals.s3
#define total4 totals.s4
#define total5 totals.s5
#define total6 totals.s6
#define total7 totals.s7
#endif

__kernel __attribute__((reqd_work_group_size(ROWS, SLICES * TILES, 1))) void linear_int8_simt_few(
    INT8_ARGUMENTS ENDING_ARGUMENTS) {
  // The sums of the slices follow the inputs in the same memory.
  __local uint16 staged[(STAGED_WORDS > PARTIAL_FLOATS ? STAGED_WORDS : PARTIAL_FLOATS) / 16];
  __local float *partial = (__local float *)staged;
  FIND_ITEM
  BEGIN_ENDING
#ifdef GROUPED
  FIND_PLACE(uint, get_group_id(0))
#else
  const int4 tile = OWN_TILE;
  const uint token = get_group_id(1) * TOKENS;
  const uint count = min((uint)TOKENS, tokens - token);
#endif
  // Rows past the last token are read, but their sums are not stored.
  const uint vectors = (uint)columns / 16, blocks = (uint)columns / BLOCK;
  const weight_place words = PLACE(first_weight(tile.x, weight_columns, first_column) + lane);
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK) + lane;
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
  x_codes += (size_t)token * (vectors * 4);
  x_blocks += (size_t)token * blocks;
#if TOKENS <= 2
  REPEAT(TOKENS, CLEAR_TOTAL)
  for (uint b = slice; b < blocks; b += SLICES) {
    const uint group = b * LANES;
    const float scale = load_half(scales, group), zero = ZERO(group);
    weight_place source = words + b * (BLOCK / WORD_INPUTS * LANES);
    REPEAT(TOKENS, CLEAR_SUM)
    __global const uint4 *inputs = CODE_VECTORS(x_codes) + b * (BLOCK / 16);
    for (uint k = 0; k < BLOCK; k += 16, source += QUADS_ROWS, inputs++) {
      LOAD_QUADS
      REPEAT(TOKENS, ADD_QUADS)
    }
    REPEAT(TOKENS, ADD_BLOCK)
  }
#else
  __local uint *inputs = (__local uint *)staged;
  __local float *input_scales = (__local float *)(inputs + TOKENS * (STAGED_INPUTS / 4));
  __local float *input_sums = input_scales + TOKENS * STAGED_BLOCKS;
  tokens_t totals = 0.0f;
  for (uint start = 0; start < blocks; start += STAGED_BLOCKS) {
    const uint depth = min((uint)STAGED_BLOCKS, blocks - start);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = OWN_ITEM; i < depth * (BLOCK / 16 * TOKENS); i += ITEMS) {
      const uint t = i % TOKENS, vector = i / TOKENS;
      const uint4 input = CODE_VECTORS(x_codes)[t * vectors + start * (BLOCK / 16) + vector];
      __local uint *slot = inputs + vector * (4 * TOKENS) + t;
      slot[0] = input.x;
      slot[TOKENS] = input.y;
      slot[2 * TOKENS] = input.z;
      slot[3 * TOKENS] = input.w;
    }
    for (uint i = OWN_ITEM; i < depth * TOKENS; i += ITEMS) {
      const float2 input = x_blocks[i % TOKENS * blocks + start + i / TOKENS];
      input_scales[i] = input.x;
      input_sums[i] = input.y;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint b = slice; b < depth; b += SLICES) {
      const uint group = (start + b) * LANES;
      const float scale = load_half(scales, group), zero = ZERO(group);
      weight_place source = words + group * (BLOCK / WORD_INPUTS);
      __local const words_t *input = (__local const words_t *)inputs + b * (BLOCK / 4);
      sums_t sums = 0;
      for (uint k = 0; k < BLOCK; k += 16, source += QUADS_ROWS, input += 4) {
        LOAD_QUADS
        ADD_QUAD(quads.x, input[0])
        ADD_QUAD(quads.y, input[1])
        ADD_QUAD(quads.z, input[2])
        ADD_QUAD(quads.w, input[3])
      }
      totals += BLOCK_PRODUCT(CONVERT_SUMS(sums), (tokens_t)zero, (tokens_t)scale,
                              ((__local const tokens_t *)input_scales)[b],
                              ((__local const tokens_t *)input_sums)[b]);
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE);
#endif
  STORE_SLICES(partial)
}
#else

// ---- many tokens ----------------------------------------------------------------------------------------

#define COLUMN_STEP ITEMS_X
#define CLEAR_TOTAL(r)                                                                                       \
  float4 total##r = 0.0f;                                                                                    \
  int4 sum##r = 0;
#define STORED(r) total##r
// The products of a word of each of four columns with a token's.
#define ADD_WORD(r, part)                                                                                    \
  sum##r += (int4)(DOT4(v0.part, input.part), DOT4(v1.part, input.part), DOT4(v2.part, input.part),          \
                   DOT4(v3.part, input.part));
#define MULTIPLY(r)                                                                                          \
  {                                                                                                          \
    const uint4 input = own_inputs[k * TILE_TOKENS + r];                                                     \
    ADD_WORD(r, x)                                                                                           \
    ADD_WORD(r, y)                                                                                           \
    ADD_WORD(r, z)                                                                                           \
    ADD_WORD(r, w)                                                                                           \
  }
#define ADD_BLOCK(r)                                                                                         \
  {                                                                                                          \
    const float2 input = block_inputs[strip * ITEM_TOKENS + r];                                              \
    total##r +=                                                                                              \
        BLOCK_PRODUCT(convert_float4(sum##r), zero, scale, (float4)input.x, (float4)input.y);                \
    sum##r = 0;                                                                                              \
  }
// Codes are staged as vectors of sixteen inputs. A work-item stages at most one of those of the inputs.
#define ROW_RUNS (DEPTH / 16)
#define INPUT_RUNS (TILE_TOKENS * ROW_RUNS)
#define WEIGHT_RUNS (LANES * ROW_RUNS)
#define RUN_ROWS (16 / WORD_INPUTS * LANES)

__kernel __attribute__((reqd_work_group_size(ITEMS_X, ITEMS_Y, 1))) void linear_int8_simt_many(
    INT8_ARGUMENTS) {
  // values[k / 16][column] and inputs[k / 16][token]
  __local uint4 values[ROW_RUNS * LANES], inputs[ROW_RUNS * TILE_TOKENS];
  __local float2 block_inputs[TILE_TOKENS];
  const uint column = get_local_id(0), strip = get_local_id(1);
  const uint item = strip * ITEMS_X + column, lane = item % LANES;
#ifdef GROUPED
  FIND_PLACE(uint, get_group_id(0))
#else
  const int4 tile = tiles[get_group_id(0)];
  const uint token = get_group_id(1) * token_step;
  const uint count = min((uint)token_step, tokens - token);
#endif
  const uint stride = (uint)columns / 4, blocks = (uint)columns / BLOCK;
  // Rows past the last one repeat it: nothing beyond the inputs is read, and their sums are not stored.
  x_codes += (size_t)token * stride + (min(item / ROW_RUNS, count - 1) * stride + item % ROW_RUNS * 4);
  x_blocks += (size_t)token * blocks + min(item, count - 1) * blocks;
  weight_place words =
      PLACE(first_weight(tile.x, weight_columns, first_column) + item / LANES * RUN_ROWS + lane);
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK) + column;
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
  __local const uint4 *own_values = values + column, *own_inputs = inputs + strip * ITEM_TOKENS;
  REPEAT(ITEM_TOKENS, CLEAR_TOTAL)
  uint start = 0;
  // There is a first step, as in linear_simt.cl.
  do {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (ITEMS <= INPUT_RUNS || item < INPUT_RUNS) {
      inputs[item % ROW_RUNS * TILE_TOKENS + item / ROW_RUNS] = *CODE_VECTORS(x_codes);
      x_codes += DEPTH / 4;
    }
    if (ITEMS <= WEIGHT_RUNS || item < WEIGHT_RUNS)
      UNROLL for (uint turn = 0; turn < TURNS(WEIGHT_RUNS); turn++) {
        const weight_place place = words + turn * (ITEMS / LANES) * RUN_ROWS;
        __local uint4 *slot = values + item + turn * ITEMS;
#if BITS == 4
        const uint low = WORD(place, 0), high = WORD(place, LANES);
        slot[0] = (uint4)(QUAD(low, 0), QUAD(low, 1), QUAD(high, 0), QUAD(high, 1));
#else
        slot[0] = (uint4)(WORD(place, 0), WORD(place, LANES), WORD(place, 2 * LANES), WORD(place, 3 * LANES));
#endif
      }
    words += DEPTH / WORD_INPUTS * LANES;
    // The block's own numbers are needed once a block, not once a step.
    const uint b = start / BLOCK;
    if ((DEPTH == BLOCK || start % BLOCK == 0) && item < TILE_TOKENS)
      block_inputs[item] = x_blocks[b];
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (uint k = 0; k < ROW_RUNS; k++) {
      __local const uint4 *value = own_values + k * LANES;
      const uint4 v0 = value[0], v1 = value[ITEMS_X], v2 = value[2 * ITEMS_X], v3 = value[3 * ITEMS_X];
      REPEAT(ITEM_TOKENS, MULTIPLY)
    }
    if (DEPTH == BLOCK || (start + DEPTH) % BLOCK == 0) {
      const uint group = b * LANES;
      const float4 scale = SCALE4(group), zero = ZERO4(group);
      REPEAT(ITEM_TOKENS, ADD_BLOCK)
    }
  } while ((start += DEPTH) < columns);
  y += (size_t)(first_token + token) * rows + tile.y + column;
  REPEAT(ITEM_TOKENS, STORE_ROW)
}
#endif
