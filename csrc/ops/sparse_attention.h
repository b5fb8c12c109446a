// Adapter of sparse_attention: tensors to SparseAttentionParams, and the op function that register_*.cpp registers.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "kernels/sparse_attention.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// The tensors of a call, by reference.
struct SparseTensors {
  const torch::stable::Tensor &query, &arena, &window_table;
  const OptionalTensor &entry_table, &selected;
  const torch::stable::Tensor &cu_seqlens_q, &seqused_k;
  const OptionalTensor &sinks, &cos, &sin;
};

// Everything that can be checked without reading device memory. out and lse are not set.
SparseAttentionParams sparse_attention_params(const SparseTensors& tensors, std::int64_t window, std::int64_t value_dim,
                                              std::int64_t ratio, double scale, const SectionArguments& window_section,
                                              const SectionArguments& entry_section);

// The sections as the op names them.
SectionArguments window_section(std::int64_t rows_per_block, std::int64_t offset, std::int64_t scale_offset, std::string format);
SectionArguments entry_section(std::int64_t rows_per_block, std::int64_t offset, std::int64_t scale_offset, std::string format);

// CPU: what a token would read outside the arena, or a selected entry that it does not see, is an ArgumentError. Parallel over tokens.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> sparse_attention_cpu(
    torch::stable::Tensor query, torch::stable::Tensor arena, torch::stable::Tensor window_table, OptionalTensor entry_table,
    OptionalTensor selected, torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k, std::int64_t window,
    std::int64_t window_rows_per_block, std::int64_t window_offset, std::string window_format, double scale,
    std::int64_t window_scale_offset, std::int64_t ratio, std::int64_t entry_rows_per_block, std::int64_t entry_offset,
    std::string entry_format, std::int64_t entry_scale_offset, OptionalTensor sinks, OptionalTensor cos, OptionalTensor sin,
    std::int64_t value_dim);
// CUDA: on the current stream of the arena's device; what would be an error on the CPU counts as absent.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> sparse_attention_cuda(
    torch::stable::Tensor query, torch::stable::Tensor arena, torch::stable::Tensor window_table, OptionalTensor entry_table,
    OptionalTensor selected, torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k, std::int64_t window,
    std::int64_t window_rows_per_block, std::int64_t window_offset, std::string window_format, double scale,
    std::int64_t window_scale_offset, std::int64_t ratio, std::int64_t entry_rows_per_block, std::int64_t entry_offset,
    std::string entry_format, std::int64_t entry_scale_offset, OptionalTensor sinks, OptionalTensor cos, OptionalTensor sin,
    std::int64_t value_dim);

}  // namespace hetkv::ops
