// Adds the bias to q, k and v, norms each head of q and k (has_norm: head / rms(head) * norms, which holds one
// head's weights for q, then one's for k), rotates q and k (Hugging Face's half-split convention: element i of
// a head pairs with element i + rotary / 2), and writes q to its buffer, k and v to the KV cache.
// With -DJOINT_NORM one norm spans all heads of q, another all of k, with weights for each element. With -DLIMITED the
// magnitude of q, k and v is at most `limit` before the rotation. With -DNORMS_LAST the weights of norms come after the
// rotation, which keeps the length of a head. With -DQUERY_SCALES q is multiplied by a factor for its position. With
// -DVALUE_NORM each head of v has a norm without weights. With -DVALUES_ARE_KEYS v is k before its norm and rotation, and no
// member of the linear. Without key heads it writes q alone.
// With -DPIECES each work-item has one piece of a head (see below), PIECES of them.
// With -DKV_CODES a head of k or v is scaled by its largest magnitude at a position, which each work-item finds for itself
// as it does the factor of a norm. Bits of magnitudes are compared as integers, so that NaN is the largest.
// The linear may have more members behind v, of which a row of its segments has `more_split` columns, and `more_rows` in all.
// Follows common.h and glue.h. Grid: work-items over runs of 8 elements of heads, tokens.

// 1 / rms of one head, its bias (null for none) added.
static inline float head_factor(member_row row, __global const float *bias, int first, int head_dim,
                                float epsilon) {
  float8 squares = 0.0f;
  for (int i = 0; i < head_dim; i += 8) {
    int count = min(8, head_dim - i);
    float8 value = load_member(row, first + i, count);
    if (bias) {
      LOAD_PART(load_float8, load_float, bias, i, count, shift)
      value += shift;
    }
    squares = FMA(value, value, squares);
  }
  return 1.0f / sqrt(sum8(squares) / head_dim + epsilon);
}

#ifdef KV_CODES
// The larger of `largest` and all of sixteen magnitudes, as bits.
static inline int largest_bits(int largest, float8 low, float8 high) {
  int8 a = as_int8(low) & 0x7fffffff, b = as_int8(high) & 0x7fffffff;
  a = a > b ? a : b;
  int4 four = a.lo > a.hi ? a.lo : a.hi;
  int2 two = four.lo > four.hi ? four.lo : four.hi;
  return max(largest, max(two.x, two.y));
}
#endif

#ifdef LIMITED
#define LIMIT_ARGUMENT , float limit
#else
#define LIMIT_ARGUMENT
#endif
#ifdef QUERY_SCALES
#define QUERY_ARGUMENT , __global const float *query_scales
#else
#define QUERY_ARGUMENT
#endif

