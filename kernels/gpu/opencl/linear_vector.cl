// Linear layers for CPU devices: explicit vectors of columns, one work-item a work-group.

// ---- a few tokens ---------------------------------------------------------------------------------------

#ifdef TOKENS

// Inputs between two additions to the totals; quantised weights have a block instead.
#define SPAN 128

#if BITS == 4
// Codes are masked without a shift; the input is divided by 16^i instead, which is exact. The last one is
// shifted, since as an int it would be negative.
#define INPUT_FACTORS (float8)(1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f)
#elif BITS == 8
#define INPUT_FACTORS (float8)(1.0f, 0x1p-8f, 0x1p-16f, 1.0f, 1.0f, 0x1p-8f, 0x1p-16f, 1.0f)
#else
#define INPUT_FACTORS 1.0f
#endif
#define MASKED(q, i)                                                                                         \
  codes_to_float((i) < WORD_INPUTS - 1 ? (q) & (wide_uint)(CODE_MASK << (BITS * (i)))                        \
                                       : (q) >> (wide_uint)(32 - BITS))

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_vector_few(LINEAR_ARGUMENTS) {
#ifdef GROUPED
  FIND_PLACE(int, get_group_id(0))
#else
  const int4 tile = tiles[get_group_id(0)];
  const int token = get_group_id(1) * TOKENS;
  const int count = min(TOKENS, tokens - token);
#endif
  x += (size_t)(first_token + token) * columns;
  y += (size_t)(first_token + token) * rows + tile.y;
  weights += first_weight(tile.x, weight_columns, first_column);
  wide_float totals[TOKENS][VECTORS];
  UNROLL for (int t = 0; t < TOKENS; t++)
    UNROLL for (int c = 0; c < VECTORS; c++) totals[t][c] = 0.0f;
#if BITS <= 8
  const int span = block;
  size_t group = first_group(tile.x, weight_columns, first_column, block);
#else
  int span = SPAN;
#endif
  for (int start = 0; start < columns; start += span) {
#if BITS > 8
    span = min(SPAN, columns - start);
#endif
    float8 inputs[TOKENS][SPAN / 8];
    float input_sums[TOKENS];
    UNROLL for (int t = 0; t < TOKENS; t++) {
      // Rows past the last one repeat it: nothing beyond x is read, and their sums are not stored.
      __global const act_t *row = x + (size_t)min(t, count - 1) * columns + start;
      float8 input_sum = 0.0f;
      for (int k = 0; k < span; k += 8) {
        const float8 v = load_act8(row, k);
        inputs[t][k / 8] = v * INPUT_FACTORS;
        input_sum += v;
      }
      input_sums[t] = sum8(input_sum);
    }
    UNROLL for (int part = 0; part < VECTORS; part += PART) {
      wide_float sums[TOKENS][PART];
      UNROLL for (int c = 0; c < PART; c++) {
#if BITS <= 8 && !defined(MINIMUMS)
        const wide_float zero = zero_points(zeros, group + WIDTH * (part + c), asymmetric);
        UNROLL for (int t = 0; t < TOKENS; t++) sums[t][c] = -input_sums[t] * zero;
#else
        UNROLL for (int t = 0; t < TOKENS; t++) sums[t][c] = 0.0f;
#endif
      }
      __global const weight_t *source = weights + WIDTH * part;
      const float *v = (const float *)inputs;
      for (int k = 0; k < span; k += WORD_INPUTS, v += WORD_INPUTS, source += LANES) {
#if BITS <= 8
        wide_uint q[PART];
        UNROLL for (int c = 0; c < PART; c++) q[c] = load_words(source, WIDTH * c);
        UNROLL for (int c = 0; c < PART * WIDTH; c += LINE_WORDS) PREFETCH_WORDS(source + c);
#endif
        UNROLL for (int i = 0; i < WORD_INPUTS; i++)
          UNROLL for (int c = 0; c < PART; c++) {
#if BITS <= 8
            const wide_float value = MASKED(q[c], i);
#else
            const wide_float value = load_wide(load_weight8, source, WIDTH * c);
#endif
            UNROLL for (int t = 0; t < TOKENS; t++)
              sums[t][c] = FMA((wide_float)v[SPAN * t + i], value, sums[t][c]);
          }
      }
      UNROLL for (int c = 0; c < PART; c++) {
#if BITS <= 8
        const wide_float scale = load_wide(load_half8, scales, group + WIDTH * (part + c));
        UNROLL for (int t = 0; t < TOKENS; t++)
          totals[t][part + c] = FMA(sums[t][c], scale, totals[t][part + c]);
#ifdef MINIMUMS
        const wide_float minimum = zero_points(zeros, group + WIDTH * (part + c), asymmetric);
        UNROLL for (int t = 0; t < TOKENS; t++)
          totals[t][part + c] = FMA((wide_float)input_sums[t], minimum, totals[t][part + c]);
#endif
#else
        UNROLL for (int t = 0; t < TOKENS; t++) totals[t][part + c] += sums[t][c];
#endif
      }
    }
    weights += span / WORD_INPUTS * LANES;
#if BITS <= 8
    group += LANES;
#endif
  }
  for (int t = 0; t < count; t++, y += rows)
    UNROLL for (int c = 0; c < VECTORS; c++)
      store_columns(totals[t][c], y + WIDTH * c, tile.z - WIDTH * c);
}
#else

// ---- many tokens ----------------------------------------------------------------------------------------

