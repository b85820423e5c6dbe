// Writes the input codes of integer NPU graphs, and reads their output codes. Follows common.h, glue.h and codes.h.

// Grid: a work-group for each token.
GROUP_SIZE __kernel void write_npu_codes(__global const act_t *restrict x, int columns CODE_ARGUMENTS) {
  __local float values[WG];
  size_t token = get_group_id(0);
  write_codes(x + token * columns, columns, code_steps, per_token, codes + token * columns, factors + token,
              counts + count_place, values);
}

// With MEMBER_STEPS up to three members have steps of their own; second and third are their first columns.
#ifdef MEMBER_STEPS
#define MEMBER_ARGUMENTS , int second, int third, float step_0, float step_1, float step_2
#define STEP_AT(i) ((i) < second ? step_0 : (i) < third ? step_1 : step_2)
#else
#define MEMBER_ARGUMENTS
#define STEP_AT(i) step
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
#ifdef MEMBER_STEPS
    const int8 at = i + (int8)(0, 1, 2, 3, 4, 5, 6, 7);
    const float8 steps =
        at < second ? (float8)(step_0) : at < third ? (float8)(step_1) : (float8)(step_2);
    store_act8((code - ZERO_CODE) * (steps * factor), out, i);
#else
    store_act8((code - ZERO_CODE) * (step * factor), out, i);
#endif
  }
#ifndef WHOLE_EIGHTS
  for (int i = max(begin, end - end % 8); i < end; ++i) {
    at_end.s0 -= codes[i] == 0 || codes[i] == LARGEST_CODE;
    store_act(((float)codes[i] - ZERO_CODE) * (STEP_AT(i) * factor), out, i);
  }
#endif
  count_ends(at_end, counts + count_place);
}
