// Checks of blocks: place, alignment, padding, checksum, non-finite values. Parameters and entry points.
//
// VerifyParams is the kernel ABI, already checked; CUDA kernels are to take the same struct. A kernel owns nothing and keeps nothing. A block
// that is not inside the arena is not read; it gets kBlockOutside and nothing else.
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

// Status of blocks [begin, end). Thread-safe over disjoint blocks; allocates nothing.
void verify_blocks_cpu(const VerifyParams& params, std::int64_t begin, std::int64_t end) noexcept;

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
