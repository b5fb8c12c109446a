#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "ops/current_stream.h"
#include "ops/top_k.h"

namespace hetkv::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::int32_t checked_k_cuda(const char* op, std::int64_t k) {
  if (k < 1 || k > kMaxTopKCuda) {
    refuse_argument(op, "k", std::to_string(k), "1 to " + std::to_string(kMaxTopKCuda) + " on CUDA");
  }
  return static_cast<std::int32_t>(k);
}

Tensor top_k_cuda(Tensor scores, OptionalTensor counts, std::int64_t k) {
  TopKParams params = top_k_params(scores, counts, k);
  params.k = checked_k_cuda("top_k", k);
  Tensor indices = torch::stable::new_empty(scores, {params.num_rows, k}, ScalarType::Int);
  if (params.num_rows == 0) return indices;
  params.indices = static_cast<std::int32_t*>(indices.mutable_data_ptr());
  Tensor workspace = torch::stable::new_empty(scores, {top_k_cuda_workspace_words(params)}, ScalarType::Long);
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  hetkv::top_k_cuda(params, static_cast<std::uint64_t*>(workspace.mutable_data_ptr()),
                    current_cuda_stream(scores.get_device_index()));
  return indices;
}

}  // namespace hetkv::ops
