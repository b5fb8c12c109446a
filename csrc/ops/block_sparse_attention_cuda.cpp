#include "ops/block_sparse_attention.h"

#include <torch/csrc/stable/accelerator.h>

#include "ops/attention_output.h"
#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> block_sparse_attention_cuda(Tensor query, Tensor arena, Tensor block_table, Tensor selected_blocks,
                                                       Tensor cu_seqlens_q, Tensor seqused_k, std::int64_t num_kv_heads,
                                                       std::int64_t rows_per_block, std::int64_t key_offset,
                                                       std::int64_t value_offset, std::string entry_format, double scale,
                                                       std::int64_t routed_tokens, OptionalTensor sinks) {
  BlockSparseParams params =
      block_sparse_params({query, arena, block_table, selected_blocks, cu_seqlens_q, seqused_k, sinks, num_kv_heads,
                           rows_per_block, key_offset, value_offset, entry_format, scale, routed_tokens});
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  const AttentionOutput output = make_attention_output(params, query, params.dim);
  if (params.num_tokens == 0) return {output.out, output.lse};
  hetkv::block_sparse_attention_cuda(params, current_cuda_stream(arena.get_device_index()));
  return {output.out, output.lse};
}

}  // namespace hetkv::ops
