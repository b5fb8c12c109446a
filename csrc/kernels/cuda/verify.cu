// One block of an arena per CTA, one segment of the checksum (8 KiB) per warp at a time. A lane holds two neighbouring lanes of
// the checksum: 16 bytes of each round, eight loads in flight. The checks of ranges look at the same segment right behind it, so
// that they find it in L1. Sums of words mod 2^64 have no order; even so they are folded by lane and warp number.
#include "kernels/verify.h"

#include <algorithm>

#include "base/checksum.h"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/paged_rows.h"

namespace hetkv {
namespace {

using gpu::kAllLanes;

constexpr int kMaxThreads = 256;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kChunk = 16;                       // bytes of a load
constexpr int kRoundBytes = 8 * kChecksumLanes;  // one round of a segment: 32 lanes of a warp, one chunk each
constexpr auto kSegment = static_cast<std::int64_t>(kChecksumSegment);
constexpr int kRoundsAhead = 8;  // loads in flight
static_assert(kRoundBytes == 32 * kChunk && kChecksumRounds % kRoundsAhead == 0);

// Where a block begins, or null if it is not inside the arena.
template <typename Params>
HETKV_DEVICE_INLINE const std::byte* block_start(const Params& params, std::int64_t index) {
  const std::int64_t offset = std::int64_t{params.blocks[index]} << kBlockOffsetShift;
  return offset < 0 || offset > params.arena_bytes - params.block_bytes ? nullptr : params.arena + offset;
}

// The first `count` bytes of a chunk, byte by byte; zeros behind them.
HETKV_DEVICE_INLINE uint4 load_bytes(const std::byte* from, int count) {
  std::uint64_t low = 0, high = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const std::uint64_t byte = static_cast<std::uint64_t>(from[i]) << (8 * (i % 8));
    if (i < 8) {
      low |= byte;
    } else {
      high |= byte;
    }
  }
  return make_uint4(static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32), static_cast<std::uint32_t>(high),
                    static_cast<std::uint32_t>(high >> 32));
}

HETKV_DEVICE_INLINE std::uint64_t word_of(std::uint32_t low, std::uint32_t high) {
  return static_cast<std::uint64_t>(high) << 32 | low;
}

// This lane's share of checksum_segment. kWhole: all of the segment is there and aligned for wide loads.
template <bool kWhole>
HETKV_DEVICE_INLINE std::uint64_t sum_of_segment(const std::byte* segment, int length, std::uint64_t number, bool aligned,
                                                 int lane) {
  const std::byte* const from = segment + lane * kChunk;
  std::uint64_t first = checksum_seed(number, static_cast<std::uint64_t>(2 * lane));
  std::uint64_t second = checksum_seed(number, static_cast<std::uint64_t>(2 * lane + 1));
#pragma unroll 1
  for (int batch = 0; batch < kChecksumRounds; batch += kRoundsAhead) {
    uint4 chunks[kRoundsAhead];
#pragma unroll
    for (int i = 0; i < kRoundsAhead; ++i) {
      const int at = (batch + i) * kRoundBytes, left = length - at - lane * kChunk;
      chunks[i] = kWhole || (aligned && left >= kChunk) ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kRoundsAhead; ++i) {
      uint4 chunk = chunks[i];
      const int at = (batch + i) * kRoundBytes, left = length - at - lane * kChunk;
      if (!kWhole && left > 0 && (left < kChunk || !aligned)) chunk = load_bytes(from + at, left < kChunk ? left : kChunk);
      if (kWhole || left > 0) first = checksum_round(first, word_of(chunk.x, chunk.y));
      if (kWhole || left > 8) second = checksum_round(second, word_of(chunk.z, chunk.w));
    }
  }
  return checksum_mix(first) + checksum_mix(second);
}

// This lane's share of the checksum of the segment at `begin` of a block.
HETKV_DEVICE_INLINE std::uint64_t sum_of_segment(const std::byte* block, std::int64_t begin, std::int64_t block_bytes, int lane) {
#ifdef HETKV_PLANT_SEGMENT_FROM_ZERO
  const auto number = static_cast<std::uint64_t>(begin / kSegment % kMaxWarps);
#else
  const auto number = static_cast<std::uint64_t>(begin / kSegment);
#endif
  const bool aligned = reinterpret_cast<std::uintptr_t>(block) % kChunk == 0;
  const std::int64_t left = block_bytes - begin;
  if (aligned && left >= kSegment) return sum_of_segment<true>(block + begin, kSegment, number, true, lane);
  return sum_of_segment<false>(block + begin, static_cast<int>(left < kSegment ? left : kSegment), number, aligned, lane);
}

