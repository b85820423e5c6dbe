// Attention for devices whose work-items run in lockstep groups (GPUs). Follows attention.h.
//
//   GROUP      query heads that share a key head: the argument `group`, known when compiling
//   SOFT_CAP   there is a cap of the scores
//   COALESCED  neighbouring work-items read neighbouring 16 bytes of a key, which reach the key's own work-item through
//              local memory; HEAD_DIM is a multiple of KEY_RUN
//
// Each pass takes as many keys as the group has work-items. A work-item computes the scores of one key and the weighted
// sum of one column of the head; queries, scores and row sums lie in local memory.

#define COLUMNS ((HEAD_DIM + WG - 1) / WG)
#define TEAM (WG / ROWS < 8 ? WG / ROWS : 8)  // work-items that reduce one row
#define QUERY_VECTORS ((HEAD_DIM + 3) / 4)    // of a row
#define ROW_VECTORS ((ROWS + 3) / 4)          // of a key's scores
#define SCORE_ROW (4 * ROW_VECTORS)

// The component of a vector that belongs to a row.
#define LANE_0 x
#define LANE_1 y
#define LANE_2 z
#define LANE_3 w
#define LANE_4 x
#define LANE_5 y
#define LANE_6 z
#define LANE_7 w
#define LANE_8 x
#define LANE_9 y
#define LANE_10 z
#define LANE_11 w
#define LANE_12 x
#define LANE_13 y
#define LANE_14 z
#define LANE_15 w

#ifdef COALESCED
// Elements of all keys that are staged at a time: 64 bytes, a line of a cache.
#define KEY_RUN (4 * PIECE)
#ifdef KV_HALF
#define PIECE 8  // elements in 16 bytes
#ifdef HAS_HALF
#define STAGED_EIGHT(p) convert_float8(as_half8((p)[0]))
#else
#define STAGED_EIGHT(p) vload_half8(0, (__local const half *)(p))
#endif
#else
#define PIECE 4
#define STAGED_EIGHT(p) (float8)(as_float4((p)[0]), as_float4((p)[1]))
#endif
#if HEAD_DIM % KEY_RUN
#error A head is no multiple of KEY_RUN.
#endif
#define RUN_PIECES 4
// One more piece a key, so that neighbours read other banks.
#define STAGED_ROW (RUN_PIECES + 1)
// The scores take the place of the keys that they were computed from.
#define SCORE_VECTORS (ROW_VECTORS > STAGED_ROW ? ROW_VECTORS : STAGED_ROW)
#else
#define SCORE_VECTORS ROW_VECTORS
#endif

// Elements of a key that are read at once.
#if HEAD_DIM % 32 == 0 && ROWS <= 2
#define KEY_STEP 32
#else
#define KEY_STEP 8
#endif

#if WG != PAGE
#error A pass over keys is not one page.
#endif

// The position of a work-item's key, and the row of a pass's key behind the start of `keys` or `values`.
#ifdef GATHERED
#define POSITION_OF(key) position
#define KEY_ROW(i) ROW_OF(pages, list[first + (i)], kv_heads)
#else
#define POSITION_OF(key) (key)
#define KEY_ROW(i) ((uint)(i) * HEAD_DIM)
#endif

// The scale of a work-item's key.
#ifdef KV_CODES
#define KEY_SCALED(sum) ((sum) * key_scale)
#else
#define KEY_SCALED(sum) (sum)
#endif

