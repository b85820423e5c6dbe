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

// Inputs are staged as vectors of four, weights as vectors of columns: a vector of products has registers side by side.

#define COLUMN_STEP 1

#ifdef HALF_SUMS
typedef half element_t;
typedef half4 element4_t;
// Copied as they are.
typedef uint4 run_t;
#define LOAD_RUN(p) (*(__global const uint4 *)(p))
#define STAGE(slot, four) *(__local uint2 *)&(slot) = four
// Sums of halves lose the 1e-6 gate within some 64 products, so they are added to float totals every DEPTH inputs, which
// is at most 32. They are of weights, or of codes less their zero point over UNITS: these are exact, their scale is a
// factor of the sum, and as they are at most a quarter, 32 inputs below 8000 overflow no sum.
#define UNITS (4 * (CODE_MASK + 1))
#define CLEAR_TOTAL(r) float4 total##r = 0.0f;
#define BEGIN_SUM(r) element4_t sum##r = (element4_t)(0);
#if BITS <= 8 && !defined(MINIMUMS)
#define LOAD_SUM_SCALE                                                                                       \
  const float4 sum_scale = convert_float4(*(__global const half4 *)(scales + (group + column)));
#define FLUSH_SUM(r) total##r = FMA(convert_float4(sum##r), sum_scale, total##r);
#define STORED(r) total##r * UNITS
#else
#define LOAD_SUM_SCALE
#define FLUSH_SUM(r) total##r += convert_float4(sum##r);
#define STORED(r) total##r
#endif
#else
typedef float element_t;
typedef float4 element4_t;
typedef float8 run_t;
#define LOAD_RUN(p) load_act8(p, 0)
#define STAGE(slot, four) slot = four
#define CLEAR_TOTAL(r) element4_t sum##r = 0.0f;
#define BEGIN_SUM(r)
#define LOAD_SUM_SCALE
#define FLUSH_SUM(r)
#define STORED(r) sum##r
#endif

#if BITS <= 8
// A work-item unpacks words of neighbouring columns.
#define WEIGHT_RUNS (DEPTH / WORD_INPUTS * LANES)
#if WEIGHT_RUNS >= 4 * ITEMS
#define WORDS 4
#define OF_WORDS(name) name##4
#define IMAGE_WORDS(p) (uint4)(WORD(p, 0), WORD(p, 1), WORD(p, 2), WORD(p, 3))
#elif WEIGHT_RUNS >= 2 * ITEMS
#define WORDS 2
#define OF_WORDS(name) name##2
#define IMAGE_WORDS(p) (uint2)(WORD(p, 0), WORD(p, 1))
#else
#define WORDS 1
#define OF_WORDS(name) name
#define IMAGE_WORDS(p) WORD(p, 0)
#endif
typedef OF_WORDS(uint) words_t;
#ifdef WEIGHT_IMAGE
#define LOAD_WORDS IMAGE_WORDS
#else
#define LOAD_WORDS(p) *(__global const words_t *)(p)
#endif
#ifdef HAS_HALF
#define LOAD_HALVES(p) OF_WORDS(convert_float)(*(__global const OF_WORDS(half) *)(p))
#else
#define LOAD_HALVES(p) OF_WORDS(vload_half)(0, p)
#endif
#ifdef MINIMUMS
#define LOAD_ZEROS LOAD_HALVES(zeros + (group + lane))
#elif defined(ASYMMETRIC)
#define LOAD_ZEROS OF_WORDS(convert_float)(*(__global const OF_WORDS(uchar) *)(zeros + (group + lane)))
#else
#define LOAD_ZEROS (weights_t)(MIDDLE)
#endif

#ifdef HALF_SUMS
typedef OF_WORDS(half) weights_t;
// A code in the mantissa of 16 or 1, whose lowest bits count by 1/64 and 1/1024.
#define HALVES(bits, one) OF_WORDS(as_half)(OF_WORDS(convert_ushort)((bits) | (one)))
#define SIXTEEN 0x4c00
#define ONE 0x3c00
#ifdef MINIMUMS
#define LOAD_SCALE                                                                                           \
  const weights_t scale = *(__global const weights_t *)(scales + (group + lane)) * (half)UNITS;              \
  const weights_t shift = *(__global const weights_t *)(zeros + (group + lane)), zero = 0;
#define SHIFTED(code) FMA(code, scale, shift)
#else
#define LOAD_SCALE                                                                                           \
  const weights_t zero = OF_WORDS(convert_half)(LOAD_ZEROS) / (half)UNITS;
#define SHIFTED(code) code
#endif
#if BITS == 4
#define UNPACK_PAIR(bits, i)                                                                                 \
  PUT(i, SHIFTED(HALVES((bits) & (ushort)15, (ushort)SIXTEEN) - (zero + (half)16)))                          \
  PUT(i + 1, SHIFTED(HALVES((bits) & (ushort)240, (ushort)ONE) - (zero + (half)1)))
#else
#define UNPACK_PAIR(bits, i)                                                                                 \
  PUT((i) / 2, SHIFTED(HALVES((bits) & (ushort)255, (ushort)ONE) - (zero + (half)1)))