// What must not be in a range: a value of `bytes` bytes whose `mask` bits, with `add`, reach `sign`. Finite ranges: all bits of
// an exponent (of e4m3: a NaN code) are set, and the addition of the lowest of them carries into the sign's place. Zero ranges:
// any bit. Several values in one word do not disturb each other, and zeros never fail.
struct Forbidden {
  std::uint32_t mask, add, sign;
  int bytes;
  std::int32_t status;  // what a find means

  HETKV_DEVICE_INLINE bool in(std::uint32_t word) const { return (((word & mask) + add) & sign) != 0; }
};

HETKV_DEVICE_INLINE Forbidden forbidden_in(int kind) {  // -1: a zero range; else a FiniteType
  switch (kind) {
    case static_cast<int>(FiniteType::kFloat32):
      return {0x7f800000u, 0x00800000u, 0x80000000u, 4, kBlockNotFinite};
    case static_cast<int>(FiniteType::kFloat16):
      return {0x7c007c00u, 0x04000400u, 0x80008000u, 2, kBlockNotFinite};
    case static_cast<int>(FiniteType::kBFloat16):
      return {0x7f807f80u, 0x00800080u, 0x80008000u, 2, kBlockNotFinite};
    case static_cast<int>(FiniteType::kE4m3):
      return {0x7f7f7f7fu, 0x01010101u, 0x80808080u, 1, kBlockNotFinite};
    default:
      return {0xffffffffu, 0u, 0xffffffffu, 1, kBlockPadding};
  }
}

// Value by value: `bytes` of them from `from` on, at any address.
HETKV_DEVICE_INLINE std::uint32_t load_value(const std::byte* from, int bytes) {
  std::uint32_t value = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < bytes) value |= static_cast<std::uint32_t>(from[i]) << (8 * i);
  }
  return value;
}

// Whether this lane finds a forbidden value among those of [from, from + length).
HETKV_DEVICE_INLINE bool find_in(const std::byte* from, int length, const Forbidden& forbidden, int lane) {
  const auto address = reinterpret_cast<std::uintptr_t>(from);
  bool found = false;
  if (address % static_cast<std::uintptr_t>(forbidden.bytes) != 0) {  // values lie across words
    for (int at = lane * forbidden.bytes; at < length; at += 32 * forbidden.bytes) {
      found |= forbidden.in(load_value(from + at, forbidden.bytes));
    }
    return found;
  }
  const int to_chunk = static_cast<int>((kChunk - address % kChunk) % kChunk);
  const int head = to_chunk < length ? to_chunk : length;
  const int chunks = (length - head) / kChunk;
  const int tail = head + chunks * kChunk;
  // Lanes 0 to 15 look at what lies before the first whole chunk, the others at what lies behind the last.
  const int edge = (lane < 16 ? 0 : tail) + lane % 16 * forbidden.bytes;
  if (edge < (lane < 16 ? head : length)) found |= forbidden.in(load_value(from + edge, forbidden.bytes));
  constexpr int kUnroll = 4;
  for (int chunk = lane; chunk < chunks; chunk += 32 * kUnroll) {
    uint4 words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      words[i] = chunk + 32 * i < chunks ? *reinterpret_cast<const uint4*>(from + head + (chunk + 32 * i) * kChunk)
                                         : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      found |= forbidden.in(words[i].x) || forbidden.in(words[i].y) || forbidden.in(words[i].z) || forbidden.in(words[i].w);
    }
  }
  return found;
}

// `at` rounded up to the next value of a range that starts at `begin`; values have 1, 2 or 4 bytes.
HETKV_DEVICE_INLINE std::int64_t next_value(std::int64_t at, std::int64_t begin, int bytes) {
  return begin + ((at - begin + bytes - 1) & -std::int64_t{bytes});
}

// Status bits of the values that begin in the segment at `segment`. Each lane looks up a range; then the warp scans, one by one,
// those that reach into the segment. Every lane returns its own finds.
HETKV_DEVICE_INLINE std::int32_t check_ranges(const VerifyParams& params, const std::byte* block, std::int64_t segment,
                                              int lane) {
  std::int32_t status = 0;
  const std::int64_t ranges = params.num_zero_ranges + params.num_finite_ranges;
  for (std::int64_t base = 0; base < ranges; base += 32) {
    const std::int64_t r = base + lane;
    std::int64_t begin = 0;
    int length = 0, kind = -1;  // of the part in this segment
    if (r < ranges) {
      const bool zero = r < params.num_zero_ranges;
      const std::int64_t* const range =
          zero ? params.zero_ranges + 2 * r : params.finite_ranges + 3 * (r - params.num_zero_ranges);
      if (zero ? zero_range_fits(range, params.block_bytes) : finite_range_fits(range, params.block_bytes)) {
        if (!zero) kind = static_cast<int>(range[2]);
        const int bytes = forbidden_in(kind).bytes;
        const std::int64_t past = segment + kSegment;
        begin = range[0] >= segment ? range[0] : next_value(segment, range[0], bytes);
        const std::int64_t end = range[1] <= past ? range[1] : next_value(past, range[0], bytes);
        if (begin < end) length = static_cast<int>(end - begin);
      } else {
        status |= zero ? kBlockPadding : kBlockNotFinite;
      }
    }
    for (std::uint32_t left = __ballot_sync(kAllLanes, length > 0); left != 0; left &= left - 1) {
      const int owner = __ffs(static_cast<int>(left)) - 1;
      const Forbidden forbidden = forbidden_in(__shfl_sync(kAllLanes, kind, owner));
      const std::int64_t from = __shfl_sync(kAllLanes, begin, owner);
      if (find_in(block + from, __shfl_sync(kAllLanes, length, owner), forbidden, lane)) status |= forbidden.status;
    }
  }
  return status;
}

