// Several residual streams (AltUp), float [token][STREAMS][hidden], of which layers compute the first alone.
// One work-group per token. Follows common.h, rounding.h and glue.h.

#if WG > 1
#define STREAMS_WAIT barrier(CLK_LOCAL_MEM_FENCE);
#else
#define STREAMS_WAIT
#endif

static inline float row_product(__global const float *row, __global const float *weight, int hidden,
                                __local float *sums) {
  float8 products = 0.0f;
  for (int i = (int)get_local_id(0) * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, row, i, count, value)
    LOAD_PART(load_float8, load_float, weight, i, count, factor)
    products = FMA(value, factor, products);
  }
  return group_sum(sum8(products), sums);
}

static inline float member_squares(member_row row, int hidden, __local float *sums) {
  float8 squares = 0.0f;
  for (int i = (int)get_local_id(0) * 8; i < hidden; i += WG * 8) {
    float8 value = load_member(row, i, min(8, hidden - i));
    squares = FMA(value, value, squares);
  }
  return group_sum(sum8(squares), sums);
}

// mixed[i] = sum of coefficients[i][j] * tanh(router[j] . row / rms(row)) for `count` i; the router has taken on the
// weights of the row's norm.
static inline void route_row(__global const float *row, __global const float *router, __global const float *coefficients,
                             int count, int hidden, float epsilon, __local float *rates, __local float *mixed,
                             __local float *sums) {
  float factor = 1.0f / sqrt(row_product(row, row, hidden, sums) / hidden + epsilon);
  for (int j = 0; j < STREAMS; ++j) {
    float rate = row_product(row, router + j * hidden, hidden, sums) * factor;
    if (get_local_id(0) == 0)
      rates[j] = tanh_8((float8)(rate)).s0;
  }
  STREAMS_WAIT
  for (int i = get_local_id(0); i < count; i += WG) {
    float sum = 0.0f;
    for (int j = 0; j < STREAMS; ++j)
      sum = FMA(coefficients[i * STREAMS + j], rates[j], sum);
    mixed[i] = sum;
  }
  STREAMS_WAIT
}

// All streams but the first += delta / rms(delta) * post.
static inline void add_to_streams(__global float *rows, member_row delta, __global const float *post, int hidden,
                                  float epsilon, __local float *sums) {
  float factor = 1.0f / sqrt(member_squares(delta, hidden, sums) / hidden + epsilon);
  for (int i = (int)get_local_id(0) * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, post, i, count, scale)
    float8 added = load_member(delta, i, count) * factor * scale;
    for (int s = 1; s < STREAMS; ++s) {
      __global float *target = rows + s * hidden;
      LOAD_PART(load_float8, load_float, target, i, count, value)
      value += added;
      STORE_PART(store_float8, store_float, value, target, i, count)
    }
  }
}

// The delta is added first, if there is one. Then stream j += sum of mixed[j][s] * stream s, and the first is the residual.
GROUP_SIZE __kernel void predict_streams(__global float *streams, __global float *residual, __global const act_t *a,
                                         __global const act_t *b, __global const float *post,
                                         __global const float *router, __global const float *coefficients, int has_delta,
                                         int split, int hidden, float epsilon) {
  __local float sums[WG], rates[STREAMS], mixed[STREAMS * STREAMS];
  __local float8 held[WG * STREAMS];
  size_t token = get_group_id(0);
  __global float *rows = streams + token * STREAMS * hidden;
  if (has_delta) {
    member_row delta = {a + token * split, b + token * COLUMNS_OF_B(hidden, split), split};
    add_to_streams(rows, delta, post, hidden, epsilon, sums);
  }
  route_row(rows, router, coefficients, STREAMS * STREAMS, hidden, epsilon, rates, mixed, sums);
  __local float8 *own = held + get_local_id(0) * STREAMS;
  for (int i = (int)get_local_id(0) * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    for (int s = 0; s < STREAMS; ++s) {
      LOAD_PART(load_float8, load_float, rows + s * hidden, i, count, value)
      own[s] = value;
    }
    for (int j = 0; j < STREAMS; ++j) {
      float8 sum = own[j];
      for (int s = 0; s < STREAMS; ++s)
        sum = FMA((float8)(mixed[j * STREAMS + s]), own[s], sum);
      STORE_PART(store_float8, store_float, sum, rows + j * hidden, i, count)
      if (j == 0) {
        STORE_PART(store_float8, store_float, sum, residual + token * hidden, i, count)
      }
    }
  }
}

