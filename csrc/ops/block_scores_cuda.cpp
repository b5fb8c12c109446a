#include "ops/block_scores.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor block_scores_cuda(Tensor query, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                         std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format,
                         std::int64_t scale_offset, std::int64_t routed_tokens, std::int64_t local_blocks) {
  BlockScoresParams params =
      block_scores_params({query, arena, block_table, cu_seqlens_q, seqused_k},
                          {rows_per_block, section_offset, scale_offset, entry_format}, routed_tokens, local_blocks);
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  Tensor out = torch::stable::new_empty(query, {params.num_tokens, params.heads, params.num_blocks}, ScalarType::Float);
  if (out.numel() == 0) return out;
  params.scores = static_cast<float*>(out.mutable_data_ptr());
  hetkv::block_scores_cuda(params, current_cuda_stream(arena.get_device_index()));
  return out;
}

}  // namespace hetkv::ops
