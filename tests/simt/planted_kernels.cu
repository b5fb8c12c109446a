// Small kernels, most of them wrong in one way, for test_executor.cpp. Each comment says what is planted.
#include "planted_kernels.h"

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/launch.cuh"

namespace hetkv::planted {
namespace {

__constant__ float kTable[4] = {1.0f, 2.0f, 4.0f, 8.0f};

// out[i] = in[i] reversed within the block, through shared memory.
template <bool kBarrier>
__global__ void reverse_kernel(const float* in, float* out) {
  HETKV_SHARED(float[128], values);
  const unsigned t = threadIdx.x;
  values[t] = in[blockIdx.x * blockDim.x + t];
  if constexpr (kBarrier) __syncthreads();
  out[blockIdx.x * blockDim.x + t] = values[blockDim.x - 1 - t] * kTable[t & 3];
}

// Write after read: everybody reads word 0 before thread 0 writes it, without a barrier between.
__global__ void write_after_read_kernel(float* out) {
  HETKV_SHARED(float[2], value);
  if (threadIdx.x < 2) value[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = value[0];
  if (threadIdx.x == 63) value[0] = 2.0f;
}

// Write after write: all threads write one word.
__global__ void write_after_write_kernel(float* out) {
  HETKV_SHARED(float, value);
  value = static_cast<float>(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = value;
}

// Neighbouring bytes of one word by different threads: not a race, unless somebody reads the word.
__global__ void bytes_kernel(std::uint32_t* out, const int read_early) {
  HETKV_SHARED(std::uint8_t[64], bytes);
  bytes[threadIdx.x] = static_cast<std::uint8_t>(threadIdx.x);
  if (read_early == 0) __syncthreads();
  if (threadIdx.x % 4 == 0)
    out[threadIdx.x / 4] = reinterpret_cast<const std::uint32_t*>(static_cast<std::uint8_t*>(bytes))[threadIdx.x / 4];
}

// Lanes of a warp exchange a word; only a warp barrier orders them.
template <int kHow>
__global__ void warp_exchange_kernel(float* out) {
  HETKV_SHARED(float[32], values);
  const unsigned t = threadIdx.x;
  values[t] = static_cast<float>(t);
  if constexpr (kHow == 0) __syncwarp();
  if constexpr (kHow == 1) static_cast<void>(__shfl_xor_sync(gpu::kAllLanes, 0, 1));
  if constexpr (kHow == 2) __syncwarp(t < 16 ? 0x0000ffffu : 0xffff0000u);
  out[t] = values[t ^ 1u];
}

// Only the even words are written.
__global__ void uninitialised_kernel(float* out) {
  HETKV_DYNAMIC_SHARED(bytes);
  float* const values = reinterpret_cast<float*>(bytes);
  if (threadIdx.x % 2 == 0) values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void out_of_bounds_kernel(float* out, const int index) { out[index] = 1.0f; }
__global__ void read_back_kernel(float* out) { out[threadIdx.x] += 1.0f; }

__global__ void shared_out_of_bounds_kernel(float* out) {
  HETKV_SHARED(float[32], values);
  values[threadIdx.x + 1] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

__global__ void misaligned_kernel(const float* in, float4* out) { out[0] = *reinterpret_cast<const float4*>(in + 1); }

template <int kHow>
__global__ void divergent_kernel(float* out) {
  if constexpr (kHow == 0) {  // an early return
    if (threadIdx.x >= 32) return;
    __syncthreads();
  } else if constexpr (kHow == 1) {  // two barriers
    if (threadIdx.x >= 32) {
      __syncthreads();
      out[threadIdx.x] = 1.0f;
    } else {
      __syncthreads();
      out[threadIdx.x] = 2.0f;
    }
  } else if constexpr (kHow == 2) {  // half a warp for a full mask
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_xor_sync(gpu::kAllLanes, 1.0f, 1);
    __syncthreads();
  } else if constexpr (kHow == 3) {  // a named lane has left
    if (threadIdx.x % 32 == 5) return;
    out[threadIdx.x] = static_cast<float>(__any_sync(gpu::kAllLanes, 1));
  } else {  // a lane that its mask does not name
    out[threadIdx.x] = static_cast<float>(__any_sync(0x0000ffffu, 1));
  }
}

// Two blocks write one word; or one reads what another writes.
__global__ void block_write_kernel(float* out) {
  if (threadIdx.x == 0) out[0] = 1.0f;
}
__global__ void block_read_kernel(float* out) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) out[0] = 1.0f;
  if (blockIdx.x == 1) out[1] = out[0];
}
__global__ void atomic_kernel(int* out) {
  atomicAdd(out, 1);
  atomicMax(out + 1, static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x));
}

// Copies one row of 16 bytes per thread through shared memory. kFault: 0 none, 1 no wait, 2 wait without a barrier, 3 source changed
// between issue and wait, 4 wait one group short.
template <int kFault>
__global__ void copy_kernel(std::byte* in, uint4* out, const int source_bytes) {
  HETKV_DYNAMIC_SHARED(bytes);
  const unsigned t = threadIdx.x;
  const std::uint32_t base = gpu::shared_address(bytes);
  gpu::copy_async_16(base + 16 * t, in + 16 * t, source_bytes);
  gpu::copy_async_commit();
  if constexpr (kFault == 3) in[16 * t] = std::byte{1};
  if constexpr (kFault != 1 && kFault != 4) gpu::copy_async_wait<0>();
  if constexpr (kFault == 4) gpu::copy_async_wait<1>();
  if constexpr (kFault != 2) __syncthreads();
  out[t] = reinterpret_cast<const uint4*>(bytes)[blockDim.x - 1 - t];
  if constexpr (kFault == 1 || kFault == 4) gpu::copy_async_wait<0>();
}

// D = A B for one warp, [16][k] row-major times [k][8]; B is given as [8][k] (rows of n) or, transposed, as [k][8 + 8 unused].
template <int kKind>
__global__ void matmul_kernel(const std::uint16_t* a, const std::uint16_t* b, float* d, const int swizzled) {
  HETKV_DYNAMIC_SHARED(bytes);
  const unsigned l = threadIdx.x;
  // 64-value rows, so that 8 chunks of 16 bytes lie in a row and the swizzle has something to do.
  uint4* const chunks = reinterpret_cast<uint4*>(bytes);
  const auto place = [&](unsigned row, unsigned chunk) { return row * 8 + (swizzled != 0 ? chunk ^ (row & 7u) : chunk); };
  for (unsigned i = l; i < 32 * 8; i += 32) {
    const unsigned row = i / 8, chunk = i % 8;
    const std::uint16_t* const from = row < 16 ? a + row * 64 + chunk * 8 : b + (row - 16) * 64 + chunk * 8;
    chunks[place(row, chunk)] = *reinterpret_cast<const uint4*>(from);
  }
  __syncthreads();
  const std::uint32_t base = gpu::shared_address(bytes);
  float c[2][4] = {};
  for (unsigned k = 0; k < (kKind == 1 ? 16u : 64u); k += 16) {
    std::uint32_t ra[4], rb[4];
    gpu::load_matrix_x4(ra, base + 16 * place(l & 15u, k / 8 + (l >> 4)));
    if constexpr (kKind == 1) {
      gpu::load_matrix_x4_trans(rb, base + 16 * place(16 + k + (l & 15u), l >> 4));
    } else {
      gpu::load_matrix_x4(rb, base + 16 * place(16 + (l & 7u) + ((l >> 4) << 3), k / 8 + ((l >> 3) & 1u)));
    }
    for (int n = 0; n < 2; ++n) {
      if constexpr (kKind == 2) {
        gpu::mma_f16(c[n], ra, rb[2 * n], rb[2 * n + 1]);
      } else {
        gpu::mma_bf16(c[n], ra, rb[2 * n], rb[2 * n + 1]);
      }
    }
  }
  for (int n = 0; n < 2; ++n) {
    for (unsigned i = 0; i < 4; ++i)
      d[((l >> 2) + 8 * (i >> 1)) * 16 + 8 * static_cast<unsigned>(n) + 2 * (l & 3u) + (i & 1u)] = c[n][i];
  }
}

// One mma with every lane's registers given and returned: for the layout tables.
template <int kKind>
__global__ void fragment_kernel(const std::uint32_t* a, const std::uint32_t* b, float* c) {
  const unsigned l = threadIdx.x;
  const std::uint32_t ra[4] = {a[4 * l], a[4 * l + 1], a[4 * l + 2], a[4 * l + 3]};
  float rc[4] = {c[4 * l], c[4 * l + 1], c[4 * l + 2], c[4 * l + 3]};
  if constexpr (kKind == 0) gpu::mma_bf16(rc, ra, b[2 * l], b[2 * l + 1]);
  if constexpr (kKind == 1) gpu::mma_f16(rc, ra, b[2 * l], b[2 * l + 1]);
  if constexpr (kKind == 2) gpu::mma_e4m3(rc, ra, b[2 * l], b[2 * l + 1]);
  for (unsigned i = 0; i < 4; ++i) c[4 * l + i] = rc[i];
}

__global__ void warp_calls_kernel(std::uint32_t* out) {
  const unsigned t = threadIdx.x;
  const int value = static_cast<int>(t * 3);
  out[t] = static_cast<std::uint32_t>(__shfl_xor_sync(gpu::kAllLanes, value, 5));
  out[32 + t] = static_cast<std::uint32_t>(__shfl_down_sync(gpu::kAllLanes, value, 2, 8));
  out[64 + t] = static_cast<std::uint32_t>(__shfl_up_sync(gpu::kAllLanes, value, 3));
  out[96 + t] = static_cast<std::uint32_t>(__shfl_sync(gpu::kAllLanes, value, 17));
  out[128 + t] = __ballot_sync(gpu::kAllLanes, t % 3 == 0);
  out[160 + t] = __reduce_add_sync(gpu::kAllLanes, t);
  out[192 + t] = static_cast<std::uint32_t>(__all_sync(gpu::kAllLanes, t < 32)) +
                 2u * static_cast<std::uint32_t>(__any_sync(gpu::kAllLanes, t > 31));
  out[224 + t] = static_cast<std::uint32_t>(__syncthreads_count(t < 7));
}

__global__ void e4m3_kernel(const float* in, std::uint8_t* by_integers, std::uint8_t* native, float* back) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  by_integers[i] = static_cast<std::uint8_t>(gpu::round_to_e4m3(in[i]));
  native[i] = static_cast<std::uint8_t>(gpu::pack_e4m3_native(in[i], 0.0f));
  std::uint32_t low, high;
  gpu::spread_e4m3_bf16(native[i], low, high);
  back[i] = gpu::low_bf16(gpu::mul_bf16x2(low, 0x7b807b80u));  // 2^120
}

cudaStream_t none() { return nullptr; }

}  // namespace

void reverse(const float* in, float* out, unsigned blocks, bool barrier) {
  if (barrier) {
    launch<reverse_kernel<true>>("reverse", dim3(blocks), dim3(128), 0, none(), in, out);
  } else {
    launch<reverse_kernel<false>>("reverse", dim3(blocks), dim3(128), 0, none(), in, out);
  }
}
void write_after_read(float* out) { launch<write_after_read_kernel>("war", dim3(1), dim3(64), 0, none(), out); }
void write_after_write(float* out) { launch<write_after_write_kernel>("waw", dim3(1), dim3(64), 0, none(), out); }
void bytes(std::uint32_t* out, bool early) { launch<bytes_kernel>("bytes", dim3(1), dim3(64), 0, none(), out, early ? 1 : 0); }
void warp_exchange(float* out, int how) {
  if (how == 0) launch<warp_exchange_kernel<0>>("exchange", dim3(1), dim3(32), 0, none(), out);
  if (how == 1) launch<warp_exchange_kernel<1>>("exchange", dim3(1), dim3(32), 0, none(), out);
  if (how == 2) launch<warp_exchange_kernel<2>>("exchange", dim3(1), dim3(32), 0, none(), out);
  if (how == 3) launch<warp_exchange_kernel<3>>("exchange", dim3(1), dim3(32), 0, none(), out);
}
void uninitialised(float* out) { launch<uninitialised_kernel>("uninitialised", dim3(1), dim3(64), 256, none(), out); }
void out_of_bounds(float* out, int index) { launch<out_of_bounds_kernel>("bounds", dim3(1), dim3(1), 0, none(), out, index); }
void read_back(float* out) { launch<read_back_kernel>("read_back", dim3(1), dim3(4), 0, none(), out); }
void shared_out_of_bounds(float* out) { launch<shared_out_of_bounds_kernel>("shared", dim3(1), dim3(32), 0, none(), out); }
void misaligned(const float* in, float* out) {
  launch<misaligned_kernel>("misaligned", dim3(1), dim3(1), 0, none(), in, reinterpret_cast<float4*>(out));
}
void divergent(float* out, int how) {
  if (how == 0) launch<divergent_kernel<0>>("divergent", dim3(1), dim3(64), 0, none(), out);
  if (how == 1) launch<divergent_kernel<1>>("divergent", dim3(1), dim3(64), 0, none(), out);
  if (how == 2) launch<divergent_kernel<2>>("divergent", dim3(1), dim3(64), 0, none(), out);
  if (how == 3) launch<divergent_kernel<3>>("divergent", dim3(1), dim3(64), 0, none(), out);
  if (how == 4) launch<divergent_kernel<4>>("divergent", dim3(1), dim3(64), 0, none(), out);
}
void block_write(float* out) { launch<block_write_kernel>("block_write", dim3(3), dim3(32), 0, none(), out); }
void block_read(float* out) { launch<block_read_kernel>("block_read", dim3(2), dim3(32), 0, none(), out); }
void atomics(int* out) { launch<atomic_kernel>("atomics", dim3(3), dim3(64), 0, none(), out); }
void copy(std::byte* in, std::uint32_t* out, int source_bytes, int fault, std::size_t shared_bytes) {
  uint4* const to = reinterpret_cast<uint4*>(out);
  if (fault == 0) launch<copy_kernel<0>>("copy", dim3(1), dim3(64), shared_bytes, none(), in, to, source_bytes);
  if (fault == 1) launch<copy_kernel<1>>("copy", dim3(1), dim3(64), shared_bytes, none(), in, to, source_bytes);
  if (fault == 2) launch<copy_kernel<2>>("copy", dim3(1), dim3(64), shared_bytes, none(), in, to, source_bytes);
  if (fault == 3) launch<copy_kernel<3>>("copy", dim3(1), dim3(64), shared_bytes, none(), in, to, source_bytes);
  if (fault == 4) launch<copy_kernel<4>>("copy", dim3(1), dim3(64), shared_bytes, none(), in, to, source_bytes);
}
void matmul(const std::uint16_t* a, const std::uint16_t* b, float* d, int kind, bool swizzled) {
  if (kind == 0) launch<matmul_kernel<0>>("matmul", dim3(1), dim3(32), 4096, none(), a, b, d, swizzled ? 1 : 0);
  if (kind == 1) launch<matmul_kernel<1>>("matmul", dim3(1), dim3(32), 4096, none(), a, b, d, swizzled ? 1 : 0);
  if (kind == 2) launch<matmul_kernel<2>>("matmul", dim3(1), dim3(32), 4096, none(), a, b, d, swizzled ? 1 : 0);
}
void fragment(const std::uint32_t* a, const std::uint32_t* b, float* c, int kind) {
  if (kind == 0) launch<fragment_kernel<0>>("fragment", dim3(1), dim3(32), 0, none(), a, b, c);
  if (kind == 1) launch<fragment_kernel<1>>("fragment", dim3(1), dim3(32), 0, none(), a, b, c);
  if (kind == 2) launch<fragment_kernel<2>>("fragment", dim3(1), dim3(32), 0, none(), a, b, c);
}
void warp_calls(std::uint32_t* out) { launch<warp_calls_kernel>("warp_calls", dim3(1), dim3(32), 0, none(), out); }
void e4m3(const float* in, std::uint8_t* by_integers, std::uint8_t* native, float* back, unsigned blocks) {
  launch<e4m3_kernel>("e4m3", dim3(blocks), dim3(256), 0, none(), in, by_integers, native, back);
}

}  // namespace hetkv::planted
