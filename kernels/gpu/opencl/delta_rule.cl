// The gated delta rule of each value head, token after token: S = decay S; e = beta (v - S k); S = S + e k^T; out = S q,
// with S [value_dim][KEY_DIM] in float. A row of S depends on no other one, and needs of the token only q, k, the head's
// factors and its own element of v. The output follows from the S before as decay (S q) + e (k q), so that a token
// needs one sum over the row. q and k come before their norms, whose factors delta_conv.cl has found.
// With STATE_SPACE it is Mamba-2's rule: e = beta v, and v times the head's number in the third row of rates is added to
// the output.
// LANES work-items share a row, RUNS runs of 8 elements each, which stay in registers for BLOCK tokens. With -DTWO_ROWS a
// work-item has two rows at once, so that the sums of one hide the latency of the other's.
// With -DBY_COLUMN, for many tokens on a CPU, a work-item holds columns of STRIPE rows in memory, so that vectors are of
// rows and no sum is within one. Sums have the order of the other form, and so the same bits.
// S comes from one slot of the state, behind `matrix` others of its values, is zero at position 0, and goes to another slot.
// Follows common.h, rounding.h and glue.h. Grid: LANES work-items for each `span` rows of a head; value heads, of which
// GROUP share a key head; sequences.

#ifdef BY_COLUMN

#ifdef __AVX512F__
typedef float16 stripe_t;
#define STRIPE 16
#else
typedef float8 stripe_t;
#define STRIPE 8
#endif
#define WIDTH ((RUNS + 1) / 2 * 16)
#define UNROLL_8 _Pragma("unroll 8")
#define ALIGNED __attribute__((aligned(sizeof(stripe_t))))

// The columns' products with q (and with k: recalled) in four of the eight lanes that sum8 adds: every second one from
// `lane` on. Each lane adds its even runs and its odd ones, then lanes add at a distance of four, and of two.
static inline stripe_t half_products(const stripe_t *columns, const float *query, const float *key, int lane,
                                     stripe_t *recalled) {
  stripe_t seen[8], known[8];
  UNROLL for (int part = 0; part < 8; ++part) seen[part] = known[part] = 0.0f;
  for (int first = lane; first < WIDTH; first += 16) {
    UNROLL for (int part = 0; part < 8; ++part) {
      const int i = first + part * 2;
      seen[part] = FMA(columns[i], (stripe_t)(query[i]), seen[part]);
      known[part] = FMA(columns[i], (stripe_t)(key[i]), known[part]);
    }
  }
  UNROLL for (int part = 0; part < 4; ++part) {
    seen[part] += seen[part + 4];
    known[part] += known[part + 4];
  }
  *recalled = (known[0] + known[2]) + (known[1] + known[3]);
  return (seen[0] + seen[2]) + (seen[1] + seen[3]);
}

