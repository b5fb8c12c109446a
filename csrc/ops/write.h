// Adapter of write_rows and write_key_value: tensors to WriteParams, and the op functions that register_*.cpp registers.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/write.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// Checks everything that needs no look at device memory. Empty if there is nothing to write. Throws ArgumentError. Thread-safe.
std::optional<WriteParams> write_rows_params(const torch::stable::Tensor& arena, const torch::stable::Tensor& rows,
                                             const torch::stable::Tensor& slots, const SectionArguments& section,
                                             const OptionalTensor& norm_weight, double norm_eps, const OptionalTensor& cos,
                                             const OptionalTensor& sin, bool rope_interleaved, bool rope_trailing);
std::optional<std::array<WriteParams, 2>> write_key_value_params(
    const torch::stable::Tensor& arena, const torch::stable::Tensor& key, const torch::stable::Tensor& value,
    const torch::stable::Tensor& slots, std::int64_t rows_per_block, std::int64_t key_offset, std::int64_t value_offset,
    const std::string& entry_format, const OptionalTensor& cos, const OptionalTensor& sin, bool rope_interleaved,
    bool rope_trailing);

// The ops. CPU: a bad slot is an ArgumentError before any byte is written; parallel over rows.
void write_rows_cpu(torch::stable::Tensor arena, torch::stable::Tensor rows, torch::stable::Tensor slots,
                    std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format, std::int64_t scale_offset,
                    OptionalTensor norm_weight, double norm_eps, OptionalTensor cos, OptionalTensor sin, bool rope_interleaved,
                    bool rope_trailing);
void write_key_value_cpu(torch::stable::Tensor arena, torch::stable::Tensor key, torch::stable::Tensor value,
                         torch::stable::Tensor slots, std::int64_t rows_per_block, std::int64_t key_offset,
                         std::int64_t value_offset, std::string entry_format, OptionalTensor cos, OptionalTensor sin,
                         bool rope_interleaved, bool rope_trailing);
// CUDA: on the current stream of the arena's device; what is outside the arena is skipped.
void write_rows_cuda(torch::stable::Tensor arena, torch::stable::Tensor rows, torch::stable::Tensor slots,
                     std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format,
                     std::int64_t scale_offset, OptionalTensor norm_weight, double norm_eps, OptionalTensor cos,
                     OptionalTensor sin, bool rope_interleaved, bool rope_trailing);
void write_key_value_cuda(torch::stable::Tensor arena, torch::stable::Tensor key, torch::stable::Tensor value,
                          torch::stable::Tensor slots, std::int64_t rows_per_block, std::int64_t key_offset,
                          std::int64_t value_offset, std::string entry_format, OptionalTensor cos, OptionalTensor sin,
                          bool rope_interleaved, bool rope_trailing);

}  // namespace hetkv::ops
