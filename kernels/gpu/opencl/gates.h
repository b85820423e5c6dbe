// The sigmoid of gates; follows glue.h.

// 1 / (1 + e^-x); the exponential of minus the magnitude cannot overflow.
static inline float8 sigmoid_8(float8 x) {
  float8 small = exp2_8((x < 0.0f ? x : -x) * 1.44269504f);
  return (x < 0.0f ? small : (float8)1.0f) / (1.0f + small);
}
