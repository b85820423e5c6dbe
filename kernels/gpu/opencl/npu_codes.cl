// Writes the input codes of integer NPU graphs, and reads their output codes. Follows common.h, glue.h and codes.h.

// Grid: a work-group for each token.
GROUP_SIZE __kernel void write_npu_codes(__global const act_t *restrict x, int columns CODE_ARGUMENTS) {
  __local float values[WG];
  size_t token = get_group_id(0);
  write_codes(x + token * columns, columns, code_steps, per_token, codes + token * columns, factors + token,
              counts + count_place, values);
}

// With MEMBER_STEPS so many members have steps of their own, from the column `first` on.
#ifdef MEMBER_STEPS
#define MEMBER_ARGUMENT(n) , int first_##n, float step_##n
#define MEMBER_ARGUMENTS REPEAT(MEMBER_STEPS, MEMBER_ARGUMENT)
#define FROM_MEMBER(n) steps = at < first_##n ? steps : (steps_t)(step_##n);
#define CHOOSE_STEPS REPEAT(MEMBER_STEPS, FROM_MEMBER)
#else
#define MEMBER_ARGUMENTS
#define CHOOSE_STEPS (void)at;
#endif

// Grid: work-items over runs of `span` columns (a multiple of 8), tokens.
GROUP_SIZE __kernel void read_npu_codes(__global const code_t *restrict codes, __global const float *restrict factors,
                                        __global act_t *restrict out, __global uint *counts, int count_place,
                                        float step, int columns, int span MEMBER_ARGUMENTS) {
  size_t token = get_global_id(1);
  codes += token * columns;
  out += token * columns;
  if (token == 0 && get_global_id(0) == 0)
    atomic_add(counts + count_place + 1, (uint)get_global_size(1));
  const float factor = factors[token];
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  int8 at_end = 0;
  for (int i = begin; i + 8 <= end; i += 8) {
#ifdef WHOLE_EIGHTS
    const float8 code = FLOATS_OF_CODES(*(__global const code8_t *)(codes + i));
#else
    const float8 code = FLOATS_OF_CODES(*(__global const loose_code8_t *)(codes + i));
#endif
    at_end += (code < 0.5f) + (code > LARGEST_CODE - 0.5f);
    typedef float8 steps_t;
    const int8 at = i + (int8)(0, 1, 2, 3, 4, 5, 6, 7);
    steps_t steps = step;
    CHOOSE_STEPS
    store_act8((code - ZERO_CODE) * (steps * factor), out, i);
  }
#ifndef WHOLE_EIGHTS
  for (int at = max(begin, end - end % 8); at < end; ++at) {
    typedef float steps_t;
    steps_t steps = step;
    CHOOSE_STEPS
    at_end.s0 -= codes[at] == 0 || codes[at] == LARGEST_CODE;
    store_act(((float)codes[at] - ZERO_CODE) * (steps * factor), out, at);
  }
#endif
  count_ends(at_end, counts + count_place);
}
