#include <torch/csrc/stable/accelerator.h>

#include "ops/current_stream.h"
#include "ops/row_copy.h"

namespace hetkv::ops {

using torch::stable::Tensor;

void scatter_rows_cuda(Tensor arena, Tensor rows, Tensor slots, std::int64_t rows_per_block, std::int64_t section_offset,
                       std::int64_t layer_stride, std::int64_t layer_begin) {
  const auto params = scatter_rows_params(arena, rows, slots, rows_per_block, section_offset, layer_stride, layer_begin);
  if (!params) return;
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  hetkv::scatter_rows_cuda(*params, current_cuda_stream(arena.get_device_index()));
}

void gather_rows_cuda(Tensor out, Tensor arena, Tensor slots, std::int64_t rows_per_block, std::int64_t section_offset,
                      std::int64_t layer_stride, std::int64_t layer_begin) {
  const auto params = gather_rows_params(out, arena, slots, rows_per_block, section_offset, layer_stride, layer_begin);
  if (!params) return;
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  hetkv::gather_rows_cuda(*params, current_cuda_stream(arena.get_device_index()));
}

}  // namespace hetkv::ops
