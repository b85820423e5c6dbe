// Selects the positions that a block of queries attends to. Follows sparse.h.
//
//   BLOCK   queries of a block
//   FIRST   leading positions that are always kept, as far as the block sees them
//   LAST    positions at the end of those that the block sees that are always kept, BLOCK or more
//
// The weight of a position is its share of attention, summed over the block's queries: a softmax of each row's scores over
// the positions that the query sees. The largest weights are kept, of equal ones the lowest positions.
//
//   positions   [head][block][key], ascending; holds the weights until the positions replace them
//   counts      [head][block]
//
// Grid: blocks of queries, members of the slots from first_slot on.

#define LANES (int8)(0, 1, 2, 3, 4, 5, 6, 7)
#define ALWAYS 0x7f000000  // the weight of positions that are always kept, above all others
#define NEVER -1           // the weight of positions that no query sees

#if WG > 1
#define WAIT barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#else
#define WAIT
#endif

static inline int sum_of_eight(int8 value) {
  const int4 four = value.lo + value.hi;
  const int2 two = four.lo + four.hi;
  return two.x + two.y;
}

// Sum over the work-items of the group.
static inline int group_count(int value, __local int *values) {
#if WG > 1
  const int lane = get_local_id(0);
  barrier(CLK_LOCAL_MEM_FENCE);
  values[lane] = value;
  for (int width = WG / 2; width > 0; width /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < width)
      values[lane] += values[lane + width];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  value = values[0];
#endif
  return value;
}

// Scores in units of log2.
static inline float8 score_of(float8 code, float factor, float cap) {
#ifdef SOFT_CAP
  return tanh_8(code * factor) * cap;
#else
  return code * factor;
#endif
}

#if WG == 1
// The share of a position is that of the row's largest score, times a power of two for each code between both scores.
// Where a processor looks up eight numbers at once, it is the product of three, one for each group of the difference's
// bits.
#if defined(__clang__) && defined(__AVX2__) && !defined(SOFT_CAP)
typedef float looked_up8 __attribute__((__vector_size__(32)));
typedef int place8 __attribute__((__vector_size__(32)));
typedef struct {
  float8 ones, eights, rest;
} decay_tables;
typedef int8 row_scores;
static inline decay_tables make_decay_tables(float factor) {
  decay_tables tables;
  const float8 steps = (float8)(0, 1, 2, 3, 4, 5, 6, 7) * -factor;
  tables.ones = exp2_8(steps);
  tables.eights = exp2_8(steps * 8.0f);
  tables.rest = exp2_8(steps * 64.0f);
  return tables;
}
static inline row_scores make_row_scores(int top, float factor, float cap) { return top; }
// Only the three lowest bits of an index count.
#define LOOK_UP(table, index)                                                                                          \
  __builtin_astype(__builtin_ia32_permvarsf256(__builtin_astype(table, looked_up8), __builtin_astype(index, place8)),  \
                   float8)
static inline float8 shares_of(int8 code, row_scores top, decay_tables tables) {
  const int8 below = top - code;
  return LOOK_UP(tables.ones, below) * LOOK_UP(tables.eights, below >> 3) * LOOK_UP(tables.rest, below >> 6);
}
#else
typedef struct {
  float factor;
} decay_tables;
typedef struct {
  float factor, cap, top;
} row_scores;
static inline decay_tables make_decay_tables(float factor) {
  decay_tables tables;
  tables.factor = factor;
  return tables;
}
static inline row_scores make_row_scores(int top, float factor, float cap) {
  row_scores scores;
  scores.factor = factor;
  scores.cap = cap;
  scores.top = score_of((float8)((float)top - CODE_ZERO), factor, cap).s0;
  return scores;
}
static inline float8 shares_of(int8 code, row_scores top, decay_tables tables) {
  return exp2_8(score_of(FLOATS_OF_CODES(code) - CODE_ZERO, top.factor, top.cap) - top.top);
}
#endif
#define CODES_AT(codes, at) INTS_OF_CODES(*(__global const uchar8 *)((codes) + (at)))
#define SHARES(code) shares_of(code, top, tables)
#endif

// Positions from `at` on that a query sees: those in [begin, end).
static inline int8 seen_by(int at, int begin, int end) {
  const int8 position = at + LANES;
  return (position >= begin) & (position < end);
}

