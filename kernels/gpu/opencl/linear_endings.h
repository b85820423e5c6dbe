// What comes before and behind a linear layer of one token, in its kernel. Follows rounding.h, glue.h
// and linear_tiles.h.
//
//   NORMED    the input is a normed row that is not yet divided by its root mean square, float: the sums are
//   ADDED     y is the residual stream: the sums are added, and the next norm's input and its squares are written
//   GATED     y is activation(gate) * up; with two tiles, gate is the first
//   ROTATED   q is rotated and stored as float in y, k is rotated and stored in the cache as is v (rope.cl)
//
// A work-group has the rows of TILES tiles: those of gate and up, or of both halves of a head. With CODE_BITS it also
// rounds what a linear with int8 inputs reads next; its rows are whole blocks.

#ifdef NORMED
// squares: sums of squares of so many parts of the row.
#define NORMED_ARGUMENTS                                                                                     \
  , __global const float *restrict squares, int square_parts, int normed_columns, float epsilon
#define BEGIN_ENDING                                                                                         \
  __local float4 square_sums[ROWS / 4];                                                                      \
  if (part == 0) {                                                                                           \
    float sum = 0.0f;                                                                                        \
    for (uint i = row; i < (uint)square_parts; i += ROWS) sum += squares[i];                     \
    ((__local float *)square_sums)[row] = sum;                                                               \
  }
#define FACTOR (1.0f / sqrt(sum_of(square_sums) / normed_columns + epsilon))
#else
#define NORMED_ARGUMENTS
#define BEGIN_ENDING
#define FACTOR 1.0f
#endif

// The sum of a value of each row.
static inline float sum_of(__local const float4 *values) {
  float4 sum = 0.0f;
  for (uint i = 0; i < ROWS / 4; i++) sum += values[i];
  return across(sum);
}

#if defined(ADDED)
// next_x: the sum times the next norm's weight. next_squares: a number of each work-group.
#define ENDING_ARGUMENTS                                                                                     \
  NORMED_ARGUMENTS, __global const float *restrict bias, int has_bias, __global const float *restrict weight, \
      __global float *restrict next_x, __global float *restrict next_squares CODE_ARGUMENTS
#elif defined(GATED)
#define ENDING_ARGUMENTS                                                                                     \
  NORMED_ARGUMENTS, __global const float *restrict bias, int has_bias, int activation CODE_ARGUMENTS
#elif defined(ROTATED)
#define ENDING_ARGUMENTS                                                                                     \
  NORMED_ARGUMENTS, __global const float *restrict bias, int has_bias, __global const float *restrict norms, \
      int has_norm, float norm_epsilon, __global const float *restrict cosines,                              \
      __global const float *restrict sines, __global kv_t *restrict cache, __global const int *restrict step, \
      int table, int row_words, int heads, int kv_heads, int capacity
#else
#define ENDING_ARGUMENTS NORMED_ARGUMENTS
#endif

#ifdef CODE_BITS
// Round the work-group's values, of which so many are valid; `first` is the output of the first one.
#define ROUND_VALUES(first, valid)                                                                           \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
  if (part == 0 && row < ROWS / CODE_BLOCK && (int)(row * CODE_BLOCK) < (valid))                             \
    round_block((__local const float *)values + row * CODE_BLOCK, codes + (first) + row * CODE_BLOCK,        \
                code_blocks + (first) / CODE_BLOCK + row, CODE_BLOCK);
#else
#define ROUND_VALUES(first, valid)
#endif

// Adds the slices' sums, with the bias; those `value` that leading work-items hold.
#define STORE_SLICES(partial)                                                                                \
  const bool leads = count > 0 && part % SLICES == 0, holds = leads && lane < (uint)tile.z;                  \
  const uint column = tile.y + lane;                                                                         \
  partial[part * ROWS + row] = total0;                                                                       \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
  float value = 0.0f;                                                                                        \
  if (holds) {                                                                                               \
    for (uint s = 0; s < SLICES; s++) value += partial[(part + s) * ROWS + row];                             \
    value *= FACTOR;                                                                                         \
    ADD_BIAS                                                                                                 \
  }                                                                                                          \
  END(value)

#if defined(ADDED) || defined(GATED) || defined(ROTATED)
// The values of a work-group, [tile][row].
#define FIND_VALUES                                                                                          \
  __local float4 values[TILES * ROWS / 4];                                                                   \
  __local float *own = (__local float *)values + part / SLICES * ROWS + row;
#define ADD_BIAS                                                                                             \
  if (has_bias) value += bias[column];
#else
#define ADD_BIAS
#endif

#if defined(ADDED)
#define END(value)                                                                                           \
  FIND_VALUES                                                                                                \
  if (holds) {                                                                                               \
    value += y[column];                                                                                      \
    y[column] = value;                                                                                       \
  }                                                                                                          \
  if (leads) *own = value * value;                                                                           \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
  if (part == 0 && row == 0) next_squares[get_group_id(0)] = sum_of(values);                                 \
  NEXT_INPUT(value)
