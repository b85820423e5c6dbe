// Linear layers for GPUs: a column for each work-item, inputs and weights staged in local memory.
//
//   HALF_SUMS   many tokens: multiplies halves, at twice the rate of floats on a GPU whose sums are halves, too; act_t
//               is half and the device has cl_khr_fp16
//   SUBGROUP    one token: its inputs lie in the registers of a subgroup, whose work-items pass them to each other, in
//               place of local memory; the device has subgroups

// ---- a few tokens ---------------------------------------------------------------------------------------

#ifdef TOKENS

// Tuned: inputs held in local memory at a time; a multiple of every block.
#ifdef SUBGROUP
#define STAGED_INPUTS 0
#elif !defined(STAGED_INPUTS)
#define STAGED_INPUTS (TOKENS == 1 ? 1024 : 256)
#endif
#define STAGED_FLOATS (TOKENS * STAGED_INPUTS)
// Row of staged inputs, in vectors.
#define STAGED_ROW (STAGED_INPUTS / 4)

// Inputs whose weights are read before they are used, so that several reads are in flight.
#if BITS > 8
#define STEP 16
#define RUN (TOKENS <= 2 ? 8 : 4)
#elif BITS == 8 || BLOCK == 16
#define STEP BLOCK
#define RUN 16
#else
#define STEP BLOCK
#define RUN 32
#endif

#ifdef SUBGROUP
#ifdef cl_khr_subgroups
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#endif
#ifdef cl_qcom_reqd_sub_group_size
#pragma OPENCL EXTENSION cl_qcom_reqd_sub_group_size : enable
// 64 work-items: a slice. The full size is two slices.
#define SUBGROUP_SIZE __attribute__((qcom_reqd_sub_group_size("half")))
#else
#define SUBGROUP_SIZE
#endif
// Each of the first work-items holds eight inputs of a run.
#define HOLDERS (RUN / 8)
#define LOAD_INPUTS(k)                                                                                       \
  const float8 own = load_in8(x, k);                                                                         \
  const uint from = 0;
#define INPUTS(t, at) passed((at) % 2 ? own.hi : own.lo, (at) / 2)
static inline float4 passed(float4 own, uint holder) {
  return (float4)(sub_group_broadcast(own.x, holder), sub_group_broadcast(own.y, holder),
                  sub_group_broadcast(own.z, holder), sub_group_broadcast(own.w, holder));
}
#else
#define SUBGROUP_SIZE
#define LOAD_INPUTS(k) const uint from = (k) / 4;
#define INPUTS(t, at) staged[t * STAGED_ROW + (at)]
#endif

#if TOKENS <= 2
// A whole run at once. The sums of a block are vectors, as vectors of inputs are read; they are added up at its end.
#define CLEAR_TOTAL(t) float total##t = 0.0f;
#define CLEAR_TOTALS REPEAT(TOKENS, CLEAR_TOTAL)
#define CLEAR_DOT(t) float4 dot##t = 0.0f;
#define CLEAR_DOTS REPEAT(TOKENS, CLEAR_DOT)
#define ADD_LOW(t) dot##t = FMA(INPUTS(t, at), low, dot##t);
#define ADD_HIGH(t) dot##t = FMA(INPUTS(t, at + 1), high, dot##t);
#define ADD_FOUR REPEAT(TOKENS, ADD_LOW)
#define ADD_SCALED(t) total##t = FMA(across(dot##t), scale, total##t);
#define ADD_DOT(t) total##t += across(dot##t);
#define ADD_ALL_SCALED REPEAT(TOKENS, ADD_SCALED)
#define ADD_ALL REPEAT(TOKENS, ADD_DOT)
#else
// Four inputs at a time: those of a whole run would take all registers. The tokens of an input are staged as a vector,
// and so are the sums.
#define VECTOR_OF(count) float##count
#define FLOATS(count) VECTOR_OF(count)
typedef FLOATS(TOKENS) tokens_t;
#define CLEAR_TOTALS tokens_t totals = 0.0f;
#define CLEAR_DOTS tokens_t dots = 0.0f;
#define ADD_FOUR                                                                                             \
  {                                                                                                          \
    __local const tokens_t *inputs = (__local const tokens_t *)staged + 4 * at;                              \
    dots = FMA(inputs[0], (tokens_t)low.x, dots);                                                            \
    dots = FMA(inputs[1], (tokens_t)low.y, dots);                                                            \
    dots = FMA(inputs[2], (tokens_t)low.z, dots);                                                            \
    dots = FMA(inputs[3], (tokens_t)low.w, dots);                                                            \
  }
