// Attention for devices that run a work-group on one core with vector registers. Follows attention.h.
//
//   MICRO      rows that one register tile holds; divides ROWS
//   VECTORS    8-wide columns of a register tile
//
// The keys of a block are transposed into private memory once for all rows of the work-group, so that scores are
// vectors of 8 keys without horizontal sums.

#define KEYS 64
#define KEY_VECTORS (KEYS / 8)
#define WIDE ((HEAD_DIM + 15) / 16 * 2)  // vectors of a head, padded to whole register tiles
#define TAIL (HEAD_DIM % 8)

// Vectors of a register tile. AVX-512 has 32 registers of twice the width: more rows, and two vectors in each.
#ifdef __AVX512F__
typedef float16 tile_float;
#define TILE_VECTORS 2
#if ROWS % 8 == 0 && MICRO == 4
#undef MICRO
#define MICRO 8
#endif
#if VECTORS == 1
#undef VECTORS
#define VECTORS 2
#endif
#if VECTORS == 2 && WIDE % 4 == 0
#undef VECTORS
#define VECTORS 4
#endif
#else
typedef float8 tile_float;
#define TILE_VECTORS 1
#endif
#define TILE (VECTORS / TILE_VECTORS)
#define ALIGNED __attribute__((aligned(sizeof(tile_float))))

// A core's own prefetching stops at 4 KiB; without this prefetch a third of the time is waiting.
#if defined(__clang__) && (defined(__x86_64__) || defined(__aarch64__))
#define PREFETCH(p) __builtin_prefetch((const void *)(size_t)(p))
#else
#define PREFETCH(p)
#endif
#define LINE_ELEMENTS (64 / (int)sizeof(kv_t))
// Whole eights of rows in 4 KiB, which are prefetched ahead: near the end of a page from the next one.
#define ROWS_AHEAD (4096 / (HEAD_DIM * (int)sizeof(kv_t)) / 8 * 8)
#define AHEAD (ROWS_AHEAD < 8 ? 8 : ROWS_AHEAD > KEYS ? KEYS : ROWS_AHEAD)

// A row of a block, and the one that is prefetched with it; `first` is a multiple of eight.
#ifdef GATHERED
#define KEY_ROW(source, i) ((source) + ROW_OF(pages, list[i], kv_heads))
#define ROW_AHEAD(row, source, next, first, i) ((row) + 4096 / (int)sizeof(kv_t))
#define KEY_ARGUMENTS , __global const int *pages, __global const int *list, uint kv_heads
#define KEY_VALUES , pages, list + first, kv_heads
#else
#define KEY_ROW(source, i) ((source) + (i) * HEAD_DIM)
#define ROW_AHEAD(row, source, next, first, i)                                                                          \
  (((first) + AHEAD < KEYS ? (source) : (next) - KEYS * HEAD_DIM) + ((first) + AHEAD + (i)) * HEAD_DIM)
#define KEY_ARGUMENTS
#define KEY_VALUES
#endif

// Interleaves the 4-element halves' lower (upper) pairs, as the AVX unpack instructions do.
#define MIX_LOW(x, y) (float8)(x.s0, y.s0, x.s1, y.s1, x.s4, y.s4, x.s5, y.s5)
#define MIX_HIGH(x, y) (float8)(x.s2, y.s2, x.s3, y.s3, x.s6, y.s6, x.s7, y.s7)
#define PAIR_LOW(x, y) (float8)(x.s01, y.s01, x.s45, y.s45)
#define PAIR_HIGH(x, y) (float8)(x.s23, y.s23, x.s67, y.s67)

