// Adapter of sparse_attention: tensors to SparseAttentionParams, and the op function that register_*.cpp registers.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "kernels/sparse_attention.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// CPU: what a token would read outside the arena, or a selected entry that it does not see, is an ArgumentError. Parallel over tokens.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> sparse_attention_cpu(
    torch::stable::Tensor query, torch::stable::Tensor arena, torch::stable::Tensor window_table, OptionalTensor entry_table,
    OptionalTensor selected, torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k, std::int64_t window,
    std::int64_t window_rows_per_block, std::int64_t window_offset, std::string window_format, double scale,
    std::int64_t window_scale_offset, std::int64_t ratio, std::int64_t entry_rows_per_block, std::int64_t entry_offset,
    std::string entry_format, std::int64_t entry_scale_offset, OptionalTensor sinks, OptionalTensor cos, OptionalTensor sin);

}  // namespace hetkv::ops
