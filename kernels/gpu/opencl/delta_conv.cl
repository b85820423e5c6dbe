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

// A member of the linear, all tokens of it, and the channels before it.
typedef struct {
  __global const act_t *a;
  __global const act_t *b;
  int split;
  int first;
} mixed_member;

// What all members have in common.
typedef struct {
  __global const float *taps;
  __global const float *before;  // the history that is read
  __global float *behind;        // and the one that is written
  int a_columns;
  int b_columns;
  int channels;
  int token;
  int length;
  int known;  // whether there is a history to read
} mixed_row;

// The channels [i, i + count) of a member after convolution and silu. Writes the history, too. Inlined, it needs no
// private memory for its arguments.
static inline float8 convolved(mixed_row row, mixed_member member, int i, int count) __attribute__((always_inline));
static inline float8 convolved(mixed_row row, mixed_member member, int i, int count) {
  const int channel = member.first + i, token = row.token;
  float8 sum = 0.0f, input = 0.0f;
#ifdef STATE_SPACE
  LOAD_PART(load_float8, load_float, row.taps + TAPS * row.channels, channel, count, bias)
  sum = bias;
#endif
  for (int tap = 0; tap < TAPS; ++tap) {
    const int from = token + tap - HISTORY;
    input = 0.0f;
    if (from >= 0) {
      member_row inputs = {member.a + from * row.a_columns, member.b + from * row.b_columns, member.split};
      input = load_member(inputs, i, count);
    } else if (row.known) {
      LOAD_PART(load_float8, load_float, row.before + (from + HISTORY) * row.channels, channel, count, held)
      input = held;
    }
    LOAD_PART(load_float8, load_float, row.taps + tap * row.channels, channel, count, weight)
    sum = FMA(input, weight, sum);
  }
  const int place = token - (row.length - HISTORY);
  if (place >= 0 && place < HISTORY) {
    STORE_PART(store_float8, store_float, input, row.behind + place * row.channels, channel, count)
  }
  // A pass shorter than the history keeps the newest inputs before it.
  for (int kept = 0; token == 0 && kept < HISTORY - row.length; ++kept) {
    float8 moved = 0.0f;
    if (row.known) {
      LOAD_PART(load_float8, load_float, row.before + (kept + row.length) * row.channels, channel, count, held)
      moved = held;
    }
    STORE_PART(store_float8, store_float, moved, row.behind + kept * row.channels, channel, count)
  }
  return sum * sigmoid_8(sum);
}

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
  mixed_row row = {taps,
                   states + (size_t)step[STEP_STATE_READ] * values,
                   states + (size_t)step[STEP_STATE_WRITTEN] * values,
                   a_columns,
                   b_columns,
                   channels,
                   token,
                   TOKENS_OF(step, row_words),
                   step[STEP_POSITION] != 0};
  __global act_t *target = mixed + (size_t)(first_row + token) * channels;
  factors += (size_t)(first_row + token) * (2 * value_heads + 3 * key_heads);
  if (unit < key_heads) {
    mixed_member q = {a, b, q_split, 0};
    mixed_member k = {a + k_before, b + COLUMNS_OF_B(key_rows, k_before), k_split, key_rows};
    float8 q_squares = 0.0f, k_squares = 0.0f, products = 0.0f;
    for (int i = lane * 8; i < key_dim; i += WG * 8) {
      const int count = min(8, key_dim - i), at = unit * key_dim + i;
      float8 query = convolved(row, q, at, count), key = convolved(row, k, at, count);
      STORE_PART(store_act8, store_act, query, target, at, count)
      STORE_PART(store_act8, store_act, key, target + key_rows, at, count)
      q_squares = FMA(query, query, q_squares);
      k_squares = FMA(key, key, k_squares);
      products = FMA(query, key, products);
    }
#ifdef STATE_SPACE
    const float query = 1.0f, key = 1.0f;
#else
    const float q_square = group_sum(sum8(q_squares), sums), k_square = group_sum(sum8(k_squares), sums);
    const float query = 1.0f / sqrt((q_square + NORM_EPSILON) * key_dim), key = 1.0f / sqrt(k_square + NORM_EPSILON);
#endif
    const float product = group_sum(sum8(products), sums);
    if (lane == 0) {
      __global float *own = factors + 2 * value_heads + unit;
      own[0] = query;
      own[key_heads] = key;
      own[2 * key_heads] = query * key * product;
    }
  } else if (unit < key_heads + value_heads) {
    mixed_member v = {a + v_before, b + COLUMNS_OF_B(2 * key_rows, v_before), v_split, 2 * key_rows};
    for (int i = lane * 8; i < value_dim; i += WG * 8) {
      const int count = min(8, value_dim - i), at = (unit - key_heads) * value_dim + i;
      float8 value = convolved(row, v, at, count);
      STORE_PART(store_act8, store_act, value, target + 2 * key_rows, at, count)
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