GROUP_SIZE __kernel void select_positions(__global const uchar *restrict scores, __global const float *restrict steps,
                                          __global const int *restrict step, __global const int *restrict order,
                                          __global const float4 *restrict numbers, __global int *restrict positions,
                                          __global int *restrict counts, int first_slot, int tokens, int keys,
                                          int window, float scale, float cap) {
  __local int lane_values[WG];
#if WG > 1
  __local float row_values[BLOCK * WG], row_top[BLOCK], row_share[BLOCK];
  __local int lane_equals[WG];
#endif
  const int lane = get_local_id(0), blocks = get_num_groups(0);
  // The blocks that see most positions come first.
  const int block = blocks - 1 - get_group_id(0), first = block * BLOCK;
  const int slot = first_slot + get_group_id(1) / GROUP, member = get_group_id(1) % GROUP;
  const int head = order[slot] * GROUP + member;
  const int place = head * blocks + block;
  // A block of padding sees no positions. A return before a barrier is not safe with PoCL 3.
  const int rows = max(0, min(BLOCK, step[STEP_LENGTH] - first));
  const int token = step[STEP_POSITION] + first;  // position of the block's first query
  const int end = rows > 0 ? min(keys, token + rows) : 0;
  const int begin = rows > 0 && window > 0 ? max(0, token - window + 1) : 0;
  const int start = begin & ~7;
  const float factor = steps[head] * scale;
  scores += ((size_t)slot * (GROUP * tokens) + member * tokens + first) * keys;
  __global int *own = positions + (size_t)place * keys;

#define BEGIN_OF(row) (window > 0 ? max(0, token + (row)-window + 1) : 0)
#define END_OF(row) min(keys, token + (row) + 1)
#if WG == 1
  // One row after the other, for a cache's sake.
  const decay_tables tables = make_decay_tables(factor);
  for (int i = 0; i < end - start; i += 8) *(__global float8 *)(own + i) = 0.0f;
  for (int row = 0; row < rows; ++row) {
    __global const uchar *codes = scores + (uint)row * (uint)keys;
    const int row_begin = BEGIN_OF(row), row_end = END_OF(row);
    const int head = row_begin & ~7, inner = (row_begin + 7) & ~7, tail = row_end & ~7;
    const int has_head = head < inner, has_tail = tail >= inner && tail < row_end;
    const int8 head_seen = seen_by(head, row_begin, row_end), tail_seen = seen_by(tail, row_begin, row_end);
    int8 most = 0;
    for (int at = inner; at < tail; at += 8) {
      const int8 code = CODES_AT(codes, at);
      most = code > most ? code : most;
    }
    if (has_head) {
      const int8 code = CODES_AT(codes, head) & head_seen;
      most = code > most ? code : most;
    }
    if (has_tail) {
      const int8 code = CODES_AT(codes, tail) & tail_seen;
      most = code > most ? code : most;
    }
    const int4 four = most.lo > most.hi ? most.lo : most.hi;
    const int2 two = four.lo > four.hi ? four.lo : four.hi;
    const row_scores top = make_row_scores(two.x > two.y ? two.x : two.y, factor, cap);
    float8 sum = 0.0f;
    for (int at = inner; at < tail; at += 8) sum += SHARES(CODES_AT(codes, at));
    if (has_head)
      sum += head_seen ? SHARES(CODES_AT(codes, head)) : (float8)0.0f;
    if (has_tail)
      sum += tail_seen ? SHARES(CODES_AT(codes, tail)) : (float8)0.0f;
    const float share = 1.0f / sum8(sum);
    __global float *weights = (__global float *)own - start;
    for (int at = inner; at < tail; at += 8)
      *(__global float8 *)(weights + at) += SHARES(CODES_AT(codes, at)) * share;
    if (has_head)
      *(__global float8 *)(weights + head) += head_seen ? SHARES(CODES_AT(codes, head)) * share : (float8)0.0f;
    if (has_tail)
      *(__global float8 *)(weights + tail) += tail_seen ? SHARES(CODES_AT(codes, tail)) * share : (float8)0.0f;
  }
  for (int at = start; at < end; at += 8) {
    const int8 position = at + LANES;
    const int8 always = (position < FIRST) | (position >= end - LAST);
    __global int8 *weight = (__global int8 *)(own + (at - start));
    *weight = seen_by(at, begin, end) ? (always ? (int8)ALWAYS : *weight) : (int8)NEVER;
  }
#else
  for (int row = 0; row < rows; ++row) {
    int8 top = 0;
    for (int at = start + lane * 8; at < end; at += WG * 8) {
      const int8 seen = seen_by(at, BEGIN_OF(row), END_OF(row));
      const int8 code = INTS_OF_CODES(*(__global const uchar8 *)(scores + (uint)row * (uint)keys + at)) & seen;
      top = code > top ? code : top;
    }
    const int4 four = top.lo > top.hi ? top.lo : top.hi;
    const int2 two = four.lo > four.hi ? four.lo : four.hi;
    row_values[row * WG + lane] = (float)(two.x > two.y ? two.x : two.y);
  }
  WAIT;
  for (int row = lane; row < rows; row += WG) {
    float top = row_values[row * WG];
    for (int i = 1; i < WG; ++i) top = row_values[row * WG + i] > top ? row_values[row * WG + i] : top;
    row_top[row] = score_of((float8)(top - CODE_ZERO), factor, cap).s0;
  }
  WAIT;
  for (int row = 0; row < rows; ++row) {
    float8 sum = 0.0f;
    for (int at = start + lane * 8; at < end; at += WG * 8) {
      const int8 seen = seen_by(at, BEGIN_OF(row), END_OF(row));
      const float8 code = FLOATS_OF_CODES(*(__global const uchar8 *)(scores + (uint)row * (uint)keys + at)) - CODE_ZERO;
      const float8 share = exp2_8(score_of(code, factor, cap) - row_top[row]);
      sum += seen ? share : (float8)0.0f;
    }
    row_values[row * WG + lane] = sum8(sum);
  }
  WAIT;
  for (int row = lane; row < rows; row += WG) {
    float sum = 0.0f;
    for (int i = 0; i < WG; ++i) sum += row_values[row * WG + i];
    row_share[row] = 1.0f / sum;
  }
  WAIT;
  for (int at = start + lane * 8; at < end; at += WG * 8) {
    float8 sum = 0.0f;
    for (int row = 0; row < rows; ++row) {
      const int8 seen = seen_by(at, BEGIN_OF(row), END_OF(row));
      const float8 code = FLOATS_OF_CODES(*(__global const uchar8 *)(scores + (uint)row * (uint)keys + at)) - CODE_ZERO;
      const float8 share = exp2_8(score_of(code, factor, cap) - row_top[row]);
      sum += seen ? share * row_share[row] : (float8)0.0f;
    }
    const int8 position = at + LANES;
    const int8 always = (position < FIRST) | (position >= end - LAST);
    const int8 weight = always ? (int8)ALWAYS : as_int8(sum);
    *(__global int8 *)(own + (at - start)) = seen_by(at, begin, end) ? weight : (int8)NEVER;
  }
  WAIT;
#endif

  const int size = end - start, seen = end - begin;
  const int forced = max(0, min(FIRST, end) - begin) + min(LAST, seen);
  const int kept = min(seen, max(forced, (int)ceil(numbers[head].KEEP * (float)seen)));
  // The largest number that `kept` weights reach, bit by bit. As integers, floats of one sign have the same order.
  // Comparisons of vectors give -1.
  int least = 0, equals = kept;
  for (int bit = 1 << 30; bit > 0; bit >>= 1) {
    int8 reach = 0;
    for (int i = lane * 8; i < size; i += WG * 8) reach += *(__global const int8 *)(own + i) >= (least | bit);
    const int reached = -group_count(sum_of_eight(reach), lane_values);
    if (reached >= kept)
      least |= bit;
    if (reached == kept)
      break;
  }
  int8 above = 0;
  for (int i = lane * 8; i < size; i += WG * 8) above += *(__global const int8 *)(own + i) > least;
  equals += group_count(sum_of_eight(above), lane_values);

  // Runs of eight positions per work-item: all are read before the group writes, which it does at or before them.
  int found = 0;
  for (int from = 0; from < size; from += WG * 8) {
    const int i = from + lane * 8;
    const int8 weight = i < size ? *(__global const int8 *)(own + i) : (int8)NEVER;
    int before = 0, equals_before = 0;
#if WG > 1
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    lane_values[lane] = -sum_of_eight(weight > least);
    lane_equals[lane] = -sum_of_eight(weight == least);
    barrier(CLK_LOCAL_MEM_FENCE);
    int all = 0, all_equals = 0;
    for (int other = 0; other < WG; ++other) {
      if (other == lane) {
        before = all;
        equals_before = all_equals;
      }
      all += lane_values[other];
      all_equals += lane_equals[other];
    }
#endif
    int left = max(0, equals - equals_before);  // equal weights that may still be kept
    int target = found + before + min(equals, equals_before);
#define TAKE(c)                                                                                                        \
  {                                                                                                                    \
    const int equal = weight.s##c == least && left > 0, take = weight.s##c > least || equal;                           \
    if (take)                                                                                                          \
      own[target] = start + i + c;                                                                                     \
    target += take;                                                                                                    \
    left -= equal;                                                                                                     \
  }
    REPEAT(8, TAKE)
#if WG > 1
    found += all + min(equals, all_equals);
    equals -= min(equals, all_equals);
#else
    found = target;
    equals = left;
#endif
  }
  if (lane == 0)
    counts[place] = kept;
}
