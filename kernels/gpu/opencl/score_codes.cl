// Writes the codes of queries and keys from which an NPU's graph estimates attention scores. Follows sparse.h.
//
// Grid of both kernels: runs of RUN_ROWS rows, those of the keys first; slots.

typedef struct {
  __global const float *queries;   // of the first member
  __global const kv_t *keys;
  __global const float4 *numbers;  // of the first member
  int stride;                      // between the queries of two tokens
  int visible;                     // keys
  int length;                      // tokens
  int tokens;                      // of a member, padding included
} score_rows;

static inline score_rows find_rows(__global const float *q, __global const kv_t *cache, __global const int *step,
                                   __global const float4 *numbers, int key_head, int key_heads, ulong k_offset,
                                   ulong head_stride, int tokens, int keys) {
  score_rows rows;
  rows.queries = q + key_head * (GROUP * HEAD_DIM);
  rows.keys = cache + k_offset + key_head * head_stride;
  rows.numbers = numbers + key_head * GROUP;
  rows.stride = key_heads * (GROUP * HEAD_DIM);
  rows.visible = min(keys, step[STEP_POSITION] + step[STEP_LENGTH]);
  rows.length = step[STEP_LENGTH];
  rows.tokens = tokens;
  return rows;
}

// Eight elements of a key (of a query, counted over all members) in calibrated steps; zeros where there is no such row.
static inline float8 load_key_steps(score_rows rows, int row, int d) {
  if (row >= rows.visible)
    return 0.0f;
  LOAD_PART(load_kv8, load_kv, rows.keys + (size_t)row * HEAD_DIM, d, HEAD_DIM - d, value)
  return value * rows.numbers[0].RECIPROCAL_KEY_STEP;
}

static inline float8 load_query_steps(score_rows rows, int row, int d) {
  const int member = row / rows.tokens, token = row - member * rows.tokens;
  if (member >= GROUP || token >= rows.length)
    return 0.0f;
  __global const float *query = rows.queries + (size_t)token * rows.stride + member * HEAD_DIM;
  LOAD_PART(load_float8, load_float, query, d, HEAD_DIM - d, value)
  return value * rows.numbers[member].RECIPROCAL_QUERY_STEP;
}

#ifdef BUCKETS
// Writes the largest magnitude of each run, in calibrated steps.
GROUP_SIZE __kernel void find_largest_steps(__global const float *q, __global const kv_t *cache,
                                            __global const int *step, __global const int *order,
                                            __global const float4 *numbers, __global float *largest, ulong k_offset,
                                            ulong head_stride, int tokens, int keys) {
  __local float values[WG];
  const int lane = get_local_id(0), run = get_group_id(0), slot = get_group_id(1);
  const int key_runs = (keys + RUN_ROWS - 1) / RUN_ROWS;
  const score_rows rows = find_rows(q, cache, step, numbers, order[slot], get_num_groups(1), k_offset, head_stride,
                                    tokens, keys);
  float8 top = 0.0f;
  for (int i = lane; i < RUN_ROWS * PIECES; i += WG) {
    const int row = i / PIECES, d = i % PIECES * 8;
    const float8 value = run < key_runs ? load_key_steps(rows, run * RUN_ROWS + row, d)
                                        : load_query_steps(rows, (run - key_runs) * RUN_ROWS + row, d);
    const float8 size = as_float8(as_int8(value) & 0x7fffffff);
    top = size > top ? size : top;
  }
  const float4 four = top.lo > top.hi ? top.lo : top.hi;
  const float2 two = four.lo > four.hi ? four.lo : four.hi;
  const float one = group_max(two.x > two.y ? two.x : two.y, values);
  if (lane == 0)
    largest[slot * get_num_groups(0) + run] = one;
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
                                           __global uchar *key_codes, __global float *score_steps, ulong k_offset,
                                           ulong head_stride, int tokens, int keys BUCKET_ARGUMENTS) {
  const int lane = get_local_id(0), run = get_group_id(0), slot = get_group_id(1), key_head = order[slot];
  const int key_runs = (keys + RUN_ROWS - 1) / RUN_ROWS;
  const score_rows rows = find_rows(q, cache, step, numbers, key_head, get_num_groups(1), k_offset, head_stride,
                                    tokens, keys);
#ifdef BUCKETS
  const float4 factor =
      nearest_bucket(largest + slot * get_num_groups(0), key_runs, get_num_groups(0), factors);
#else
  const float4 factor = 1.0f;
#endif
  if (run == 0)
    for (int member = lane; member < GROUP; member += WG)
      score_steps[key_head * GROUP + member] = rows.numbers[member].SCORE_STEP * (factor.x * factor.y);
  const int first = (run < key_runs ? run : run - key_runs) * RUN_ROWS;
  const int count = min(RUN_ROWS, (run < key_runs ? keys : GROUP * tokens) - first);
  if (run < key_runs) {
    key_codes += ((size_t)slot * keys + first) * HEAD_DIM;
    for (int i = lane; i < count * PIECES; i += WG) {
      const int row = i / PIECES, d = i % PIECES * 8;
      store_score_codes(load_key_steps(rows, first + row, d) * factor.w, key_codes + row * HEAD_DIM, d);
    }
  } else {
    query_codes += ((size_t)slot * (GROUP * tokens) + first) * HEAD_DIM;
    for (int i = lane; i < count * PIECES; i += WG) {
      const int row = i / PIECES, d = i % PIECES * 8;
      store_score_codes(load_query_steps(rows, first + row, d) * factor.z, query_codes + row * HEAD_DIM, d);
    }
  }
}
