// Routing of tokens to the experts of a layer, and the moves of rows around the products of linear.h. Follows common.h,
// rounding.h and glue.h.
//
//   EXPERTS, CHOSEN   experts of the layer, and those that each token chooses
//   SCORING           rule of the weights
//   NORMALIZED        the weights of a token are divided by their sum
//   BIASED            the choice is by score plus the expert's bias
//   GROUPS, KEPT      equal groups of experts, and how many of them a token chooses from: those with the largest sum of
//                     two biased scores, or without BIASED with the largest logit
//   SHIFTED           the logits have that bias, for choice and weights
//   OUTPUT_BIASED     the rows of an expert have a bias, which combine_rows adds
//   WEIGHS_INPUTS     the weight of an expert multiplies its input in place of its output; a token chooses one
//   FACTORS           the weight of an expert is multiplied by its factor
//   STEP              rows of one expert that a work-group of the product takes, a power of two
//   TAKEN             another processor takes some rows
//   DROPS             nobody computes the rows of its experts beyond those: the tokens of the least saliency have none
//   SALIENCY          the saliency of tokens
//
// A pair is a token and an expert that it chose: number token * CHOSEN + slot. The pairs in the order of the experts, and
// of the tokens for one expert, have the positions from 0 on.
//
//   chosen     expert of each pair
//   position   position of each pair; of a pair that another processor takes, its row there, as ~row; DROPPED of one that
//              nobody computes
//   source     token of each position; below 0 of one that the GPU does not compute
//   saliency   of each token: the square of the norm of its row of the attention's output, the bias included
//   places     (expert, first position, positions, 0) for each step of each expert; idle ones have the expert -1
//   taken      for each expert the positions that another processor takes, the first ones, and the first's row there
//   counts     added to: all pairs, those that another processor takes, those beyond that the GPU computes, dropped ones

#define SOFTMAX 0
#define SIGMOID 1
#define SPARSEMIXER 2

#define DROPPED INT_MIN

// ---- saliency -----------------------------------------------------------------------------------------------------

#ifdef SALIENCY
// Grid: a work-group for each token. The row has `split` columns in a.
GROUP_SIZE __kernel void weigh_tokens(__global const act_t *a, __global const act_t *b,
                                      __global const float *restrict bias, __global float *restrict saliency, int split,
                                      int columns, int has_bias) {
  __local float sums[WG];
  const uint token = get_group_id(0);
  const int lane = get_local_id(0);
  member_row row = {a + token * (uint)split, b + token * (uint)COLUMNS_OF_B(columns, split), split};
  float8 squares = 0.0f;
  for (int i = lane * 8; i < columns; i += WG * 8) {
    const int count = min(8, columns - i);
    float8 value = load_member(row, i, count);
    if (has_bias) {
      LOAD_PART(load_float8, load_float, bias, i, count, shift)
      value += shift;
    }
    squares = FMA(value, value, squares);
  }
  const float total = group_sum(sum8(squares), sums);
  if (lane == 0)
    saliency[token] = total;
}
#endif

// ---- choice -------------------------------------------------------------------------------------------------------

#ifdef SCORING

// A number whose order is that of the values, then that of the experts from the last to the first. It is never 0, and NaN
// has a place, too: a token chooses CHOSEN different experts whatever its logits are.
static inline ulong ranked(float value, uint expert) {
  const uint bits = as_uint(value == 0.0f ? 0.0f : value);
  const uint order = bits ^ ((bits >> 31) ? 0xffffffffu : 0x80000000u);
  return (ulong)order << 32 | (0xffffffffu - expert);
}
#define EXPERT_OF(rank) (0xffffffffu - (uint)(rank))

// The largest rank of the work-items of the group.
static inline ulong group_best(ulong rank, __local ulong *ranks) {
#if WG > 1
  const uint lane = get_local_id(0);
  barrier(CLK_LOCAL_MEM_FENCE);
  ranks[lane] = rank;
  for (uint width = WG / 2; width > 0; width /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < width)
      ranks[lane] = max(ranks[lane], ranks[lane + width]);
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  rank = ranks[0];
#endif
  return rank;
}

