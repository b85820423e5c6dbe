// The inputs of the delta rule from the members q, k, v, z, b and a of a linear: q, k and v after a causal convolution
// of each channel over TAPS tokens and silu; and for each head, in float,
//   decay = exp(rates * softplus(a + shifts)) and beta = sigmoid(b) of a value head,
//   1 / |q| / sqrt(key_dim), 1 / |k| and q k / |q| / |k| / sqrt(key_dim) of a key head,
// so that q and k themselves are stored before their norm. The squares of a norm have 1e-6 added.
// With STATE_SPACE there is no member b, and beta is softplus(a + shifts); q and k have no norm, so that their factors are
// 1, 1 and q k; and channels have biases, a row behind those of the taps.
// Inputs of earlier passes come from the slot of the state that the step buffer names, whose first [TAPS - 1][channels]
// they are, and zeros at position 0; the last ones of this pass go to another slot.
// Follows common.h, rounding.h, glue.h and gates.h. Grid: a work-group for each key head, each value head and all value
// heads together; tokens.

#define HISTORY (TAPS - 1)
#define NORM_EPSILON 1e-6f
#ifdef STATE_SPACE
#define GATES 1
#else
#define GATES 2
#endif

// rates: -exp(A_log) of each value head, then the shifts.
GROUP_SIZE __kernel void delta_conv(__global const act_t *a, __global const act_t *b, __global act_t *mixed,
                                    __global float *factors, __global const float *taps, __global const float *rates,
                                    __global float *states, __global const int *step, int row_words, int values,
                                    int q_split, int k_split, int v_split, int z_split, int b_split, int a_split,
                                    int key_heads, int value_heads, int key_dim, int value_dim) {
  __local float sums[WG];
  const int unit = get_group_id(0), lane = get_local_id(0);
  const int first_row = row_words ? get_global_id(1) : 0, token = get_global_id(1) - first_row;
  const int key_rows = key_heads * key_dim, value_rows = value_heads * value_dim;
  const int channels = 2 * key_rows + value_rows, rows = channels + value_rows + GATES * value_heads;
  const int k_before = q_split, v_before = k_before + k_split, b_before = v_before + v_split + z_split;
  const int a_before = b_before + b_split, a_columns = a_before + a_split;
  const int b_columns = COLUMNS_OF_B(rows, a_columns);
  step += first_row * row_words;
  a += (size_t)first_row * a_columns;
  b += (size_t)first_row * b_columns;
  __global const float *before = states + (size_t)step[STEP_STATE_READ] * values;
  __global float *behind = states + (size_t)step[STEP_STATE_WRITTEN] * values;
  const int length = TOKENS_OF(step, row_words), known = step[STEP_POSITION] != 0;
  __global act_t *target = mixed + (size_t)(first_row + token) * channels;
  factors += (size_t)(first_row + token) * (2 * value_heads + 3 * key_heads);
  if (unit < key_heads + value_heads) {
    // A head of q and the same of k, or one of v. One loop has both: a second copy of the convolution spills registers.
    const int has_keys = unit < key_heads, head = has_keys ? unit : unit - key_heads;
    const int dim = has_keys ? key_dim : value_dim, last = has_keys ? 1 : 2;
    float8 query = 0.0f, q_squares = 0.0f, k_squares = 0.0f, products = 0.0f;
    for (int i = lane * 8; i < dim; i += WG * 8) {
      const int count = min(8, dim - i), at = head * dim + i;
      for (int member = has_keys ? 0 : 2; member <= last; ++member) {
        const int first = member * key_rows, channel = first + at;
        const int leading = member == 0 ? 0 : member == 1 ? k_before : v_before;
        const int split = member == 0 ? q_split : member == 1 ? k_split : v_split;
        __global const act_t *a_first = a + leading, *b_first = b + COLUMNS_OF_B(first, leading);
        float8 sum = 0.0f, input = 0.0f;
#ifdef STATE_SPACE
        LOAD_PART(load_float8, load_float, taps + TAPS * channels, channel, count, bias)
        sum = bias;
#endif
        for (int tap = 0; tap < TAPS; ++tap) {
          const int from = token + tap - HISTORY;
          input = 0.0f;
          if (from >= 0) {
            member_row inputs = {a_first + from * a_columns, b_first + from * b_columns, split};
            input = load_member(inputs, at, count);
          } else if (known) {
            LOAD_PART(load_float8, load_float, before + (from + HISTORY) * channels, channel, count, held)
            input = held;
          }
          LOAD_PART(load_float8, load_float, taps + tap * channels, channel, count, weight)
          sum = FMA(input, weight, sum);
        }
        const int place = token - (length - HISTORY);
        if (place >= 0 && place < HISTORY) {
          STORE_PART(store_float8, store_float, input, behind + place * channels, channel, count)
        }
        // A pass shorter than the history keeps the newest inputs before it.
        for (int kept = 0; token == 0 && kept < HISTORY - length; ++kept) {
          float8 moved = 0.0f;
          if (known) {
            LOAD_PART(load_float8, load_float, before + (kept + length) * channels, channel, count, held)
            moved = held;
          }
          STORE_PART(store_float8, store_float, moved, behind + kept * channels, channel, count)
        }
        float8 value = sum * sigmoid_8(sum);
        STORE_PART(store_act8, store_act, value, target, channel, count)
        if (member == 0) {
          query = value;
          q_squares = FMA(value, value, q_squares);
        } else {
          k_squares = FMA(value, value, k_squares);
          products = FMA(query, value, products);
        }
      }
    }
    if (has_keys) {
#ifdef STATE_SPACE
      const float q_factor = 1.0f, k_factor = 1.0f;
#else
      const float q_square = group_sum(sum8(q_squares), sums), k_square = group_sum(sum8(k_squares), sums);
      const float q_factor = 1.0f / sqrt((q_square + NORM_EPSILON) * key_dim);
      const float k_factor = 1.0f / sqrt(k_square + NORM_EPSILON);
#endif
      const float product = group_sum(sum8(products), sums);
      if (lane == 0) {
        __global float *own = factors + 2 * value_heads + unit;
        own[0] = q_factor;
        own[key_heads] = k_factor;
        own[2 * key_heads] = q_factor * k_factor * product;
      }
    }
  } else {
    a += (size_t)token * a_columns;
    b += (size_t)token * b_columns;
    member_row times = {a + a_before, b + COLUMNS_OF_B(rows - value_heads, a_before), a_split};
#ifndef STATE_SPACE
    member_row writes = {a + b_before, b + COLUMNS_OF_B(channels + value_rows, b_before), b_split};
#endif
    for (int i = lane * 8; i < value_heads; i += WG * 8) {
      const int count = min(8, value_heads - i);
      LOAD_PART(load_float8, load_float, rates, i, count, rate)
      LOAD_PART(load_float8, load_float, rates + value_heads, i, count, shift)
      float8 x = load_member(times, i, count) + shift;
      float8 size = x < 0.0f ? -x : x;
      float8 softplus = (x < 0.0f ? (float8)0.0f : x) + log1p(exp2_8(size * -1.44269504f));
      float8 decay = exp2_8(rate * softplus * 1.44269504f);
#ifdef STATE_SPACE
      float8 beta = softplus;
#else
      float8 beta = sigmoid_8(load_member(writes, i, count));
#endif
      STORE_PART(store_float8, store_float, decay, factors, i, count)
      STORE_PART(store_float8, store_float, beta, factors + value_heads, i, count)
    }
  }
}
