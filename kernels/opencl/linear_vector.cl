// Linear layers for CPU devices: explicit float8 columns, one work-item a work-group.

static inline void store_columns(float8 value, __global out_t *y, int valid) {
  if (valid >= 8) {
    store_out8(value, y, 0);
  } else {
    const float *lanes = (const float *)&value;
    for (int c = 0; c < valid; c++) store_out(lanes[c], y, c);
  }
}

#if BITS <= 8
static inline float8 zero_points8(__global const uchar *zeros, size_t index, int asymmetric) {
  return asymmetric ? convert_float8(*(__global const uchar8 *)(zeros + index)) : (float8)(MIDDLE);
}
#endif

// ---- one token ------------------------------------------------------------------------------------------

// A work-item computes a whole row block: its weights are one contiguous stream, which one core reads 1.7
// times faster than two halves of 128 bytes each 256. Eight sums hide the latency of the additions.
#define VECTORS (LANES / 8)

#if BITS == 4
// Codes are masked without a shift; the input is divided by 16^i instead, which is exact. The last one is
// shifted, since as an int it would be negative.
#define INPUT_FACTORS (float8)(1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f)
#elif BITS == 8
#define INPUT_FACTORS (float8)(1.0f, 0x1p-8f, 0x1p-16f, 1.0f, 1.0f, 0x1p-8f, 0x1p-16f, 1.0f)
#endif
#define MASKED(q, i) convert_float8(as_int8((q) & (uint8)(CODE_MASK << (BITS * (i)))))
#define LAST(q) convert_float8(as_int8((q) >> (uint8)(32 - BITS)))

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_vector_one(LINEAR_ARGUMENTS) {
  const int4 tile = tiles[get_group_id(0)];
  const size_t token = first_token + get_group_id(1);
  x += token * columns;
  y += token * rows + tile.y;
  weights += (size_t)tile.x * (columns / WORD_INPUTS) * LANES;
  float8 totals[VECTORS];
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
    float8 sums[VECTORS];
    UNROLL for (int c = 0; c < VECTORS; c++)
      sums[c] = -input_sum * zero_points8(zeros, group + 8 * c, asymmetric);
    const float *v = (const float *)inputs;
    for (int k = 0; k < block; k += WORD_INPUTS, v += WORD_INPUTS, weights += LANES) {
      uint8 q[VECTORS];
      UNROLL for (int c = 0; c < VECTORS; c++) q[c] = load_uint8(weights, 8 * c);
      UNROLL for (int i = 0; i < WORD_INPUTS - 1; i++)
        UNROLL for (int c = 0; c < VECTORS; c++) sums[c] = FMA((float8)v[i], MASKED(q[c], i), sums[c]);
      UNROLL for (int c = 0; c < VECTORS; c++)
        sums[c] = FMA((float8)v[WORD_INPUTS - 1], LAST(q[c]), sums[c]);
    }
    UNROLL for (int c = 0; c < VECTORS; c++)
      totals[c] = FMA(sums[c], load_half8(scales, group + 8 * c), totals[c]);
  }
#else
  for (int k = 0; k < columns; k++, weights += LANES) {
    const float8 v = (float8)load_act(x, k);
    UNROLL for (int c = 0; c < VECTORS; c++) totals[c] = FMA(v, load_weight8(weights, 8 * c), totals[c]);
  }
#endif
  UNROLL for (int c = 0; c < VECTORS; c++) store_columns(totals[c], y + 8 * c, tile.z - 8 * c);
}

// ---- many tokens ----------------------------------------------------------------------------------------

// Inputs that are dequantised at a time; a multiple of every block.
#define DEPTH 128
// Largest token_step: weights are dequantised once for so many tokens, whose sums stay in the first cache.
#define MAX_TOKEN_STEP 128
// Tokens of the inner loop: 4 x 16 sums fill the registers, more spill.
#define STRIP 4

// Dequantise `depth` inputs from `start` of 16 columns.
static inline void dequantize(
    float8 *values, __global const weight_t *weights, __global const half *scales,
    __global const uchar *zeros, int start, int depth, int block, int asymmetric) {
#if BITS <= 8
  for (int g = 0; g < depth; g += block) {
    const size_t group = (size_t)((start + g) / block) * LANES;
    const float8 scale0 = load_half8(scales, group), scale1 = load_half8(scales, group + 8);
    const float8 offset0 = -scale0 * zero_points8(zeros, group, asymmetric);
    const float8 offset1 = -scale1 * zero_points8(zeros, group + 8, asymmetric);
    for (int k = g; k < g + block; k += WORD_INPUTS) {
      __global const uint *word = weights + (size_t)((start + k) / WORD_INPUTS) * LANES;
      const uint8 q0 = load_uint8(word, 0), q1 = load_uint8(word, 8);
      UNROLL for (int i = 0; i < WORD_INPUTS; i++) {
        const uint8 code0 = (q0 >> (uint8)(BITS * i)) & (uint8)(CODE_MASK);
        const uint8 code1 = (q1 >> (uint8)(BITS * i)) & (uint8)(CODE_MASK);
        values[2 * (k + i)] = FMA(convert_float8(as_int8(code0)), scale0, offset0);
        values[2 * (k + i) + 1] = FMA(convert_float8(as_int8(code1)), scale1, offset1);
      }
    }
  }
#else
  for (int k = 0; k < depth; k++) {
    __global const weight_t *source = weights + (size_t)(start + k) * LANES;
    values[2 * k] = load_weight8(source, 0);
    values[2 * k + 1] = load_weight8(source, 8);
  }
#endif
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void linear_vector_many(LINEAR_ARGUMENTS) {
  const int item = get_group_id(0);
  const int4 tile = tiles[item / (LANES / 16)];
  const int lane = item % (LANES / 16) * 16;
  if (lane >= tile.z) return;
  const int token = get_group_id(1) * token_step;
  const int count = min(token_step, tokens - token);
  x += (size_t)(first_token + token) * columns;
  y += (size_t)(first_token + token) * rows + tile.y + lane;
  weights += (size_t)tile.x * (columns / WORD_INPUTS) * LANES + lane;
#if BITS <= 8
  const size_t group = (size_t)tile.x * (columns / block) * LANES + lane;
  scales += group;
  zeros += group;
#endif
  float8 values[DEPTH * 2];
  float8 sums[MAX_TOKEN_STEP * 2];
  for (int t = 0; t < 2 * count; t++) sums[t] = 0.0f;
  for (int t = 2 * count; t % (2 * STRIP); t++) sums[t] = 0.0f;

  for (int start = 0; start < columns; start += DEPTH) {
    const int depth = min(DEPTH, columns - start);
    dequantize(values, weights, scales, zeros, start, depth, block, asymmetric);
    for (int t = 0; t < count; t += STRIP) {
      float8 a[STRIP * 2];
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
        const float8 w0 = values[2 * k], w1 = values[2 * k + 1];
        UNROLL for (int r = 0; r < STRIP; r++) {
          const float8 input = (float8)INPUT(r, k);
          a[2 * r] = FMA(input, w0, a[2 * r]);
          a[2 * r + 1] = FMA(input, w1, a[2 * r + 1]);
        }
      }
      UNROLL for (int r = 0; r < 2 * STRIP; r++) sums[2 * t + r] = a[r];
    }
  }
  for (int t = 0; t < count; t++, y += rows) {
    store_columns(sums[2 * t], y, tile.z - lane);
    store_columns(sums[2 * t + 1], y + 8, tile.z - lane - 8);
  }
}
