// Linear layers with int8 activations for CPU devices: explicit vectors of columns, one work-item a
// work-group.

#if WIDTH == 16
typedef int16 wide_int;
#define ints_to_float(v) convert_float16(v)
#else
typedef int8 wide_int;
#define ints_to_float(v) convert_float8(v)
#endif

// run_t, START(total), ADD(run, codes, input), END(total, run): sum the products of four codes of each column
// and four inputs, up to RUN(block) inputs at a time.
#if defined(__AVX512VNNI__)
typedef int lanes_i32 __attribute__((__vector_size__(64)));
typedef wide_int run_t;
#define RUN(block) (block)
#define START(total) (total)
#define ADD(run, codes, input)                                                                               \
  __builtin_astype(__builtin_ia32_vpdpbusd512(__builtin_astype(run, lanes_i32),                              \
                                              __builtin_astype(codes, lanes_i32),                            \
                                              __builtin_astype((wide_uint)(input), lanes_i32)),              \
                   wide_int)
#define END(total, run) (run)
#elif defined(__AVX512BW__) || defined(__AVX2__)
#if WIDTH == 16
typedef char lanes_i8 __attribute__((__vector_size__(64)));
typedef short lanes_i16 __attribute__((__vector_size__(64)));
#define MULTIPLY_BYTES __builtin_ia32_pmaddubsw512
#define ADD_PAIRS __builtin_ia32_pmaddwd512
#else
typedef char lanes_i8 __attribute__((__vector_size__(32)));
typedef short lanes_i16 __attribute__((__vector_size__(32)));
#define MULTIPLY_BYTES __builtin_ia32_pmaddubsw256
#define ADD_PAIRS __builtin_ia32_pmaddwd256
#endif
#define PAIR_SUMS(codes, input)                                                                              \
  MULTIPLY_BYTES(__builtin_astype(codes, lanes_i8), __builtin_astype((wide_uint)(input), lanes_i8))
#define TIMES(pairs, factor)                                                                                 \
  __builtin_astype(ADD_PAIRS(pairs, __builtin_astype((wide_uint)((factor) * 0x10001u), lanes_i16)), wide_int)
#if BITS == 4
// 32 products of at most 15 * 127 stay below 2^15 in each of two 16-bit sums.
typedef lanes_i16 run_t;
#define RUN(block) min(block, 32)
#define START(total) __builtin_astype((wide_int)(0), lanes_i16)
#define ADD(run, codes, input) ((run) + PAIR_SUMS(codes, input))
#define END(total, run) ((total) + TIMES(run, 1))
#else
// A pair of 8-bit products would exceed 16 bits, so the two halves of a code are multiplied apart.
typedef wide_int run_t;
#define RUN(block) (block)
#define START(total) (total)
#define ADD(run, codes, input)                                                                               \
  ((run) + TIMES(PAIR_SUMS((codes) & 0x0f0f0f0f, input), 1) +                                                \
   TIMES(PAIR_SUMS(((codes) >> 4) & 0x0f0f0f0f, input), 16))
#define END(total, run) (run)
#endif
#else
typedef wide_int run_t;
#define RUN(block) (block)
#define START(total) (total)
static inline wide_int add_products(wide_int run, wide_uint codes, uint input) {
  const char4 inputs = as_char4(input);
  run += __builtin_astype(codes & 255u, wide_int) * (wide_int)(inputs.x);
  run += __builtin_astype((codes >> 8) & 255u, wide_int) * (wide_int)(inputs.y);
  run += __builtin_astype((codes >> 16) & 255u, wide_int) * (wide_int)(inputs.z);
  run += __builtin_astype(codes >> 24, wide_int) * (wide_int)(inputs.w);
  return run;
}
#define ADD(run, codes, input) add_products(run, codes, input)
#define END(total, run) (run)
#endif

#define WIDE_PRODUCT(sum, zero, scale, input)                                                                \
  BLOCK_PRODUCT(ints_to_float(sum), zero, scale, (wide_float)((input).x), (wide_float)((input).y))

// ---- a few tokens ---------------------------------------------------------------------------------------

