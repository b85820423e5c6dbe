// The common part of the glue kernels; follows common.h.
//
//   WG          work-items of a work-group: 1 where one explicit vector loop is fastest (a CPU), else 64..256
//   KV_HALF     the KV cache stores half instead of float
//   KV_CODES    it stores int8, and for each position of a head a float scale: value = code * scale
//   SUM         the segments of a linear's output are added (member_row)
//
// The step buffer, written by the host once a pass. In a pass of several sequences, a token of each, row r of inputs and
// outputs has words of its own, `row_words` behind those of the row before; elsewhere row_words is 0:
#define STEP_POSITION 0  // position of the pass's first token
#define STEP_LENGTH 1    // tokens of the pass
#define STEP_HEAD_ROW 2  // first row that the head reads
#define STEP_STATE_READ 3     // slot of recurrent state before the pass; none at position 0
#define STEP_STATE_WRITTEN 4  // slot of the state behind it

// Tokens of the pass that belong to one sequence.
#define TOKENS_OF(step, row_words) ((row_words) ? 1 : (step)[STEP_LENGTH])

#define GROUP_SIZE __attribute__((reqd_work_group_size(WG, 1, 1)))

#if defined(KV_CODES)
typedef char kv_t;
#define load_kv(p, i) (float)(p)[i]
#define load_kv8(p, i) load_char8(p, i)
#define store_kv(v, p, i) ((p)[i] = (char)ROUND8((float8)(v)).s0)
#define store_kv8(v, p, i) store_char8(v, p, i)
#elif defined(KV_HALF)
typedef half kv_t;
#ifdef HAS_HALF
#define load_kv(p, i) (float)(p)[i]
#else
#define load_kv(p, i) load_half(p, i)
#endif
#define load_kv8(p, i) load_half8(p, i)
#define store_kv(v, p, i) store_half(v, p, i)
#define store_kv8(v, p, i) store_half8(v, p, i)
#else
typedef float kv_t;
#define load_kv(p, i) ((p)[i])
#define load_kv8(p, i) load_float8(p, i)
#define store_kv(v, p, i) ((p)[i] = (v))
#define store_kv8(v, p, i) store_float8(v, p, i)
#endif
// A layer's keys and values lie in pages of 64 positions, [page][k|v][kv_head][row][head_dim]. The page of each 64 positions
// is a word of the step buffer, from the argument `table` on. With KV_CODES the scales of a head's rows follow them.
// Pages of positions before a window may have been given away.
#define PAGE 64
#ifdef KV_CODES
#define HEAD_ELEMENTS(head_dim) (PAGE * (head_dim) + PAGE * (uint)sizeof(float))
#define SCALES_OF(head, head_dim) ((__global float *)((head) + PAGE * (head_dim)))
#define SCALED(value, head, row) ((value) * SCALES_OF(head, HEAD_DIM)[row])
#else
#define HEAD_ELEMENTS(head_dim) (PAGE * (uint)(head_dim))
#define SCALED(value, head, row) (value)
#endif
// The first element of a head's rows in a page; heads of values come behind those of keys, or with SHARED_VALUES are those.
#ifdef SHARED_VALUES
#define PAGE_HEADS(kv_heads) (kv_heads)
#define VALUE_HEAD(head, kv_heads) (head)
#else
#define PAGE_HEADS(kv_heads) (2 * (kv_heads))
#define VALUE_HEAD(head, kv_heads) ((kv_heads) + (head))
#endif
#define HEAD_AT(page, head, kv_heads, head_dim) (((uint)(page) * PAGE_HEADS(kv_heads) + (head)) * HEAD_ELEMENTS(head_dim))

#ifdef WHOLE_EIGHTS
// Every count is 8, so no loop with a count of its own keeps the vector in memory.
#define LOAD_PART(load8, load1, p, i, count, value)                            \
  (void)(count);                                                               \
  float8 value = load8(p, i);
#define STORE_PART(store8, store1, value, p, i, count)                         \
  (void)(count);                                                               \
  store8(value, p, i);
#else
// Load and store `count` (at most 8) elements from i on as a float8, padded with zeros.
#define LOAD_PART(load8, load1, p, i, count, value)                            \
  float8 value;                                                                \
  if ((count) >= 8) {                                                          \
    value = load8(p, i);                                                       \
  } else {                                                                     \
    value = 0.0f;                                                              \
    for (int lane_ = 0; lane_ < (count); ++lane_)                              \
      ((float *)&value)[lane_] = load1(p, (i) + lane_);                        \
  }
#define STORE_PART(store8, store1, value, p, i, count)                         \
  if ((count) >= 8) {                                                          \
    store8(value, p, i);                                                       \
  } else {                                                                     \
    for (int lane_ = 0; lane_ < (count); ++lane_)                              \
      store1(((float *)&(value))[lane_], p, (i) + lane_);                      \
  }
#endif
#define load_float(p, i) ((p)[i])
#define store_float(v, p, i) ((p)[i] = (v))

// One row of one member of a split linear group: its columns below `split` lie in `a`, the others in `b`. With -DSUM
// all columns lie in `b`, and those in `a` are added. Both point at the row's first element of that member.
typedef struct {
  __global const act_t *a;
  __global const act_t *b;
  int split;
} member_row;

