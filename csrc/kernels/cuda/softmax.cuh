// The ends of a softmax in base 2, whose scores carry a factor log2(e).
#pragma once

#include "kernels/cuda/instructions.cuh"

namespace hetkv::gpu {

inline constexpr float kLog2e = 1.44269504088896341f;
inline constexpr float kLn2 = 0.693147180559945309f;

HETKV_DEVICE_INLINE float base_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }  // -inf - -inf would be NaN

// The end of a row: what its output is multiplied by, and its natural lse without the sink. sink: natural, -inf for none.
struct Finish {
  float factor, lse;
};

HETKV_DEVICE_INLINE Finish finish_of(float largest, float sum, float sink) {
  if (sum == 0.0f) return {0.0f, -INFINITY};
  const float with = sink * kLog2e, base = base_of(fmaxf(largest, with));
  const float worth = exp2_approx(largest - base);
  return {worth / (sum * worth + exp2_approx(with - base)), (largest + log2f(sum)) * kLn2};
}

}  // namespace hetkv::gpu