// Writes the 8x8 transpose of r[0..7] to to[0], to[step], ...
static inline void transpose8(const float8 *r, float8 *to, int step) {
  float8 t0 = MIX_LOW(r[0], r[1]), t1 = MIX_HIGH(r[0], r[1]);
  float8 t2 = MIX_LOW(r[2], r[3]), t3 = MIX_HIGH(r[2], r[3]);
  float8 t4 = MIX_LOW(r[4], r[5]), t5 = MIX_HIGH(r[4], r[5]);
  float8 t6 = MIX_LOW(r[6], r[7]), t7 = MIX_HIGH(r[6], r[7]);
  float8 u0 = PAIR_LOW(t0, t2), u1 = PAIR_HIGH(t0, t2), u2 = PAIR_LOW(t1, t3), u3 = PAIR_HIGH(t1, t3);
  float8 u4 = PAIR_LOW(t4, t6), u5 = PAIR_HIGH(t4, t6), u6 = PAIR_LOW(t5, t7), u7 = PAIR_HIGH(t5, t7);
  to[0] = (float8)(u0.lo, u4.lo);
  to[step] = (float8)(u1.lo, u5.lo);
  to[2 * step] = (float8)(u2.lo, u6.lo);
  to[3 * step] = (float8)(u3.lo, u7.lo);
  to[4 * step] = (float8)(u0.hi, u4.hi);
  to[5 * step] = (float8)(u1.hi, u5.hi);
  to[6 * step] = (float8)(u2.hi, u6.hi);
  to[7 * step] = (float8)(u3.hi, u7.hi);
}

// Reads the keys of a block, transposed: keys[d * KEY_VECTORS + key / 8]. Behind the last one it is repeated. A block is a
// page, or with GATHERED a part of the list; `next` has the rows that are read behind it.
static inline void load_keys(__global const kv_t *source, __global const kv_t *next KEY_ARGUMENTS, int count,
                             float8 *keys) {
  for (int block = 0; block < KEY_VECTORS && block * 8 < count; ++block) {
    for (int d = 0; d < HEAD_DIM; d += 8) {
      float8 r[8];
      UNROLL for (int i = 0; i < 8; ++i) {
        const int row = min(block * 8 + i, count - 1);
        __global const kv_t *key = KEY_ROW(source, row);
        if (d % LINE_ELEMENTS == 0)
          PREFETCH(ROW_AHEAD(key, source, next, block * 8, i) + d);
#if TAIL
        LOAD_PART(load_kv8, load_kv, key, d, HEAD_DIM - d, value)
        r[i] = SCALED(value, source, row);
#else
        r[i] = SCALED(load_kv8(key, d), source, row);
#endif
      }
      transpose8(r, keys + d * KEY_VECTORS + block, KEY_VECTORS);
    }
  }
}

static inline void load_values(__global const kv_t *source, __global const kv_t *next KEY_ARGUMENTS, int count,
                               float8 *values) {
  for (int key = 0; key < count; ++key) {
    __global const kv_t *value_row = KEY_ROW(source, key);
    UNROLL for (int d = 0; d < HEAD_DIM; d += LINE_ELEMENTS)
      PREFETCH(ROW_AHEAD(value_row, source, next, key & -8, key & 7) + d);
    UNROLL for (int d = 0; d < HEAD_DIM / 8; ++d) values[key * WIDE + d] = SCALED(load_kv8(value_row, d * 8), source, key);
#if TAIL
    LOAD_PART(load_kv8, load_kv, value_row, HEAD_DIM / 8 * 8, TAIL, last)
    values[key * WIDE + HEAD_DIM / 8] = SCALED(last, source, key);
#endif
  }
}

// scores[row][key] = queries[row] . keys[key] for MICRO rows and VECTORS * 8 keys.
static inline void score_tile(const float *queries, const float8 *keys, float8 *scores) {
  tile_float sums[MICRO * TILE];
  UNROLL for (int i = 0; i < MICRO * TILE; ++i) sums[i] = 0.0f;
  for (int d = 0; d < HEAD_DIM; ++d) {
    tile_float key[TILE];
    UNROLL for (int v = 0; v < TILE; ++v) key[v] = ((const tile_float *)(keys + d * KEY_VECTORS))[v];
    UNROLL for (int r = 0; r < MICRO; ++r) {
      tile_float query = (tile_float)queries[r * WIDE * 8 + d];
      UNROLL for (int v = 0; v < TILE; ++v) sums[r * TILE + v] = FMA(query, key[v], sums[r * TILE + v]);
    }
  }
  UNROLL for (int r = 0; r < MICRO; ++r)
    UNROLL for (int v = 0; v < TILE; ++v) ((tile_float *)(scores + r * KEY_VECTORS))[v] = sums[r * TILE + v];
}

