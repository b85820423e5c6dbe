// Writes the inputs of an NPU's graph of attention. Follows glue.h.
//
//   HEAD_DIM    elements of a head
//   GROUP       query heads that share a key head, its members
//   RANGE_KEYS  keys that the graph joins at once
//
//   queries     [head][token][HEAD_DIM], times the scale of scores
//   keys        [key_head][HEAD_DIM][key]
//   values      [key_head][key][HEAD_DIM]
//   limits      [range][token]: the place in a range of keys of the last one that the token sees, from -1 to RANGE_KEYS
//
// Tokens and keys that do not exist have zeros; such a token sees what the one before would.
//
// Grid: pages of keys, then runs of as many tokens of each member; key heads.

#define PIECES ((HEAD_DIM + 7) / 8)
#define RUNS_OF(rows) (int)((uint)((rows) + PAGE - 1) / PAGE)

static inline void write_page(__global const kv_t *cache, __global const int *step, __global act_t *keys,
                              __global act_t *values, int table, int all, int page, int head, int heads) {
  const int lane = get_local_id(0), first = page * PAGE, count = min(PAGE, all - first);
  const int existing = step[STEP_POSITION] + step[STEP_LENGTH] - first;
  // Pages behind the last position are in no table.
  const uint place = existing > 0 ? (uint)step[table + page] : 0;
  __global const kv_t *own = cache + HEAD_AT(place, head, heads, HEAD_DIM);
  __global const kv_t *behind = cache + HEAD_AT(place, VALUE_HEAD(head, heads), heads, HEAD_DIM);
  keys += (size_t)head * HEAD_DIM * all + first;
  values += ((size_t)head * all + first) * HEAD_DIM;
  // Neighbours write neighbours: the graph reads keys by element.
  for (uint i = lane; i < (uint)(count * HEAD_DIM); i += WG) {
    const uint d = i / (uint)count, row = i % (uint)count;
    const float key = (int)row < existing ? SCALED(load_kv(own, row * HEAD_DIM + d), own, row) : 0.0f;
    store_act(key, keys, (size_t)d * all + row);
  }
  for (uint i = lane; i < (uint)count * PIECES; i += WG) {
    const uint row = i / PIECES, d = i % PIECES * 8;
    float8 value = 0.0f;
    if ((int)row < existing) {
      LOAD_PART(load_kv8, load_kv, behind + row * HEAD_DIM, d, HEAD_DIM - d, loaded)
      value = SCALED(loaded, behind, row);
    }
    STORE_PART(store_act8, store_act, value, values + row * HEAD_DIM, d, HEAD_DIM - d)
  }
}

static inline void write_queries(__global const float *q, __global const int *step, __global act_t *queries, int tokens,
                                 int run, int head, int heads, float scale) {
  const int lane = get_local_id(0), first = run * PAGE, count = min(PAGE, tokens - first);
  const int existing = step[STEP_LENGTH] - first;
  q += (size_t)first * heads * HEAD_DIM + head * HEAD_DIM;
  queries += ((size_t)head * tokens + first) * HEAD_DIM;
  for (uint i = lane; i < (uint)count * PIECES; i += WG) {
    const uint row = i / PIECES, d = i % PIECES * 8;
    float8 value = 0.0f;
    if ((int)row < existing) {
      LOAD_PART(load_float8, load_float, q + row * (uint)(heads * HEAD_DIM), d, HEAD_DIM - d, loaded)
      value = loaded * scale;
    }
    STORE_PART(store_act8, store_act, value, queries + row * HEAD_DIM, d, HEAD_DIM - d)
  }
}

static inline void write_limits(__global const int *step, __global act_t *limits, int tokens, int all, int run) {
  const int first = run * PAGE, count = min(PAGE, tokens - first);
  for (int begin = 0, range = 0; begin < all; begin += RANGE_KEYS, ++range)
    for (int row = get_local_id(0); row < count; row += WG) {
      const int last = step[STEP_POSITION] + first + row - begin;
      store_act((float)max(-1, min(last, RANGE_KEYS)), limits, (size_t)range * tokens + first + row);
    }
}

GROUP_SIZE __kernel void write_attention_inputs(__global const float *q, __global const kv_t *cache,
                                                __global const int *step, __global act_t *queries,
                                                __global act_t *keys, __global act_t *values, __global act_t *limits,
                                                int table, int tokens, int all, float scale) {
  const int key_head = get_group_id(1), key_heads = get_num_groups(1);
  const int key_runs = RUNS_OF(all), token_runs = RUNS_OF(tokens);
  int run = get_group_id(0), member = 0;
  if (run < key_runs) {
    write_page(cache, step, keys, values, table, all, run, key_head, key_heads);
    return;
  }
  for (run -= key_runs; run >= token_runs; run -= token_runs) ++member;
  write_queries(q, step, queries, tokens, run, key_head * GROUP + member, key_heads * GROUP, scale);
  if (key_head == 0 && member == 0)
    write_limits(step, limits, tokens, all, run);
}
