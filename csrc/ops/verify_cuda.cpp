#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include "ops/current_stream.h"
#include "ops/verify.h"

namespace hetkv::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor verify_blocks_cuda(Tensor arena, Tensor blocks, std::int64_t block_bytes, OptionalTensor checksums,
                          OptionalTensor zero_ranges, OptionalTensor finite_ranges, std::int64_t base_alignment,
                          std::int64_t stride_alignment) {
  VerifyParams params =
      verify_blocks_params(arena, blocks, block_bytes, checksums, zero_ranges, finite_ranges, base_alignment, stride_alignment);
  Tensor status = torch::stable::new_empty(blocks, {params.num_blocks}, ScalarType::Int);
  params.status = static_cast<std::int32_t*>(status.mutable_data_ptr());
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  hetkv::verify_blocks_cuda(params, current_cuda_stream(arena.get_device_index()));
  return status;
}

Tensor checksum_blocks_cuda(Tensor arena, Tensor blocks, std::int64_t block_bytes) {
  ChecksumParams params = checksum_blocks_params(arena, blocks, block_bytes);
  Tensor sums = torch::stable::new_empty(blocks, {params.num_blocks}, ScalarType::Long);
  params.checksums = static_cast<std::int64_t*>(sums.mutable_data_ptr());
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  hetkv::checksum_blocks_cuda(params, current_cuda_stream(arena.get_device_index()));
  return sums;
}

}  // namespace hetkv::ops
