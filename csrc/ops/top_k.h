// Adapter of top_k: tensors to TopKParams, and the op function that register_*.cpp registers.
#pragma once

#include <cstdint>

#include "kernels/top_k.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// All but the indices. Throws ArgumentError. Thread-safe.
TopKParams top_k_params(const torch::stable::Tensor& scores, const OptionalTensor& counts, std::int64_t k);

// Parallel over rows.
torch::stable::Tensor top_k_cpu(torch::stable::Tensor scores, OptionalTensor counts, std::int64_t k);
// CUDA: on the current stream of the scores' device. k as checked_k_cuda says.
torch::stable::Tensor top_k_cuda(torch::stable::Tensor scores, OptionalTensor counts, std::int64_t k);

// k as an op takes it: 1 to 2^31 - 1.
std::int32_t checked_k(const char* op, std::int64_t k);
// As the CUDA kernel takes it: 1 to kMaxTopKCuda.
std::int32_t checked_k_cuda(const char* op, std::int64_t k);

}  // namespace hetkv::ops
