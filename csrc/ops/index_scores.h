// Adapter of index_scores and select_entries: tensors to IndexScoresParams, and the op functions that register_*.cpp registers.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/index_scores.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

struct IndexTensors {
  const char* op;
  const torch::stable::Tensor &query, &weights, &arena, &block_table, &cu_seqlens_q, &seqused_k;
};

// Checks everything that needs no look at device memory. Throws ArgumentError. Thread-safe.
IndexScoresParams index_scores_params(const IndexTensors& tensors, std::int64_t ratio, const SectionArguments& section);

// CPU: a block of an entry that a token sees outside the arena is an ArgumentError.
torch::stable::Tensor index_scores_cpu(torch::stable::Tensor query, torch::stable::Tensor weights, torch::stable::Tensor arena,
                                       torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                                       torch::stable::Tensor seqused_k, std::int64_t ratio, std::int64_t rows_per_block,
                                       std::int64_t section_offset, std::string entry_format, std::int64_t scale_offset);

// The best k entries of every token, without a matrix of scores: one row of scores per thread.
torch::stable::Tensor select_entries_cpu(torch::stable::Tensor query, torch::stable::Tensor weights, torch::stable::Tensor arena,
                                         torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                                         torch::stable::Tensor seqused_k, std::int64_t ratio, std::int64_t rows_per_block,
                                         std::int64_t section_offset, std::string entry_format, std::int64_t k,
                                         std::int64_t scale_offset);

// CUDA: on the current stream of the arena's device; an entry in a block outside the arena scores -inf.
torch::stable::Tensor index_scores_cuda(torch::stable::Tensor query, torch::stable::Tensor weights, torch::stable::Tensor arena,
                                        torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                                        torch::stable::Tensor seqused_k, std::int64_t ratio, std::int64_t rows_per_block,
                                        std::int64_t section_offset, std::string entry_format, std::int64_t scale_offset);

// The scores of as many tokens at a time as fit a workspace of fixed size.
torch::stable::Tensor select_entries_cuda(torch::stable::Tensor query, torch::stable::Tensor weights, torch::stable::Tensor arena,
                                          torch::stable::Tensor block_table, torch::stable::Tensor cu_seqlens_q,
                                          torch::stable::Tensor seqused_k, std::int64_t ratio, std::int64_t rows_per_block,
                                          std::int64_t section_offset, std::string entry_format, std::int64_t k,
                                          std::int64_t scale_offset);

}  // namespace hetkv::ops
