#include "ops/top_k.h"

#include <algorithm>
#include <vector>

#include <torch/csrc/stable/ops.h>

namespace hetkv::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::int32_t checked_k(const char* op, std::int64_t k) {
  if (k < 1 || k > INT32_MAX) refuse_argument(op, "k", std::to_string(k), "1 to 2^31 - 1");
  return static_cast<std::int32_t>(k);
}

TopKParams top_k_params(const Tensor& scores, const OptionalTensor& counts, std::int64_t k) {
  constexpr const char* kOp = "top_k";
  const TensorArgument argument{kOp, "scores", scores};
  check_ndim(argument, 2);
  check_dtype(argument, ScalarType::Float);
  check_contiguous_from(argument, 1);
  TopKParams params;
  params.k = checked_k(kOp, k);
  params.num_rows = scores.size(0);
  params.width = scores.size(1);
  params.stride = scores.stride(0);
  if (counts) {
    check_dense({kOp, "counts", *counts}, argument, ScalarType::Int, {params.num_rows}, "the rows of scores");
    params.counts = data_of<std::int32_t>(*counts);
  }
  params.scores = data_of<float>(scores);
  return params;
}

Tensor top_k_cpu(Tensor scores, OptionalTensor counts, std::int64_t k) {
  constexpr std::int64_t kScoresPerThread = 32 * 1024;
  TopKParams params = top_k_params(scores, counts, k);
  Tensor indices = torch::stable::new_empty(scores, {params.num_rows, k}, ScalarType::Int);
  params.indices = static_cast<std::int32_t*>(indices.mutable_data_ptr());
  if (params.num_rows == 0) return indices;
  const std::int64_t grain = std::max<std::int64_t>(1, kScoresPerThread / std::max<std::int64_t>(1, params.width));
  torch::stable::parallel_for(0, params.num_rows, grain, [&params](std::int64_t begin, std::int64_t end) {
    std::vector<std::uint64_t> scratch(static_cast<std::size_t>(top_k_scratch_words(params.width, params.k)));
    hetkv::top_k_cpu(params, begin, end, scratch.data());
  });
  return indices;
}

}  // namespace hetkv::ops