#ifdef TOKENS

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_int8_vector_few(INT8_ARGUMENTS) {
#ifdef GROUPED
  FIND_PLACE(int, get_group_id(0))
#else
  const int4 tile = tiles[get_group_id(0)];
  const int token = get_group_id(1) * TOKENS;
  const int count = min(TOKENS, tokens - token);
#endif
  const int blocks = columns / block;
  y += (size_t)(first_token + token) * rows + tile.y;
  weights += first_weight(tile.x, weight_columns, first_column);
  size_t group = first_group(tile.x, weight_columns, first_column, block);
  wide_float totals[TOKENS][VECTORS];
  // Rows past the last token are read, but their sums are not stored.
  const size_t stride = columns / 4;
  x_codes += token * stride;
  x_blocks += (size_t)token * blocks;
  UNROLL for (int t = 0; t < TOKENS; t++)
    UNROLL for (int c = 0; c < VECTORS; c++) totals[t][c] = 0.0f;
  for (int b = 0; b < blocks; b++, group += LANES) {
    UNROLL for (int part = 0; part < VECTORS; part += PART) {
      wide_int sums[TOKENS][PART];
      UNROLL for (int t = 0; t < TOKENS; t++)
        UNROLL for (int c = 0; c < PART; c++) sums[t][c] = 0;
      __global const weight_t *source = weights + WIDTH * part;
      for (int start = 0; start < block; start += RUN(block)) {
        run_t runs[TOKENS][PART];
        UNROLL for (int t = 0; t < TOKENS; t++)
          UNROLL for (int c = 0; c < PART; c++) runs[t][c] = START(sums[t][c]);
        int quad = (b * block + start) / 4;
        for (int k = 0; k < RUN(block); k += WORD_INPUTS, source += LANES, quad += QUADS) {
          wide_uint q[PART];
          UNROLL for (int c = 0; c < PART; c++) q[c] = load_words(source, WIDTH * c);
          UNROLL for (int c = 0; c < PART * WIDTH; c += LINE_WORDS) PREFETCH_WORDS(source + c);
          UNROLL for (int h = 0; h < QUADS; h++)
            UNROLL for (int c = 0; c < PART; c++) {
              const wide_uint codes = QUAD(q[c], h);
              UNROLL for (int t = 0; t < TOKENS; t++)
                runs[t][c] = ADD(runs[t][c], codes, x_codes[t * stride + quad + h]);
            }
        }
        UNROLL for (int t = 0; t < TOKENS; t++)
          UNROLL for (int c = 0; c < PART; c++) sums[t][c] = END(sums[t][c], runs[t][c]);
      }
      UNROLL for (int c = 0; c < PART; c++) {
        const wide_float scale = load_wide(load_half8, scales, group + WIDTH * (part + c));
        const wide_float zero = zero_points(zeros, group + WIDTH * (part + c), asymmetric);
        UNROLL for (int t = 0; t < TOKENS; t++)
          totals[t][part + c] += WIDE_PRODUCT(sums[t][c], zero, scale, x_blocks[t * blocks + b]);
      }
    }
    weights += block / WORD_INPUTS * LANES;
  }
  for (int t = 0; t < count; t++, y += rows)
    UNROLL for (int c = 0; c < VECTORS; c++)
      store_columns(totals[t][c], y + WIDTH * c, tile.z - WIDTH * c);
}
#else

// ---- many tokens ----------------------------------------------------------------------------------------

// Smallest block.
#define MIN_BLOCK 16

// DEPTH inputs of PAIR columns.
typedef struct {
  wide_uint codes[DEPTH / 4][2];
  wide_float scales[DEPTH / MIN_BLOCK][2];
  wide_float zeros[DEPTH / MIN_BLOCK][2];
} panel_t;

static inline void unpack(
    panel_t *panel, __global const weight_t *weights, __global const half *scales,
    __global const zero_t *zeros, int start, int depth, int block, int asymmetric) {
  for (int k = 0; k < depth; k += WORD_INPUTS) {
    __global const uint *word = weights + (size_t)((start + k) / WORD_INPUTS) * LANES;
    UNROLL for (int c = 0; c < PAIR; c += LINE_WORDS) PREFETCH_WORDS(word + c);
    UNROLL for (int c = 0; c < 2; c++) {
      const wide_uint q = load_words(word, WIDTH * c);
      UNROLL for (int h = 0; h < QUADS; h++) panel->codes[k / 4 + h][c] = QUAD(q, h);
    }
  }
  for (int g = 0; g < depth / block; g++) {
    const size_t group = (size_t)(start / block + g) * LANES;
    UNROLL for (int c = 0; c < 2; c++) {
      panel->scales[g][c] = load_wide(load_half8, scales, group + WIDTH * c);
      panel->zeros[g][c] = zero_points(zeros, group + WIDTH * c, asymmetric);
    }
  }
}

