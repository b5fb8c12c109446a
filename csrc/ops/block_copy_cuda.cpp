#include <torch/csrc/stable/accelerator.h>

#include "ops/block_copy.h"
#include "ops/current_stream.h"

namespace hetkv::ops {

using torch::stable::Tensor;

void copy_blocks_cuda(Tensor arena, Tensor source, Tensor target, std::int64_t num_bytes, std::int64_t begin) {
  const BlockCopyParams params = copy_blocks_params(arena, source, target, num_bytes, begin);
  const torch::stable::accelerator::DeviceGuard guard(arena.get_device_index());
  hetkv::copy_blocks_cuda("copy_blocks", params, current_cuda_stream(arena.get_device_index()));
}

void transfer_blocks_cuda(Tensor target_arena, Tensor source_arena, Tensor source, Tensor target, std::int64_t num_bytes,
                          std::int64_t begin) {
  const BlockCopyParams params = transfer_blocks_params(target_arena, source_arena, source, target, num_bytes, begin);
  const torch::stable::accelerator::DeviceGuard guard(target_arena.get_device_index());
  hetkv::copy_blocks_cuda("transfer_blocks", params, current_cuda_stream(target_arena.get_device_index()));
}

}  // namespace hetkv::ops
