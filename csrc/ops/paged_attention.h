// Adapter of paged_attention: tensors to PagedAttentionParams, and the op function that register_*.cpp registers.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "kernels/paged_attention.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

struct PagedAttentionTensors {
  torch::stable::Tensor query, arena, block_table, cu_seqlens_q, seqused_k;
  OptionalTensor sinks;
};
struct PagedAttentionSettings {
  std::int64_t num_kv_heads, rows_per_block, key_offset, value_offset;
  std::string entry_format;
  double scale;
  std::int64_t window;
  double softcap;
};

// What all devices check, in a fixed order. Looks at no tensor's values; out and lse are not set.
PagedAttentionParams paged_attention_params(const PagedAttentionTensors& tensors, const PagedAttentionSettings& settings);

// CPU: blocks that a token would read outside the arena are an ArgumentError. Parallel over (tile, KV head), or, where these are few,
// over splits of their keys; the result does not depend on which.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> paged_attention_cpu(
    torch::stable::Tensor query, torch::stable::Tensor arena, torch::stable::Tensor block_table,
    torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k, std::int64_t num_kv_heads, std::int64_t rows_per_block,
    std::int64_t key_offset, std::int64_t value_offset, std::string entry_format, double scale, std::int64_t window,
    OptionalTensor sinks, double softcap);

// CUDA: looks at no lengths; a block outside the arena counts as absent.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> paged_attention_cuda(
    torch::stable::Tensor query, torch::stable::Tensor arena, torch::stable::Tensor block_table,
    torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k, std::int64_t num_kv_heads, std::int64_t rows_per_block,
    std::int64_t key_offset, std::int64_t value_offset, std::string entry_format, double scale, std::int64_t window,
    OptionalTensor sinks, double softcap);

}  // namespace hetkv::ops
