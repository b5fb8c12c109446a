#pragma once

#include <cstdint>

namespace hetkv::ops {

// Torch's current CUDA stream of a device, as cudaStream_t. Throws std::runtime_error if this torch has no CUDA.
// Thread-safe, allocates nothing, does not block.
void* current_cuda_stream(std::int32_t device_index);

}  // namespace hetkv::ops