#ifdef SHIFTED
#define LOGIT(e) (logits[e] + bias[e])
#else
#define LOGIT(e) logits[e]
#endif

#if SCORING == SOFTMAX
#define SCORE(logit) exp((logit) - top) / total
#else
#define SCORE(logit) 1.0f / (1.0f + exp(-(logit)))
#endif

#ifdef BIASED
#define CHOICE(e) (SCORE(logits[e]) + bias[e])
#else
#define CHOICE(e) LOGIT(e)
#endif

#ifdef FACTORS
#define FACTORS_ARGUMENT , __global const float *restrict factors
#define FACTOR_OF(expert) *factors[expert]
#else
#define FACTORS_ARGUMENT
#define FACTOR_OF(expert)
#endif

// Grid: a work-group for each token. With SPARSEMIXER a logit is near the largest one, `top`, if
// (top - logit) / max(|logit|, top) is at most `distance`.
GROUP_SIZE __kernel void route(__global const float *restrict logits, __global const float *restrict bias,
                               __global int *restrict chosen, __global float *restrict weights, float scale,
                               float distance FACTORS_ARGUMENT) {
  __local ulong left[EXPERTS], ranks[WG];
#if SCORING != SIGMOID
  __local float sums[WG];
#endif
  const uint lane = get_local_id(0);
  logits += get_group_id(0) * EXPERTS;
  chosen += get_group_id(0) * CHOSEN;
  weights += get_group_id(0) * CHOSEN;
#if SCORING == SOFTMAX
  ulong own = 0;
  for (uint e = lane; e < EXPERTS; e += WG)
    own = max(own, ranked(LOGIT(e), e));
  const float top = LOGIT(EXPERT_OF(group_best(own, ranks)));
  float total = 0.0f;
  for (uint e = lane; e < EXPERTS; e += WG)
    total += exp(LOGIT(e) - top);
  total = group_sum(total, sums);
#endif
#ifdef GROUPS
  __local ulong groups[GROUPS];
  for (uint g = lane; g < GROUPS; g += WG) {
    float first = -INFINITY, second = -INFINITY;
    for (uint e = g * (EXPERTS / GROUPS); e < (g + 1) * (EXPERTS / GROUPS); e++) {
      const float value = CHOICE(e);
      second = max(second, min(first, value));
      first = max(first, value);
    }
#ifdef BIASED
    first += second;
#endif
    groups[g] = ranked(first, g);
  }
  for (uint slot = 0; slot < KEPT; slot++) {
    ulong best = 0;
    for (uint g = lane; g < GROUPS; g += WG)
      best = max(best, groups[g]);
    best = group_best(best, ranks);
    if (EXPERT_OF(best) % WG == lane)
      groups[EXPERT_OF(best)] = 0;
  }
#if WG > 1
  barrier(CLK_LOCAL_MEM_FENCE);
#endif
  // Experts of a group that is not chosen, whose rank is left, have the rank of one that is.
  for (uint e = lane; e < EXPERTS; e += WG)
    left[e] = groups[e / (EXPERTS / GROUPS)] ? 0 : ranked(CHOICE(e), e);
#else
  for (uint e = lane; e < EXPERTS; e += WG)
    left[e] = ranked(CHOICE(e), e);
#endif
#ifdef NORMALIZED
  float sum = 0.0f;
#endif
  for (uint slot = 0; slot < CHOSEN; slot++) {
    // No work-item reads what another one writes of `left`.
    ulong best = 0;
    for (uint e = lane; e < EXPERTS; e += WG)
      best = max(best, left[e]);
    best = group_best(best, ranks);
    const uint expert = EXPERT_OF(best);
#if SCORING == SPARSEMIXER
    const float top = LOGIT(expert);
    float near = 0.0f;
    for (uint e = lane; e < EXPERTS; e += WG) {
      const float logit = LOGIT(e);
      if (left[e] && !((top - logit) / max(fabs(logit), top) > distance))
        near += exp(logit - top);
    }
    const float weight = 1.0f / group_sum(near, sums);
#else
    const float weight = SCORE(LOGIT(expert));
#endif
    if (expert % WG == lane)
      left[expert] = 0;
#ifdef NORMALIZED
    sum += weight;
#endif
    if (lane == 0) {
      chosen[slot] = expert;
      weights[slot] = weight;
    }
  }
#ifdef NORMALIZED
  scale /= sum;
#endif
  if (lane == 0)
    for (uint slot = 0; slot < CHOSEN; slot++)
      weights[slot] *= scale FACTOR_OF(chosen[slot]);
}
#endif

