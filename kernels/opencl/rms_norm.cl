// residual += delta, then out = residual / rms(residual) * weight, one work-group per row.
// Follows common.h and layers.h.

#define NORM_ONLY 0       // no delta
#define NORM_ADD 1        // delta is added and the sum stored back
#define NORM_ADD_HEAD 2   // delta is added, rows start at the step's head row, nothing is stored back

GROUP_SIZE __kernel void rms_norm(__global float *residual, __global const float *weight,
                                  __global act_t *out, __global const act_t *a, __global const act_t *b,
                                  __global const int *step, int split, int hidden, float epsilon, int mode) {
  size_t out_row = get_group_id(0);
  size_t row = mode == NORM_ADD_HEAD ? out_row + step[STEP_HEAD_ROW] : out_row;
  int lane = get_local_id(0);
  __global float *values = residual + row * hidden;
  member_row delta = {a + row * split, b + row * (hidden - split), split};
  float8 squares = 0.0f;
  for (int i = lane * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, values, i, count, value)
    if (mode != NORM_ONLY)
      value += load_member(delta, i, count);
    if (mode == NORM_ADD) {
      STORE_PART(store_float8, store_float, value, values, i, count)
    }
    squares = FMA(value, value, squares);
  }
  float sum = sum8(squares);
#if WG > 1
  __local float sums[WG];
  sums[lane] = sum;
  for (int width = WG / 2; width > 0; width /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < width)
      sums[lane] += sums[lane + width];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  sum = sums[0];
#endif
  float factor = 1.0f / sqrt(sum / hidden + epsilon);
  for (int i = lane * 8; i < hidden; i += WG * 8) {
    int count = min(8, hidden - i);
    LOAD_PART(load_float8, load_float, values, i, count, value)
    LOAD_PART(load_float8, load_float, weight, i, count, scale)
    if (mode == NORM_ADD_HEAD)
      value += load_member(delta, i, count);
    value = value * factor * scale;
    STORE_PART(store_act8, store_act, value, out + out_row * hidden, i, count)
  }
}
