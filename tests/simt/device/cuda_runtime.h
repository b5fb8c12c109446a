// What a kernel sees in place of CUDA's own headers when the host compiler builds it for the executor. Only names that hetkv's
// kernels use; pure functions are defined here, everything that concerns other threads or memory is the executor's.
#pragma once

#ifndef HETKV_SIMT
#error "tests/simt/device is for sources compiled with HETKV_SIMT only"
#endif

#include <math.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef HETKV_SIMT_KERNEL  // not in the executor's own sources
// Copies of structs and explicit copies go through the executor: the compiler does not instrument the calls themselves.
extern "C" {
void* memcpy(void* to, const void* from, std::size_t bytes) noexcept __asm__("hetkv_simt_memcpy");
void* memmove(void* to, const void* from, std::size_t bytes) noexcept __asm__("hetkv_simt_memmove");
void* memset(void* to, int value, std::size_t bytes) noexcept __asm__("hetkv_simt_memset");
}
#endif

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct uint3 {
  unsigned x, y, z;
};

#define HETKV_SIMT_VECTORS(name, T) \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; }; \
  struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HETKV_SIMT_VECTORS(char, signed char)
HETKV_SIMT_VECTORS(uchar, unsigned char)
HETKV_SIMT_VECTORS(short, short)
HETKV_SIMT_VECTORS(ushort, unsigned short)
HETKV_SIMT_VECTORS(int, int)
HETKV_SIMT_VECTORS(uint, unsigned)
HETKV_SIMT_VECTORS(float, float)
HETKV_SIMT_VECTORS(longlong, long long)
HETKV_SIMT_VECTORS(ulonglong, unsigned long long)
#undef HETKV_SIMT_VECTORS

using cudaStream_t = struct CUstream_st*;

namespace hetkv::simt {

// The source line of a call.
struct Site {
  const char* file;
  unsigned line;
};

enum class Shuffle : std::uint8_t { kIndex, kUp, kDown, kXor };
enum class Vote : std::uint8_t { kAny, kAll, kBallot };
enum class Reduce : std::uint8_t { kAdd, kMin, kMax, kAnd, kOr, kXor, kSignedMin, kSignedMax };
enum class BlockVote : std::uint8_t { kNone, kCount, kAnd, kOr };

[[gnu::const]] uint3 thread_index();
[[gnu::const]] uint3 block_index();
[[gnu::const]] dim3 block_size();
[[gnu::const]] dim3 grid_size();
std::byte* dynamic_shared();
std::size_t shared_bytes_limit();  // of the device that the test made
void* static_shared(const void* declaration, std::size_t bytes, std::size_t alignment);
int barrier(BlockVote vote, int value, Site site);
void warp_barrier(std::uint32_t mask, Site site);
std::uint64_t shuffle(Shuffle kind, std::uint32_t mask, std::uint64_t bits, unsigned argument, int width, Site site);
std::uint32_t vote(Vote kind, std::uint32_t mask, int value, Site site);
std::uint32_t reduce(Reduce kind, std::uint32_t mask, std::uint32_t value, Site site);
void touch_atomic(const void* pointer, std::size_t bytes);  // checked as one atomic access of this thread

// Runs call(context) once for every thread of the grid. The kernel may read the arguments and the call.
void run(const char* op, dim3 grid, dim3 block, std::size_t shared_bytes, const void* const* arguments, const std::size_t* sizes,
         std::size_t num_arguments, void (*call)(const void*), const void* context, std::size_t context_bytes);

template <typename T>
std::uint64_t to_bits(T value) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "a shuffle moves 32 or 64 bits");
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<std::uint32_t>(value);
  } else {
    return std::bit_cast<std::uint64_t>(value);
  }
}
template <typename T>
T from_bits(std::uint64_t bits) {
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<T>(static_cast<std::uint32_t>(bits));
  } else {
    return std::bit_cast<T>(bits);
  }
}

}  // namespace hetkv::simt

#define threadIdx (::hetkv::simt::thread_index())
#define blockIdx (::hetkv::simt::block_index())
#define blockDim (::hetkv::simt::block_size())
#define gridDim (::hetkv::simt::grid_size())
inline constexpr int warpSize = 32;

// The caller's line is a default argument: no macro, and a call through a helper function counts as that one line.
#define HETKV_SIMT_SITE ::hetkv::simt::Site site = {__builtin_FILE(), __builtin_LINE()}

inline void __syncthreads(HETKV_SIMT_SITE) { hetkv::simt::barrier(hetkv::simt::BlockVote::kNone, 0, site); }
inline int __syncthreads_count(int value, HETKV_SIMT_SITE) {
  return hetkv::simt::barrier(hetkv::simt::BlockVote::kCount, value, site);
}
inline int __syncthreads_and(int value, HETKV_SIMT_SITE) {
  return hetkv::simt::barrier(hetkv::simt::BlockVote::kAnd, value, site);
}
inline int __syncthreads_or(int value, HETKV_SIMT_SITE) { return hetkv::simt::barrier(hetkv::simt::BlockVote::kOr, value, site); }
inline void __syncwarp(std::uint32_t mask = 0xffffffffu, HETKV_SIMT_SITE) { hetkv::simt::warp_barrier(mask, site); }