// ---- order --------------------------------------------------------------------------------------------------------

#ifdef STEP

#if WG > 1
#define COUNT_ONE(count) atomic_inc(&(count))
#else
#define COUNT_ONE(count) (count)++
#endif
#ifdef TAKEN
#ifdef DROPS
#define SALIENCY_OF_TOKENS , __global const float *restrict saliency
#else
#define SALIENCY_OF_TOKENS
#endif
#define TAKEN_ROWS \
  , __global const int2 *restrict taken, __global int *restrict counts, int counts_place SALIENCY_OF_TOKENS
#define TAKEN_OF(expert) taken[expert]
#else
#define TAKEN_ROWS
#define TAKEN_OF(expert) (int2)(0)
#endif

// The positions that the GPU computes, of an expert with `rows`: the last ones.
static inline int own_rows(int rows, int2 taken) {
#ifdef DROPS
  return taken.x ? 0 : rows;
#else
  return rows - min(rows, taken.x);
#endif
}

// One work-group, each work-item of which has a run of experts. count: entries of `places`.
GROUP_SIZE __kernel void sort_pairs(__global const int *restrict chosen, __global int *restrict source,
                                    __global int *restrict position, __global int4 *restrict places, int pairs,
                                    int count TAKEN_ROWS) {
  // Pairs of each expert; then its first position, and the position of its next pair.
  __local int first[EXPERTS], next[EXPERTS];
  const int lane = get_local_id(0);
  for (int e = lane; e < EXPERTS; e += WG)
    next[e] = 0;
#if WG > 1
  __local int2 runs[WG];
  __local int experts[WG];
  barrier(CLK_LOCAL_MEM_FENCE);
#endif
  for (int pair = lane; pair < pairs; pair += WG)
    COUNT_ONE(next[chosen[pair]]);
#if WG > 1
  barrier(CLK_LOCAL_MEM_FENCE);
#endif

  // Pairs and places of the own experts, those of the experts before, and all.
  const int own = (EXPERTS + WG - 1) / WG, begin = min(EXPERTS, lane * own), end = min(EXPERTS, begin + own);
  int2 mine = 0;
  for (int e = begin; e < end; e++) {
    const int rows = own_rows(next[e], TAKEN_OF(e));
    mine += (int2)(next[e], (uint)(rows + STEP - 1) / STEP);
  }
  int2 before = 0, all = mine;
#if WG > 1
  runs[lane] = mine;
  barrier(CLK_LOCAL_MEM_FENCE);
  all = 0;
  for (int other = 0; other < WG; other++) {
    const int2 theirs = runs[other];
    all += theirs;
    before += other < lane ? theirs : (int2)(0);
  }
#endif
#ifdef TAKEN
  int others_rows = 0, beyond = 0;
#endif
  for (int e = begin; e < end; e++) {
    const int rows = next[e];
    for (int row = rows - own_rows(rows, TAKEN_OF(e)); row < rows; row += STEP)
      places[before.y++] = (int4)(e, before.x + row, min(STEP, rows - row), 0);
    first[e] = before.x;
    next[e] = before.x;
    before.x += rows;
#ifdef TAKEN
    const int limit = TAKEN_OF(e).x;
    others_rows += min(rows, limit);
    beyond += limit ? max(0, rows - limit) : 0;
#endif
  }
#ifdef TAKEN
  counts += counts_place;
  if (lane == 0)
    atomic_add(counts, pairs);
  atomic_add(counts + 1, others_rows);
#ifdef DROPS
  atomic_add(counts + 3, beyond);
#else
  atomic_add(counts + 2, beyond);
#endif
#endif
  for (int at = all.y + lane; at < count; at += WG)
    places[at] = (int4)(-1, 0, 0, 0);

  // The pairs in turns of one for each work-item, so that the order is always the same.
  for (int base = 0; base < pairs; base += WG) {
    const int pair = base + lane;
    const int expert = pair < pairs ? chosen[pair] : -1;
    int rank = 0;
#if WG > 1
    barrier(CLK_LOCAL_MEM_FENCE);
    experts[lane] = expert;
    barrier(CLK_LOCAL_MEM_FENCE);
    int later = 0;
    for (int other = 0; other < min(WG, pairs - base); other++) {
      const int same = experts[other] == expert;
      rank += other < lane ? same : 0;
      later += other > lane ? same : 0;
    }
#else
    const int later = 0;
#endif
    const int at = expert < 0 ? 0 : next[expert] + rank;
#if WG > 1
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    if (expert >= 0) {
      if (later == 0)
        next[expert] = at + 1;
#ifdef TAKEN
      const int2 others = TAKEN_OF(expert);
      const int row = at - first[expert];
      const int is_taken = row < others.x;
#ifdef DROPS
      const int is_own = !others.x;
#else
      const int is_own = !is_taken;
#endif
      const int token = (uint)pair / CHOSEN;
      position[pair] = is_taken ? ~(others.y + row) : is_own ? at : DROPPED;
      source[at] = is_own ? token : ~token;
#else
      position[pair] = at;
      source[at] = (uint)pair / CHOSEN;
#endif
    }
  }
#ifdef DROPS
  // Now `next` ends the positions of each expert. Of those with more rows than are taken, the tokens of the largest
  // saliency have a row each, by rank: of equal ones the first. Squares are not negative: the order of their bits is
  // theirs, and NaN has a place, too.
#if WG > 1
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
#endif
  for (int pair = lane; pair < pairs; pair += WG) {
    const int expert = chosen[pair], begin = first[expert], end = next[expert];
    const int2 others = TAKEN_OF(expert);
    if (others.x && end - begin > others.x) {
      const int token = (uint)pair / CHOSEN;
      const uint own = as_uint(saliency[token]);
      int rank = 0;
      for (int at = begin; at < end; at++) {
        const int other = ~source[at];
        const uint its = as_uint(saliency[other]);
        rank += its > own || (its == own && other < token);
      }
      position[pair] = rank < others.x ? ~(others.y + rank) : DROPPED;
    }
  }
#endif
}
#endif

