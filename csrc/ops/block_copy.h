// Adapter of copy_blocks and transfer_blocks: tensors to params, and the op functions that register_*.cpp registers.
#pragma once

#include <cstdint>

#include "kernels/block_copy.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// Check everything that needs no look at device memory. Throw ArgumentError. Thread-safe.
BlockCopyParams copy_blocks_params(const torch::stable::Tensor& arena, const torch::stable::Tensor& source,
                                   const torch::stable::Tensor& target, std::int64_t num_bytes, std::int64_t begin);
BlockCopyParams transfer_blocks_params(const torch::stable::Tensor& target_arena, const torch::stable::Tensor& source_arena,
                                       const torch::stable::Tensor& source, const torch::stable::Tensor& target,
                                       std::int64_t num_bytes, std::int64_t begin);

// Parallel over pairs. A part outside its arena, or pairs of which one writes what another reads or writes, are an ArgumentError
// before any byte is written.
void copy_blocks_cpu(torch::stable::Tensor arena, torch::stable::Tensor source, torch::stable::Tensor target,
                     std::int64_t num_bytes, std::int64_t begin);
void transfer_blocks_cpu(torch::stable::Tensor target_arena, torch::stable::Tensor source_arena, torch::stable::Tensor source,
                         torch::stable::Tensor target, std::int64_t num_bytes, std::int64_t begin);
// CUDA: on the current stream of the arenas' device; pairs of which a part is outside its arena are skipped, and what comes of
// pairs that depend on each other is open.
void copy_blocks_cuda(torch::stable::Tensor arena, torch::stable::Tensor source, torch::stable::Tensor target,
                      std::int64_t num_bytes, std::int64_t begin);
void transfer_blocks_cuda(torch::stable::Tensor target_arena, torch::stable::Tensor source_arena, torch::stable::Tensor source,
                          torch::stable::Tensor target, std::int64_t num_bytes, std::int64_t begin);

}  // namespace hetkv::ops
