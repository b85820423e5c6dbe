// Latent attention around its scores. Queries [heads][LATENT + ROPE] of a token attend to one key of that
// many elements, of which the first LATENT are the value, too.
// Follows common.h, rounding.h and glue.h.

#define KEY_DIM (LATENT + ROPE)
#define HALF (ROPE / 2)

// Columns of a linear's output before a member, and those of them that lie in the first segment.
static inline member_row row_of(__global const act_t *a, __global const act_t *b, size_t token, int rows, int leading,
                                int before, int before_leading, int split) {
  member_row row = {a + token * leading + before_leading,
                    b + token * COLUMNS_OF_B(rows, leading) + COLUMNS_OF_B(before, before_leading), split};
  return row;
}

#ifdef TURNS
// Rotates a part of ROPE elements: the last of each query, or with -DKEY that behind a latent vector, which it norms and
// stores with it. Element i pairs with element i + ROPE / 2. The member is [heads][ROPE], or [LATENT + ROPE].
// Grid: a work-group for each head, or for the key; tokens.
GROUP_SIZE __kernel void latent_turn(__global const act_t *a, __global const act_t *b, __global const float *norm,
                                     __global const float *cosines, __global const float *sines,
                                     __global float *query, __global kv_t *cache, __global const int *step,
                                     int table, int row_words, int rows, int leading, int before, int before_leading,
                                     int split, int r_split, int heads, int capacity, float epsilon) {
  const int head = get_group_id(0), lane = get_local_id(0);
  const size_t at = get_global_id(1);
  const int number = row_words ? 0 : at;  // number of the token in its sequence
  step += at * row_words;
  const int position = step[STEP_POSITION] + number;
  if (number >= TOKENS_OF(step, row_words) || position >= capacity)
    return;
#ifdef KEY
  __local float sums[WG];
  member_row latent = row_of(a, b, at, rows, leading, before, before_leading, split);
  member_row turned = row_of(a, b, at, rows, leading, before + LATENT, before_leading + split, r_split);
  const int page = step[table + (uint)position / PAGE];
  __global kv_t *target = cache + HEAD_AT(page, 0, 1, KEY_DIM) + (uint)position % PAGE * KEY_DIM;
  float8 squares = 0.0f;
  for (int i = lane * 8; i < LATENT; i += WG * 8) {
    float8 value = load_member(latent, i, min(8, LATENT - i));
    squares = FMA(value, value, squares);
  }
  const float factor = 1.0f / sqrt(group_sum(sum8(squares), sums) / LATENT + epsilon);
  for (int i = lane * 8; i < LATENT; i += WG * 8) {
    const int count = min(8, LATENT - i);
    LOAD_PART(load_float8, load_float, norm, i, count, weight)
    float8 value = load_member(latent, i, count) * factor * weight;
    STORE_PART(store_kv8, store_kv, value, target, i, count)
  }
#define STORE_TURNED(value, i) STORE_PART(store_kv8, store_kv, value, target, LATENT + (i), count)
#else
  member_row turned = row_of(a, b, at, rows, leading, before, before_leading, split);
  __global float *target = query + (at * heads + head) * KEY_DIM;
#define STORE_TURNED(value, i) STORE_PART(store_float8, store_float, value, target, LATENT + (i), count)
#endif
  for (int i = lane * 8; i < HALF; i += WG * 8) {
    const int count = min(8, HALF - i), first = head * ROPE + i;
    const size_t table = (size_t)position * HALF + i;
    LOAD_PART(load_float8, load_float, cosines, table, count, c)
    LOAD_PART(load_float8, load_float, sines, table, count, s)
    float8 low = load_member(turned, first, count), high = load_member(turned, first + HALF, count);
    float8 low_turned = low * c - high * s, high_turned = high * c + low * s;
    STORE_TURNED(low_turned, i)
    STORE_TURNED(high_turned, HALF + i)
  }
}
#endif

#ifdef NORMS
// The norm of a member. Grid: a work-group; tokens.
GROUP_SIZE __kernel void latent_norm(__global const act_t *a, __global const act_t *b, __global const float *norm,
                                     __global act_t *out, int rows, int leading, int before, int before_leading,
                                     int split, int width, float epsilon) {
  __local float sums[WG];
  const size_t token = get_global_id(1);
  const int lane = get_local_id(0);
  member_row row = row_of(a, b, token, rows, leading, before, before_leading, split);
  float8 squares = 0.0f;
  for (int i = lane * 8; i < width; i += WG * 8) {
    float8 value = load_member(row, i, min(8, width - i));
    squares = FMA(value, value, squares);
  }
  const float factor = 1.0f / sqrt(group_sum(sum8(squares), sums) / width + epsilon);
  out += token * width;
  for (int i = lane * 8; i < width; i += WG * 8) {
    const int count = min(8, width - i);
    LOAD_PART(load_float8, load_float, norm, i, count, weight)
    float8 value = load_member(row, i, count) * factor * weight;
    STORE_PART(store_act8, store_act, value, out, i, count)
  }
}
#endif

#ifdef MULTIPLIES
// out[token][head][row] = weights[head][row] x[token][head], with weights [heads][OUTPUTS][INPUTS]: head h reads INPUTS
// columns of a member from h * in_stride on, and writes from h * out_stride on. TOKENS tokens share a read of a weight.
// Grid: work-items over spans of `span` rows; heads; TOKENS tokens each.
#ifdef FLOAT_OUTPUT
typedef float out_t;
#define store_out store_float
#else
typedef act_t out_t;
#define store_out store_act
#endif
#define DECLARE_TOKEN(t)                                                                                       \
  member_row row_##t = row_of(a, b, min(token + t, tokens - 1), rows, leading, before, before_leading, split); \
  float8 sum_##t = 0.0f;
#define CLEAR_TOKEN(t) sum_##t = 0.0f;
#define ADD_TOKEN(t) sum_##t = FMA(load_member(row_##t, head * in_stride + i, count), weight, sum_##t);
#define STORE_TOKEN(t)  \
  if (token + t < tokens) \
    store_out(sum8(sum_##t), out + ((size_t)(token + t) * heads + head) * out_stride, output);

GROUP_SIZE __kernel void head_linear(__global const act_t *a, __global const act_t *b, __global const act_t *weights,
                                     __global out_t *out, int rows, int leading, int before, int before_leading,
                                     int split, int heads, int in_stride, int out_stride, int tokens, int span) {
  const int head = get_global_id(1), token = get_global_id(2) * TOKENS;
  const int first = get_global_id(0) * span, stop = min(OUTPUTS, first + span);
  REPEAT(TOKENS, DECLARE_TOKEN)
  for (int output = first; output < stop; ++output) {
    __global const act_t *own = weights + ((size_t)head * OUTPUTS + output) * INPUTS;
    REPEAT(TOKENS, CLEAR_TOKEN)
    for (int i = 0; i < INPUTS; i += 8) {
      const int count = min(8, INPUTS - i);
      LOAD_PART(load_act8, load_act, own, i, count, weight)
      REPEAT(TOKENS, ADD_TOKEN)
    }
    REPEAT(TOKENS, STORE_TOKEN)
  }
}
#endif
