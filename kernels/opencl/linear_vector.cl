// Linear layers for CPU devices: explicit vectors of columns, one work-item a work-group.

#ifdef __AVX512F__
#define WIDTH 16
typedef float16 wide_float;
typedef uint16 wide_uint;
typedef uint16 loose_uint16 __attribute__((aligned(4)));
#define load_words(p, i) (*(__global const loose_uint16 *)((p) + (i)))
#define codes_to_float(q) convert_float16(as_int16(q))
#define load_wide(load8, p, i) (float16)(load8(p, i), load8(p, (i) + 8))
#else
#define WIDTH 8
typedef float8 wide_float;
typedef uint8 wide_uint;
#define load_words(p, i) load_uint8(p, i)
#define codes_to_float(q) convert_float8(as_int8(q))
#define load_wide(load8, p, i) load8(p, i)
#endif

// Write the first `valid` columns.
static inline void store_columns(wide_float value, __global out_t *y, int valid) {
  const float8 *parts = (const float8 *)&value;
  for (int p = 0; p < WIDTH / 8; p++, y += 8, valid -= 8) {
    if (valid >= 8) {
      store_out8(parts[p], y, 0);
    } else {
      const float *lanes = (const float *)&parts[p];
      for (int c = 0; c < valid; c++) store_out(lanes[c], y, c);
    }
  }
}

#if BITS <= 8
#define load_zero8(p, i) convert_float8(*(__global const uchar8 *)((p) + (i)))

static inline wide_float zero_points(__global const uchar *zeros, size_t index, int asymmetric) {
  return asymmetric ? load_wide(load_zero8, zeros, index) : (wide_float)(MIDDLE);
}
#endif

// ---- one token ------------------------------------------------------------------------------------------

// A work-item computes a whole row block: its weights are one contiguous stream, which one core reads 1.7
// times faster than two halves of 128 bytes each 256.
#define VECTORS (LANES / WIDTH)

#if BITS == 4
// Codes are masked without a shift; the input is divided by 16^i instead, which is exact. The last one is
// shifted, since as an int it would be negative.
#define INPUT_FACTORS (float8)(1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f)
#elif BITS == 8
#define INPUT_FACTORS (float8)(1.0f, 0x1p-8f, 0x1p-16f, 1.0f, 1.0f, 0x1p-8f, 0x1p-16f, 1.0f)
#endif
#define MASKED(q, i) codes_to_float((q) & (wide_uint)(CODE_MASK << (BITS * (i))))
#define LAST(q) codes_to_float((q) >> (wide_uint)(32 - BITS))

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_vector_one(LINEAR_ARGUMENTS) {
  const int4 tile = tiles[get_group_id(0)];
  const size_t token = first_token + get_group_id(1);
  x += token * columns;
  y += token * rows + tile.y;
  weights += (size_t)tile.x * (columns / WORD_INPUTS) * LANES;
  wide_float totals[VECTORS];
  UNROLL for (int c = 0; c < VECTORS; c++) totals[c] = 0.0f;
#if BITS <= 8
  size_t group = (size_t)tile.x * (columns / block) * LANES;
  for (int start = 0; start < columns; start += block, group += LANES) {
    float8 inputs[16];
    float8 input_sums = 0.0f;
    for (int k = 0; k < block; k += 8) {
      const float8 v = load_act8(x, start + k);
      input_sums += v;
      inputs[k / 8] = v * INPUT_FACTORS;
    }
    const float input_sum = sum8(input_sums);
    wide_float sums[VECTORS];
    UNROLL for (int c = 0; c < VECTORS; c++)
      sums[c] = -input_sum * zero_points(zeros, group + WIDTH * c, asymmetric);
    const float *v = (const float *)inputs;
    for (int k = 0; k < block; k += WORD_INPUTS, v += WORD_INPUTS, weights += LANES) {
      wide_uint q[VECTORS];
      UNROLL for (int c = 0; c < VECTORS; c++) q[c] = load_words(weights, WIDTH * c);
      UNROLL for (int i = 0; i < WORD_INPUTS - 1; i++)
        UNROLL for (int c = 0; c < VECTORS; c++) sums[c] = FMA((wide_float)v[i], MASKED(q[c], i), sums[c]);
      UNROLL for (int c = 0; c < VECTORS; c++)
        sums[c] = FMA((wide_float)v[WORD_INPUTS - 1], LAST(q[c]), sums[c]);
    }
    UNROLL for (int c = 0; c < VECTORS; c++)
      totals[c] = FMA(sums[c], load_wide(load_half8, scales, group + WIDTH * c), totals[c]);
  }
#else
  for (int k = 0; k < columns; k++, weights += LANES) {
    const wide_float v = (wide_float)load_act(x, k);
    UNROLL for (int c = 0; c < VECTORS; c++)
      totals[c] = FMA(v, load_wide(load_weight8, weights, WIDTH * c), totals[c]);
  }
#endif
  UNROLL for (int c = 0; c < VECTORS; c++)
    store_columns(totals[c], y + WIDTH * c, tile.z - WIDTH * c);
}

