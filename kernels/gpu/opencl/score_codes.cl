// Writes the codes of queries and keys from which an NPU's graph estimates attention scores. Follows sparse.h.
//
// Keys that no query sees, before the window of the first, count as zeros: their pages may have been given away.
//
// Grid of both kernels: runs of RUN_ROWS rows, first those of the keys, then those of each member; slots.

#define FIRST_SEEN(step) (window > 0 ? max(0, step[STEP_POSITION] - window + 1) : 0)

#if RUN_ROWS != PAGE
#error A run of keys is not one page.
#endif

typedef struct {
  __global const float *queries;  // of a member; null for keys
  __global const kv_t *keys;      // of the run
  uint stride;                    // between two rows of queries
  int first, count;               // rows of the run, padding included
  int begin, existing;            // first row that counts, and the one behind the last
  int padded;                     // rows of the codes before the run's member
  float reciprocal;               // of the step
} code_run;

static inline code_run find_run(__global const float *q, __global const kv_t *cache, __global const int *step,
                                __global const float4 *numbers, int key_head, int key_heads, int table, int tokens,
                                int keys, int run, int begin) {
  code_run found;
  const int key_runs = RUNS_OF(keys), token_runs = RUNS_OF(tokens);
  numbers += key_head * GROUP;
  found.keys = cache;
  if (run < key_runs) {
    found.queries = 0;
    found.begin = begin;
    found.first = run * RUN_ROWS;
    found.count = min(RUN_ROWS, keys - found.first);
    found.existing = step[STEP_POSITION] + step[STEP_LENGTH];
    if (found.first < found.existing)
      found.keys += HEAD_AT(step[table + run], key_head, key_heads, HEAD_DIM);
    found.padded = 0;
    found.reciprocal = numbers[0].RECIPROCAL_KEY_STEP;
  } else {
    int member = 0;
    for (run -= key_runs; run >= token_runs; run -= token_runs) ++member;
    found.begin = 0;
    found.queries = q + (key_head * GROUP + member) * HEAD_DIM;
    found.stride = key_heads * (GROUP * HEAD_DIM);
    found.first = run * RUN_ROWS;
    found.count = min(RUN_ROWS, tokens - found.first);
    found.existing = step[STEP_LENGTH];
    found.padded = member * tokens;
    found.reciprocal = numbers[member].RECIPROCAL_QUERY_STEP;
  }
  return found;
}

// Eight elements of a row in calibrated steps; zeros where there is no such row.
static inline float8 load_steps(code_run run, int row, int d) {
  const int place = run.first + row;
  if (place < run.begin || place >= run.existing)
    return 0.0f;
  if (run.queries) {
    LOAD_PART(load_float8, load_float, run.queries + place * run.stride, d, HEAD_DIM - d, query)
    return query * run.reciprocal;
  }
  LOAD_PART(load_kv8, load_kv, run.keys + row * HEAD_DIM, d, HEAD_DIM - d, key)
  return key * run.reciprocal;
}

#ifdef BUCKETS
// Writes the largest magnitude of each run, in calibrated steps.
GROUP_SIZE __kernel void find_largest_steps(__global const float *q, __global const kv_t *cache,
                                            __global const int *step, __global const int *order,
                                            __global const float4 *numbers, __global float *largest, int table,
                                            int window, int tokens, int keys) {
  __local float values[WG];
  const int lane = get_local_id(0), slot = get_group_id(1);
  const code_run run = find_run(q, cache, step, numbers, order[slot], get_num_groups(1), table, tokens, keys,
                                get_group_id(0), FIRST_SEEN(step));
  float8 top = 0.0f;
  for (uint i = lane; i < run.count * PIECES; i += WG) {
    const float8 size = as_float8(as_int8(load_steps(run, i / PIECES, i % PIECES * 8)) & 0x7fffffff);
    top = size > top ? size : top;
  }
  const float4 four = top.lo > top.hi ? top.lo : top.hi;
  const float2 two = four.lo > four.hi ? four.lo : four.hi;
  const float one = group_max(two.x > two.y ? two.x : two.y, values);
  if (lane == 0)
    largest[slot * get_num_groups(0) + get_group_id(0)] = one;
}

// Returns the factors of the bucket whose largest codes have the least squared distance to those of the head.
static inline float4 nearest_bucket(__global const float *largest, int key_runs, int runs,
                                    __global const float4 *factors) {
  float key = 0.0f, query = 0.0f;
  for (int run = 0; run < key_runs; ++run) key = largest[run] > key ? largest[run] : key;
  for (int run = key_runs; run < runs; ++run) query = largest[run] > query ? largest[run] : query;
  float4 nearest = factors[0];
  float least = INFINITY;
  for (int bucket = 0; bucket < BUCKETS; ++bucket) {
    const float4 own = factors[bucket];
    const float of_query = query - 127.0f * own.x, of_key = key - 127.0f * own.y;
    const float distance = of_query * of_query + of_key * of_key;
    if (distance < least) {
      least = distance;
      nearest = own;
    }
  }
  return nearest;
}
#define BUCKET_ARGUMENTS , __global const float *largest, __global const float4 *factors
#else
#define BUCKET_ARGUMENTS
#endif

static inline void store_score_codes(float8 value, __global uchar *codes, int d) {
  value = value < -128.0f ? (float8)-128.0f : value > 127.0f ? (float8)127.0f : value;
  const uchar8 code = CODES_OF_INTS(ROUND8(value) + CODE_ZERO);
#if HEAD_DIM % 8
  const int count = min(8, HEAD_DIM - d);
  for (int i = 0; i < count; ++i) codes[d + i] = ((const uchar *)&code)[i];
#else
  *(__global uchar8 *)(codes + d) = code;
#endif
}

// Writes the codes of a run, and the score steps of the slot's members.
GROUP_SIZE __kernel void write_score_codes(__global const float *q, __global const kv_t *cache,
                                           __global const int *step, __global const int *order,
                                           __global const float4 *numbers, __global uchar *query_codes,
                                           __global uchar *key_codes, __global float *score_steps, int table,
                                           int window, int tokens, int keys BUCKET_ARGUMENTS) {
  const int lane = get_local_id(0), slot = get_group_id(1), key_head = order[slot];
  const code_run run = find_run(q, cache, step, numbers, key_head, get_num_groups(1), table, tokens, keys,
                                get_group_id(0), FIRST_SEEN(step));
#ifdef BUCKETS
  const float4 factor =
      nearest_bucket(largest + slot * get_num_groups(0), RUNS_OF(keys), get_num_groups(0), factors);
#else
  const float4 factor = 1.0f;
#endif
  if (get_group_id(0) == 0)
    for (int member = lane; member < GROUP; member += WG) {
      const int head = key_head * GROUP + member;
      score_steps[head] = numbers[head].SCORE_STEP * (factor.x * factor.y);
    }
  const float reciprocal = run.queries ? factor.z : factor.w;
  __global uchar *codes = run.queries ? query_codes + (size_t)(slot * GROUP * tokens + run.padded) * HEAD_DIM
                                      : key_codes + (size_t)(slot * keys) * HEAD_DIM;
  codes += run.first * HEAD_DIM;
  for (uint i = lane; i < run.count * PIECES; i += WG) {
    const uint row = i / PIECES, d = i % PIECES * 8;
    store_score_codes(load_steps(run, row, d) * reciprocal, codes + row * HEAD_DIM, d);
  }
}
