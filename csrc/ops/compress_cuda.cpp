#include "ops/compress.h"

#include <torch/csrc/stable/accelerator.h>

#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::stable::Tensor;

void compress_cuda(Tensor arena, Tensor kv, Tensor gate, Tensor position_bias, Tensor norm_weight, Tensor cos, Tensor sin,
                   Tensor cu_seqlens_q, Tensor seqused_k, Tensor ring_table, Tensor slots, std::int64_t ratio, bool overlap,
                   std::int64_t ring_rows, std::int64_t ring_kv_offset, std::int64_t ring_gate_offset,
                   std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format, std::int64_t scale_offset,
                   double norm_eps) {
  const auto params =
      compress_params({arena, kv, gate, position_bias, norm_weight, cos, sin, cu_seqlens_q, seqused_k, ring_table, slots},
                      {ratio, overlap, ring_rows, ring_kv_offset, ring_gate_offset},
                      {rows_per_block, section_offset, scale_offset, entry_format}, norm_eps);
  if (!params) return;
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  hetkv::compress_cuda(*params, current_cuda_stream(arena.get_device_index()));
}

}  // namespace hetkv::ops
