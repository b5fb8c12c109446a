#include "ops/write.h"

#include <torch/csrc/stable/accelerator.h>

#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::stable::Tensor;

void write_rows_cuda(Tensor arena, Tensor rows, Tensor slots, std::int64_t rows_per_block, std::int64_t section_offset,
                     std::string entry_format, std::int64_t scale_offset, OptionalTensor norm_weight, double norm_eps,
                     OptionalTensor cos, OptionalTensor sin, bool rope_interleaved, bool rope_trailing) {
  const auto params = write_rows_params(arena, rows, slots, {rows_per_block, section_offset, scale_offset, entry_format},
                                        norm_weight, norm_eps, cos, sin, rope_interleaved, rope_trailing);
  if (!params) return;
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  hetkv::write_rows_cuda(*params, current_cuda_stream(arena.get_device_index()));
}

void write_key_value_cuda(Tensor arena, Tensor key, Tensor value, Tensor slots, std::int64_t rows_per_block,
                          std::int64_t key_offset, std::int64_t value_offset, std::string entry_format, OptionalTensor cos,
                          OptionalTensor sin, bool rope_interleaved, bool rope_trailing) {
  const auto params = write_key_value_params(arena, key, value, slots, rows_per_block, key_offset, value_offset, entry_format,
                                             cos, sin, rope_interleaved, rope_trailing);
  if (!params) return;
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  for (const WriteParams& part : *params) hetkv::write_rows_cuda(part, current_cuda_stream(arena.get_device_index()));
}

}  // namespace hetkv::ops
