// Adapter of block_scores: tensors to BlockScoresParams, and the op functions that register_*.cpp registers.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/block_scores.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

// The tensors of a call, by reference.
struct BlockScoresTensors {
  const torch::stable::Tensor &query, &arena, &block_table, &cu_seqlens_q, &seqused_k;
};

// Everything that can be checked without reading device memory. scores is not set.
BlockScoresParams block_scores_params(const BlockScoresTensors& tensors, const SectionArguments& section,
                                      std::int64_t routed_tokens, std::int64_t local_blocks);

// CPU: a block of a key that a token sees outside the arena is an ArgumentError. Parallel over tokens and routed blocks.
torch::stable::Tensor block_scores_cpu(torch::stable::Tensor query, torch::stable::Tensor arena,
                                       torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                                       torch::stable::Tensor seqused_k, std::int64_t rows_per_block, std::int64_t section_offset,
                                       std::string entry_format, std::int64_t scale_offset, std::int64_t routed_tokens,
                                       std::int64_t local_blocks);
// CUDA: on the current stream of the arena's device; what would be an error on the CPU counts as absent.
torch::stable::Tensor block_scores_cuda(torch::stable::Tensor query, torch::stable::Tensor arena,
                                        torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                                        torch::stable::Tensor seqused_k, std::int64_t rows_per_block, std::int64_t section_offset,
                                        std::string entry_format, std::int64_t scale_offset, std::int64_t routed_tokens,
                                        std::int64_t local_blocks);

}  // namespace hetkv::ops
