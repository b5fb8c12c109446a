// The only file with inline PTX. Each instruction has one declaration here; its host twin, for the SIMT executor, is in
// tests/simt/instructions.cpp and follows the fragment layouts of the PTX manual.
//
// HOW TO WRITE A KERNEL THAT THE EXECUTOR CAN RUN
//  - Include "kernels/cuda/launch.cuh" and this file. No other CUDA header: 16-bit floats are std::uint16_t bits, pairs of them
//    std::uint32_t (low half = lower index), converted by the functions below. float2..4, uint2..4, int2..4 are there.
//  - Launch with launch<kernel>("op", grid, block, shared_bytes, stream, arguments...), never <<<>>>. The grid comes from shapes.
//  - Shared memory only through HETKV_SHARED(type[n], name) and HETKV_DYNAMIC_SHARED(name). No `__shared__`, no types with
//    constructors in it. It starts as NaN bytes, and reading a byte that nobody wrote is a fault.
//  - Plain loads, stores, threadIdx, blockIdx, blockDim, gridDim, __syncthreads, __syncwarp, __shfl_*_sync, __any/all/ballot_sync,
//    __reduce_*_sync, atomicAdd/Min/Max/Or/CAS/Exch, __ldg, __popc, __clz, __ffs, __byte_perm, __float_as_uint: use them as ever.
//    Anything missing: add it to tests/simt/device/cuda_runtime.h (pure functions) or tests/simt/collectives.cpp.
//  - Every thread reaches every __syncthreads, at the same source line. No `return` before a barrier: a block without work
//    leaves as a whole (the condition is equal for all its threads) and before any barrier.
//  - Lanes of a warp are not in step. Between a write to shared or global memory and a read of it by another lane stands a
//    __syncwarp or a __syncthreads; a shuffle, vote or mma is no fence. All lanes of a mask make the call; masks are explicit.
//  - Not supported, and not wanted in hetkv: printf, assert, clock, `volatile` as a fence, recursion, device globals that are
//    written, cooperative launches, blocks that talk to each other (two blocks writing one byte is a fault), textures, threadfence
//    protocols, constructors of static objects in kernels, function pointers to kernels.
//  - Widen before you multiply: block offsets and slots pass 2^31. Pass addresses as pointer + 64-bit offset.
//  - Use HETKV_ARCH (not __CUDA_ARCH__) for branches: 800, 890, 900, ...; it is 0 in nvcc's host pass, HETKV_SIMT_ARCH (900) in the executor.
//  - A registers-only array must not be indexed with a run-time value (local memory on the GPU; the resource check fails).
//
// HOW TO TEST IT (tests/simt/README.md has more)
//  - tests/simt/CMakeLists.txt: hetkv_simt_kernel(x.cu) and hetkv_simt_test(test_x KERNELS x.cu).
//  - tests/simt/test_x.cpp includes "simt/kernel_test.h" and "kernels/x.h":
//      TEST(X, Shape) {
//        simt::for_every_schedule([&](simt::Device& device) {        // 3 orders, early and late copies; fails on any fault
//          std::vector<float> out(n, NAN);                           // fresh outputs for every run
//          device.reads("in", in);                                   // every buffer that the kernel may touch, with its right
//          device.writes("out", out);
//          x_cuda(params, nullptr);
//          EXPECT_EQ(out, expected);                                 // a plain loop or the CPU op
//        });
//      }
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#ifdef HETKV_SIMT
#ifndef HETKV_SIMT_ARCH
#define HETKV_SIMT_ARCH 900
#endif
#define HETKV_ARCH HETKV_SIMT_ARCH
#define HETKV_DEVICE_INLINE inline
#else
#ifdef __CUDA_ARCH__
#define HETKV_ARCH __CUDA_ARCH__
#else  // nvcc's host pass, which only parses kernels
#define HETKV_ARCH 0
#endif
#define HETKV_DEVICE_INLINE __device__ __forceinline__
#endif

namespace hetkv::gpu {

inline constexpr std::uint32_t kAllLanes = 0xffffffffu;

#ifdef HETKV_SIMT

// Described below; defined in tests/simt/instructions.cpp.
std::uint32_t shared_address(const void* pointer);
void load_matrix_x4(std::uint32_t (&r)[4], std::uint32_t address);
void load_matrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address);
void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
void mma_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
void mma_e4m3(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
void copy_async_16(std::uint32_t address, const void* source, int source_bytes = 16);
void copy_async_commit();
void copy_async_wait_for(int newest_left);
template <int kNewestLeft>
void copy_async_wait() {
  copy_async_wait_for(kNewestLeft);
}
uint4 load_once_16(const void* source);
float exp2_approx(float x);
std::uint32_t pack_bf16(float low, float high);
std::uint32_t pack_f16(float low, float high);
float f16_to_float(std::uint16_t bits);
std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b);
std::uint16_t pack_e4m3_native(float low, float high);
std::uint32_t unpack_e4m3_native(std::uint16_t codes);

#else

