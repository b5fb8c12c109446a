// Adapter of copy_blocks and transfer_blocks: tensors to BlockCopyParams, and the op functions that register_*.cpp registers.
#pragma once

#include <cstdint>

#include "kernels/block_copy.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// Parallel over pairs. A part outside its arena, or pairs of which one writes what another reads or writes, are an ArgumentError before
// any byte is written.
void copy_blocks_cpu(torch::stable::Tensor arena, torch::stable::Tensor source, torch::stable::Tensor target,
                     std::int64_t num_bytes, std::int64_t begin);
void transfer_blocks_cpu(torch::stable::Tensor target_arena, torch::stable::Tensor source_arena, torch::stable::Tensor source,
                         torch::stable::Tensor target, std::int64_t num_bytes, std::int64_t begin);

}  // namespace hetkv::ops
