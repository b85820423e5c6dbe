// Attention for devices whose work-items run in lockstep groups (GPUs). Follows attention.h.
//
// Each pass takes as many keys as the group has work-items. A work-item computes the scores of one key and the weighted
// sum of one column of the head; queries, scores and row sums lie in local memory.

#define COLUMNS ((HEAD_DIM + WG - 1) / WG)
#define TEAM (WG / ROWS < 8 ? WG / ROWS : 8)  // work-items that reduce one row

GROUP_SIZE __kernel void attention(__global const float *q, __global const kv_t *cache, __global act_t *out,
                                   __global float *partial, __global const int *step, ulong k_offset,
                                   ulong v_offset, ulong head_stride, int group, int window, int part_keys,
                                   float scale, float cap CODE_ARGUMENTS) {
  __local float queries[ROWS * HEAD_DIM], scores[ROWS * WG], reduced[ROWS * TEAM];
  __local float largest[ROWS], total[ROWS], decay[ROWS];
  // The row tiles that see most keys come first.
  attention_tile tile = find_tile(step, get_num_groups(0) - 1 - get_group_id(0), get_group_id(2),
                                  get_num_groups(2), group, window, part_keys);
  int lane = get_local_id(0), row_of_lane = lane / TEAM, teammate = lane % TEAM;
  bool reduces = row_of_lane < ROWS;
  int kv_head = get_group_id(1), heads = get_num_groups(1) * group, parts = PARTS;
  __global const kv_t *keys = cache + k_offset + kv_head * head_stride;
  __global const kv_t *values = cache + v_offset + kv_head * head_stride;
  // A tile without rows sees no keys and writes nothing. With a return here and a barrier behind the last store
  // PoCL 3 loses what the group shares in between.
  if (tile.rows <= 0)
    tile.stop = tile.start;

  for (int i = lane; i < ROWS * HEAD_DIM; i += WG) {
    int row = max(0, tile.first_row + min(i / HEAD_DIM, tile.rows - 1));
    size_t at = (size_t)(row / group) * heads + kv_head * group + row % group;
    queries[i] = q[at * HEAD_DIM + i % HEAD_DIM] * scale;
  }
  if (lane < ROWS) {
    largest[lane] = NO_SCORE;
    total[lane] = 0.0f;
  }
  float sums[ROWS * COLUMNS];
  UNROLL for (int i = 0; i < ROWS * COLUMNS; ++i) sums[i] = 0.0f;
  barrier(CLK_LOCAL_MEM_FENCE);

  for (int first = tile.start; first < tile.stop; first += WG) {
    int key = first + lane, count = min(WG, tile.stop - first);
    __global const kv_t *key_row = keys + (size_t)min(key, tile.stop - 1) * HEAD_DIM;
    float score[ROWS];
    UNROLL for (int r = 0; r < ROWS; ++r) score[r] = 0.0f;
    for (int d = 0; d < HEAD_DIM; d += 8) {
      LOAD_PART(load_kv8, load_kv, key_row, d, HEAD_DIM - d, piece)
      if (d + 8 <= HEAD_DIM) {
        UNROLL for (int r = 0; r < ROWS; ++r) {
          float8 product = vload8(0, queries + r * HEAD_DIM + d) * piece;
          score[r] += sum8(product);
        }
      } else {
        for (int i = 0; i < HEAD_DIM - d; ++i)
          UNROLL for (int r = 0; r < ROWS; ++r)
            score[r] = FMA(queries[r * HEAD_DIM + d + i], ((float *)&piece)[i], score[r]);
      }
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      int token = tile.position + (tile.first_row + min(r, tile.rows - 1)) / group;
      bool seen = key < tile.stop && key <= token && (window <= 0 || key > token - window);
      float shown = cap > 0.0f ? tanh(score[r]) * cap : score[r];
      scores[r * WG + lane] = seen ? shown : NO_SCORE;
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    if (reduces) {
      float best = NO_SCORE;
      for (int i = teammate; i < WG; i += TEAM)
        best = max(best, scores[row_of_lane * WG + i]);
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
        float weight = exp2(scores[row_of_lane * WG + i] - best);
        scores[row_of_lane * WG + i] = weight;
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
    UNROLL for (int r = 0; r < ROWS; ++r)
      UNROLL for (int c = 0; c < COLUMNS; ++c) sums[r * COLUMNS + c] *= decay[r];
    for (int i = 0; i < count; ++i) {
      UNROLL for (int c = 0; c < COLUMNS; ++c) {
        // Work-items past the head's end read its last element and write nothing.
        float value = load_kv(values + (size_t)(first + i) * HEAD_DIM, min(lane + c * WG, HEAD_DIM - 1));
        UNROLL for (int r = 0; r < ROWS; ++r)
          sums[r * COLUMNS + c] = FMA(scores[r * WG + i], value, sums[r * COLUMNS + c]);
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }

  // Indices known when compiling keep the sums in registers. Each branch has one condition: PoCL 3 loses the
  // one that differs between work-items from `column < HEAD_DIM && parts > 1`.
  UNROLL for (int r = 0; r < ROWS; ++r) {
    if (r < tile.rows) {
      int row = tile.first_row + r;
      size_t at = (size_t)(row / group) * heads + kv_head * group + row % group;
      if (parts > 1) {
        __global float *target = partial + (at * parts + get_group_id(2)) * PARTIAL_COLUMNS;
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          if (lane + c * WG < HEAD_DIM)
            target[lane + c * WG] = sums[r * COLUMNS + c];
        }
        if (lane == 0) {
          target[HEAD_DIM] = largest[r];
          target[HEAD_DIM + 1] = total[r];
        }
      } else {
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
          if (lane + c * WG < HEAD_DIM)
            store_act(sums[r * COLUMNS + c] / total[r], out + at * HEAD_DIM, lane + c * WG);
        }
      }
    }
  }
#ifdef CODE_BITS
  round_tile(tile, group, kv_head, heads, out, codes, code_blocks);
#endif
}
