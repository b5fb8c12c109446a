// Checks of blocks: place, alignment, padding, checksum, non-finite values. Parameters and entry points.
//
// VerifyParams and ChecksumParams are the kernel ABI, already checked, the same for CPU and CUDA. A kernel owns nothing and keeps
// nothing. A block that is not inside the arena is not read; it gets kBlockOutside and nothing else, and 0 for a checksum.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host_device.h"

namespace hetkv {

// Bits of a block's status; 0: all checks passed. Mirrored in python/hetkv/ops/verify.py.
enum BlockStatus : std::int32_t {
  kBlockOutside = 1,     // not inside the arena
  kBlockMisaligned = 2,  // its address is no multiple of the alignment
  kBlockStride = 4,      // the bytes of a block are no multiple of the stride's alignment
  kBlockPadding = 8,     // a byte that must be 0 is not
  kBlockChecksum = 16,   // not the stored checksum
  kBlockNotFinite = 32,  // infinity or NaN
};

enum class FiniteType : std::int64_t { kFloat32, kFloat16, kBFloat16, kE4m3 };

HETKV_HOST_DEVICE constexpr std::int64_t finite_type_bytes(FiniteType type) {
  return type == FiniteType::kFloat32 ? 4 : type == FiniteType::kE4m3 ? 1 : 2;
}

struct VerifyParams {
  const std::byte* arena = nullptr;
  const std::int32_t* blocks = nullptr;         // [num_blocks], units of 256 bytes
  const std::int64_t* checksums = nullptr;      // [num_blocks], or null
  const std::int64_t* zero_ranges = nullptr;    // [num_zero_ranges, 2]: bytes [begin, end) of every block
  const std::int64_t* finite_ranges = nullptr;  // [num_finite_ranges, 3]: begin, end, FiniteType
  std::int32_t* status = nullptr;               // [num_blocks]
  std::int64_t arena_bytes = 0;
  std::int64_t num_blocks = 0;
  std::int64_t num_zero_ranges = 0;
  std::int64_t num_finite_ranges = 0;
  std::int64_t block_bytes = 0;     // >= 1
  std::int64_t base_alignment = 1;  // powers of two
  std::int64_t stride_alignment = 1;
};

struct ChecksumParams {
  const std::byte* arena = nullptr;
  const std::int32_t* blocks = nullptr;  // [num_blocks], units of 256 bytes
  std::int64_t* checksums = nullptr;     // [num_blocks]
  std::int64_t arena_bytes = 0;
  std::int64_t num_blocks = 0;
  std::int64_t block_bytes = 0;  // >= 1
};

// Whether a range lies in a block and, of finite ranges, holds whole values of a known type. The CPU op refuses others.
HETKV_HOST_DEVICE inline bool zero_range_fits(const std::int64_t* range, std::int64_t block_bytes) {
  return range[0] >= 0 && range[0] <= range[1] && range[1] <= block_bytes;
}
HETKV_HOST_DEVICE inline bool finite_range_fits(const std::int64_t* range, std::int64_t block_bytes) {
  if (!zero_range_fits(range, block_bytes)) return false;
  if (range[2] < 0 || range[2] > static_cast<std::int64_t>(FiniteType::kE4m3)) return false;
  return (range[1] - range[0]) % finite_type_bytes(static_cast<FiniteType>(range[2])) == 0;
}

// Checksums of blocks [begin, end), which must all be inside the arena. Thread-safe over disjoint blocks; allocates nothing.
void checksum_blocks_cpu(const ChecksumParams& params, std::int64_t begin, std::int64_t end) noexcept;

// Status of blocks [begin, end). Thread-safe over disjoint blocks; allocates nothing.
void verify_blocks_cpu(const VerifyParams& params, std::int64_t begin, std::int64_t end) noexcept;

// All blocks, on a stream of the arena's device. Every pointer is device memory, also the ranges: one that does not fit the
// block, which the CPU op refuses, is a failed check of every block. Throw CudaError if the launch is refused. Thread-safe,
// allocate nothing, do not block; may be captured.
void verify_blocks_cuda(const VerifyParams& params, void* stream);
void checksum_blocks_cuda(const ChecksumParams& params, void* stream);

// base/checksum.h of some bytes, at this process's level: the same number at each. Thread-safe, allocates nothing.
std::uint64_t checksum_cpu(const std::byte* data, std::size_t length) noexcept;

// The builds of cpu/levels: the sum of checksum_segment over some bytes, whose first segment has the number `first`.
using ChecksumSegmentsFn = std::uint64_t(const std::byte* data, std::size_t length, std::uint64_t first) noexcept;
namespace portable {
ChecksumSegmentsFn checksum_segments;
}
namespace avx2 {
ChecksumSegmentsFn checksum_segments;
}
namespace avx512 {
ChecksumSegmentsFn checksum_segments;
}

}  // namespace hetkv
