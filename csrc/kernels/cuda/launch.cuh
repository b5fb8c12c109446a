// How every kernel of hetkv is launched, and how it declares shared memory. With HETKV_SIMT (tests/simt) the same source is compiled
// by the host compiler and the launch runs on the CPU executor; <cuda_runtime.h> is then the one of tests/simt/device.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cuda/cuda_error.h"

// HETKV_SHARED(float[64], sums); declares `sums` in shared memory, not initialised. A type with commas needs an alias.
// HETKV_DYNAMIC_SHARED(bytes); declares `std::byte* const bytes`, 128-byte aligned: the launch's shared_bytes.
#ifdef HETKV_SIMT
#define HETKV_SHARED(type, name) \
  auto& name = *static_cast<std::type_identity_t<type>*>(::hetkv::simt::static_shared( \
      [] { \
        static const char declaration = 0; \
        return static_cast<const void*>(&declaration); \
      }(), \
      sizeof(std::type_identity_t<type>), alignof(std::type_identity_t<type>)))
#define HETKV_DYNAMIC_SHARED(name) std::byte* const name = ::hetkv::simt::dynamic_shared()
#else
#define HETKV_SHARED(type, name) __shared__ std::type_identity_t<type> name
#define HETKV_DYNAMIC_SHARED(name) \
  extern __shared__ __align__(128) std::byte hetkv_dynamic_shared[]; \
  std::byte* const name = hetkv_dynamic_shared
#endif

namespace hetkv {

inline constexpr std::int64_t kMaxGridX = (std::int64_t{1} << 31) - 1;
inline constexpr std::size_t kPlainSharedBytes = 48 * 1024;  // a kernel may have more only if it was asked for

// Dynamic shared memory that a block may have on the current device, in bytes. Thread-safe, not a stream operation.
inline std::size_t shared_bytes_limit(const char* op) {
#ifdef HETKV_SIMT
  static_cast<void>(op);
  return ::hetkv::simt::shared_bytes_limit();
#else
  int device = 0, bytes = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (status != cudaSuccess) throw CudaError(op, static_cast<int>(status), cudaGetErrorString(status));
  return static_cast<std::size_t>(bytes);
#endif
}

// launch<kernel>("op", grid, block, shared_bytes, stream, arguments...). Throws CudaError naming the op if the launch was refused.
// An empty grid launches nothing. Thread-safe, allocates nothing, does not block. Capture-safe: the one attribute call, at a
// kernel's first launch with more than 48 KiB on a device, is not a stream operation.
template <auto kKernel, typename... Arguments>
void launch(const char* op, dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream, Arguments&&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
#ifdef HETKV_SIMT
  static_cast<void>(stream);
  const auto body = [&] { kKernel(arguments...); };
  const void* const places[] = {&arguments..., nullptr};
  const std::size_t sizes[] = {sizeof(arguments)..., 0};
  ::hetkv::simt::run(
      op, grid, block, shared_bytes, places, sizes, sizeof...(arguments),
      [](const void* call) { (*static_cast<const std::remove_reference_t<decltype(body)>*>(call))(); }, &body, sizeof(body));
#else
  const auto require = [op](cudaError_t status) {
    if (status != cudaSuccess) throw CudaError(op, static_cast<int>(status), cudaGetErrorString(status));
  };
  if (shared_bytes > kPlainSharedBytes) {
    constexpr int kDevices = 64;
    static std::atomic<std::size_t> allowed[kDevices];  // of this kernel, by device
    int device = 0;
    require(cudaGetDevice(&device));
    if (device >= kDevices || allowed[device].load(std::memory_order_relaxed) < shared_bytes) {
      require(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
      if (device < kDevices) allowed[device].store(shared_bytes, std::memory_order_relaxed);
    }
  }
  kKernel<<<grid, block, shared_bytes, stream>>>(std::forward<Arguments>(arguments)...);
  require(cudaGetLastError());
#endif
}

}  // namespace hetkv
