// Shadow outliers: what the range of an integer NPU graph cuts off its input, times float weights. Follows common.h,
// rounding.h and glue.h.
//
// A channel is one input of the linear. It is an outlier if some token's value lies outside of [low, high]. The float
// weights of hot channels lie in memory; the host reads those of the others, the cold ones, when they occur.
//
//   flags    a bit for each channel; all are 0 between launches
//   place    for each channel its row in the weights of hot channels, or -1
//   found    HOT_COUNT, COLD_COUNT, then from FIRST_FOUND on the hot channels, behind them the cold ones, both ascending
//   batch    written by the host: position of the first fetched one among the cold channels, and their number

#define HOT_COUNT 0
#define COLD_COUNT 1
#define FIRST_FOUND 2

// Grid: work-items over runs of `span` channels (a multiple of 8), steps of `token_step` tokens.
GROUP_SIZE __kernel void find_outliers(__global const act_t *restrict x, __global uint *flags, float low, float high,
                                       int tokens, int columns, int span, int token_step) {
  const int begin = get_global_id(0) * span, end = min(columns, begin + span);
  const int first = get_global_id(1) * token_step, last = min(tokens, first + token_step);
  for (int i = begin; i < end; i += 8) {
    const int count = min(8, columns - i);
    int8 outside = 0;
    __global const act_t *row = x + (size_t)first * columns;
    for (int token = first; token < last; ++token, row += columns) {
      LOAD_PART(load_act8, load_act, row, i, count, value)
      outside |= (value < low) | (value > high);
    }
    outside &= (int8)(1, 2, 4, 8, 16, 32, 64, 128);
    const int4 halves = outside.lo | outside.hi;
    const int2 quarters = halves.lo | halves.hi;
    const uint bits = quarters.x | quarters.y;
    if (bits)
      atomic_or(flags + (uint)i / 32, bits << ((uint)i % 32));
  }
}

// One work-group, each work-item of which has a run of words: the order of the channels, and with it that of the sums, is
// always the same.
GROUP_SIZE __kernel void list_outliers(__global uint *flags, __global const int *restrict place, __global int *found,
                                       int words) {
#if WG > 1
  __local int2 counts[WG];
#endif
  const int lane = get_local_id(0), own = (uint)(words + WG - 1) / WG;
  const int begin = min(words, lane * own), end = min(words, begin + own);
  int2 mine = 0;
  for (int word = begin; word < end; ++word)
    for (uint left = flags[word]; left; left &= left - 1) {
      const int cold = place[word * 32 + 31 - clz(left & -left)] < 0;
      mine += (int2)(1 - cold, cold);
    }
  int2 before = 0, all = mine;
#if WG > 1
  counts[lane] = mine;
  barrier(CLK_LOCAL_MEM_FENCE);
  all = 0;
  for (int other = 0; other < WG; ++other) {
    const int2 theirs = counts[other];
    all += theirs;
    before += other < lane ? theirs : (int2)0;
  }
#endif
  if (lane == 0) {
    found[HOT_COUNT] = all.x;
    found[COLD_COUNT] = all.y;
  }
  int hot = FIRST_FOUND + before.x, cold = FIRST_FOUND + all.x + before.y;
  for (int word = begin; word < end; ++word) {
    for (uint left = flags[word]; left; left &= left - 1) {
      const int channel = word * 32 + 31 - clz(left & -left);
      if (place[channel] < 0)
        found[cold++] = channel;
      else
        found[hot++] = channel;
    }
    flags[word] = 0;
  }
}

#ifdef TOKENS
// y = (x - clamp(x)) * weights of the hot channels that were found, in some columns of y. With -DFETCHED the products with
// the weights of fetched channels are added instead. The rest of x behind `covered` tokens counts as 0, and nothing of it
// is read.
// Grid: ranges of columns, the first and the one behind the last of each; steps of TOKENS tokens.
GROUP_SIZE __kernel void multiply_outliers(__global const act_t *restrict x, __global const int *restrict found,
                                           __global const int *restrict place, __global const act_t *restrict weights,
                                           __global act_t *y, __global const int2 *restrict ranges, float low,
                                           float high, int covered, int tokens, int columns, int rows) {
  const int2 range = ranges[get_group_id(0)];
  const int token = get_group_id(1) * TOKENS, valid = min(TOKENS, tokens - token);
  __global const int *channels = found + FIRST_FOUND;
#ifdef FETCHED
  channels += found[HOT_COUNT] + place[0];
  const int count = place[1];
#else
  const int count = found[HOT_COUNT];
#endif
  x += (size_t)token * columns;
  y += (size_t)token * rows;
  for (int i = range.x + (int)get_local_id(0) * 8; i < range.y; i += WG * 8) {
    const int width = min(8, range.y - i);
#ifdef FETCHED
#define START(t)                                                                                                       \
  float8 sum##t = 0.0f;                                                                                                \
  if (t < valid) {                                                                                                     \
    LOAD_PART(load_act8, load_act, y, i + t * rows, width, earlier)                                                    \
    sum##t = earlier;                                                                                                  \
  }
#else
#define START(t) float8 sum##t = 0.0f;
#endif
    REPEAT(TOKENS, START)
    for (int number = 0; number < count; ++number) {
      const int channel = channels[number];
#ifdef FETCHED
      const uint row = number;
#else
      const uint row = place[channel];
#endif
      LOAD_PART(load_act8, load_act, weights + row * (uint)rows, i, width, weight)
#define ADD(t)                                                                                                         \
  {                                                                                                                    \
    const float value = token + t < covered ? load_act(x, (size_t)t * columns + channel) : 0.0f;                       \
    const float inside = value < low ? low : value > high ? high : value;                                              \
    sum##t = FMA((float8)(value - inside), weight, sum##t);                                                            \
  }
      REPEAT(TOKENS, ADD)
    }
#define STORE(t)                                                                                                       \
  if (t < valid) {                                                                                                     \
    STORE_PART(store_act8, store_act, sum##t, y, i + t * rows, width)                                                  \
  }
    REPEAT(TOKENS, STORE)
  }
}
#endif
