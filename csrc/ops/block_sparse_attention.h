// Adapter of block_sparse_attention: tensors to BlockSparseParams, and the op functions that register_*.cpp registers.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "kernels/block_sparse_attention.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// The arguments of a call, by reference.
struct BlockSparseArguments {
  const torch::stable::Tensor &query, &arena, &block_table, &selected_blocks, &cu_seqlens_q, &seqused_k;
  const OptionalTensor& sinks;
  std::int64_t num_kv_heads, rows_per_block, key_offset, value_offset;
  const std::string& entry_format;
  double scale;
  std::int64_t routed_tokens;
};

// Everything that can be checked without reading device memory. out and lse are not set.
BlockSparseParams block_sparse_params(const BlockSparseArguments& arguments);

// CPU: what a token would read outside the arena, or a selected block below -1, is an ArgumentError. Parallel over (token, KV head).
std::tuple<torch::stable::Tensor, torch::stable::Tensor> block_sparse_attention_cpu(
    torch::stable::Tensor query, torch::stable::Tensor arena, torch::stable::Tensor block_table,
    torch::stable::Tensor selected_blocks, torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k,
    std::int64_t num_kv_heads, std::int64_t rows_per_block, std::int64_t key_offset, std::int64_t value_offset,
    std::string entry_format, double scale, std::int64_t routed_tokens, OptionalTensor sinks);
// CUDA: on the current stream of the arena's device; what would be an error on the CPU counts as absent.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> block_sparse_attention_cuda(
    torch::stable::Tensor query, torch::stable::Tensor arena, torch::stable::Tensor block_table,
    torch::stable::Tensor selected_blocks, torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k,
    std::int64_t num_kv_heads, std::int64_t rows_per_block, std::int64_t key_offset, std::int64_t value_offset,
    std::string entry_format, double scale, std::int64_t routed_tokens, OptionalTensor sinks);

}  // namespace hetkv::ops