// The sum over the warp's lanes, in all of them.
HETKV_DEVICE_INLINE std::uint64_t sum_of_warp(std::uint64_t sum) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

__global__ void __launch_bounds__(kMaxThreads, 3) verify_blocks_kernel(const VerifyParams params) {
  HETKV_SHARED(std::uint64_t[kMaxWarps], sums);
  HETKV_SHARED(std::uint32_t[kMaxWarps], finds);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (std::int64_t index = blockIdx.x; index < params.num_blocks; index += gridDim.x) {
    const std::byte* const block = block_start(params, index);
    std::uint64_t sum = 0;
    std::int32_t found = 0;
    if (block != nullptr) {
      for (std::int64_t begin = warp * kSegment; begin < params.block_bytes; begin += warps * kSegment) {
        if (params.checksums != nullptr) sum += sum_of_segment(block, begin, params.block_bytes, lane);
        found |= check_ranges(params, block, begin, lane);
      }
    }
    sum = sum_of_warp(sum);
    const std::uint32_t found_by_warp = __reduce_or_sync(kAllLanes, static_cast<std::uint32_t>(found));
    if (lane == 0) {
      sums[warp] = sum;
      finds[warp] = found_by_warp;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      std::int32_t status = kBlockOutside;
      if (block != nullptr) {
        status = 0;
        sum = 0;
        for (int w = 0; w < warps; ++w) {
          status |= static_cast<std::int32_t>(finds[w]);
          sum += sums[w];
        }
        const auto address = reinterpret_cast<std::uintptr_t>(block);
        if ((address & (static_cast<std::uintptr_t>(params.base_alignment) - 1)) != 0) status |= kBlockMisaligned;
        if ((params.block_bytes & (params.stride_alignment - 1)) != 0) status |= kBlockStride;
        if (params.checksums != nullptr) {
          const std::uint64_t checksum = checksum_finish(sum, static_cast<std::uint64_t>(params.block_bytes));
          if (checksum != static_cast<std::uint64_t>(params.checksums[index])) status |= kBlockChecksum;
        }
      }
      params.status[index] = status;
    }
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kMaxThreads, 4) checksum_blocks_kernel(const ChecksumParams params) {
  HETKV_SHARED(std::uint64_t[kMaxWarps], sums);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (std::int64_t index = blockIdx.x; index < params.num_blocks; index += gridDim.x) {
    const std::byte* const block = block_start(params, index);
    std::uint64_t sum = 0;
    if (block != nullptr) {
      for (std::int64_t begin = warp * kSegment; begin < params.block_bytes; begin += warps * kSegment) {
        sum += sum_of_segment(block, begin, params.block_bytes, lane);
      }
    }
    sum = sum_of_warp(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      sum = 0;
      for (int w = 0; w < warps; ++w) sum += sums[w];
      const std::uint64_t checksum = checksum_finish(sum, static_cast<std::uint64_t>(params.block_bytes));
      params.checksums[index] = block == nullptr ? 0 : static_cast<std::int64_t>(checksum);
    }
    __syncthreads();
  }
}

dim3 grid_for(std::int64_t blocks) { return dim3(static_cast<unsigned>(std::min(blocks, kMaxGridX))); }

// A warp for each segment of a block, up to the limit.
dim3 threads_for(std::int64_t block_bytes) {
  return dim3(static_cast<unsigned>(32 * std::clamp<std::int64_t>((block_bytes + kSegment - 1) / kSegment, 1, kMaxWarps)));
}

}  // namespace

void verify_blocks_cuda(const VerifyParams& params, void* stream) {
  launch<verify_blocks_kernel>("verify_blocks", grid_for(params.num_blocks), threads_for(params.block_bytes), 0,
                               static_cast<cudaStream_t>(stream), params);
}

void checksum_blocks_cuda(const ChecksumParams& params, void* stream) {
  launch<checksum_blocks_kernel>("checksum_blocks", grid_for(params.num_blocks), threads_for(params.block_bytes), 0,
                                 static_cast<cudaStream_t>(stream), params);
}

}  // namespace hetkv
