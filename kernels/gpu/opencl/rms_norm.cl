// residual += delta, then out = residual / rms(residual) * weight, one work-group per row.
// The delta may have a bias and a norm of its own: delta / rms(delta) * post. With GAIN the sum is multiplied by `gain`.
// With UNNORMED the output is the sum itself, with ALONE the delta itself behind its own norm; with IN_PLACE the norm, without
// weights, becomes the residual.
// With CENTERED it is a LayerNorm: the mean is subtracted first, and the last `hidden` of 2 * hidden weights are
// added at the end. With CODE_BITS the work-group also rounds its row to int8, with NPU_CODES to codes of an NPU. Follows common.h,
// rounding.h and glue.h, and with NPU_CODES codes.h.

#define NORM_ONLY 0       // no delta
#define NORM_ADD 1        // delta is added and the sum stored back
#define NORM_ADD_HEAD 2   // delta is added, rows start at the step's head row, nothing is stored back

typedef struct {
  member_row row;
  __global const float *bias;  // null for none
} norm_delta;

static inline float8 load_delta(norm_delta delta, int i, int count) {
  float8 value = load_member(delta.row, i, count);
  if (delta.bias) {
    LOAD_PART(load_float8, load_float, delta.bias, i, count, shift)
    value += shift;
  }
  return value;
}

// The delta after its own norm, whose weight is `post` and whose 1 / rms is `factor`.
static inline float8 load_normed(norm_delta delta, __global const float *post, float factor, int has_post, int i,
                                 int count) {
  float8 value = load_delta(delta, i, count);
  if (has_post) {
    LOAD_PART(load_float8, load_float, post, i, count, scale)
    value *= factor * scale;
  }
  return value;
}

#ifdef GAIN
#define GAIN_ARGUMENT , float gain
#define SUMMED(value, added) (((value) + (added)) * gain)
#else
#define GAIN_ARGUMENT
#define SUMMED(value, added) ((value) + (added))
#endif

// split: columns of the delta in a.
GROUP_SIZE __kernel void rms_norm(__global float *residual, __global const float *weight,
                                  __global act_t *out, __global const act_t *a, __global const act_t *b,
                                  __global const float *bias, __global const float *post,
                                  __global const int *step, int split, int hidden, float epsilon,
                                  float post_epsilon, int mode, int has_bias, int has_post GAIN_ARGUMENT CODE_ARGUMENTS) {
  __local float sums[WG];
  size_t out_row = get_group_id(0);
  size_t row = mode == NORM_ADD_HEAD ? out_row + step[STEP_HEAD_ROW] : out_row;
  int lane = get_local_id(0);
  __global float *values = residual + row * hidden;
  member_row parts = {a + row * split, b + row * COLUMNS_OF_B(hidden, split), split};
  norm_delta delta = {parts, has_bias ? bias : 0};
  float delta_factor = 1.0f;
  if (has_post) {
    float8 squares = 0.0f;
    for (int i = lane * 8; i < hidden; i += WG * 8) {
      float8 value = load_delta(delta, i, min(8, hidden - i));
      squares = FMA(value, value, squares);
    }
    delta_factor = 1.0f / sqrt(group_sum(sum8(squares), sums) / hidden + post_epsilon);
  }
#ifdef CENTERED
  float8 total = 0.0f;
  for (int i = lane * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, values, i, count, value)
    if (mode != NORM_ONLY)
      value = SUMMED(value, load_normed(delta, post, delta_factor, has_post, i, count));
    total += value;
  }
  float mean = group_sum(sum8(total), sums) / hidden;
#endif
#ifndef UNNORMED
  float8 squares = 0.0f;
#endif
  for (int i = lane * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
#ifdef ALONE
    float8 value = load_normed(delta, post, delta_factor, has_post, i, count);
#else
    LOAD_PART(load_float8, load_float, values, i, count, value)
    if (mode != NORM_ONLY)
      value = SUMMED(value, load_normed(delta, post, delta_factor, has_post, i, count));
#endif
    if (mode == NORM_ADD) {
      STORE_PART(store_float8, store_float, value, values, i, count)
    }
#ifdef UNNORMED
    STORE_PART(store_act8, store_act, value, out + out_row * hidden, i, count)
  }
#else
#ifdef CENTERED
    value -= mean;
#endif
    squares = FMA(value, value, squares);
  }
  float factor = 1.0f / sqrt(group_sum(sum8(squares), sums) / hidden + epsilon);
  for (int i = lane * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, values, i, count, value)
    if (mode == NORM_ADD_HEAD)
      value = SUMMED(value, load_normed(delta, post, delta_factor, has_post, i, count));
#ifdef IN_PLACE
    value *= factor;
    STORE_PART(store_float8, store_float, value, values, i, count)
#else
    LOAD_PART(load_float8, load_float, weight, i, count, scale)
#ifdef CENTERED
    LOAD_PART(load_float8, load_float, weight, hidden + i, count, shift)
    value = (value - mean) * factor * scale + shift;
#else
    value = value * factor * scale;
#endif
    STORE_PART(store_act8, store_act, value, out + out_row * hidden, i, count)
#endif
  }
#endif
#ifdef CODE_BITS
  wait_for_values();
  int blocks = (uint)hidden / CODE_BLOCK;
  for (int block = lane; block < blocks; block += WG)
    round_written(out, codes, code_blocks, out_row * blocks + block);
#endif
#ifdef NPU_CODES
  write_codes(out + out_row * hidden, hidden, code_steps, per_token, codes + out_row * hidden, factors + out_row,
              counts + count_place, sums);
#endif
}
