// Adapter of verify_blocks and checksum_blocks: tensors to params, and the op functions that register_*.cpp registers.
#pragma once

#include <cstdint>

#include "kernels/verify.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// Check everything that needs no look at device memory; where the results go is not set. Throw ArgumentError. Thread-safe.
VerifyParams verify_blocks_params(const torch::stable::Tensor& arena, const torch::stable::Tensor& blocks,
                                  std::int64_t block_bytes, const OptionalTensor& checksums, const OptionalTensor& zero_ranges,
                                  const OptionalTensor& finite_ranges, std::int64_t base_alignment,
                                  std::int64_t stride_alignment);
ChecksumParams checksum_blocks_params(const torch::stable::Tensor& arena, const torch::stable::Tensor& blocks,
                                      std::int64_t block_bytes);

// Parallel over blocks. Blocks outside the arena are a status, not an error; a range that does not fit is an ArgumentError.
torch::stable::Tensor verify_blocks_cpu(torch::stable::Tensor arena, torch::stable::Tensor blocks, std::int64_t block_bytes,
                                        OptionalTensor checksums, OptionalTensor zero_ranges, OptionalTensor finite_ranges,
                                        std::int64_t base_alignment, std::int64_t stride_alignment);
// Parallel over blocks. A block outside the arena is an ArgumentError.
torch::stable::Tensor checksum_blocks_cpu(torch::stable::Tensor arena, torch::stable::Tensor blocks, std::int64_t block_bytes);
// CUDA: on the current stream of the arena's device; a range that does not fit is a failed check of every block.
torch::stable::Tensor verify_blocks_cuda(torch::stable::Tensor arena, torch::stable::Tensor blocks, std::int64_t block_bytes,
                                         OptionalTensor checksums, OptionalTensor zero_ranges, OptionalTensor finite_ranges,
                                         std::int64_t base_alignment, std::int64_t stride_alignment);
// A block outside the arena has checksum 0.
torch::stable::Tensor checksum_blocks_cuda(torch::stable::Tensor arena, torch::stable::Tensor blocks, std::int64_t block_bytes);

}  // namespace hetkv::ops
