// A causal convolution of each channel over TAPS tokens, with a gate before and one behind:
// out = c * sum of taps[i] * u[token + i - (TAPS - 1)], where u = b * x of the three members b, c and x.
// Inputs u of earlier passes come from the slot [TAPS - 1][columns] of the state that the step buffer names, zeros at
// position 0; the last ones of this pass go to another slot. Inputs are float before they are stored, so that a pass of
// many tokens and passes of one each give the same bits. Follows common.h, rounding.h and glue.h.
// Grid: work-items over runs of `span` columns (a multiple of 8), tokens.

#define HISTORY (TAPS - 1)

GROUP_SIZE __kernel void short_conv(__global const act_t *a, __global const act_t *b, __global act_t *out,
                                    __global const float *taps, __global float *states, __global const int *step,
                                    int row_words, int b_split, int c_split, int x_split, int columns, int span
                                    CODE_ARGUMENTS) {
  const uint row_of_all = get_global_id(1), first_row = row_words ? row_of_all : 0;
  step += first_row * row_words;
  const int token = row_of_all - first_row, length = TOKENS_OF(step, row_words);
  const int a_columns = b_split + c_split + x_split;
  const int b_columns = COLUMNS_OF_B(3 * columns, a_columns);
  __global const float *before = states + (size_t)step[STEP_STATE_READ] * HISTORY * columns;
  __global float *behind = states + (size_t)step[STEP_STATE_WRITTEN] * HISTORY * columns;
  const int known = step[STEP_POSITION] ? HISTORY : 0;
  a += (size_t)first_row * a_columns;
  b += (size_t)first_row * b_columns;
  __global act_t *target = out + (size_t)row_of_all * columns;
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  for (int i = begin; i < end; i += 8) {
    int count = min(8, columns - i);
    float8 sum = 0.0f, input = 0.0f;
    for (int tap = 0; tap < TAPS; ++tap) {
      const int from = token + tap - HISTORY;
      input = 0.0f;
      if (from >= 0) {
        __global const act_t *a_row = a + from * a_columns, *b_row = b + from * b_columns;
        member_row gates = {a_row, b_row, b_split};
        member_row inputs = {a_row + b_split + c_split,
                             b_row + COLUMNS_OF_B(2 * columns, b_split + c_split), x_split};
        input = load_member(gates, i, count) * load_member(inputs, i, count);
      } else if (known) {
        LOAD_PART(load_float8, load_float, before + (from + HISTORY) * columns, i, count, held)
        input = held;
      }
      LOAD_PART(load_float8, load_float, taps + tap * columns, i, count, weight)
      sum = FMA(input, weight, sum);
    }
    const int row = token - (length - HISTORY);
    if (row >= 0 && row < HISTORY) {
      STORE_PART(store_float8, store_float, input, behind + row * columns, i, count)
    }
    // A pass shorter than the history keeps the newest inputs before it.
    for (int kept = 0; token == 0 && kept < HISTORY - length; ++kept) {
      float8 moved = 0.0f;
      if (known) {
        LOAD_PART(load_float8, load_float, before + (kept + length) * columns, i, count, held)
        moved = held;
      }
      STORE_PART(store_float8, store_float, moved, behind + kept * columns, i, count)
    }
    member_row outer = {a + token * a_columns + b_split,
                        b + token * b_columns + COLUMNS_OF_B(columns, b_split), c_split};
    float8 value = load_member(outer, i, count) * sum;
    STORE_PART(store_act8, store_act, value, target, i, count)
  }
#ifdef CODE_BITS
  // The work-group has written whole blocks, as WG * span is a multiple of every block.
  wait_for_values();
  uint first = get_group_id(0) * WG * span, stop = min((uint)columns, first + WG * span);
  for (uint block = first / CODE_BLOCK + get_local_id(0); block < (uint)stop / CODE_BLOCK; block += WG)
    round_written(out, codes, code_blocks, row_of_all * ((uint)columns / CODE_BLOCK) + block);
#endif
}
