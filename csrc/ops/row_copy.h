// Adapter of scatter_rows and gather_rows: tensors to RowCopyParams, and the op functions that register_*.cpp registers.
#pragma once

#include <cstdint>
#include <optional>

#include <torch/csrc/stable/tensor.h>

#include "kernels/row_copy.h"

namespace hetkv::ops {

// Checks everything that needs no look at device memory and fills the parameters. Empty if there is nothing to copy.
// Throws ArgumentError. Thread-safe, does not block.
std::optional<RowCopyParams> scatter_rows_params(const torch::stable::Tensor& arena, const torch::stable::Tensor& rows,
                                                 const torch::stable::Tensor& slots, std::int64_t rows_per_block,
                                                 std::int64_t section_offset, std::int64_t layer_stride,
                                                 std::int64_t layer_begin);
std::optional<RowCopyParams> gather_rows_params(const torch::stable::Tensor& out, const torch::stable::Tensor& arena,
                                                const torch::stable::Tensor& slots, std::int64_t rows_per_block,
                                                std::int64_t section_offset, std::int64_t layer_stride, std::int64_t layer_begin);

// The ops. CPU: a bad slot is an ArgumentError before any byte is written; parallel over layers and rows when the copy is large.
// CUDA: enqueued on torch's current stream of the tensors' device; bad slots are skipped.
void scatter_rows_cpu(torch::stable::Tensor arena, torch::stable::Tensor rows, torch::stable::Tensor slots,
                      std::int64_t rows_per_block, std::int64_t section_offset, std::int64_t layer_stride,
                      std::int64_t layer_begin);
void gather_rows_cpu(torch::stable::Tensor out, torch::stable::Tensor arena, torch::stable::Tensor slots,
                     std::int64_t rows_per_block, std::int64_t section_offset, std::int64_t layer_stride,
                     std::int64_t layer_begin);
void scatter_rows_cuda(torch::stable::Tensor arena, torch::stable::Tensor rows, torch::stable::Tensor slots,
                       std::int64_t rows_per_block, std::int64_t section_offset, std::int64_t layer_stride,
                       std::int64_t layer_begin);
void gather_rows_cuda(torch::stable::Tensor out, torch::stable::Tensor arena, torch::stable::Tensor slots,
                      std::int64_t rows_per_block, std::int64_t section_offset, std::int64_t layer_stride,
                      std::int64_t layer_begin);

}  // namespace hetkv::ops
