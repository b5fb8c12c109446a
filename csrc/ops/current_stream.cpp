#include "ops/current_stream.h"

#include <stdexcept>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/shim_utils.h>

// Lives in libtorch_cuda, and the header hides it without USE_CUDA. Weak, so that the same library loads with a CPU-only torch.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(std::int32_t device_index, void** ret_stream);

namespace hetkv::ops {

void* current_cuda_stream(std::int32_t device_index) {
  if (aoti_torch_get_current_cuda_stream == nullptr) throw std::runtime_error("hetkv: this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

}  // namespace hetkv::ops