// The 32-bit shared address of a pointer into shared memory.
HETKV_DEVICE_INLINE std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit values. Lane 8j + i gives the address of row i of matrix j, 16-byte aligned; lane l gets in r[j]
// the values (row l / 4, columns 2 (l % 4) and + 1) of matrix j. All 32 lanes.
HETKV_DEVICE_INLINE void load_matrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same, transposed: r[j] = (row 2 (l % 4), column l / 4) low, (row 2 (l % 4) + 1, column l / 4) high.
HETKV_DEVICE_INLINE void load_matrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// c += a b, m16n8k16, sums in float32. With g = lane / 4, t = lane % 4:
//   a: (g, 2t..) (g + 8, 2t..) (g, 2t + 8..) (g + 8, 2t + 8..); b: k = 2t.. and k = 2t + 8.., n = g; c: (g, 2t..2t + 1), (g + 8, ..).
// All 32 lanes.
HETKV_DEVICE_INLINE void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
HETKV_DEVICE_INLINE void mma_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#if HETKV_ARCH >= 890 || HETKV_ARCH == 0
// m16n8k32 over e4m3: a: (g, 4t..4t + 3) (g + 8, 4t..) (g, 16 + 4t..) (g + 8, 16 + 4t..); b: k = 4t.. and 16 + 4t.., n = g. Native on
// sm_89 and sm_120; sm_90 and sm_100 emulate it with conversions, so unpack to 16 bits there.
HETKV_DEVICE_INLINE void mma_e4m3(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// 16 bytes from global to shared memory, both 16-byte aligned; the bytes from source_bytes (0..16) on are zero. With 0 nothing is
// read, but `source` must still be a mapped address (the arena's start). Visible to this thread after a wait, to others after a
// wait and a barrier. Commit one group per tile, also an empty one, so that counts stay right.
HETKV_DEVICE_INLINE void copy_async_16(std::uint32_t address, const void* source, int source_bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(source_bytes)
               : "memory");
}
HETKV_DEVICE_INLINE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the kNewestLeft newest groups of this thread are in flight.
template <int kNewestLeft>
HETKV_DEVICE_INLINE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewestLeft) : "memory");
}

// 16 bytes of global memory that no thread of this launch writes, without keeping them in L1.
HETKV_DEVICE_INLINE uint4 load_once_16(const void* source) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(source));
  return v;
}

// 2^x, relative error about 2^-22; denormal results are 0, 2^-inf is 0.
HETKV_DEVICE_INLINE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Round to nearest even; `low` in the low half.
HETKV_DEVICE_INLINE std::uint32_t pack_bf16(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
HETKV_DEVICE_INLINE std::uint32_t pack_f16(float low, float high) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
HETKV_DEVICE_INLINE float f16_to_float(std::uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// Products of bf16 pairs, each rounded once. A fused multiply-add with -0, since sm_80 has no plain product.
HETKV_DEVICE_INLINE std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(0x80008000u));
  return pair;
}

#if HETKV_ARCH >= 890 || HETKV_ARCH == 0
HETKV_DEVICE_INLINE std::uint16_t pack_e4m3_native(float low, float high) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
// Two codes as a pair of f16, exact; NaN stays NaN.
HETKV_DEVICE_INLINE std::uint32_t unpack_e4m3_native(std::uint16_t codes) {
  std::uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(codes));
  return pair;
}
#endif

#endif  // HETKV_SIMT

HETKV_DEVICE_INLINE float bf16_to_float(std::uint16_t bits) { return __uint_as_float(static_cast<std::uint32_t>(bits) << 16); }
HETKV_DEVICE_INLINE float low_bf16(std::uint32_t pair) { return __uint_as_float(pair << 16); }
HETKV_DEVICE_INLINE float high_bf16(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
HETKV_DEVICE_INLINE std::uint16_t float_to_bf16(float x) { return static_cast<std::uint16_t>(pack_bf16(x, 0.0f)); }
HETKV_DEVICE_INLINE std::uint16_t float_to_f16(float x) { return static_cast<std::uint16_t>(pack_f16(x, 0.0f)); }
HETKV_DEVICE_INLINE float low_f16(std::uint32_t pair) { return f16_to_float(static_cast<std::uint16_t>(pair)); }
HETKV_DEVICE_INLINE float high_f16(std::uint32_t pair) { return f16_to_float(static_cast<std::uint16_t>(pair >> 16)); }

// e4m3 codes of two floats, round to nearest even, saturating at 448, any NaN to 0x7f.
// Hardware from sm_89 on, integers before: the same codes.
HETKV_DEVICE_INLINE std::uint32_t round_to_e4m3(float x) {
  const std::uint32_t bits = __float_as_uint(x);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fu;
  if (size >= 0x43e00000u) return sign | 0x7eu;             // 448 and above
  if (size < 0x3c800000u) {                                 // below 2^-6: multiples of 2^-9
    const float scaled = __uint_as_float(size) + 16384.0f;  // 2^14 = 2^23 * 2^-9: the sum's mantissa counts them, rounded to even
    return sign | (__float_as_uint(scaled) & 0x7fffffu);
  }
  const std::uint32_t rounded = size + 0x7ffffu + ((size >> 20) & 1u);
  return sign | ((rounded >> 20) - (120u << 3));
}

// `low` in the low byte.
HETKV_DEVICE_INLINE std::uint16_t pack_e4m3(float low, float high) {
#if HETKV_ARCH >= 890
  return pack_e4m3_native(low, high);
#else
  return static_cast<std::uint16_t>(round_to_e4m3(low) | (round_to_e4m3(high) << 8));
#endif
}

// Four e4m3 codes as bf16 pairs, by moving bits: exact after the multiplication by 2^120, which can carry a power-of-two scale
// (multiply by scale_bits = bf16 pair of 2^(120 + e), e <= 7). Codes 0x7f and 0xff become +-480 * 2^e: check for NaN where you write.
HETKV_DEVICE_INLINE void spread_e4m3_bf16(std::uint32_t codes, std::uint32_t& low_pair, std::uint32_t& high_pair) {
  const std::uint32_t low = __byte_perm(codes, 0u, 0x1404u);
  const std::uint32_t high = __byte_perm(codes, 0u, 0x3424u);
  low_pair = (low & 0x80008000u) | ((low >> 4) & 0x07f007f0u);
  high_pair = (high & 0x80008000u) | ((high >> 4) & 0x07f007f0u);
}

}  // namespace hetkv::gpu