// ---- rows ---------------------------------------------------------------------------------------------------------

// rows[p] = x[source[p]], of `units` units each; with -DCODES also those of a second memory. Grid: a work-group for each
// position; those of positions that the GPU does not compute leave.
#ifdef CODES
typedef uint2 unit_t;
#define SECOND , __global const unit_t *restrict y, __global unit_t *restrict second, int second_units
#else
typedef uint4 unit_t;
#define SECOND
#endif
// to[i] = from[i], both of `units` units from there on; the weighted row in eights of elements.
#ifdef WEIGHS_INPUTS
#define WEIGHTS_ARGUMENT , __global const float *restrict weights
#define WEIGHT_OF(slot) 1.0f
#define UNIT_ELEMENTS (sizeof(uint4) / sizeof(act_t))
#define COPY_ROW(from, to, token)                                                                                      \
  for (uint i = get_local_id(0) * 8; i < units * UNIT_ELEMENTS; i += WG * 8) {                                         \
    const float8 values = weights[token] * load_act8((__global const act_t *)(from), i);                               \
    store_act8(values, (__global act_t *)(to), i);                                                                     \
  }
#else
#define WEIGHTS_ARGUMENT
#define WEIGHT_OF(slot) weights[slot]
#define COPY_ROW(from, to, token)                                                                                      \
  for (uint i = get_local_id(0); i < (uint)units; i += WG)                                                             \
    (to)[i] = (from)[i];
#endif