// Columns of `b` for `all` columns, of which `a` has `leading`.
#ifdef SUM
#define COLUMNS_OF_B(all, leading) (all)
#else
#define COLUMNS_OF_B(all, leading) ((all) - (leading))
#endif

// The columns [column, column + count) of a row, count at most 8, padded with zeros.
static inline float8 load_member(member_row row, int column, int count) {
#if defined(SUM)
  LOAD_PART(load_act8, load_act, row.b, column, count, value)
  const int added = min(count, row.split - column);
  if (added > 0) {
    LOAD_PART(load_act8, load_act, row.a, column, added, more)
    value += more;
  }
  return value;
#elif defined(WHOLE_EIGHTS)
  return column < row.split ? load_act8(row.a, column) : load_act8(row.b, column - row.split);
#else
  if (count == 8 && column + 8 <= row.split)
    return load_act8(row.a, column);
  if (count == 8 && column >= row.split)
    return load_act8(row.b, column - row.split);
  float8 value = 0.0f;
  for (int lane = 0; lane < count; ++lane) {
    int at = column + lane;
    ((float *)&value)[lane] = at < row.split ? load_act(row.a, at) : load_act(row.b, at - row.split);
  }
  return value;
#endif
}

// The sum of one value of each work-item of the group.
static inline float group_sum(float value, __local float *sums) {
#if WG > 1
  int lane = get_local_id(0);
  barrier(CLK_LOCAL_MEM_FENCE);
  sums[lane] = value;
  for (int width = WG / 2; width > 0; width /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < width)
      sums[lane] += sums[lane + width];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  value = sums[0];
#endif
  return value;
}

// 2^x for x <= 127, zero below -126; relative error 1e-7. Adding 1.5 * 2^23 rounds x to an integer, which
// then lies in the sum's lowest bits; the rest goes through a minimax polynomial.
static inline float8 exp2_8(float8 x) {
  float8 shifted = x + 12582912.0f;
  float8 rest = x - (shifted - 12582912.0f);
  float8 value = FMA(rest, (float8)1.326472e-3f, (float8)9.671513e-3f);
  value = FMA(rest, value, (float8)5.5507336e-2f);
  value = FMA(rest, value, (float8)2.4022242e-1f);
  value = FMA(rest, value, (float8)6.93147e-1f);
  value = FMA(rest, value, (float8)1.0f);
  value = as_float8(as_int8(value) + (as_int8(shifted) << 23));
  return x < -126.0f ? (float8)0.0f : value;
}

// tanh of any x; absolute error 2e-7, relative too near zero (the polynomial is that of Cephes' tanhf).
static inline float8 tanh_8(float8 x) {
  float8 size = x < 0.0f ? -x : x, square = x * x;
  float8 small = FMA(square, (float8)-5.70498872745e-3f, (float8)2.06390887954e-2f);
  small = FMA(square, small, (float8)-5.37397155531e-2f);
  small = FMA(square, small, (float8)1.33314422036e-1f);
  small = FMA(square, small, (float8)-3.33332819422e-1f);
  small = FMA(square * x, small, x);
  float8 decay = exp2_8(size * -2.88539008f);
  float8 large = (1.0f - decay) / (1.0f + decay);
  large = x < 0.0f ? -large : large;
  return size < 0.625f ? small : large;
}

// Numbers of activations: 0 is silu, and 5 is xIELU, with SLOPES (pointwise.cl).
#define GELU_TANH 1
#define GELU_ERF 2
#define RELU 3
#define RELU_SQUARED 4

// Factors of the polynomial in formula 7.1.26 of Abramowitz and Stegun, whose error is below 1.5e-7.
#define ERF_SHIFT 0.3275911f
#define ERF_SERIES(t) \
  (t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f)))))

// The share of a gate of a magnitude that an activation leaves. Activations but those of RELU are gate * sigmoid(s): s is
// the gate itself, or for gelu 2 sqrt(2 / pi) (gate + 0.044715 gate^3), since (1 + tanh(x)) / 2 = sigmoid(2 x). GELU_ERF is
// gate * (1 + erf(gate / sqrt(2))) / 2, where erf(x) = 1 - exp(-x^2) series(1 / (1 + shift x)).
static inline float8 gate_share(float8 gate, float8 size, int activation) {
  if (activation == GELU_TANH)
    size *= 1.59576912f * (1.0f + 0.044715f * size * size);
  float8 power = size;
  if (activation == GELU_ERF) {
    size *= 0.707106781f;
    power = size * size;
  }
  // The exponential of minus the magnitude cannot overflow.
  float8 small = exp2_8(power * -1.44269504f);
  float8 share = (gate < 0.0f ? small : (float8)1.0f) / (1.0f + small);
  if (activation == GELU_ERF) {
    float8 t = 1.0f / (1.0f + ERF_SHIFT * size);
    small *= 0.5f * ERF_SERIES(t);
    share = gate < 0.0f ? small : 1.0f - small;
  }
  if (activation >= RELU)
    share = gate < 0.0f ? (float8)0.0f : activation == RELU ? (float8)1.0f : gate;
  return share;
}