#define ADD_ALL_SCALED totals = FMA(dots, (tokens_t)scale, totals);
#define ADD_ALL totals += dots;
#define total0 totals.s0
#define total1 totals.s1
#define total2 totals.s2
#define total3 totals.s3
#define total4 totals.s4
#define total5 totals.s5
#define total6 totals.s6
#define total7 totals.s7
#endif

#if BITS <= 8
// Multiplies the codes of a word with the staged inputs from vector `from` on.
#if BITS == 4
#define MULTIPLY(word, from)                                                                                 \
  {                                                                                                          \
    const uint at = from;                                                                                    \
    const float4 low = VALUES_LOW(word), high = VALUES_HIGH(word);                                           \
    ADD_FOUR                                                                                                 \
    REPEAT(TOKENS, ADD_HIGH)                                                                                 \
  }
// The words of a run without the four codes of vector `at`.
#define NEXT_CODES(q, at) ((at) & 1 ? (uint4)((q).yzw, 0) : (uint4)((q).x >> 16, (q).yzw))
#else
#define MULTIPLY(word, from)                                                                                 \
  {                                                                                                          \
    const uint at = from;                                                                                    \
    const float4 low = VALUES_LOW(word);                                                                     \
    ADD_FOUR                                                                                                 \
  }
#define NEXT_CODES(q, at) (uint4)((q).yzw, 0)
#endif
#if RUN / WORD_INPUTS == 4
#define LOAD_RUN(p) (uint4)(WORD(p, 0), WORD(p, LANES), WORD(p, 2 * LANES), WORD(p, 3 * LANES))
#else
#define LOAD_RUN(p) (uint4)(WORD(p, 0), WORD(p, LANES), 0, 0)
#endif
#else
#define LOAD_FOUR(p, i)                                                                                      \
  (float4)(load_weight(p, (i) * LANES), load_weight(p, ((i) + 1) * LANES),                                   \
           load_weight(p, ((i) + 2) * LANES), load_weight(p, ((i) + 3) * LANES))
#endif

SUBGROUP_SIZE __kernel __attribute__((reqd_work_group_size(ROWS, SLICES * TILES, 1))) void linear_simt_few(
    LINEAR_ARGUMENTS ENDING_ARGUMENTS) {
  // The sums of the slices follow the inputs in the same memory.
  __local float4 staged[(STAGED_FLOATS > PARTIAL_FLOATS ? STAGED_FLOATS : PARTIAL_FLOATS) / 4];
  FIND_ITEM
  BEGIN_ENDING
#ifdef GROUPED
  FIND_PLACE(uint, get_group_id(0))
#else
  const int4 tile = OWN_TILE;
  const uint token = get_group_id(1) * TOKENS;
  const uint count = min((uint)TOKENS, tokens - token);
#endif
  x += (size_t)(first_token + token) * columns;
  const weight_place words = PLACE(first_weight(tile.x, weight_columns, first_column) + lane);
#if BITS <= 8
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK) + lane;
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
#endif
  CLEAR_TOTALS