// sums[row][d] = sums[row][d] * decay[row] + weights[row] . values[.][d] for MICRO rows, VECTORS * 8 columns.
// The block is summed separately first, which rounds less over long contexts.
static inline void value_tile(const float *weights, const float *decay, const float8 *values, int count,
                              float8 *sums) {
  tile_float tile[MICRO * TILE];
  UNROLL for (int i = 0; i < MICRO * TILE; ++i) tile[i] = 0.0f;
  for (int key = 0; key < count; ++key) {
    tile_float value[TILE];
    UNROLL for (int v = 0; v < TILE; ++v) value[v] = ((const tile_float *)(values + key * WIDE))[v];
    UNROLL for (int r = 0; r < MICRO; ++r) {
      tile_float weight = (tile_float)weights[r * KEYS + key];
      UNROLL for (int v = 0; v < TILE; ++v) tile[r * TILE + v] = FMA(weight, value[v], tile[r * TILE + v]);
    }
  }
  UNROLL for (int r = 0; r < MICRO; ++r) {
    tile_float *row = (tile_float *)(sums + r * WIDE);
    UNROLL for (int v = 0; v < TILE; ++v) row[v] = FMA(row[v], (tile_float)decay[r], tile[r * TILE + v]);
  }
}

// Turns one row's scores of a block into weights; updates its largest score and total weight and returns by
// how much its earlier sums shrink. Keys outside [low, high], counted from the block's first, are hidden.
static inline float soften(float8 *scores, int low, int high, float cap, float *largest, float *total) {
  if (cap > 0.0f)
    for (int v = 0; v < KEY_VECTORS; ++v) scores[v] = tanh_8(scores[v]) * cap;
  if (low > 0 || high < KEYS - 1) {
    for (int v = 0; v < KEY_VECTORS; ++v) {
      int8 key = (int8)(0, 1, 2, 3, 4, 5, 6, 7) + v * 8;
      scores[v] = ((key >= low) & (key <= high)) ? scores[v] : (float8)NO_SCORE;
    }
  }
  float8 top = scores[0];
  UNROLL for (int v = 1; v < KEY_VECTORS; ++v) top = top > scores[v] ? top : scores[v];
  float best = max8(top);
  best = best > *largest ? best : *largest;
  float8 weight_sum = 0.0f;
  UNROLL for (int v = 0; v < KEY_VECTORS; ++v) {
    scores[v] = exp2_8(scores[v] - best);
    weight_sum += scores[v];
  }
  float decay = exp2_8((float8)(*largest - best)).s0;
  *total = *total * decay + sum8(weight_sum);
  *largest = best;
  return decay;
}

#ifdef GATHERED
// Returns how many positions of an ascending list are at most `position`.
static inline int places_up_to(__global const int *list, int count, int position) {
  int low = 0;
  while (low < count) {
    const int middle = (low + count) / 2;
    if (list[middle] <= position)
      low = middle + 1;
    else
      count = middle;
  }
  return low;
}
#endif

