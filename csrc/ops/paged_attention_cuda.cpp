#include "ops/paged_attention.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> paged_attention_cuda(Tensor query, Tensor arena, Tensor block_table, Tensor cu_seqlens_q,
                                                Tensor seqused_k, std::int64_t num_kv_heads, std::int64_t rows_per_block,
                                                std::int64_t key_offset, std::int64_t value_offset, std::string entry_format,
                                                double scale, std::int64_t window, OptionalTensor sinks, double softcap) {
  const PagedAttentionCall call =
      paged_attention_call({query, arena, block_table, cu_seqlens_q, seqused_k, sinks},
                           {num_kv_heads, rows_per_block, key_offset, value_offset, entry_format, scale, window, softcap});
  if (call.params.num_tokens == 0) return {call.out, call.lse};
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  // Its size follows from shapes, so that a captured graph replays with other lengths.
  Tensor workspace =
      torch::stable::new_empty(query, {attention_workspace_floats(call.params)}, torch::headeronly::ScalarType::Float);
  hetkv::paged_attention_cuda(call.params, static_cast<float*>(workspace.mutable_data_ptr()),
                              current_cuda_stream(arena.get_device_index()));
  return {call.out, call.lse};
}

}  // namespace hetkv::ops