#ifdef CODE_BITS
#define NEXT_INPUT(value)                                                                                    \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
  if (holds) *own = value * weight[column];                                                                  \
  ROUND_VALUES(column - row, tile.z - (int)(lane - row))
#else
#define NEXT_INPUT(value)                                                                                    \
  if (holds) next_x[column] = value * weight[column];
#endif

#elif defined(GATED)
#define END(value)                                                                                           \
  FIND_VALUES                                                                                                \
  if (leads) *own = value;                                                                                   \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
  if (holds && part == 0) {                                                                                  \
    const float8 gate = own[0];                                                                              \
    const float gated = (gate * gate_share(gate, gate < 0.0f ? -gate : gate, activation)).s0 * UP;                     \
    store_out(gated, y, column);                                                                             \
    *own = gated;                                                                                            \
  }                                                                                                          \
  ROUND_VALUES(column - row, tile.z - (int)(lane - row))
#if TILES == 2
#define UP own[ROWS]
#else
#define UP 1.0f
#endif

#elif defined(ROTATED)
// Heads are whole: HEAD_DIM divides TILES * LANES, and ROWS is LANES.
#define END(value)                                                                                           \
  FIND_VALUES                                                                                                \
  const int position = step[STEP_POSITION];                                                                  \
  const bool stored = holds && TOKENS_OF(step, row_words) > 0 && position < capacity;                        \
  const uint element = (part / SLICES * ROWS + row) % HEAD_DIM, q_rows = heads * HEAD_DIM, kv_rows = kv_heads * HEAD_DIM;           \
  const bool is_q = column < q_rows, is_v = column >= q_rows + kv_rows;                                      \
  if (leads) *own = value;                                                                                   \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                              \
  if (stored && !is_v) {                                                                                     \
    const uint other = element < ROTARY / 2 ? element + ROTARY / 2 : element - ROTARY / 2;                   \
    float with = own[(int)other - (int)element];                                                             \
    if (has_norm) {                                                                                          \
      const float scale = head_factor_of(own - element, has_norm * (HEAD_DIM / 8), norm_epsilon);           \
      __global const float *weights = norms + (is_q ? 0 : HEAD_DIM);                                         \
      value *= scale * weights[element];                                                                     \
      with *= scale * weights[other];                                                                        \
    }                                                                                                        \
    if (element < ROTARY) {                                                                                  \
      const uint angle = (uint)position * (ROTARY / 2) + element % (ROTARY / 2);                             \
      value = value * cosines[angle] + (element < ROTARY / 2 ? -with : with) * sines[angle];                 \
    }                                                                                                        \
  }                                                                                                          \
  if (stored && is_q) y[column] = value;                                                                     \
  KEEP_TURNED(value)                                                                                         \
  if (stored && !is_q) {                                                                                     \
    __global kv_t *target =                                                                                  \
        cache + HEAD_AT(step[table + (uint)position / PAGE], (column - q_rows) / HEAD_DIM, kv_heads, HEAD_DIM); \
    SCALE_TURNED(value, target)                                                                              \
    store_kv(value, target, (uint)position % PAGE * HEAD_DIM + element);                                     \
  }
#ifdef KV_CODES
#define KEEP_TURNED(value)                                                                                   \
  __local float turned[TILES * ROWS];                                                                        \
  __local float *own_turned = turned + part / SLICES * ROWS + row;                                           \
  if (leads) *own_turned = value;                                                                            \
  barrier(CLK_LOCAL_MEM_FENCE);
#define SCALE_TURNED(value, target)                                                                          \
  const float size = as_float(largest_of(own_turned - element));                                             \
  if (element == 0) SCALES_OF(target, HEAD_DIM)[(uint)position % PAGE] = size / 127.0f;                      \
  value *= size > 1e-30f ? 127.0f / size : 0.0f;
#else
#define KEEP_TURNED(value)
#define SCALE_TURNED(value, target)
#endif

// 1 / rms of a head of so many eights, a number that no compiler knows: unrolled, the loop would take all registers.
static inline float head_factor_of(__local const float *head, int eights, float epsilon) {
  float8 squares = 0.0f;
  for (int i = 0; i < eights; i++) {
    const float8 eight = vload8(i, head);
    squares = FMA(eight, eight, squares);
  }
  return 1.0f / sqrt(sum8(squares) / HEAD_DIM + epsilon);
}

// The largest magnitude of a head as bits, which compare as integers so that NaN is the largest.
static inline int largest_of(__local const float *head) {
  int largest = 0;
  for (uint i = 0; i < HEAD_DIM; i++) largest = max(largest, as_int(head[i]) & 0x7fffffff);
  return largest;
}

#else
#define END(value)                                                                                           \
  if (holds) store_out(value, y, column);
#endif
