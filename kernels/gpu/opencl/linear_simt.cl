// Linear layers for GPUs: a column for each work-item, inputs and weights staged in local memory.

// ---- a few tokens ---------------------------------------------------------------------------------------

#ifdef TOKENS

// Tuned: inputs held in local memory at a time; a multiple of every block.
#ifndef STAGED_INPUTS
#define STAGED_INPUTS (TOKENS == 1 ? 1024 : 256)
#endif
#define STAGED_FLOATS (TOKENS * STAGED_INPUTS)
// Row of staged inputs, in vectors.
#define STAGED_ROW (STAGED_INPUTS / 4)

// Inputs whose weights are read before they are used, so that several reads are in flight.
#if BITS > 8
#define STEP 16
#define RUN 4
#elif BITS == 8 || BLOCK == 16
#define STEP BLOCK
#define RUN 16
#else
#define STEP BLOCK
#define RUN 32
#endif

#define CLEAR_TOTAL(t) float total##t = 0.0f;
#if TOKENS <= 2
// A whole run at once. The sums of a block are vectors, as vectors of inputs are read; they are added up at its end.
#define CLEAR_DOT(t) float4 dot##t = 0.0f;
#define ADD_LOW(t) dot##t = FMA(staged[t * STAGED_ROW + at], low, dot##t);
#define ADD_HIGH(t) dot##t = FMA(staged[t * STAGED_ROW + at + 1], high, dot##t);
#define DOT(t) across(dot##t)
#else
// Four inputs at a time: the inputs of a whole run, and vectors of sums, would take all registers.
#define CLEAR_DOT(t) float dot##t = 0.0f;
#define ADD_LOW(t) dot##t += dot(staged[t * STAGED_ROW + at], low);
#define DOT(t) dot##t
#endif
#define ADD_SCALED(t) total##t = FMA(DOT(t), scale, total##t);
#define ADD_DOT(t) total##t += DOT(t);

#if BITS <= 8
// Multiplies the codes of a word with the staged inputs from vector `from` on.
#if BITS == 4
#define MULTIPLY(word, from)                                                                                 \
  {                                                                                                          \
    const uint at = from;                                                                                    \
    const float4 low = VALUES_LOW(word, zero), high = VALUES_HIGH(word, zero);                               \
    REPEAT(TOKENS, ADD_LOW)                                                                                  \
    REPEAT(TOKENS, ADD_HIGH)                                                                                 \
  }
// The words of a run without the four codes of vector `at`.
#define NEXT_CODES(q, at) ((at) & 1 ? (uint4)((q).yzw, 0) : (uint4)((q).x >> 16, (q).yzw))
#else
#define MULTIPLY(word, from)                                                                                 \
  {                                                                                                          \
    const uint at = from;                                                                                    \
    const float4 low = VALUES_LOW(word, zero);                                                               \
    REPEAT(TOKENS, ADD_LOW)                                                                                  \
  }
#define NEXT_CODES(q, at) (uint4)((q).yzw, 0)
#endif
#if RUN / WORD_INPUTS == 4
#define LOAD_RUN(p) (uint4)((p)[0], (p)[LANES], (p)[2 * LANES], (p)[3 * LANES])
#else
#define LOAD_RUN(p) (uint4)((p)[0], (p)[LANES], 0, 0)
#endif
#endif

__kernel __attribute__((reqd_work_group_size(LANES, SLICES, 1))) void linear_simt_few(LINEAR_ARGUMENTS) {
  // The sums of the slices follow the inputs in the same memory.
  __local float4 staged[(STAGED_FLOATS > PARTIAL_FLOATS ? STAGED_FLOATS : PARTIAL_FLOATS) / 4];
  const uint lane = get_local_id(0), slice = get_local_id(1);
  const int4 tile = tiles[get_group_id(0)];
  const uint token = get_group_id(1) * TOKENS;
  const uint count = min((uint)TOKENS, tokens - token);
  x += (size_t)(first_token + token) * columns;
  weights += first_weight(tile.x, weight_columns, first_column) + lane;
#if BITS <= 8
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK) + lane;
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
#endif
  REPEAT(TOKENS, CLEAR_TOTAL)
  for (uint start = 0; start < columns; start += STAGED_INPUTS) {
    const uint depth = min((uint)STAGED_INPUTS, columns - start);
    barrier(CLK_LOCAL_MEM_FENCE);
    // Rows past the last one repeat it: nothing beyond x is read, and their sums are not stored.
    for (uint i = slice * LANES + lane; i < TOKENS * (STAGED_INPUTS / 8); i += LANES * SLICES) {
      const uint t = i / (STAGED_INPUTS / 8), k = i % (STAGED_INPUTS / 8) * 8;
      if (k < depth) {
        const float8 v = load_act8(x, min(t, count - 1) * columns + start + k);
        staged[t * STAGED_ROW + k / 4] = v.lo;
        staged[t * STAGED_ROW + k / 4 + 1] = v.hi;
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint g = slice * STEP; g < depth; g += SLICES * STEP) {
      __global const weight_t *source = weights + (start + g) / WORD_INPUTS * LANES;
      REPEAT(TOKENS, CLEAR_DOT)
#if BITS <= 8
      const uint group = (start + g) / BLOCK * LANES;
      const float zero = ZERO(group), scale = load_half(scales, group);
      for (uint k = g; k < g + STEP; k += RUN, source += RUN / WORD_INPUTS * LANES) {
#if TOKENS <= 2
        const uint4 q = LOAD_RUN(source);
        MULTIPLY(q.x, k / 4)
        MULTIPLY(q.y, (k + WORD_INPUTS) / 4)
#if RUN / WORD_INPUTS == 4
        MULTIPLY(q.z, (k + 2 * WORD_INPUTS) / 4)
        MULTIPLY(q.w, (k + 3 * WORD_INPUTS) / 4)
#endif
#else
        uint4 q = LOAD_RUN(source);
        // The end is a number that no compiler knows, so none unrolls the loop.
        const uint stop = min(k + RUN, depth) / 4;
        for (uint at = k / 4; at < stop; q = NEXT_CODES(q, at), at++) {
          const float4 low = VALUES_LOW(q.x, zero);
          REPEAT(TOKENS, ADD_LOW)
        }
#endif
      }
      REPEAT(TOKENS, ADD_SCALED)
#else
      for (uint at = g / 4; at < min(g + STEP, depth) / 4; at++, source += RUN * LANES) {
        const float4 low = (float4)(load_weight(source, 0), load_weight(source, LANES),
                                    load_weight(source, 2 * LANES), load_weight(source, 3 * LANES));
        REPEAT(TOKENS, ADD_LOW)
      }
      REPEAT(TOKENS, ADD_DOT)
#endif
    }
  }
  __local float *partial = (__local float *)staged;
  barrier(CLK_LOCAL_MEM_FENCE);
  STORE_SLICES(partial)
}
#else