// Dequantise `depth` inputs from `start` of PAIR columns.
static inline void dequantize(
    wide_float *values, __global const weight_t *weights, __global const half *scales,
    __global const zero_t *zeros, int start, int depth, int block, int asymmetric) {
#if BITS <= 8
  for (int g = 0; g < depth; g += block) {
    const size_t group = (size_t)((start + g) / block) * LANES;
    wide_float scale[2], offset[2];
    UNROLL for (int c = 0; c < 2; c++) {
      scale[c] = load_wide(load_half8, scales, group + WIDTH * c);
      offset[c] = offsets(scale[c], zeros, group + WIDTH * c, asymmetric);
    }
    for (int k = g; k < g + block; k += WORD_INPUTS) {
      __global const uint *word = weights + (size_t)((start + k) / WORD_INPUTS) * LANES;
      UNROLL for (int c = 0; c < PAIR; c += LINE_WORDS) PREFETCH_WORDS(word + c);
      UNROLL for (int c = 0; c < 2; c++) {
        const wide_uint q = load_words(word, WIDTH * c);
        UNROLL for (int i = 0; i < WORD_INPUTS; i++)
          values[2 * (k + i) + c] =
              FMA(codes_to_float((q >> (wide_uint)(BITS * i)) & (wide_uint)(CODE_MASK)), scale[c], offset[c]);
      }
    }
  }
#else
  for (int k = 0; k < depth; k++) {
    __global const weight_t *source = weights + (size_t)(start + k) * LANES;
    UNROLL for (int c = 0; c < 2; c++)
      values[2 * k + c] = load_wide(load_weight8, source, WIDTH * c);
  }
#endif
}

#ifdef ACT_HALF
#define STRIP_INPUTS(size)                                                                                   \
  float8 copies[size * (DEPTH / 8)];                                                                         \
  UNROLL for (int r = 0; r < size; r++)                                                                      \
    for (int k = 0; k < depth; k += 8) copies[r * (DEPTH / 8) + k / 8] = load_act8(rows_of_x[r], k);         \
  const float *inputs = (const float *)copies;
#define STRIP_INPUT(r, k) inputs[(r) * DEPTH + (k)]
#else
#define STRIP_INPUTS(size)
#define STRIP_INPUT(r, k) rows_of_x[r][k]
#endif

// Add the products of `depth` inputs to the sums of `size` tokens, of which `count` are read: rows past the
// last one repeat it, and their sums are not stored. A macro, because the size must be constant for the loops
// to be unrolled.
#define DEFINE_STRIP(name, size)                                                                             \
  static inline void name(wide_float *sums, const wide_float *values, __global const act_t *x, int columns, \
                          int depth, int count) {                                                            \
    wide_float a[size * 2];                                                                                  \
    UNROLL for (int r = 0; r < 2 * size; r++) a[r] = sums[r];                                                \
    __global const act_t *rows_of_x[size];                                                                   \
    UNROLL for (int r = 0; r < size; r++) rows_of_x[r] = x + (size_t)min(r, count - 1) * columns;            \
    STRIP_INPUTS(size)                                                                                       \
    for (int k = 0; k < depth; k++) {                                                                        \
      const wide_float w0 = values[2 * k], w1 = values[2 * k + 1];                                           \
      UNROLL for (int r = 0; r < size; r++) {                                                                \
        const wide_float input = (wide_float)STRIP_INPUT(r, k);                                              \
        a[2 * r] = FMA(input, w0, a[2 * r]);                                                                 \
        a[2 * r + 1] = FMA(input, w1, a[2 * r + 1]);                                                         \
      }                                                                                                      \
    }                                                                                                        \
    UNROLL for (int r = 0; r < 2 * size; r++) sums[r] = a[r];                                                \
  }
DEFINE_STRIP(multiply_strip, STRIP)
DEFINE_STRIP(multiply_half_strip, STRIP / 2)

// Compute `count` tokens of PAIR columns, of which `valid` are written.
static inline void multiply(
    __global const weight_t *weights, __global const half *scales, __global const zero_t *zeros,
    __global const act_t *x, __global out_t *y, int columns, int rows, int block, int asymmetric, int count,
    int valid) {
  wide_float values[DEPTH * 2];
  wide_float sums[WHOLE_STRIPS(MAX_TOKEN_STEP) * 2];
  for (int t = 0; t < WHOLE_STRIPS(count) * 2; t++) sums[t] = 0.0f;

  for (int start = 0; start < columns; start += DEPTH) {
    const int depth = min(DEPTH, columns - start);
    dequantize(values, weights, scales, zeros, start, depth, block, asymmetric);
    int t = 0;
    for (; t + STRIP / 2 < count; t += STRIP)
      multiply_strip(sums + 2 * t, values, x + (size_t)t * columns + start, columns, depth, count - t);
    if (t < count)
      multiply_half_strip(sums + 2 * t, values, x + (size_t)t * columns + start, columns, depth, count - t);
  }
  for (int t = 0; t < count; t++, y += rows) {
    store_columns(sums[2 * t], y, valid);
    store_columns(sums[2 * t + 1], y + WIDTH, valid - WIDTH);
  }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_vector_many(LINEAR_ARGUMENTS) {
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
  x += (size_t)(first_token + token) * columns;
  y += (size_t)(first_token + token) * rows + tile.y;
  weights += first_weight(tile.x, weight_columns, first_column);
#if BITS <= 8
  const size_t group = first_group(tile.x, weight_columns, first_column, block);
  scales += group;
  zeros += group;
#endif
  for (int lane = first_lane; lane < min(first_lane + ITEM_COLUMNS, tile.z); lane += PAIR)
    multiply(weights + lane, scales + lane, zeros + lane, x, y + lane, columns, rows, block, asymmetric,
             count, tile.z - lane);
}
#endif
