#include "ops/paged_attention.h"

#include <torch/csrc/stable/accelerator.h>

#include "ops/attention_output.h"
#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> paged_attention_cuda(Tensor query, Tensor arena, Tensor block_table, Tensor cu_seqlens_q,
                                                Tensor seqused_k, std::int64_t num_kv_heads, std::int64_t rows_per_block,
                                                std::int64_t key_offset, std::int64_t value_offset, std::string entry_format,
                                                double scale, std::int64_t window, OptionalTensor sinks, double softcap) {
  PagedAttentionParams params =
      paged_attention_params({query, arena, block_table, cu_seqlens_q, seqused_k, sinks},
                             {num_kv_heads, rows_per_block, key_offset, value_offset, entry_format, scale, window, softcap});
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  const AttentionOutput output = make_attention_output(params, query, params.dim);
  if (params.num_tokens == 0) return {output.out, output.lse};
  // Its size follows from shapes, so that a captured graph replays with other lengths.
  Tensor workspace = torch::stable::new_empty(query, {attention_workspace_floats(params)}, torch::headeronly::ScalarType::Float);
  hetkv::paged_attention_cuda(params, static_cast<float*>(workspace.mutable_data_ptr()),
                              current_cuda_stream(arena.get_device_index()));
  return {output.out, output.lse};
}

}  // namespace hetkv::ops
