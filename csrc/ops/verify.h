// Adapter of verify_blocks and checksum_blocks: tensors to VerifyParams, and the op functions that register_*.cpp registers.
#pragma once

#include <cstdint>

#include "kernels/verify.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// Parallel over blocks. Blocks outside the arena are a status, not an error.
torch::stable::Tensor verify_blocks_cpu(torch::stable::Tensor arena, torch::stable::Tensor blocks, std::int64_t block_bytes,
                                        OptionalTensor checksums, OptionalTensor zero_ranges, OptionalTensor finite_ranges,
                                        std::int64_t base_alignment, std::int64_t stride_alignment);
// Parallel over blocks. A block outside the arena is an ArgumentError.
torch::stable::Tensor checksum_blocks_cpu(torch::stable::Tensor arena, torch::stable::Tensor blocks, std::int64_t block_bytes);

}  // namespace hetkv::ops