GROUP_SIZE __kernel void attention(__global const float *q, __global const kv_t *cache, __global act_t *out,
                                   __global float *partial, __global const int *step, int table, int row_words,
                                   int group, int window, float scale, float cap SINKS_ARGUMENT GATHER_ARGUMENTS
                                   CODE_ARGUMENTS) {
  // The row tiles that see most keys come first.
#ifdef GATHERED
  // Rows are tokens of one head, as if it shared its key head with no other.
  const int kv_head = gathered_head(order, first_slot, get_group_id(1)), heads = all_heads;
  const uint key_head = (uint)kv_head / MEMBERS, kv_heads = (uint)heads / MEMBERS;
  counts += kv_head * blocks;
  attention_tile tile = find_gathered_tile(step, get_num_groups(0) - 1 - get_group_id(0), counts);
  if (tile.rows <= 0)
    return;
  __global const int *list = positions + ((size_t)kv_head * blocks + (uint)tile.first_row / BLOCK) * most;
  int begins[ROWS], ends[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    const int token = tile.position + tile.first_row + min(r, tile.rows - 1);
    begins[r] = window > 0 ? places_up_to(list, tile.stop, token - window) : 0;
    ends[r] = places_up_to(list, tile.stop, token);
  }
#define FIRST_SEEN(i) begins[i]
#define LAST_SEEN(i) (ends[i] - 1)
#else
#define TOKEN(i) (tile.position + (tile.first_row + min(i, tile.rows - 1)) / group)
#define FIRST_SEEN(i) FIRST_KEY(TOKEN(i), window)
#define LAST_SEEN(i) TOKEN(i)
  attention_tile tile = find_tile(step, get_num_groups(0) - 1 - get_group_id(0), get_group_id(2),
                                  get_num_groups(2), group, window, row_words);
  if (tile.rows <= 0)
    return;
  const int kv_head = get_group_id(1), kv_heads = get_num_groups(1), heads = kv_heads * group, key_head = kv_head;
#endif
  __global const int *pages = step + tile.sequence * row_words + table;
  float8 queries[ROWS * WIDE];
  float8 keys[WIDE * 8 * KEY_VECTORS] ALIGNED, values[KEYS * WIDE] ALIGNED;
  float8 scores[ROWS * KEY_VECTORS] ALIGNED, sums[ROWS * WIDE] ALIGNED;
  float largest[ROWS], total[ROWS], decay[ROWS];

  for (int r = 0; r < ROWS; ++r) {
    int row = tile.first_row + min(r, tile.rows - 1);
    __global const float *source = q + (size_t)HEAD_ROW(tile, row, heads, kv_head, group) * HEAD_DIM;
    for (int d = 0; d < WIDE; ++d) {
      LOAD_PART(load_float8, load_float, source, d * 8, HEAD_DIM - d * 8, value)
      queries[r * WIDE + d] = value * scale;
      sums[r * WIDE + d] = 0.0f;
    }
    largest[r] = FIRST_SCORE(kv_head * group + row % group, get_group_id(2));
    total[r] = FIRST_WEIGHT(largest[r]);
  }
#if HEAD_DIM % 16
  for (int key = 0; key < KEYS; ++key)
    for (int d = HEAD_DIM / 8; d < WIDE; ++d) values[key * WIDE + d] = 0.0f;
#endif

  for (int first = tile.start; first < tile.stop; first += KEYS) {
    int count = min(KEYS, tile.stop - first);
#ifdef GATHERED
    const int page = 0, next = 0;
#else
    const int page = pages[(uint)first / PAGE], next = first + PAGE < tile.stop ? pages[(uint)first / PAGE + 1] : page;
#endif
    load_keys(cache + HEAD_AT(page, key_head, kv_heads, HEAD_DIM),
              cache + HEAD_AT(next, key_head, kv_heads, HEAD_DIM) KEY_VALUES, count, keys);
    load_values(cache + HEAD_AT(page, VALUE_HEAD(key_head, kv_heads), kv_heads, HEAD_DIM),
                cache + HEAD_AT(next, VALUE_HEAD(key_head, kv_heads), kv_heads, HEAD_DIM) KEY_VALUES, count, values);
    for (int r = 0; r < tile.rows; r += MICRO) {
      for (int v = 0; v < KEY_VECTORS; v += VECTORS)
        if (v * 8 < count)
          score_tile((const float *)(queries + r * WIDE), keys + v, scores + r * KEY_VECTORS + v);
      for (int i = r; i < r + MICRO; ++i) {
        decay[i] = soften(scores + i * KEY_VECTORS, FIRST_SEEN(i) - first, min(LAST_SEEN(i) - first, count - 1), cap,
                          largest + i, total + i);
      }
      for (int v = 0; v < WIDE; v += VECTORS)
        value_tile((const float *)(scores + r * KEY_VECTORS), decay + r, values + v, count,
                   sums + r * WIDE + v);
    }
  }

  for (int r = 0; r < tile.rows; ++r) {
    int row = tile.first_row + r;
    size_t at = HEAD_ROW(tile, row, heads, kv_head, group);
    int parts = PARTS;
    float factor = parts > 1 ? 1.0f : 1.0f / total[r];
    for (int d = 0; d < HEAD_DIM; d += 8) {
      float8 value = sums[r * WIDE + d / 8] * factor;
      if (parts > 1) {
        __global float *target = partial + (at * parts + get_group_id(2)) * PARTIAL_COLUMNS;
        STORE_PART(store_float8, store_float, value, target, d, HEAD_DIM - d)
      } else {
        STORE_PART(store_act8, store_act, value, out + at * HEAD_DIM, d, HEAD_DIM - d)
      }
    }
    if (parts > 1) {
      __global float *target = partial + (at * parts + get_group_id(2)) * PARTIAL_COLUMNS + HEAD_DIM;
      target[0] = largest[r];
      target[1] = total[r];
    }
  }
#ifdef CODE_BITS
  round_tile(tile, group, kv_head, heads, out, codes, code_blocks);
#endif
}
