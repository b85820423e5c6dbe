// Gated activation, learned positions, join and bias of the logits, soft cap. Follows common.h, rounding.h and glue.h.
// Grid: work-items over runs of `span` columns (a multiple of 8), tokens.

// out = activation(gate) * up of the two members gate and up, which may have a bias; of one member, its activation
// alone. With CODE_BITS the kernel also rounds its output to int8. With FACTORS the output is multiplied by columns of another array.
// With BY_EXPERT rows are those of pairs of a token and an expert, and each expert has a bias (experts.cl); no other processor
// takes any. With SLOPES the activation is xIELU (kernels/ops.py). With CUTOFFS gate exceeds a number of its token, which
// is taken off it, or is zero. With CLIPPED gate is bounded from above and up on both sides, and the output is
// (up + 1) * gate * sigmoid(slope * gate).
#ifdef FACTORS
#define FACTOR_ARGUMENTS __global const act_t *factors, int factor_columns, int first_factor,
#else
#define FACTOR_ARGUMENTS
#endif
#ifdef BY_EXPERT
#define EXPERT_ARGUMENTS __global const int *position, __global const int *chosen,
#else
#define EXPERT_ARGUMENTS
#endif
#ifdef CLIPPED
#define CLIP_ARGUMENTS float limit, float slope,
#else
#define CLIP_ARGUMENTS
#endif
#ifdef SLOPES
#define SLOPE_ARGUMENTS float rising, float falling, float linear, float largest,
#else
#define SLOPE_ARGUMENTS
#endif
#ifdef CUTOFFS
#define CUTOFF_ARGUMENTS __global const float *cutoffs,
#else
#define CUTOFF_ARGUMENTS
#endif
GROUP_SIZE __kernel void gated_activation(__global const act_t *a, __global const act_t *b,
                                          __global act_t *out, __global const float *bias,
                                          FACTOR_ARGUMENTS EXPERT_ARGUMENTS CLIP_ARGUMENTS SLOPE_ARGUMENTS CUTOFF_ARGUMENTS
                                          int activation, int has_bias, int members, int gate_split, int up_split, int columns, int span
                                          CODE_ARGUMENTS) {
  size_t token = get_global_id(1);
#ifdef BY_EXPERT
  bias += (size_t)chosen[token] * members * columns;
  token = position[token];
#endif
  int a_columns = gate_split + up_split;
  __global const act_t *a_row = a + token * a_columns;
  __global const act_t *b_row = b + token * COLUMNS_OF_B(members * columns, a_columns);
  member_row gates = {a_row, b_row, gate_split};
  member_row ups = {a_row + gate_split, b_row + COLUMNS_OF_B(columns, gate_split), up_split};
  __global act_t *target = out + token * columns;
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  for (int i = begin; i < end; i += 8) {
    int count = min(8, columns - i);
    float8 gate = load_member(gates, i, count);
    float8 up = 1.0f;
    if (members == 2)
      up = load_member(ups, i, count);
    if (has_bias) {
      LOAD_PART(load_float8, load_float, bias, i, count, gate_bias)
      gate += gate_bias;
      if (members == 2) {
        LOAD_PART(load_float8, load_float, bias + columns, i, count, up_bias)
        up += up_bias;
      }
    }
#ifdef CUTOFFS
    gate -= cutoffs[token];
    gate = gate < 0.0f ? (float8)0.0f : gate;
#endif
#ifdef CLIPPED
    gate = gate > limit ? limit : gate;
    up = (up > limit ? limit : up < -limit ? -limit : up) + 1.0f;
    float8 size = (gate < 0.0f ? -gate : gate) * slope;
#else
    float8 size = gate < 0.0f ? -gate : gate;
#endif
#ifdef SLOPES
    float8 low = gate > largest ? (float8)largest : gate;
    // exp(x) - 1 - x loses its digits near 0, where its series has them.
    float8 near = low * low * 0.5f * (1.0f + low / 3.0f * (1.0f + low / 4.0f * (1.0f + low / 5.0f * (1.0f + low / 6.0f))));
    float8 bent = low > -0.25f ? near : exp2_8(low * 1.44269504f) - 1.0f - low;
    bent = gate > 0.0f ? rising * gate * gate : falling * (bent + low - gate);
    float8 value = (bent + linear * gate) * up;
#else
    float8 value = gate * gate_share(gate, size, activation) * up;
#endif
#ifdef FACTORS
    LOAD_PART(load_act8, load_act, factors, token * factor_columns + first_factor + i, count, factor)
    value *= factor;
#endif
    STORE_PART(store_act8, store_act, value, target, i, count)
  }
#ifdef CODE_BITS
  // The work-group has written whole blocks, as WG * span is a multiple of every block.
  wait_for_values();
  uint first = get_group_id(0) * WG * span, stop = min((uint)columns, first + WG * span);
  for (uint block = first / CODE_BLOCK + get_local_id(0); block < (uint)stop / CODE_BLOCK; block += WG)
    round_written(out, codes, code_blocks, token * ((uint)columns / CODE_BLOCK) + block);
#endif
}

// residual += rows of a table, that of each token's position, in place.
GROUP_SIZE __kernel void add_positions(__global float *residual, __global const float *table, __global const int *step,
                                       int columns, int span) {
  size_t token = get_global_id(1);
  if ((int)token >= step[STEP_LENGTH])
    return;
  __global float *row = residual + token * columns;
  __global const float *learned = table + (size_t)(step[STEP_POSITION] + (int)token) * columns;
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  for (int i = begin; i < end; i += 8) {
    int count = min(8, columns - i);
    LOAD_PART(load_float8, load_float, row, i, count, value)
    LOAD_PART(load_float8, load_float, learned, i, count, position)
    value += position;
    STORE_PART(store_float8, store_float, value, row, i, count)
  }
}

// Joins the two segments of the head's output as float.
GROUP_SIZE __kernel void join_logits(__global const act_t *a, __global const act_t *b, __global float *out,
                                     int split, int columns, int span) {
  size_t row = get_global_id(1);
  member_row logits = {a + row * split, b + row * COLUMNS_OF_B(columns, split), split};
  __global float *target = out + row * columns;
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  for (int i = begin; i < end; i += 8) {
    int count = min(8, columns - i);
    float8 value = load_member(logits, i, count);
    STORE_PART(store_float8, store_float, value, target, i, count)
  }
}

// logits += bias, in place.
GROUP_SIZE __kernel void add_bias(__global float *logits, __global const float *bias, int columns, int span) {
  __global float *row = logits + get_global_id(1) * columns;
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  for (int i = begin; i < end; i += 8) {
    int count = min(8, columns - i);
    LOAD_PART(load_float8, load_float, row, i, count, value)
    LOAD_PART(load_float8, load_float, bias, i, count, shift)
    value += shift;
    STORE_PART(store_float8, store_float, value, row, i, count)
  }
}

// logits = cap * tanh(logits / cap), in place.
GROUP_SIZE __kernel void soft_cap(__global float *logits, float cap, int columns, int span) {
  __global float *row = logits + get_global_id(1) * columns;
  int begin = get_global_id(0) * span, end = min(columns, begin + span);
  for (int i = begin; i < end; i += 8) {
    int count = min(8, columns - i);
    LOAD_PART(load_float8, load_float, row, i, count, value)
    value = tanh_8(value / cap) * cap;
    STORE_PART(store_float8, store_float, value, row, i, count)
  }
}
