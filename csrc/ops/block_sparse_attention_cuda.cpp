#include "ops/block_sparse_attention.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::headeronly::ScalarType;
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
  Tensor out = torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)});
  Tensor lse = torch::stable::new_empty(query, {query.size(0), query.size(1)}, ScalarType::Float);
  params.out = static_cast<std::byte*>(out.mutable_data_ptr());
  params.lse = static_cast<float*>(lse.mutable_data_ptr());
  if (params.num_tokens == 0) return {out, lse};
  hetkv::block_sparse_attention_cuda(params, current_cuda_stream(arena.get_device_index()));
  return {out, lse};
}

}  // namespace hetkv::ops
