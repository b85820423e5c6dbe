// Linear layers for GPUs: a column for each work-item, inputs and weights staged in local memory.

#if BITS <= 8
#define CODE(q, i) ((float)(((q) >> (BITS * (i))) & CODE_MASK))
#endif

// ---- a few tokens ---------------------------------------------------------------------------------------

#ifdef TOKENS

// Tuned: inputs held in local memory at a time; a multiple of every block.
#ifndef STAGED_INPUTS
#define STAGED_INPUTS (TOKENS == 1 ? 1024 : 512)
#endif

__kernel __attribute__((reqd_work_group_size(LANES, SLICES, 1))) void linear_simt_few(LINEAR_ARGUMENTS) {
  __local float inputs[TOKENS][STAGED_INPUTS];
  __local float partial[SLICES][TOKENS][LANES];
  const int lane = get_local_id(0), slice = get_local_id(1);
  const int4 tile = tiles[get_group_id(0)];
#if BITS <= 8
  const int step = block;
#else
  const int step = 16;
#endif
  const int token = get_group_id(1) * TOKENS;
  const int count = min(TOKENS, tokens - token);
  x += (size_t)(first_token + token) * columns;
  weights += first_weight(tile.x, weight_columns, first_column) + lane;
#if BITS <= 8
  const size_t groups = first_group(tile.x, weight_columns, first_column, block) + lane;
#endif
  float totals[TOKENS];
  UNROLL for (int t = 0; t < TOKENS; t++) totals[t] = 0.0f;
  for (int start = 0; start < columns; start += STAGED_INPUTS) {
    const int depth = min(STAGED_INPUTS, columns - start);
    barrier(CLK_LOCAL_MEM_FENCE);
    // Rows past the last one repeat it: nothing beyond x is read, and their sums are not stored.
    for (int t = 0; t < TOKENS; t++)
      for (int k = slice * LANES + lane; k < depth; k += LANES * SLICES)
        inputs[t][k] = load_act(x, (size_t)min(t, count - 1) * columns + start + k);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int g = slice * step; g < depth; g += SLICES * step) {
      __global const weight_t *source = weights + (size_t)((start + g) / WORD_INPUTS) * LANES;
      float dots[TOKENS];
      UNROLL for (int t = 0; t < TOKENS; t++) dots[t] = 0.0f;
#if BITS <= 8
      const size_t group = groups + (size_t)((start + g) / block) * LANES;
      const float zero = zero_point(zeros, group, asymmetric);
      for (int k = g; k < g + step; k += WORD_INPUTS, source += LANES) {
        const uint q = *source;
        UNROLL for (int i = 0; i < WORD_INPUTS; i++) {
          const float value = CODE(q, i) - zero;
          UNROLL for (int t = 0; t < TOKENS; t++) dots[t] = FMA(inputs[t][k + i], value, dots[t]);
        }
      }
      const float scale = load_half(scales, group);
      UNROLL for (int t = 0; t < TOKENS; t++) totals[t] = FMA(dots[t], scale, totals[t]);
#else
      for (int k = g; k < g + step; k++, source += LANES) {
        const float value = load_weight(source, 0);
        UNROLL for (int t = 0; t < TOKENS; t++) dots[t] = FMA(inputs[t][k], value, dots[t]);
      }
      UNROLL for (int t = 0; t < TOKENS; t++) totals[t] += dots[t];
#endif
    }
  }
  STORE_SLICES
}
#else

// ---- many tokens ----------------------------------------------------------------------------------------

__kernel __attribute__((reqd_work_group_size(ITEMS_X, ITEMS_Y, 1))) void linear_simt_many(LINEAR_ARGUMENTS) {
  __local float4 inputs[DEPTH][TILE_TOKENS / 4];
  __local float4 values[DEPTH][LANES / 4];
  const int column = get_local_id(0), strip = get_local_id(1);
  const int item = strip * ITEMS_X + column;
  const int4 tile = tiles[get_group_id(0)];
  const int token = get_group_id(1) * token_step;
  const int count = min(token_step, tokens - token);
  x += (size_t)(first_token + token) * columns;
  weights += first_weight(tile.x, weight_columns, first_column);
#if BITS <= 8
  const size_t groups = first_group(tile.x, weight_columns, first_column, block);
#endif
  float4 sums[ITEM_TOKENS];
  UNROLL for (int r = 0; r < ITEM_TOKENS; r++) sums[r] = 0.0f;

  for (int start = 0; start < columns; start += DEPTH) {
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = item; i < TILE_TOKENS * DEPTH / 8; i += ITEMS_X * ITEMS_Y) {
      const int t = i / (DEPTH / 8), k = i % (DEPTH / 8) * 8;
      // Rows past the last one repeat it: nothing beyond x is read, and their sums are not stored.
      float8 v = load_act8(x, (size_t)min(t, count - 1) * columns + start + k);
      const float *lanes = (const float *)&v;
      UNROLL for (int j = 0; j < 8; j++) ((__local float *)inputs[k + j])[t] = lanes[j];
    }
    for (int i = item; i < LANES * DEPTH / WORD_INPUTS; i += ITEMS_X * ITEMS_Y) {
      const int lane = i % LANES, k = i / LANES * WORD_INPUTS;
      __global const weight_t *source = weights + (size_t)((start + k) / WORD_INPUTS) * LANES + lane;
#if BITS <= 8
      const size_t group = groups + (size_t)((start + k) / block) * LANES + lane;
      const float scale = load_half(scales, group), zero = zero_point(zeros, group, asymmetric);
      const uint q = *source;
      UNROLL for (int j = 0; j < WORD_INPUTS; j++)
        ((__local float *)values[k + j])[lane] = (CODE(q, j) - zero) * scale;
#else
      ((__local float *)values[k])[lane] = load_weight(source, 0);
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    UNROLL for (int k = 0; k < DEPTH; k++) {
      const float4 value = values[k][column];
      UNROLL for (int r = 0; r < ITEM_TOKENS; r += 4) {
        const float4 input = inputs[k][(strip * ITEM_TOKENS + r) / 4];
        sums[r] = FMA((float4)input.x, value, sums[r]);
        sums[r + 1] = FMA((float4)input.y, value, sums[r + 1]);
        sums[r + 2] = FMA((float4)input.z, value, sums[r + 2]);
        sums[r + 3] = FMA((float4)input.w, value, sums[r + 3]);
      }
    }
  }
  y += (size_t)(first_token + token) * rows + tile.y;
  for (int r = 0; r < ITEM_TOKENS; r++) {
    const int t = strip * ITEM_TOKENS + r;
    const float *lanes = (const float *)&sums[r];
    for (int c = 0; c < 4; c++)
      if (t < count && column * 4 + c < tile.z) store_out(lanes[c], y + (size_t)t * rows, column * 4 + c);
  }
}
#endif
