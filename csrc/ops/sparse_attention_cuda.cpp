#include "ops/sparse_attention.h"

#include <torch/csrc/stable/accelerator.h>

#include "ops/attention_output.h"
#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

std::tuple<Tensor, Tensor> sparse_attention_cuda(Tensor query, Tensor arena, Tensor window_table, OptionalTensor entry_table,
                                                 OptionalTensor selected, Tensor cu_seqlens_q, Tensor seqused_k,
                                                 std::int64_t window, std::int64_t window_rows_per_block,
                                                 std::int64_t window_offset, std::string window_format, double scale,
                                                 std::int64_t window_scale_offset, std::int64_t ratio,
                                                 std::int64_t entry_rows_per_block, std::int64_t entry_offset,
                                                 std::string entry_format, std::int64_t entry_scale_offset, OptionalTensor sinks,
                                                 OptionalTensor cos, OptionalTensor sin, std::int64_t value_dim) {
  SparseAttentionParams params = sparse_attention_params(
      {query, arena, window_table, entry_table, selected, cu_seqlens_q, seqused_k, sinks, cos, sin}, window, value_dim, ratio,
      scale, window_section(window_rows_per_block, window_offset, window_scale_offset, window_format),
      entry_section(entry_rows_per_block, entry_offset, entry_scale_offset, entry_format));
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  const AttentionOutput output = make_attention_output(params, query, params.value_dim);
  if (params.num_tokens == 0) return {output.out, output.lse};
  Tensor workspace = torch::stable::new_empty(query, {sparse_workspace_floats(params)}, ScalarType::Float);
  hetkv::sparse_attention_cuda(params, static_cast<float*>(workspace.mutable_data_ptr()),
                               current_cuda_stream(arena.get_device_index()));
  return {output.out, output.lse};
}

}  // namespace hetkv::ops
