// Linear layers of many tokens for GPUs with half arithmetic, which multiply halves at twice the rate of floats if the
// sum is a half, too. Follows linear_tiles.h; act_t is half and the device has cl_khr_fp16.
//
// Sums of halves lose the 1e-6 gate within some 64 products, so they are added to float totals every DEPTH inputs, which is at most 32. The
// weights are unpacked with their scale, so that a sum is as large as a part of an output, which a half holds.

#if BITS == 4
// Codes i and i + 4 of a word as halves: 0x6400 is 1024, whose lowest bits count by one.
#define PAIR(q, i) (as_half2((((q) >> (4 * (i))) & 0x000f000fu) | 0x64006400u) - offset)
#elif BITS == 8
#define PAIR(q, i) (as_half2((((q) >> (8 * (i))) & 0x00ff00ffu) | 0x64006400u) - offset)
#endif

#define CLEAR_SUM(r)                                                                                         \
  float4 total##r = 0.0f;                                                                                    \
  half4 sum##r = (half4)(0);
#define FLUSH_SUM(r)                                                                                         \
  total##r += convert_float4(sum##r);                                                                        \
  sum##r = (half4)(0);
#define STORED(r) total##r

__kernel __attribute__((reqd_work_group_size(ITEMS_X, ITEMS_Y, 1))) void linear_half_many(LINEAR_ARGUMENTS) {
  __local half4 inputs[DEPTH * TILE_TOKENS / 4];
  __local half4 values[DEPTH * LANES / 4];
  __local half *input_slots = (__local half *)inputs, *value_slots = (__local half *)values;
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
      const half8 v = *(__global const half8 *)(x + (min(t, count - 1) * columns + start + k));
      __local half *slot = input_slots + k * TILE_TOKENS + t;
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
      __local half *slot = value_slots + k * LANES + lane;
      const uint at = (start + k) / WORD_INPUTS * LANES + lane;
#if BITS <= 8
      const uint group = (start + k) / BLOCK * LANES + lane;
      const half scale = scales[group];
#ifdef ASYMMETRIC
      const half offset = (half)1024 + (half)zeros[group];
#else
      const half offset = (half)(1024 + MIDDLE);
#endif
      const uint q = weights[at];
      const half2 first = PAIR(q, 0) * scale, second = PAIR(q, 1) * scale;
#if BITS == 4
      const half2 third = PAIR(q, 2) * scale, fourth = PAIR(q, 3) * scale;
      slot[0] = first.x;
      slot[LANES] = second.x;
      slot[2 * LANES] = third.x;
      slot[3 * LANES] = fourth.x;
      slot[4 * LANES] = first.y;
      slot[5 * LANES] = second.y;
      slot[6 * LANES] = third.y;
      slot[7 * LANES] = fourth.y;
#else
      slot[0] = first.x;
      slot[LANES] = second.x;
      slot[2 * LANES] = first.y;
      slot[3 * LANES] = second.y;
#endif
#else
      slot[0] = weights[at];
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (uint k = 0; k < DEPTH; k++) {
      const half4 value = values[k * (LANES / 4) + column];
      const half4 input = inputs[(k * TILE_TOKENS + strip * ITEM_TOKENS) / 4];
      sum0 = FMA((half4)input.x, value, sum0);
      sum1 = FMA((half4)input.y, value, sum1);
      sum2 = FMA((half4)input.z, value, sum2);
      sum3 = FMA((half4)input.w, value, sum3);
#if ITEM_TOKENS == 8
      const half4 more = inputs[(k * TILE_TOKENS + strip * ITEM_TOKENS) / 4 + 1];
      sum4 = FMA((half4)more.x, value, sum4);
      sum5 = FMA((half4)more.y, value, sum5);
      sum6 = FMA((half4)more.z, value, sum6);
      sum7 = FMA((half4)more.w, value, sum7);
#endif
    }
    REPEAT(ITEM_TOKENS, FLUSH_SUM)
  }
  y += (size_t)(first_token + token) * rows + tile.y;
  REPEAT(ITEM_TOKENS, STORE_ROW)
}