// residual += delta / rms(delta) * post; stream j += (1 + mixed[j]) * (residual - stream 0); then the first is the
// residual, and times `scale` the output.
GROUP_SIZE __kernel void correct_streams(__global float *streams, __global float *residual, __global act_t *out,
                                         __global const act_t *a, __global const act_t *b, __global const float *post,
                                         __global const float *router, __global const float *coefficients,
                                         __global const float *scale, int split, int hidden, float epsilon) {
  __local float sums[WG], rates[STREAMS], mixed[STREAMS];
  size_t token = get_group_id(0);
  __global float *rows = streams + token * STREAMS * hidden, *row = residual + token * hidden;
  member_row delta = {a + token * split, b + token * COLUMNS_OF_B(hidden, split), split};
  float factor = 1.0f / sqrt(member_squares(delta, hidden, sums) / hidden + epsilon);
  for (int i = (int)get_local_id(0) * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, row, i, count, value)
    LOAD_PART(load_float8, load_float, post, i, count, weight)
    value += load_member(delta, i, count) * factor * weight;
    STORE_PART(store_float8, store_float, value, row, i, count)
  }
  route_row(row, router, coefficients, STREAMS, hidden, epsilon, rates, mixed, sums);
  for (int i = (int)get_local_id(0) * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, row, i, count, computed)
    LOAD_PART(load_float8, load_float, rows, i, count, predicted)
    float8 change = computed - predicted;
    for (int j = 0; j < STREAMS; ++j) {
      __global float *target = rows + j * hidden;
      LOAD_PART(load_float8, load_float, target, i, count, value)
      value = FMA((float8)(1.0f + mixed[j]), change, value);
      STORE_PART(store_float8, store_float, value, target, i, count)
      if (j == 0) {
        STORE_PART(store_float8, store_float, value, row, i, count)
        LOAD_PART(load_float8, load_float, scale, i, count, weight)
        value *= weight;
        STORE_PART(store_act8, store_act, value, out + token * hidden, i, count)
      }
    }
  }
}

// out = a stream, behind the addition of the delta if there is one.
GROUP_SIZE __kernel void read_stream(__global float *streams, __global act_t *out, __global const act_t *a,
                                     __global const act_t *b, __global const float *post, int has_delta, int stream,
                                     int split, int hidden, float epsilon) {
  __local float sums[WG];
  size_t token = get_group_id(0);
  __global float *rows = streams + token * STREAMS * hidden;
  if (has_delta) {
    member_row delta = {a + token * split, b + token * COLUMNS_OF_B(hidden, split), split};
    add_to_streams(rows, delta, post, hidden, epsilon, sums);
  }
  for (int i = (int)get_local_id(0) * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, rows + stream * hidden, i, count, value)
    STORE_PART(store_act8, store_act, value, out + token * hidden, i, count)
  }
}

// Values brought to the root mean square of a token's first stream: with OPENS, where that is the residual, they become
// another stream; else they are added to the residual, or if they are the last stream stay where they are.
GROUP_SIZE __kernel void fit_stream(__global float *streams, __global float *residual, __global act_t *values,
                                    int stream, int hidden) {
  __local float sums[WG];
  size_t token = get_group_id(0);
  __global float *rows = streams + token * STREAMS * hidden, *row = residual + token * hidden;
  __global act_t *own = values + token * hidden;
  member_row fitted = {own, own, 0};
#ifdef OPENS
  __global const float *first = row;
  __global float *target = rows + stream * hidden;
#else
  __global const float *first = rows;
  __global float *target = row;
#endif
  float size = row_product(first, first, hidden, sums) / hidden;
  float factor = sqrt(size) / sqrt(max(member_squares(fitted, hidden, sums) / hidden, 1e-5f));
  for (int i = (int)get_local_id(0) * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    float8 value = load_member(fitted, i, count) * factor;
#ifdef OPENS
    if (stream == 1) {
      LOAD_PART(load_float8, load_float, first, i, count, copied)
      STORE_PART(store_float8, store_float, copied, rows, i, count)
    }
    STORE_PART(store_float8, store_float, value, target, i, count)
#else
    if (stream == STREAMS - 1) {
      STORE_PART(store_act8, store_act, value, own, i, count)
    } else {
      LOAD_PART(load_float8, load_float, target, i, count, sum)
      value += sum;
      STORE_PART(store_float8, store_float, value, target, i, count)
    }
#endif
  }
}