GROUP_SIZE __kernel void delta_rule(__global const act_t *mixed, __global const float *factors, __global float *out,
                                    __global const float *rates, __global float *states, __global const int *step,
                                    int row_words, int values, int matrix, int value_heads, int value_dim, int span) {
  const uint sequence = get_global_id(2);
  step += sequence * row_words;
  const int length = TOKENS_OF(step, row_words), known = step[STEP_POSITION] != 0, key_heads = (uint)value_heads / GROUP;
  const int rows = value_heads * value_dim, channels = 2 * key_heads * KEY_DIM + rows;
  const int factor_count = 2 * value_heads + 3 * key_heads;
  mixed += (size_t)sequence * channels;
  factors += (size_t)sequence * factor_count;
  out += (size_t)sequence * rows;
  __global const float *before = states + (size_t)step[STEP_STATE_READ] * values + matrix;
  __global float *behind = states + (size_t)step[STEP_STATE_WRITTEN] * values + matrix;
  const uint head = get_global_id(1), key_head = head / GROUP;
  const int base = head * value_dim, stripes = (value_dim + STRIPE - 1) / STRIPE;
  // Rows behind the last one, and columns behind the last one, stay zero.
  stripe_t state[ROWS_PADDED / STRIPE * WIDTH];
  float queries[BLOCK * WIDTH] ALIGNED, keys[BLOCK * WIDTH] ALIGNED, values_of_token[STRIPE] ALIGNED;
  for (int i = 0; i < stripes * WIDTH; ++i)
    state[i] = 0.0f;
  for (int i = 0; i < BLOCK * WIDTH; ++i)
    queries[i] = keys[i] = 0.0f;
  for (int j = 0; j < STRIPE; ++j)
    values_of_token[j] = 0.0f;
  for (int row = 0; known && row < value_dim; ++row) {
    float *column = (float *)(state + row / STRIPE * WIDTH) + row % STRIPE;
    for (int i = 0; i < KEY_DIM; ++i)
      column[i * STRIPE] = before[(base + row) * KEY_DIM + i];
  }
  for (int first = 0; first < length; first += BLOCK) {
    const int count = min(BLOCK, length - first);
    for (int token = 0; token < count; ++token) {
      __global const act_t *q = mixed + (first + token) * channels + key_head * KEY_DIM, *k = q + key_heads * KEY_DIM;
      for (int i = 0; i < KEY_DIM; i += 8) {
        LOAD_PART(load_act8, load_act, q, i, KEY_DIM - i, query)
        LOAD_PART(load_act8, load_act, k, i, KEY_DIM - i, key)
        *(float8 *)(queries + token * WIDTH + i) = query;
        *(float8 *)(keys + token * WIDTH + i) = key;
      }
    }
    for (int stripe = 0; stripe < stripes; ++stripe) {
      stripe_t *columns = state + stripe * WIDTH;
      const int row = base + stripe * STRIPE, rows_of_stripe = min(STRIPE, value_dim - stripe * STRIPE);
      for (int token = 0; token < count; ++token) {
        const float *query = queries + token * WIDTH, *key = keys + token * WIDTH;
        __global const act_t *v = mixed + (first + token) * channels + 2 * key_heads * KEY_DIM + row;
        __global const float *own_factors = factors + (first + token) * factor_count + head;
        __global const float *key_factors = factors + (first + token) * factor_count + 2 * value_heads + key_head;
        __global float *target = out + (first + token) * rows + row;
        const float decay = own_factors[0], beta = own_factors[value_heads];
        const float query_factor = key_factors[0], key_factor = key_factors[key_heads];
        for (int j = 0; j < rows_of_stripe; ++j)
          values_of_token[j] = load_act(v, j);
        const stripe_t value = *(const stripe_t *)values_of_token;
        stripe_t recalled, others;
        stripe_t seen = half_products(columns, query, key, 0, &recalled);
        seen += half_products(columns, query, key, 1, &others);
        recalled += others;
#ifdef STATE_SPACE
        const stripe_t error = beta * value, skipped = rates[2 * value_heads + head] * value;
#else
        const stripe_t error = beta * (value - decay * key_factor * recalled), skipped = 0.0f;
#endif
        const stripe_t written = error * key_factor;
        UNROLL_8 for (int i = 0; i < WIDTH; ++i) columns[i] = FMA((stripe_t)(key[i]), written, columns[i] * decay);
        const stripe_t result = decay * query_factor * seen + error * key_factors[2 * key_heads] + skipped;
        for (int j = 0; j < rows_of_stripe; ++j)
          target[j] = ((const float *)&result)[j];
      }
    }
  }
  for (int row = 0; row < value_dim; ++row) {
    const float *column = (const float *)(state + row / STRIPE * WIDTH) + row % STRIPE;
    for (int i = 0; i < KEY_DIM; ++i)
      behind[(base + row) * KEY_DIM + i] = column[i * STRIPE];
  }
}

#else

#ifdef TWO_ROWS
#define ROWS 2
typedef float16 rows_t;
#define OF_ROWS(first, second) (float16)(first, second)
#define SUMS(x) (float2)(sum8((x).lo), sum8((x).hi))
#define FIRST_ROW(x) (x).lo
#define SECOND_ROW(x) (x).hi
#else
#define ROWS 1
typedef float8 rows_t;
#define OF_ROWS(first, second) (first)
#define SUMS(x) (float2)(sum8(x), 0.0f)
#define FIRST_ROW(x) (x)
#define SECOND_ROW(x) (x)
#endif

#define RUN_AT(r) (((r) * LANES + (int)lane) * 8)
#define RUN_COUNT(r) min(8, KEY_DIM - RUN_AT(r))

#define DECLARE_RUN(r) rows_t held_##r = 0.0f, key_##r = 0.0f;
#define LOAD_RUN(r)                                                            \
  if (RUN_AT(r) < KEY_DIM) {                                                   \
    LOAD_PART(load_float8, load_float, from, RUN_AT(r), RUN_COUNT(r), first_row) \
    LOAD_PART(load_float8, load_float, from + other, RUN_AT(r), RUN_COUNT(r), second_row) \
    held_##r = OF_ROWS(first_row, second_row);                                 \
    (void)second_row;                                                          \
  }