#ifdef SUBGROUP
  x += get_sub_group_local_id() % HOLDERS * 8;
  const uint start = 0, depth = columns;
  {
#else
  for (uint start = 0; start < columns; start += STAGED_INPUTS) {
    const uint depth = min((uint)STAGED_INPUTS, columns - start);
    barrier(CLK_LOCAL_MEM_FENCE);
    // Rows past the last one repeat it: nothing beyond x is read, and their sums are not stored.
    for (uint i = OWN_ITEM; i < TOKENS * (STAGED_INPUTS / 8); i += ITEMS) {
#if TOKENS <= 2
      const uint t = i / (STAGED_INPUTS / 8), k = i % (STAGED_INPUTS / 8) * 8;
#else
      const uint t = i % TOKENS, k = i / TOKENS * 8;
#endif
      if (k < depth) {
        const float8 v = load_in8(x, min(t, count - 1) * columns + start + k);
#if TOKENS <= 2
        staged[t * STAGED_ROW + k / 4] = v.lo;
        staged[t * STAGED_ROW + k / 4 + 1] = v.hi;
#else
        __local float *slot = (__local float *)staged + k * TOKENS + t;
        slot[0] = v.s0;
        slot[TOKENS] = v.s1;
        slot[2 * TOKENS] = v.s2;
        slot[3 * TOKENS] = v.s3;
        slot[4 * TOKENS] = v.s4;
        slot[5 * TOKENS] = v.s5;
        slot[6 * TOKENS] = v.s6;
        slot[7 * TOKENS] = v.s7;
#endif
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    for (uint g = slice * STEP; g < depth; g += SLICES * STEP) {
      weight_place source = words + (start + g) / WORD_INPUTS * LANES;
      CLEAR_DOTS
#if BITS <= 8
      const uint group = (start + g) / BLOCK * LANES;
      LOAD_BLOCK(group)
      for (uint k = g; k < g + STEP; k += RUN, source += RUN / WORD_INPUTS * LANES) {
#if TOKENS <= 2
        const uint4 q = LOAD_RUN(source);
        LOAD_INPUTS(k)
        MULTIPLY(q.x, from)
        MULTIPLY(q.y, from + WORD_INPUTS / 4)
#if RUN / WORD_INPUTS == 4
        MULTIPLY(q.z, from + 2 * WORD_INPUTS / 4)
        MULTIPLY(q.w, from + 3 * WORD_INPUTS / 4)
#endif
#else
        uint4 q = LOAD_RUN(source);
        // The end is a number that no compiler knows, so none unrolls the loop.
        const uint stop = min(k + RUN, depth) / 4;
        for (uint at = k / 4; at < stop; q = NEXT_CODES(q, at), at++) {
          const float4 low = VALUES_LOW(q.x);
          ADD_FOUR
        }
#endif
      }
      ADD_ALL_SCALED
#else
      for (uint at = g / 4; at < min(g + STEP, depth) / 4; at += RUN / 4, source += RUN * LANES) {
        const float4 low = LOAD_FOUR(source, 0);
#if TOKENS <= 2
        const float4 high = LOAD_FOUR(source, 4);
        REPEAT(TOKENS, ADD_HIGH)
#endif
        ADD_FOUR
      }
      ADD_ALL
#endif
    }
  }
#ifdef SUBGROUP
  // A subgroup that spans slices, or is too small, has passed wrong inputs: its numbers must not pass for right ones.
  if (sub_group_broadcast(slice, 0) != slice || get_sub_group_size() < HOLDERS) total0 = NAN;
#endif
  __local float *partial = (__local float *)staged;
  barrier(CLK_LOCAL_MEM_FENCE);
  STORE_SLICES(partial)
}
#else

// ---- many tokens ----------------------------------------------------------------------------------------

// Inputs and weights are staged as vectors of four inputs.

#ifdef HALF_SUMS
typedef half element_t;
typedef half4 element4_t;
typedef half8 element8_t;
#define LOAD_RUN(p) (*(__global const half8 *)(p))
// Sums of halves lose the 1e-6 gate within some 64 products, so they are added to float totals every DEPTH inputs,
// which is at most 32. The weights are unpacked with their scale, so that a sum is as large as a part of an output,
// which a half holds.
#define CLEAR_TOTAL(r) float4 total##r = 0.0f;
#define BEGIN_SUM(r) element4_t sum##r = (element4_t)(0);
#define FLUSH_SUM(r) total##r += convert_float4(sum##r);
#define STORED(r) total##r
#else
typedef float element_t;
typedef float4 element4_t;
typedef float8 element8_t;
#define LOAD_RUN(p) load_act8(p, 0)
#define CLEAR_TOTAL(r) element4_t sum##r = 0.0f;
#define BEGIN_SUM(r)
#define FLUSH_SUM(r)
#define STORED(r) sum##r
#endif

// The weights that a work-item unpacks at a time: a word of codes, or four weights.
#if BITS == 4
#define UNPACKED 8
#else
#define UNPACKED 4
#endif
#define UNPACKED_ROWS (UNPACKED / WORD_INPUTS * LANES)
#define WEIGHT_RUNS (DEPTH / UNPACKED * LANES)

#if BITS <= 8
#if defined(HALF_SUMS) && defined(MINIMUMS)
#define LOAD_SCALE const half scale = scales[group], offset = 1024, shift = zeros[group];
#define SHIFTED(value) FMA(value, scale, shift)
#elif defined(HALF_SUMS)
#define LOAD_SCALE const half scale = scales[group], offset = (half)(1024.0f + ZERO(group));
#define SHIFTED(value) (value) * scale
#elif defined(MINIMUMS)
#define LOAD_SCALE const float scale = load_half(scales, group), shift = ZERO(group);
#else
#define LOAD_SCALE const float scale = load_half(scales, group), shift = -scale * ZERO(group);
#endif
// Codes i and i + 4 of four bits, or i and i + 2 of eight: 0x6400 is 1024, whose lowest bits count by one.
#define PAIR(q, i)                                                                                           \
  SHIFTED(as_half2((((q) >> (BITS * (i))) & (CODE_MASK << 16 | CODE_MASK)) | 0x64006400u) - offset)
#endif

// Eight inputs of a token: a work-item stages up to four of such runs.
#define ROW_RUNS (DEPTH / 8)
#define INPUT_RUNS (TILE_TOKENS * ROW_RUNS)
#if ITEM_TOKENS * DEPTH == 512
#define INPUT_TURNS 4
#elif ITEM_TOKENS * DEPTH == 256
#define INPUT_TURNS 2
#else
#define INPUT_TURNS 1
#endif
// Rows past the last one repeat it: nothing beyond x is read, and their sums are not stored.
#define FIND_INPUTS(n)                                                                                       \
  __global const act_t *source##n =                                                                          \
      x + (min((item + n * ITEMS) / ROW_RUNS, count - 1) * columns + item % ROW_RUNS * 8);
#define STAGE_INPUTS(n)                                                                                      \
  if (ITEMS <= INPUT_RUNS || item < INPUT_RUNS) {                                                            \
    const element8_t v = LOAD_RUN(source##n);                                                             \
    source##n += DEPTH;                                                                                      \
    input_slot[n * (ITEMS / ROW_RUNS)] = v.lo;                                                               \
    input_slot[n * (ITEMS / ROW_RUNS) + TILE_TOKENS] = v.hi;                                                 \
  }
#define MULTIPLY(r)                                                                                          \
  {                                                                                                          \
    const element4_t four = input[r];                                                                        \
    sum##r = FMA((element4_t)four.x, first, sum##r);                                                         \
    sum##r = FMA((element4_t)four.y, second, sum##r);                                                        \
    sum##r = FMA((element4_t)four.z, third, sum##r);                                                         \
    sum##r = FMA((element4_t)four.w, fourth, sum##r);                                                        \
  }

__kernel __attribute__((reqd_work_group_size(ITEMS_X, ITEMS_Y, 1))) void linear_simt_many(LINEAR_ARGUMENTS) {
  // values[k / 4][column], and behind them inputs[k / 4][token]. The offset, which no compiler knows, is a part of the
  // address: a constant beyond the 4 KiB that a load of an Adreno adds would cost an addition for each load.
  __local element4_t values[DEPTH / 4 * (LANES + TILE_TOKENS)];
  __local element4_t *inputs =
      (__local element4_t *)((__local char *)values + (tokens > 0 ? DEPTH / 4 * LANES * sizeof(element4_t) : 0));
  const uint column = get_local_id(0), strip = get_local_id(1);
  const uint item = strip * ITEMS_X + column, lane = item % LANES;
#ifdef GROUPED
  FIND_PLACE(uint, get_group_id(0))
#else
  const int4 tile = tiles[get_group_id(0)];
  const uint token = get_group_id(1) * token_step;
  const uint count = min((uint)token_step, tokens - token);
#endif
  x += (size_t)(first_token + token) * columns;
  weight_place words =
      PLACE(first_weight(tile.x, weight_columns, first_column) + item / LANES * UNPACKED_ROWS + lane);
#if BITS <= 8
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK) + lane;
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
#endif
  __local element4_t *value_slot = values + (item / LANES * (UNPACKED / 4 * LANES) + lane);
  __local element4_t *input_slot = inputs + (item % ROW_RUNS * (2 * TILE_TOKENS) + item / ROW_RUNS);
  __local const element4_t *own_values = values + column, *own_inputs = inputs + strip * ITEM_TOKENS;
  REPEAT(INPUT_TURNS, FIND_INPUTS)
  REPEAT(ITEM_TOKENS, CLEAR_TOTAL)

  uint start = 0;
  // There is a first step. Without one the sums would have another value behind the loop, and Mesa's compiler would
  // convert them to outputs in every step.
  do {
    barrier(CLK_LOCAL_MEM_FENCE);
    REPEAT(INPUT_TURNS, STAGE_INPUTS)
#if BITS <= 8
    const uint group = start / BLOCK * LANES;
    LOAD_SCALE
#endif
    if (ITEMS <= WEIGHT_RUNS || item < WEIGHT_RUNS)
      UNROLL for (uint turn = 0; turn < TURNS(WEIGHT_RUNS); turn++) {
        const weight_place place = words + turn * (ITEMS / LANES) * UNPACKED_ROWS;
        __local element4_t *slot = value_slot + turn * (ITEMS / LANES) * (UNPACKED / 4 * LANES);
#if BITS <= 8
        const uint q = WORD(place, 0);
#ifdef HALF_SUMS
        const half2 a = PAIR(q, 0), b = PAIR(q, 1);
#if BITS == 4
        const half2 c = PAIR(q, 2), d = PAIR(q, 3);
        slot[0] = (half4)(a.x, b.x, c.x, d.x);
        slot[LANES] = (half4)(a.y, b.y, c.y, d.y);
#else
        slot[0] = (half4)(a.x, b.x, a.y, b.y);
#endif
#else
        slot[0] = FMA(CODES_LOW(q), FACTORS_LOW * scale, (float4)shift);
#if BITS == 4
        slot[LANES] = FMA(CODES_HIGH(q), FACTORS_HIGH * scale, (float4)shift);
#endif
#endif
#elif defined(HALF_SUMS)
        slot[0] = (half4)(place[0], place[LANES], place[2 * LANES], place[3 * LANES]);
#else
        slot[0] = (float4)(load_weight(place, 0), load_weight(place, LANES), load_weight(place, 2 * LANES),
                           load_weight(place, 3 * LANES));
#endif
      }
    words += DEPTH / WORD_INPUTS * LANES;
    barrier(CLK_LOCAL_MEM_FENCE);
    REPEAT(ITEM_TOKENS, BEGIN_SUM)
    __local const element4_t *value = own_values, *input = own_inputs;
    UNROLL for (uint k = 0; k < DEPTH / 4; k++, value += LANES, input += TILE_TOKENS) {
      const element4_t v0 = value[0], v1 = value[ITEMS_X], v2 = value[2 * ITEMS_X], v3 = value[3 * ITEMS_X];
      const element4_t first = (element4_t)(v0.x, v1.x, v2.x, v3.x), second = (element4_t)(v0.y, v1.y, v2.y, v3.y);
      const element4_t third = (element4_t)(v0.z, v1.z, v2.z, v3.z), fourth = (element4_t)(v0.w, v1.w, v2.w, v3.w);
      REPEAT(ITEM_TOKENS, MULTIPLY)
    }
    REPEAT(ITEM_TOKENS, FLUSH_SUM)
  } while ((start += DEPTH) < columns);
  y += (size_t)(first_token + token) * rows + tile.y + column;
  REPEAT(ITEM_TOKENS, STORE_ROW)
}
#endif
