// Sigmoid, and sums of a work-group; follows glue.h.

// 1 / (1 + e^-x); the exponential of minus the magnitude cannot overflow.
static inline float8 sigmoid_8(float8 x) {
  float8 small = exp2_8((x < 0.0f ? x : -x) * 1.44269504f);
  return (x < 0.0f ? small : (float8)1.0f) / (1.0f + small);
}

// The sums of four values of each work-item of the group.
static inline float4 group_sums(float4 values, __local float4 *sums) {
#if WG > 1
  const int lane = get_local_id(0);
  sums[lane] = values;
  for (int width = WG / 2; width > 0; width /= 2) {
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lane < width)
      sums[lane] += sums[lane + width];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  values = sums[0];
#endif
  return values;
}