#define STORE_RUN(r)                                                           \
  if (RUN_AT(r) < KEY_DIM) {                                                   \
    float8 first_row = FIRST_ROW(held_##r), second_row = SECOND_ROW(held_##r); \
    STORE_PART(store_float8, store_float, first_row, to, RUN_AT(r), RUN_COUNT(r)) \
    if (ROWS == 2) {                                                           \
      STORE_PART(store_float8, store_float, second_row, to + other, RUN_AT(r), RUN_COUNT(r)) \
    }                                                                          \
  }
#ifdef STATE_SPACE
#define RECALL_RUN(r, sum)
#else
#define RECALL_RUN(r, sum) sum = FMA(held_##r, key_##r, sum);
#endif
#define SUM_RUN(r)                                                             \
  if (RUN_AT(r) < KEY_DIM) {                                                   \
    LOAD_PART(load_act8, load_act, k, RUN_AT(r), RUN_COUNT(r), key)            \
    LOAD_PART(load_act8, load_act, q, RUN_AT(r), RUN_COUNT(r), query)          \
    key_##r = OF_ROWS(key, key);                                               \
    rows_t both = OF_ROWS(query, query);                                       \
    if ((r) & 1) {                                                             \
      RECALL_RUN(r, recalled_1)                                                \
      seen_1 = FMA(held_##r, both, seen_1);                                    \
    } else {                                                                   \
      RECALL_RUN(r, recalled_0)                                                \
      seen_0 = FMA(held_##r, both, seen_0);                                    \
    }                                                                          \
  }
#define UPDATE_RUN(r) held_##r = FMA(key_##r, written, held_##r * decay);

GROUP_SIZE __kernel void delta_rule(__global const act_t *mixed, __global const float *factors, __global float *out,
                                    __global const float *rates, __global float *states, __global const int *step,
                                    int row_words, int values, int matrix, int value_heads, int value_dim, int span) {
#if LANES > 1
  __local float2 parts[2][WG];
  const uint item = get_local_id(0), lane = item % LANES;
#else
  const int lane = 0;
#endif
  const uint sequence = get_global_id(2);
  step += sequence * row_words;
  const int length = TOKENS_OF(step, row_words), known = step[STEP_POSITION] != 0, key_heads = (uint)value_heads / GROUP;
  const int rows = value_heads * value_dim, channels = 2 * key_heads * KEY_DIM + rows;
  const int factor_count = 2 * value_heads + 3 * key_heads;
  mixed += (size_t)sequence * channels;
  factors += (size_t)sequence * factor_count;
  out += (size_t)sequence * rows;
  __global const float *before = states + (size_t)step[STEP_STATE_READ] * values + matrix;
  __global float *behind = states + (size_t)step[STEP_STATE_WRITTEN] * values + matrix;
  // All work-items of a group take part in its barriers.
  const uint head = get_global_id(1), key_head = head / GROUP;
  const int begin = (uint)get_global_id(0) / LANES * span;
  const int own = begin < value_dim, base = head * value_dim + min(begin, value_dim - span), end = base + span;
  for (int first = 0; first < length; first += BLOCK) {
    const int stop = min(length, first + BLOCK);
    for (int row = base; row < end; row += ROWS) {
      // Of an odd number of rows the last one comes twice.
      const int next = min(ROWS - 1, end - 1 - row), other = next * KEY_DIM;
      __global const float *from = (first ? behind : before) + row * KEY_DIM;
      __global float *to = behind + row * KEY_DIM;
      REPEAT(RUNS, DECLARE_RUN)
      if (first || known) {
        REPEAT(RUNS, LOAD_RUN)
      }
      __global const act_t *q = mixed + first * channels + key_head * KEY_DIM, *k = q + key_heads * KEY_DIM;
      __global const act_t *v = mixed + first * channels + 2 * key_heads * KEY_DIM + row;
      __global const float *own_factors = factors + first * factor_count + head;
      __global const float *key_factors = factors + first * factor_count + 2 * value_heads + key_head;
      __global float *target = out + first * rows + row;
      for (int token = first; token < stop; ++token) {
        const float decay = own_factors[0], beta = own_factors[value_heads];
        const float query_factor = key_factors[0], key_factor = key_factors[key_heads];
        rows_t recalled_0 = 0.0f, recalled_1 = 0.0f, seen_0 = 0.0f, seen_1 = 0.0f;
        REPEAT(RUNS, SUM_RUN)
        float2 recalled = SUMS(recalled_0 + recalled_1), seen = SUMS(seen_0 + seen_1);
#if LANES > 1
        // Work-items that are one token ahead write the other half.
        __local float2 *shared = parts[token & 1];
        shared[item] = (float2)(recalled.x, seen.x);
        barrier(CLK_LOCAL_MEM_FENCE);
        float2 sums = 0.0f;
        for (int part = 0; part < LANES; ++part)
          sums += shared[item - lane + part];
        recalled.x = sums.x;
        seen.x = sums.y;
#endif
        const float2 value = {load_act(v, 0), load_act(v, next)};
#ifdef STATE_SPACE
        const float2 error = beta * value, skipped = rates[2 * value_heads + head] * value;
#else
        const float2 error = beta * (value - decay * key_factor * recalled), skipped = 0.0f;
#endif
        const float2 scaled = error * key_factor;
        const rows_t written = OF_ROWS((float8)(scaled.x), (float8)(scaled.y));
        REPEAT(RUNS, UPDATE_RUN)
        const float2 result = decay * query_factor * seen + error * key_factors[2 * key_heads] + skipped;
        if (lane == 0 && own) {
          target[0] = result.x;
          if (ROWS == 2)
            target[next] = next ? result.y : result.x;
        }
        q += channels;
        k += channels;
        v += channels;
        own_factors += factor_count;
        key_factors += factor_count;
        target += rows;
      }
      if (own) {
        REPEAT(RUNS, STORE_RUN)
      }
    }
  }
}

#endif