// ---- many tokens ----------------------------------------------------------------------------------------

// Columns of a work-item.
#define ITEM_COLUMNS 32
// Columns computed at a time: two vectors.
#define PAIR (2 * WIDTH)
// Inputs that are dequantised at a time; a multiple of every block.
#define DEPTH 128
// Largest token_step: weights are dequantised once for so many tokens, whose sums stay in the first cache.
#define MAX_TOKEN_STEP 128
// Tokens of the inner loop: eight sums hide the latency of the additions and fit in 16 registers.
#define STRIP 4

// Dequantise `depth` inputs from `start` of PAIR columns.
static inline void dequantize(
    wide_float *values, __global const weight_t *weights, __global const half *scales,
    __global const uchar *zeros, int start, int depth, int block, int asymmetric) {
#if BITS <= 8
  for (int g = 0; g < depth; g += block) {
    const size_t group = (size_t)((start + g) / block) * LANES;
    wide_float scale[2], offset[2];
    UNROLL for (int c = 0; c < 2; c++) {
      scale[c] = load_wide(load_half8, scales, group + WIDTH * c);
      offset[c] = -scale[c] * zero_points(zeros, group + WIDTH * c, asymmetric);
    }
    for (int k = g; k < g + block; k += WORD_INPUTS) {
      __global const uint *word = weights + (size_t)((start + k) / WORD_INPUTS) * LANES;
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

// Compute `count` tokens of PAIR columns, of which `valid` are written.
static inline void multiply(
    __global const weight_t *weights, __global const half *scales, __global const uchar *zeros,
    __global const act_t *x, __global out_t *y, int columns, int rows, int block, int asymmetric, int count,
    int valid) {
  wide_float values[DEPTH * 2];
  wide_float sums[MAX_TOKEN_STEP * 2];
  for (int t = 0; t < (count + STRIP - 1) / STRIP * STRIP * 2; t++) sums[t] = 0.0f;

  for (int start = 0; start < columns; start += DEPTH) {
    const int depth = min(DEPTH, columns - start);
    dequantize(values, weights, scales, zeros, start, depth, block, asymmetric);
    for (int t = 0; t < count; t += STRIP) {
      wide_float a[STRIP * 2];
      UNROLL for (int r = 0; r < 2 * STRIP; r++) a[r] = sums[2 * t + r];
      // Rows past the last one repeat it: nothing beyond x is read, and their sums are not stored.
      __global const act_t *rows_of_x[STRIP];
      UNROLL for (int r = 0; r < STRIP; r++)
        rows_of_x[r] = x + (size_t)min(t + r, count - 1) * columns + start;
#ifdef ACT_HALF
      float8 copies[STRIP][DEPTH / 8];
      const float *v[STRIP];
      UNROLL for (int r = 0; r < STRIP; r++) {
        for (int k = 0; k < depth; k += 8) copies[r][k / 8] = load_act8(rows_of_x[r], k);
        v[r] = (const float *)copies[r];
      }
#define INPUT(r, k) v[r][k]
#else
#define INPUT(r, k) rows_of_x[r][k]
#endif
      for (int k = 0; k < depth; k++) {
        const wide_float w0 = values[2 * k], w1 = values[2 * k + 1];
        UNROLL for (int r = 0; r < STRIP; r++) {
          const wide_float input = (wide_float)INPUT(r, k);
          a[2 * r] = FMA(input, w0, a[2 * r]);
          a[2 * r + 1] = FMA(input, w1, a[2 * r + 1]);
        }
      }
      UNROLL for (int r = 0; r < 2 * STRIP; r++) sums[2 * t + r] = a[r];
    }
  }
  for (int t = 0; t < count; t++, y += rows) {
    store_columns(sums[2 * t], y, valid);
    store_columns(sums[2 * t + 1], y + WIDTH, valid - WIDTH);
  }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_vector_many(LINEAR_ARGUMENTS) {
  const int item = get_group_id(0);
  const int4 tile = tiles[item / (LANES / ITEM_COLUMNS)];
  const int first_lane = item % (LANES / ITEM_COLUMNS) * ITEM_COLUMNS;
  const int token = get_group_id(1) * token_step;
  const int count = min(token_step, tokens - token);
  x += (size_t)(first_token + token) * columns;
  y += (size_t)(first_token + token) * rows + tile.y;
  weights += (size_t)tile.x * (columns / WORD_INPUTS) * LANES;
#if BITS <= 8
  scales += (size_t)tile.x * (columns / block) * LANES;
  zeros += (size_t)tile.x * (columns / block) * LANES;
#endif
  for (int lane = first_lane; lane < min(first_lane + ITEM_COLUMNS, tile.z); lane += PAIR)
    multiply(weights + lane, scales + lane, zeros + lane, x, y + lane, columns, rows, block, asymmetric,
             count, tile.z - lane);
}