GROUP_SIZE __kernel void gather_rows(__global const unit_t *restrict x, __global unit_t *restrict rows,
                                     __global const int *restrict source, int units SECOND WEIGHTS_ARGUMENT) {
  const uint at = get_group_id(0);
  const int from = source[at];
  if (from < 0)
    return;
#ifdef CODES
  for (uint i = get_local_id(0); i < (uint)units; i += WG)
    rows[at * (uint)units + i] = x[from * (uint)units + i];
  for (uint i = get_local_id(0); i < (uint)second_units; i += WG) {
    unit_t block = y[from * (uint)second_units + i];
#ifdef WEIGHS_INPUTS
    // The step of the codes; the other number is their sum.
    block.x = as_uint(as_float(block.x) * weights[from]);
#endif
    second[at * (uint)second_units + i] = block;
  }
#else
  COPY_ROW(x + from * (uint)units, rows + at * (uint)units, from)
#endif
}

#ifdef GATHERS_TAKEN
// taken[~position] = x[token], of `units` units each, for the pairs that another processor takes. Grid: a work-group for
// each pair; those of other pairs leave, and so do rows from `limit` on, which do not exist.
GROUP_SIZE __kernel void gather_taken(__global const uint4 *restrict x, __global uint4 *restrict taken,
                                      __global const int *restrict position, int units, int limit WEIGHTS_ARGUMENT) {
  const uint pair = get_group_id(0), row = ~position[pair];
  if (row >= (uint)limit)
    return;
  const uint token = pair / CHOSEN;
  COPY_ROW(x + token * (uint)units, taken + row * (uint)units, token)
}
#endif

#ifdef COMBINES
#ifdef OUTPUT_BIASED
#define OUTPUT_BIAS , __global const int *restrict chosen, __global const float *restrict bias
#else
#define OUTPUT_BIAS
#endif
// out[t] = sum of weight * row over the slots of a token; with -DADDS that is added to what `out` holds. Rows lie in y,
// those that another processor took in `other`; with -DDROPS, dropped pairs add nothing. Grid: work-items over runs of `span` columns (a multiple of 8), tokens.
GROUP_SIZE __kernel void combine_rows(__global const act_t *y, __global const act_t *other,
                                      __global const int *restrict position, __global const float *restrict weights,
                                      __global act_t *out, int columns, int span OUTPUT_BIAS) {
  const uint token = get_global_id(1);
  const int begin = get_global_id(0) * span, end = min(columns, begin + span);
  out += token * (uint)columns;
  for (int i = begin; i < end; i += 8) {
    const int count = min(8, columns - i);
    float8 sum = 0.0f;
    for (uint slot = token * CHOSEN; slot < (token + 1) * CHOSEN; slot++) {
      const int at = position[slot];
#ifdef DROPS
      if (at == DROPPED)
        continue;
#endif
      __global const act_t *row = at < 0 ? other + (uint)~at * (uint)columns : y + (uint)at * (uint)columns;
      LOAD_PART(load_act8, load_act, row, i, count, value)
#ifdef OUTPUT_BIASED
      LOAD_PART(load_float8, load_float, bias + chosen[slot] * columns, i, count, shift)
      value += shift;
#endif
      sum = FMA((float8)WEIGHT_OF(slot), value, sum);
    }
#ifdef ADDS
    LOAD_PART(load_act8, load_act, out, i, count, held)
    sum += held;
#endif
    STORE_PART(store_act8, store_act, sum, out, i, count)
  }
}
#endif

#ifdef SLOTS
// Gives each place the slot that holds its expert's weights in a round, or -1 where none does. The fourth number of a
// place keeps the expert's number plus 1, so that later rounds find it. slots: of each expert, from `first` on. Grid:
// work-items over places.
GROUP_SIZE __kernel void place_in_slots(__global int4 *restrict places, __global const int *restrict slots, int count,
                                        int first) {
  const int at = get_global_id(0);
  if (at >= count)
    return;
  int4 place = places[at];
  const int expert = place.w ? place.w - 1 : place.x;
  places[at] = (int4)(expert < 0 ? -1 : slots[first + expert], place.y, place.z, expert + 1);
}
#endif
