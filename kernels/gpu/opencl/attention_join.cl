// Joins the parts of the context, one work-group per token and head. Follows attention.h. With CODE_BITS a work-group
// has CODE_HEADS heads and also rounds them to int8.

#ifndef CODE_HEADS
#define CODE_HEADS 1
#endif

// The rows of partial results are no whole eights.
#ifdef WHOLE_EIGHTS
#define load_partial8(p, i) vload8(0, (p) + (i))
#else
#define load_partial8(p, i) load_float8(p, i)
#endif

// Joins the parts that were written.
static inline void join_head(__global const float *partial, __global act_t *out, int parts, int written, size_t row) {
  __global const float *source = partial + row * parts * PARTIAL_COLUMNS;
  float best = NO_SCORE;
  for (int part = 0; part < written; ++part)
    best = max(best, source[part * PARTIAL_COLUMNS + HEAD_DIM]);
  for (int d = (int)get_local_id(0) * 8; d < HEAD_DIM; d += WG * 8) {
    float8 sum = 0.0f;
    float total = 0.0f;
    for (int part = 0; part < written; ++part) {
      __global const float *one = source + part * PARTIAL_COLUMNS;
      float weight = exp2_8((float8)(one[HEAD_DIM] - best)).s0;
      LOAD_PART(load_partial8, load_float, one, d, HEAD_DIM - d, value)
      sum = FMA(value, (float8)weight, sum);
      total = FMA(one[HEAD_DIM + 1], weight, total);
    }
    sum = sum / total;
    STORE_PART(store_act8, store_act, sum, out + row * HEAD_DIM, d, HEAD_DIM - d)
  }
}

GROUP_SIZE __kernel void attention_join(__global const float *partial, __global act_t *out,
                                        __global const int *step, int heads, int parts, int row_words CODE_ARGUMENTS) {
  size_t first = get_group_id(0) * CODE_HEADS;
  step += QUOTIENT(first, heads) * row_words;
  const int keys = step[STEP_POSITION] + TOKENS_OF(step, row_words), part_keys = PART_KEYS(keys, parts);
  const int written = QUOTIENT(keys + part_keys - 1, part_keys);
  for (int head = 0; head < CODE_HEADS; ++head)
    join_head(partial, out, parts, written, first + head);
#ifdef CODE_BITS
  wait_for_values();
  for (int block = get_local_id(0); block < HEADS_BLOCKS; block += WG)
    round_written(out, codes, code_blocks, first * HEAD_DIM / CODE_BLOCK + block);
#endif
}