GROUP_SIZE __kernel void rope_and_store(
    __global const act_t *a, __global const act_t *b, __global const float *bias,
    __global const float *norms, __global const float *cosines, __global const float *sines,
    __global float *q_out, __global kv_t *cache,
    __global const int *step, int table, int row_words, int q_split, int k_split, int v_split, int more_split, int more_rows, int heads, int kv_heads, int head_dim, int rotary, int capacity, int has_bias,
    int has_norm, float epsilon LIMIT_ARGUMENT QUERY_ARGUMENT) {
  const int token = get_global_id(1), number = row_words ? 0 : token;  // number of the token in its sequence
  step += token * row_words;
  const int position = step[STEP_POSITION] + number;
  if (number >= TOKENS_OF(step, row_words) || position >= capacity)
    return;
  int q_rows = heads * head_dim, kv_rows = kv_heads * head_dim;
  int a_columns = q_split + k_split + v_split + more_split;
#ifdef VALUES_ARE_KEYS
  const bool own_values = false;
#else
  const bool own_values = true;
#endif
  int b_columns = COLUMNS_OF_B(q_rows + (own_values ? 2 : 1) * kv_rows + more_rows, a_columns);
  // A piece is two runs of up to 8 elements, half the rotated (or the unrotated) part of a head apart.
  int normed_head = -1;
  float factor = 1.0f;
#ifdef KV_CODES
  int scaled_head = -1, largest = 0;
#endif
#ifdef PIECES
  // As many work-items as pieces, whose number of a head is known when compiling: no loop and no division.
  const uint pieces = PIECES, item = get_global_id(0);
  if (item >= pieces * (heads + 2 * kv_heads))
    return;
  for (int turn = 0; turn < 1; ++turn) {
#else
  int pieces = max((rotary / 2 + 7) / 8 + ((head_dim - rotary) / 2 + 7) / 8, (head_dim / 2 + 7) / 8);
  for (int item = get_global_id(0); item < pieces * (heads + 2 * kv_heads); item += get_global_size(0)) {
#endif
    int head = item / pieces, piece = item % pieces;
    bool is_q = head < heads, is_v = head >= heads + kv_heads;
#ifdef KV_CODES
    // All pieces of the head come before the work-item's own one, unless it has seen them.
    const int own_piece = piece;
    if (head != scaled_head)
      largest = 0;
    for (int turn = is_q || head == scaled_head ? pieces : 0; turn <= pieces; ++turn) {
    piece = turn < pieces ? turn : own_piece;
    scaled_head = head;
#endif
    int rotated = is_v ? 0 : rotary;
    int turned = ((uint)rotated / 2 + 7) / 8;  // pieces
    bool rotate = piece < turned;
    int run = (uint)(rotate ? rotated : head_dim - rotated) / 2;
    int begin = (rotate ? piece : piece - turned) * 8;
    int count = min(8, run - begin);
    if (count <= 0)
      continue;
    int member_head = is_q ? head : is_v ? head - heads - kv_heads : head - heads;
    bool behind_keys = is_v && own_values;
    int split = is_q ? q_split : behind_keys ? v_split : k_split;
    int a_before = is_q ? 0 : behind_keys ? q_split + k_split : q_split;
    int rows_before = is_q ? 0 : behind_keys ? q_rows + kv_rows : q_rows;
    member_row row = {a + (size_t)token * a_columns + a_before,
                      b + (size_t)token * b_columns + COLUMNS_OF_B(rows_before, a_before), split};
    int low_at = (rotate ? 0 : rotated) + begin, high_at = low_at + run;
    float8 low = load_member(row, member_head * head_dim + low_at, count);
    float8 high = load_member(row, member_head * head_dim + high_at, count);
    __global const float *biases = has_bias ? bias + rows_before + member_head * head_dim : 0;
    if (has_bias) {
      LOAD_PART(load_float8, load_float, biases, low_at, count, low_bias)
      LOAD_PART(load_float8, load_float, biases, high_at, count, high_bias)
      low += low_bias;
      high += high_bias;
    }
#ifdef VALUE_NORM
    if (is_v) {
      if (head != normed_head)
        factor = head_factor(row, biases, member_head * head_dim, head_dim, epsilon);
      normed_head = head;
      low *= factor;
      high *= factor;
    }
#endif
#ifdef NORMS_LAST
    float8 low_scale = 1.0f, high_scale = 1.0f;
#endif
    if (has_norm && !is_v) {
#ifdef JOINT_NORM
      // The first head of q, or of k, stands for all.
      int normed = is_q ? 0 : heads;
      if (normed != normed_head)
        factor = head_factor(row, has_bias ? bias + rows_before : 0, 0, is_q ? q_rows : kv_rows, epsilon);
      normed_head = normed;
      __global const float *weights = norms + head * head_dim;
#else
      if (head != normed_head)
        factor = head_factor(row, biases, member_head * head_dim, head_dim, epsilon);
      normed_head = head;
      __global const float *weights = norms + (is_q ? 0 : head_dim);
#endif
      LOAD_PART(load_float8, load_float, weights, low_at, count, low_weight)
      LOAD_PART(load_float8, load_float, weights, high_at, count, high_weight)
#ifdef NORMS_LAST
      low_scale = factor * low_weight;
      high_scale = factor * high_weight;
#else
      low *= factor * low_weight;
      high *= factor * high_weight;
#endif
    }
#ifdef LIMITED
    low = clamp(low, -limit, limit);
    high = clamp(high, -limit, limit);
#endif
    if (rotate) {
      size_t table = (size_t)position * ((uint)rotary / 2) + begin;
      LOAD_PART(load_float8, load_float, cosines, table, count, c)
      LOAD_PART(load_float8, load_float, sines, table, count, s)
      float8 turned = low * c - high * s;
      high = high * c + low * s;
      low = turned;
    }
#ifdef NORMS_LAST
    low *= low_scale;
    high *= high_scale;
#endif
#ifdef QUERY_SCALES
    if (is_q) {
      low *= query_scales[position];
      high *= query_scales[position];
    }
#endif
#ifdef KV_CODES
    if (turn < pieces) {
      largest = largest_bits(largest, low, high);
      continue;
    }
#endif
    if (is_q) {
      __global float *target = q_out + (size_t)token * q_rows + head * head_dim;
      STORE_PART(store_float8, store_float, low, target, low_at, count)
      STORE_PART(store_float8, store_float, high, target, high_at, count)
    } else {
      const int page = step[table + (uint)position / PAGE];
      __global kv_t *stored = cache + HEAD_AT(page, head - heads, kv_heads, head_dim);
      __global kv_t *target = stored + (uint)position % PAGE * head_dim;
#ifdef KV_CODES
      const float size = as_float(largest), inverse = size > 1e-30f ? 127.0f / size : 0.0f;
      if (piece == 0)
        SCALES_OF(stored, head_dim)[(uint)position % PAGE] = size / 127.0f;
      low *= inverse;
      high *= inverse;
#endif
      STORE_PART(store_kv8, store_kv, low, target, low_at, count)
      STORE_PART(store_kv8, store_kv, high, target, high_at, count)
    }
#ifdef KV_CODES
    }
#endif
  }
}
