// The two results of every attention op.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <torch/csrc/stable/ops.h>

#include "ops/check_tensor.h"

namespace hetkv::ops {

struct AttentionOutput {
  torch::stable::Tensor out;  // [tokens, heads, dim of a value], of the query's dtype
  torch::stable::Tensor lse;  // float32 [tokens, heads]
};

// Allocates both beside the query and points the kernel's params at them. What they hold is not set.
template <typename Params>
AttentionOutput make_attention_output(Params& params, const torch::stable::Tensor& query, std::int64_t value_dim) {
  AttentionOutput output{torch::stable::new_empty(query, {query.size(0), query.size(1), value_dim}),
                         torch::stable::new_empty(query, {query.size(0), query.size(1)}, torch::headeronly::ScalarType::Float)};
  params.out = static_cast<std::byte*>(output.out.mutable_data_ptr());
  params.lse = static_cast<float*>(output.lse.mutable_data_ptr());
  return output;
}

// What tokens of no sequence get, in host memory: 0 and -inf.
template <typename Params>
void clear_attention_output(const Params& params, const AttentionOutput& output) {
  std::memset(params.out, 0, static_cast<std::size_t>(output.out.numel()) * output.out.element_size());
  std::fill_n(params.lse, output.lse.numel(), -__builtin_inff());
}

}  // namespace hetkv::ops