#endif
#define UNPACK(q)                                                                                            \
  {                                                                                                          \
    const OF_WORDS(ushort) first = OF_WORDS(convert_ushort)(q), second = OF_WORDS(convert_ushort)((q) >> 16); \
    UNPACK_PAIR(first, 0)                                                                                    \
    UNPACK_PAIR(first >> (ushort)8, 2)                                                                       \
    UNPACK_PAIR(second, 4)                                                                                   \
    UNPACK_PAIR(second >> (ushort)8, 6)                                                                      \
  }
#else
typedef OF_WORDS(float) weights_t;
#ifdef MINIMUMS
#define LOAD_SCALE const weights_t scale = LOAD_HALVES(scales + (group + lane)), shift = LOAD_ZEROS;
#else
#define LOAD_SCALE const weights_t scale = LOAD_HALVES(scales + (group + lane)), shift = -scale * LOAD_ZEROS;
#endif
// A mask without a shift leaves the code times a power of two, which the exact factor undoes.
#define UNPACK_CODE(i)                                                                                       \
  PUT(i, FMA(OF_WORDS(convert_float)(q & (CODE_MASK << BITS * (i))), scale * (1.0f / (1u << BITS * (i))), shift))
#define UNPACK(q) REPEAT(WORD_INPUTS, UNPACK_CODE)
#endif
#define PUT(i, value) *(__local weights_t *)(slot + (i) * LANES) = value;
#elif BITS == 32
#define LOAD_FLOATS(p) *(__global const float4 *)(p)
#elif defined(HALF_SUMS)
#define LOAD_FLOATS(p) *(__global const half4 *)(p)
#elif defined(HAS_HALF)
#define LOAD_FLOATS(p) convert_float4(*(__global const half4 *)(p))
#else
#define LOAD_FLOATS(p) vload_half4(0, p)
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
    const run_t v = LOAD_RUN(source##n);                                                                     \
    source##n += DEPTH;                                                                                      \
    STAGE(input_slot[n * (ITEMS / ROW_RUNS)], v.lo);                                                         \
    STAGE(input_slot[n * (ITEMS / ROW_RUNS) + TILE_TOKENS], v.hi);                                           \
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
  // values[k][column / 4], and behind them inputs[k / 4][token]. The offset, which no compiler knows, is a part of the
  // address: a constant beyond the 4 KiB that a load of an Adreno adds would cost an addition for each load.
  __local element4_t values[DEPTH / 4 * (LANES + TILE_TOKENS)];
  __local element4_t *inputs =
      (__local element4_t *)((__local char *)values + (tokens > 0 ? DEPTH / 4 * LANES * sizeof(element4_t) : 0));
  const uint strip = get_local_id(1), item = strip * ITEMS_X + get_local_id(0), column = get_local_id(0) * 4;
#ifdef GROUPED
  FIND_PLACE(uint, get_group_id(0))
#else
  const int4 tile = tiles[get_group_id(0)];
  const uint token = get_group_id(1) * token_step;
  const uint count = min((uint)token_step, tokens - token);
#endif
  x += (size_t)(first_token + token) * columns;
  weight_place words = PLACE(first_weight(tile.x, weight_columns, first_column));
#if BITS <= 8
  const uint word = item * WORDS, lane = word % LANES;
  words += word;
  __local element_t *own_slot = (__local element_t *)values + (word / LANES * (WORD_INPUTS * LANES) + lane);
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK);
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
#endif
  __local element4_t *input_slot = inputs + (item % ROW_RUNS * (2 * TILE_TOKENS) + item / ROW_RUNS);
  __local const element4_t *own_values = values + get_local_id(0), *own_inputs = inputs + strip * ITEM_TOKENS;
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
    if (ITEMS <= WEIGHT_RUNS || item < WEIGHT_RUNS) {
      LOAD_SCALE
      UNROLL for (uint turn = 0; turn < TURNS(WEIGHT_RUNS / WORDS); turn++) {
        const words_t q = LOAD_WORDS(words + turn * (WORDS * ITEMS));
        __local element_t *slot = own_slot + turn * (WORDS * ITEMS * WORD_INPUTS);
        UNPACK(q)
      }
    }
#else
    UNROLL for (uint turn = 0; turn < DEPTH * ITEMS_X / ITEMS; turn++)
      values[item + turn * ITEMS] = LOAD_FLOATS(words + (item + turn * ITEMS) * 4);
#endif
    words += DEPTH / WORD_INPUTS * LANES;
    barrier(CLK_LOCAL_MEM_FENCE);
    REPEAT(ITEM_TOKENS, BEGIN_SUM)
    __local const element4_t *value = own_values, *input = own_inputs;
    UNROLL for (uint k = 0; k < DEPTH / 4; k++, value += LANES, input += TILE_TOKENS) {
      const element4_t first = value[0], second = value[ITEMS_X];
      const element4_t third = value[2 * ITEMS_X], fourth = value[3 * ITEMS_X];
      REPEAT(ITEM_TOKENS, MULTIPLY)
    }
    LOAD_SUM_SCALE
    REPEAT(ITEM_TOKENS, FLUSH_SUM)
  } while ((start += DEPTH) < columns);
  y += (size_t)(first_token + token) * rows + tile.y + column;
  REPEAT(ITEM_TOKENS, STORE_ROW)
}
#endif