// Add the products of `depth` inputs to the totals of `size` tokens, of which `count` are read: rows past the
// last one repeat it, and their totals are not stored. A macro, because the size must be constant for the
// loops to be unrolled.
#define DEFINE_STRIP(name, size)                                                                             \
  static inline void name(wide_float *totals, const panel_t *panel, __global const uint *x_codes,            \
                          __global const float2 *x_blocks, int columns, int depth, int block, int count) {   \
    __global const uint *inputs[size];                                                                       \
    __global const float2 *input_blocks[size];                                                               \
    UNROLL for (int r = 0; r < size; r++) {                                                                  \
      inputs[r] = x_codes + (size_t)min(r, count - 1) * (columns / 4);                                       \
      input_blocks[r] = x_blocks + (size_t)min(r, count - 1) * (columns / block);                            \
    }                                                                                                        \
    for (int g = 0; g < depth / block; g++) {                                                                \
      wide_int sums[2 * size];                                                                               \
      UNROLL for (int r = 0; r < 2 * size; r++) sums[r] = 0;                                                 \
      for (int start = 0; start < block; start += RUN(block)) {                                              \
        run_t runs[2 * size];                                                                                \
        UNROLL for (int r = 0; r < 2 * size; r++) runs[r] = START(sums[r]);                                  \
        const int quad = (g * block + start) / 4;                                                            \
        for (int k = quad; k < quad + RUN(block) / 4; k++) {                                                 \
          const wide_uint w0 = panel->codes[k][0], w1 = panel->codes[k][1];                                  \
          UNROLL for (int r = 0; r < size; r++) {                                                            \
            runs[2 * r] = ADD(runs[2 * r], w0, inputs[r][k]);                                                \
            runs[2 * r + 1] = ADD(runs[2 * r + 1], w1, inputs[r][k]);                                        \
          }                                                                                                  \
        }                                                                                                    \
        UNROLL for (int r = 0; r < 2 * size; r++) sums[r] = END(sums[r], runs[r]);                           \
      }                                                                                                      \
      const wide_float s0 = panel->scales[g][0], s1 = panel->scales[g][1];                                   \
      const wide_float z0 = panel->zeros[g][0], z1 = panel->zeros[g][1];                                     \
      UNROLL for (int r = 0; r < size; r++) {                                                                \
        const float2 input = input_blocks[r][g];                                                             \
        totals[2 * r] += WIDE_PRODUCT(sums[2 * r], z0, s0, input);                                           \
        totals[2 * r + 1] += WIDE_PRODUCT(sums[2 * r + 1], z1, s1, input);                                   \
      }                                                                                                      \
    }                                                                                                        \
  }
DEFINE_STRIP(multiply_strip, STRIP)
DEFINE_STRIP(multiply_half_strip, STRIP / 2)

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_int8_vector_many(INT8_ARGUMENTS) {
  const int item = get_group_id(0);
#ifdef GROUPED
  FIND_PLACE(int, item / (LANES / ITEM_COLUMNS))
  const int first_lane = item % (LANES / ITEM_COLUMNS) * ITEM_COLUMNS;
#else
  const int4 tile = tiles[item / (LANES / ITEM_COLUMNS)];
  const int first_lane = item % (LANES / ITEM_COLUMNS) * ITEM_COLUMNS;
  const int token = get_group_id(1) * token_step;
  const int count = min(token_step, tokens - token);
#endif
  x_codes += (size_t)token * (columns / 4);
  x_blocks += (size_t)token * (columns / block);
  y += (size_t)(first_token + token) * rows + tile.y;
  const size_t group = first_group(tile.x, weight_columns, first_column, block);
  weights += first_weight(tile.x, weight_columns, first_column);
  scales += group;
  zeros += group;
  panel_t panel;
  wide_float totals[WHOLE_STRIPS(MAX_TOKEN_STEP) * 2];
  for (int lane = first_lane; lane < min(first_lane + ITEM_COLUMNS, tile.z); lane += PAIR) {
    for (int t = 0; t < WHOLE_STRIPS(count) * 2; t++) totals[t] = 0.0f;
    for (int start = 0; start < columns; start += DEPTH) {
      const int depth = min(DEPTH, columns - start);
      unpack(&panel, weights + lane, scales + lane, zeros + lane, start, depth, block, asymmetric);
      for (int t = 0; t < count; t += STRIP) {
        __global const uint *codes = x_codes + (size_t)t * (columns / 4) + start / 4;
        __global const float2 *blocks = x_blocks + (size_t)t * (columns / block) + start / block;
        if (count - t > STRIP / 2)
          multiply_strip(totals + 2 * t, &panel, codes, blocks, columns, depth, block, count - t);
        else
          multiply_half_strip(totals + 2 * t, &panel, codes, blocks, columns, depth, block, count - t);
      }
    }
    for (int t = 0; t < count; t++) {
      store_columns(totals[2 * t], y + (size_t)t * rows + lane, tile.z - lane);
      store_columns(totals[2 * t + 1], y + (size_t)t * rows + lane + WIDTH, tile.z - lane - WIDTH);
    }
  }
}
#endif