#define CLEAR_SCORE(r) float4 score##r = 0.0f;
#define ADD_LOW(r) score##r = FMA(queries[r * QUERY_VECTORS + d / 4], piece.lo, score##r);
#define ADD_HIGH(r) score##r = FMA(queries[r * QUERY_VECTORS + d / 4 + 1], piece.hi, score##r);
#define ADD_ONE(r) score##r.x = FMA(query_slots[r * QUERY_VECTORS * 4 + d], one, score##r.x);
#ifdef SOFT_CAP
#define CAPPED(score) (tanh(score) * cap)
#else
#define CAPPED(score) (score)
#endif
#define KEEP_SCORE(r)                                                                                        \
  {                                                                                                          \
    const float sum = (score##r.x + score##r.y) + (score##r.z + score##r.w);                                 \
    const int token = tile.position + (uint)(tile.first_row + min(r, tile.rows - 1)) / GROUP;                \
    const bool seen = key < tile.stop && POSITION_OF(key) <= token && !IS_HIDDEN(POSITION_OF(key), token, window); \
    score_slots[lane * SCORE_ROW + r] = seen ? CAPPED(KEY_SCALED(sum)) : NO_SCORE;                           \
  }
// Rows that only fill the last vector have scores, too: finite ones.
#define CLEAR_LAST_SCORES                                                                                    \
  for (int r = ROWS; r < SCORE_ROW; ++r) score_slots[lane * SCORE_ROW + r] = 0.0f;
#define STORE_ROW(r)                                                                                         \
  if (r < tile.rows) {                                                                                       \
    const uint row = tile.first_row + r;                                                                     \
    const size_t at = HEAD_ROW(tile, row, heads, kv_head, GROUP);                                            \
    if (parts > 1) {                                                                                         \
      __global float *target = partial + (at * parts + get_group_id(2)) * PARTIAL_COLUMNS;                   \
      UNROLL for (int c = 0; c < COLUMNS; ++c) {                                                             \
        if (lane + c * WG < HEAD_DIM) target[lane + c * WG] = sums[r / 4 * COLUMNS + c].LANE_##r;            \
      }                                                                                                      \
      if (lane == 0) {                                                                                       \
        target[HEAD_DIM] = largest[r];                                                                       \
        target[HEAD_DIM + 1] = total[r];                                                                     \
      }                                                                                                      \
    } else {                                                                                                 \
      __global act_t *target = out + at * HEAD_DIM;                                                          \
      UNROLL for (int c = 0; c < COLUMNS; ++c) {                                                             \
        if (lane + c * WG < HEAD_DIM)                                                                        \
          store_act(sums[r / 4 * COLUMNS + c].LANE_##r / total[r], target, lane + c * WG);                   \
      }                                                                                                      \
    }                                                                                                        \
  }

GROUP_SIZE __kernel void attention(__global const float *q, __global const kv_t *cache, __global act_t *out,
                                   __global float *partial, __global const int *step, int table, int row_words,
                                   int group, int window, float scale, float cap SINKS_ARGUMENT GATHER_ARGUMENTS
                                   CODE_ARGUMENTS) {
  __local float4 queries[ROWS * QUERY_VECTORS], scores[WG * SCORE_VECTORS], decays[ROW_VECTORS];
  __local float *query_slots = (__local float *)queries, *score_slots = (__local float *)scores;
  __local float *decay = (__local float *)decays;
  __local float reduced[ROWS * TEAM], largest[ROWS], total[ROWS];
  // The row tiles that see most keys come first.
#ifdef GATHERED
  // Rows are tokens of one head, as if it shared its key head with no other.
  const int kv_head = gathered_head(order, first_slot, get_group_id(1)), heads = all_heads;
  const uint key_head = (uint)kv_head / MEMBERS, kv_heads = (uint)heads / MEMBERS;
  counts += kv_head * blocks;
  attention_tile tile = find_gathered_tile(step, get_num_groups(0) - 1 - get_group_id(0), counts);
  __global const int *list = positions + ((size_t)kv_head * blocks + (uint)tile.first_row / BLOCK) * most;
#else
  const int kv_head = get_group_id(1), kv_heads = get_num_groups(1), heads = kv_heads * GROUP, key_head = kv_head;
  attention_tile tile = find_tile(step, get_num_groups(0) - 1 - get_group_id(0), get_group_id(2),
                                  get_num_groups(2), GROUP, window, row_words);
#endif
  int lane = get_local_id(0), row_of_lane = (uint)lane / TEAM, teammate = (uint)lane % TEAM;
  bool reduces = row_of_lane < ROWS;
  int parts = PARTS;
  __global const int *pages = step + tile.sequence * row_words + table;
#ifdef GATHERED
  __global const kv_t *keys = cache + HEAD_AT(0, key_head, kv_heads, HEAD_DIM);
  __global const kv_t *values = cache + HEAD_AT(0, VALUE_HEAD(key_head, kv_heads), kv_heads, HEAD_DIM);
#endif
  // A tile without rows sees no keys and writes nothing. With a return here and a barrier behind the last store
  // PoCL 3 loses what the group shares in between.
  if (tile.rows <= 0)
    tile.stop = tile.start;

  for (uint r = 0; r < ROWS; ++r) {
    const uint row = max(0, tile.first_row + min((int)r, tile.rows - 1));
    __global const float *query = q + (size_t)HEAD_ROW(tile, row, heads, kv_head, GROUP) * HEAD_DIM;
    for (uint d = lane; d < HEAD_DIM; d += WG) query_slots[r * QUERY_VECTORS * 4 + d] = query[d] * scale;
  }
  if (lane < ROWS) {
    largest[lane] =
        FIRST_SCORE(kv_head * GROUP + (uint)max(0, tile.first_row + min(lane, tile.rows - 1)) % GROUP, get_group_id(2));
    total[lane] = FIRST_WEIGHT(largest[lane]);
  }
  // By four rows, then columns.
  float4 sums[ROW_VECTORS * COLUMNS];
  UNROLL for (int i = 0; i < ROW_VECTORS * COLUMNS; ++i) sums[i] = 0.0f;
#ifndef COALESCED
  CLEAR_LAST_SCORES
#endif
  if (lane < SCORE_ROW) decay[lane] = 0.0f;
  barrier(CLK_LOCAL_MEM_FENCE);

  for (int first = tile.start; first < tile.stop; first += WG) {
    const int key = first + lane, count = min(WG, tile.stop - first);
#ifdef GATHERED
    const int position = list[min(key, tile.stop - 1)];
#else
    const int page = pages[(uint)first / PAGE];
    __global const kv_t *keys = cache + HEAD_AT(page, key_head, kv_heads, HEAD_DIM);
    __global const kv_t *values = cache + HEAD_AT(page, VALUE_HEAD(key_head, kv_heads), kv_heads, HEAD_DIM);
#endif
#ifdef KV_CODES
    const float key_scale = SCALES_OF(keys, HEAD_DIM)[min(lane, count - 1)];
#endif
    REPEAT(ROWS, CLEAR_SCORE)
#ifdef COALESCED
    __local uint4 *staged = (__local uint4 *)scores;
    for (uint run = 0; run < HEAD_DIM; run += KEY_RUN) {
      UNROLL for (uint turn = 0; turn < RUN_PIECES; ++turn) {
        const uint i = turn * WG + lane, staged_key = i / RUN_PIECES, piece = i % RUN_PIECES;
        staged[staged_key * STAGED_ROW + piece] =
            *(__global const uint4 *)(keys + (KEY_ROW(min((int)staged_key, count - 1)) + run + piece * PIECE));
      }
      barrier(CLK_LOCAL_MEM_FENCE);
      for (uint d = run; d < run + KEY_RUN; d += 8) {
        const float8 piece = STAGED_EIGHT(staged + lane * STAGED_ROW + (d - run) / PIECE);
        REPEAT(ROWS, ADD_LOW)
        REPEAT(ROWS, ADD_HIGH)
      }
      barrier(CLK_LOCAL_MEM_FENCE);
    }
    CLEAR_LAST_SCORES
#else
    // With few rows no compiler knows the end, so none reads the whole key at once, which would take most registers.
    const uint whole = ROWS > 2 ? HEAD_DIM / 8 * 8 : HEAD_DIM / 8 * 8 * (uint)group / GROUP;
    __global const kv_t *key_row = keys + KEY_ROW(min(lane, count - 1));
    for (uint step = 0; step < whole; step += KEY_STEP)
      UNROLL for (uint d = step; d < step + KEY_STEP; d += 8) {
        const float8 piece = load_kv8(key_row, d);
        REPEAT(ROWS, ADD_LOW)
        REPEAT(ROWS, ADD_HIGH)
      }
    for (uint d = HEAD_DIM / 8 * 8; d < HEAD_DIM; ++d) {
      const float one = load_kv(key_row, d);
      REPEAT(ROWS, ADD_ONE)
    }
#endif
    REPEAT(ROWS, KEEP_SCORE)
    barrier(CLK_LOCAL_MEM_FENCE);

    if (reduces) {
      float best = NO_SCORE;
      for (int i = teammate; i < WG; i += TEAM)
        best = max(best, score_slots[i * SCORE_ROW + row_of_lane]);
      reduced[lane] = best;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float before = 0.0f, best = 0.0f;
    if (reduces) {
      before = best = largest[row_of_lane];
      for (int i = 0; i < TEAM; ++i)
        best = max(best, reduced[row_of_lane * TEAM + i]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (reduces) {
      float weights = 0.0f;
      for (int i = teammate; i < WG; i += TEAM) {
        float weight = exp2(score_slots[i * SCORE_ROW + row_of_lane] - best);
        score_slots[i * SCORE_ROW + row_of_lane] = weight;
        weights += weight;
      }
      reduced[lane] = weights;
      if (teammate == 0) {
        largest[row_of_lane] = best;
        decay[row_of_lane] = exp2(before - best);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    if (reduces && teammate == 0) {
      float weights = total[row_of_lane] * decay[row_of_lane];
      for (int i = 0; i < TEAM; ++i)
        weights += reduced[row_of_lane * TEAM + i];
      total[row_of_lane] = weights;
    }
    UNROLL for (int v = 0; v < ROW_VECTORS; ++v)
      UNROLL for (int c = 0; c < COLUMNS; ++c) sums[v * COLUMNS + c] *= decays[v];
    __global const kv_t *value_row = values;
    for (int i = 0; i < count; ++i, value_row += HEAD_DIM) {
#ifdef GATHERED
      value_row = values + KEY_ROW(i);
#endif
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        // Work-items past the head's end read its last element and write nothing.
        const float4 value = SCALED(load_kv(value_row, min(lane + c * WG, HEAD_DIM - 1)), values, i);
        UNROLL for (int v = 0; v < ROW_VECTORS; ++v)
          sums[v * COLUMNS + c] = FMA(scores[i * ROW_VECTORS + v], value, sums[v * COLUMNS + c]);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }

  // Each branch has one condition: PoCL 3 loses the one that differs between work-items from
  // `column < HEAD_DIM && parts > 1`.
  REPEAT(ROWS, STORE_ROW)
#ifdef CODE_BITS
  round_tile(tile, GROUP, kv_head, heads, out, codes, code_blocks);
#endif
}