// ---- many tokens ----------------------------------------------------------------------------------------

#define CLEAR_SUM(r) float4 sum##r = 0.0f;
#define STORED(r) sum##r

__kernel __attribute__((reqd_work_group_size(ITEMS_X, ITEMS_Y, 1))) void linear_simt_many(LINEAR_ARGUMENTS) {
  __local float4 inputs[DEPTH * TILE_TOKENS / 4];
  __local float4 values[DEPTH * LANES / 4];
  __local float *input_slots = (__local float *)inputs, *value_slots = (__local float *)values;
  const uint column = get_local_id(0), strip = get_local_id(1);
  const uint item = strip * ITEMS_X + column;
  const int4 tile = tiles[get_group_id(0)];
  const uint token = get_group_id(1) * token_step;
  const uint count = min((uint)token_step, tokens - token);
  x += (size_t)(first_token + token) * columns;
  weights += first_weight(tile.x, weight_columns, first_column);
#if BITS <= 8
  const size_t groups = first_group(tile.x, weight_columns, first_column, BLOCK);
  scales += groups;
#ifdef ASYMMETRIC
  zeros += groups;
#endif
#endif
  REPEAT(ITEM_TOKENS, CLEAR_SUM)

  for (uint start = 0; start < columns; start += DEPTH) {
    barrier(CLK_LOCAL_MEM_FENCE);
    SPREAD(i, TILE_TOKENS * DEPTH / 8) {
      const uint t = i / (DEPTH / 8), k = i % (DEPTH / 8) * 8;
      // Rows past the last one repeat it: nothing beyond x is read, and their sums are not stored.
      const float8 v = load_act8(x, min(t, count - 1) * columns + start + k);
      __local float *slot = input_slots + k * TILE_TOKENS + t;
      slot[0] = v.s0;
      slot[TILE_TOKENS] = v.s1;
      slot[2 * TILE_TOKENS] = v.s2;
      slot[3 * TILE_TOKENS] = v.s3;
      slot[4 * TILE_TOKENS] = v.s4;
      slot[5 * TILE_TOKENS] = v.s5;
      slot[6 * TILE_TOKENS] = v.s6;
      slot[7 * TILE_TOKENS] = v.s7;
    }
    SPREAD(i, LANES * DEPTH / WORD_INPUTS) {
      const uint lane = i % LANES, k = i / LANES * WORD_INPUTS;
      __local float *slot = value_slots + k * LANES + lane;
      const uint at = (start + k) / WORD_INPUTS * LANES + lane;
#if BITS <= 8
      const uint group = (start + k) / BLOCK * LANES + lane;
      const float scale = load_half(scales, group), zero = ZERO(group);
      const uint q = weights[at];
      const float4 low = VALUES_LOW(q, zero) * scale;
      slot[0] = low.x;
      slot[LANES] = low.y;
      slot[2 * LANES] = low.z;
      slot[3 * LANES] = low.w;
#if BITS == 4
      const float4 high = VALUES_HIGH(q, zero) * scale;
      slot[4 * LANES] = high.x;
      slot[5 * LANES] = high.y;
      slot[6 * LANES] = high.z;
      slot[7 * LANES] = high.w;
#endif
#else
      slot[0] = load_weight(weights, at);
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (uint k = 0; k < DEPTH; k++) {
      const float4 value = values[k * (LANES / 4) + column];
      const float4 input = inputs[(k * TILE_TOKENS + strip * ITEM_TOKENS) / 4];
      sum0 = FMA((float4)input.x, value, sum0);
      sum1 = FMA((float4)input.y, value, sum1);
      sum2 = FMA((float4)input.z, value, sum2);
      sum3 = FMA((float4)input.w, value, sum3);
#if ITEM_TOKENS == 8
      const float4 more = inputs[(k * TILE_TOKENS + strip * ITEM_TOKENS) / 4 + 1];
      sum4 = FMA((float4)more.x, value, sum4);
      sum5 = FMA((float4)more.y, value, sum5);
      sum6 = FMA((float4)more.z, value, sum6);
      sum7 = FMA((float4)more.w, value, sum7);
#endif
    }
  }
  y += (size_t)(first_token + token) * rows + tile.y;
  REPEAT(ITEM_TOKENS, STORE_ROW)
}
#endif
