// Adapter of top_k: tensors to TopKParams, and the op function that register_*.cpp registers.
#pragma once

#include <cstdint>

#include "kernels/top_k.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// Parallel over rows.
torch::stable::Tensor top_k_cpu(torch::stable::Tensor scores, OptionalTensor counts, std::int64_t k);

// k as an op takes it: 1 to 2^31 - 1.
std::int32_t checked_k(const char* op, std::int64_t k);

}  // namespace hetkv::ops