#define HETKV_SIMT_SHUFFLE(name, kind, Argument) \
  template <typename T> \
  T name(std::uint32_t mask, T value, Argument argument, int width = 32, HETKV_SIMT_SITE) { \
    return hetkv::simt::from_bits<T>(hetkv::simt::shuffle(hetkv::simt::Shuffle::kind, mask, hetkv::simt::to_bits(value), \
                                                          static_cast<unsigned>(argument), width, site)); \
  }
HETKV_SIMT_SHUFFLE(__shfl_sync, kIndex, int)
HETKV_SIMT_SHUFFLE(__shfl_up_sync, kUp, unsigned)
HETKV_SIMT_SHUFFLE(__shfl_down_sync, kDown, unsigned)
HETKV_SIMT_SHUFFLE(__shfl_xor_sync, kXor, int)
#undef HETKV_SIMT_SHUFFLE

inline int __any_sync(std::uint32_t mask, int value, HETKV_SIMT_SITE) {
  return static_cast<int>(hetkv::simt::vote(hetkv::simt::Vote::kAny, mask, value, site));
}
inline int __all_sync(std::uint32_t mask, int value, HETKV_SIMT_SITE) {
  return static_cast<int>(hetkv::simt::vote(hetkv::simt::Vote::kAll, mask, value, site));
}
inline unsigned __ballot_sync(std::uint32_t mask, int value, HETKV_SIMT_SITE) {
  return hetkv::simt::vote(hetkv::simt::Vote::kBallot, mask, value, site);
}

#define HETKV_SIMT_REDUCE(name, T, kind) \
  inline T name(std::uint32_t mask, T value, HETKV_SIMT_SITE) { \
    return static_cast<T>(hetkv::simt::reduce(hetkv::simt::Reduce::kind, mask, static_cast<std::uint32_t>(value), site)); \
  }
HETKV_SIMT_REDUCE(__reduce_add_sync, unsigned, kAdd)
HETKV_SIMT_REDUCE(__reduce_add_sync, int, kAdd)
HETKV_SIMT_REDUCE(__reduce_min_sync, unsigned, kMin)
HETKV_SIMT_REDUCE(__reduce_min_sync, int, kSignedMin)
HETKV_SIMT_REDUCE(__reduce_max_sync, unsigned, kMax)
HETKV_SIMT_REDUCE(__reduce_max_sync, int, kSignedMax)
HETKV_SIMT_REDUCE(__reduce_and_sync, unsigned, kAnd)
HETKV_SIMT_REDUCE(__reduce_or_sync, unsigned, kOr)
HETKV_SIMT_REDUCE(__reduce_xor_sync, unsigned, kXor)
#undef HETKV_SIMT_REDUCE

// Atomics: announced to the executor, then done by code that is not instrumented. Threads are not preempted in between.
#define HETKV_SIMT_ATOMIC(name, change) \
  template <typename T> \
  [[gnu::no_sanitize("thread")]] T name(T* pointer, std::type_identity_t<T> value) { \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8); \
    hetkv::simt::touch_atomic(pointer, sizeof(T)); \
    const T old = *pointer; \
    *pointer = static_cast<T>(change); \
    return old; \
  }
HETKV_SIMT_ATOMIC(atomicAdd, old + value)
HETKV_SIMT_ATOMIC(atomicSub, old - value)
HETKV_SIMT_ATOMIC(atomicMin, old < value ? old : value)
HETKV_SIMT_ATOMIC(atomicMax, old > value ? old : value)
HETKV_SIMT_ATOMIC(atomicAnd, old& value)
HETKV_SIMT_ATOMIC(atomicOr, old | value)
HETKV_SIMT_ATOMIC(atomicXor, old ^ value)
HETKV_SIMT_ATOMIC(atomicExch, value)
#undef HETKV_SIMT_ATOMIC
template <typename T>
[[gnu::no_sanitize("thread")]] T atomicCAS(T* pointer, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  hetkv::simt::touch_atomic(pointer, sizeof(T));
  const T old = *pointer;
  if (old == expected) *pointer = value;
  return old;
}

template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
template <typename T>
T __ldcs(const T* pointer) {
  return *pointer;
}
template <typename T>
T __ldcg(const T* pointer) {
  return *pointer;
}
template <typename T>
void __stcs(T* pointer, T value) {
  *pointer = value;
}
template <typename T>
void __stcg(T* pointer, T value) {
  *pointer = value;
}

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned y = 0;
  for (int i = 0; i < 32; ++i) y |= ((x >> i) & 1u) << (31 - i);
  return y;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const std::uint64_t both = (static_cast<std::uint64_t>(b) << 32) | a;
  unsigned result = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned pick = (selector >> (4 * i)) & 0xfu;
    unsigned byte = static_cast<unsigned>(both >> (8 * (pick & 7u))) & 0xffu;
    if (pick & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    result |= byte << (8 * i);
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<std::uint64_t>(high) << 32 | low) << (shift & 31u)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31u));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((std::uint64_t{a} * b) >> 32); }
__extension__ typedef unsigned __int128 hetkv_simt_uint128;
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<hetkv_simt_uint128>(a) * b) >> 64);
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __sinf(float x) { return std::sin(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }

#define HETKV_SIMT_MIN_MAX(T) \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
HETKV_SIMT_MIN_MAX(int)
HETKV_SIMT_MIN_MAX(unsigned)
HETKV_SIMT_MIN_MAX(long)
HETKV_SIMT_MIN_MAX(unsigned long)
HETKV_SIMT_MIN_MAX(long long)
HETKV_SIMT_MIN_MAX(unsigned long long)
#undef HETKV_SIMT_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
