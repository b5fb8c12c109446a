#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "ops/current_stream.h"
#include "ops/index_scores.h"
#include "ops/top_k.h"

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr std::int64_t kWorkspaceBytes = std::int64_t{64} << 20;  // of select_entries; more only if one token needs more

}  // namespace

Tensor index_scores_cuda(Tensor query, Tensor weights, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                         std::int64_t ratio, std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format,
                         std::int64_t scale_offset) {
  const IndexScoresParams params =
      index_scores_params({"index_scores", query, weights, arena, block_table, cu_seqlens_q, seqused_k}, ratio,
                          {rows_per_block, section_offset, scale_offset, entry_format});
  const std::int64_t width = block_table.size(1) * rows_per_block;
  Tensor out = torch::stable::new_empty(query, {params.num_tokens, width}, ScalarType::Float);
  if (out.numel() == 0) return out;
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  hetkv::index_scores_cuda(params, {0, params.num_tokens, static_cast<float*>(out.mutable_data_ptr()), width, nullptr},
                           current_cuda_stream(arena.get_device_index()));
  return out;
}

Tensor select_entries_cuda(Tensor query, Tensor weights, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                           std::int64_t ratio, std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format,
                           std::int64_t k, std::int64_t scale_offset) {
  constexpr const char* kOp = "select_entries";
  const IndexScoresParams params = index_scores_params({kOp, query, weights, arena, block_table, cu_seqlens_q, seqused_k}, ratio,
                                                       {rows_per_block, section_offset, scale_offset, entry_format});
  TopKParams best;
  best.k = checked_k_cuda(kOp, k);
  best.width = best.stride = block_table.size(1) * rows_per_block;
  best.num_rows = 1;
  Tensor out = torch::stable::new_empty(query, {params.num_tokens, k}, ScalarType::Int);
  if (params.num_tokens == 0) return out;
  auto* const indices = static_cast<std::int32_t*>(out.mutable_data_ptr());

  const std::int64_t token_bytes = 4 * best.width + 4 + 8 * top_k_cuda_workspace_words(best);
  const std::int64_t tokens = std::clamp<std::int64_t>(kWorkspaceBytes / token_bytes, 1, params.num_tokens);  // at a time
  best.num_rows = tokens;
  Tensor scores = torch::stable::new_empty(query, {tokens, best.width}, ScalarType::Float);
  Tensor visible = torch::stable::new_empty(query, {tokens}, ScalarType::Int);
  Tensor words = torch::stable::new_empty(query, {top_k_cuda_workspace_words(best)}, ScalarType::Long);
  IndexScoresRows rows;
  rows.scores = static_cast<float*>(scores.mutable_data_ptr());
  rows.stride = best.width;
  rows.visible = static_cast<std::int32_t*>(visible.mutable_data_ptr());
  best.scores = rows.scores;
  best.counts = rows.visible;

  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  void* const stream = current_cuda_stream(arena.get_device_index());
  for (rows.first_token = 0; rows.first_token < params.num_tokens; rows.first_token += tokens) {
    rows.num_tokens = best.num_rows = std::min(tokens, params.num_tokens - rows.first_token);
    hetkv::index_scores_cuda(params, rows, stream);
    best.indices = indices + rows.first_token * k;
    hetkv::top_k_cuda(best, static_cast<std::uint64_t*>(words.mutable_data_ptr()), stream);
  }
  return out;
}

}  // namespace hetkv::ops
