// Copying blocks, or the same part of blocks, inside an arena or between two. Parameters and entry points.
//
// BlockCopyParams is the kernel ABI, already checked, the same for CPU and CUDA. Pair i copies num_bytes bytes from block
// source[i] to block target[i], `begin` bytes into both. The two parts of one pair may overlap: the target ends with what the
// source held. Parts of different pairs must not, except sources.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetkv {

struct BlockCopyParams {
  const std::byte* source_arena = nullptr;
  std::byte* target_arena = nullptr;     // may be the same
  const std::int32_t* source = nullptr;  // [num_pairs], units of 256 bytes
  const std::int32_t* target = nullptr;  // [num_pairs]
  std::int64_t source_arena_bytes = 0;
  std::int64_t target_arena_bytes = 0;
  std::int64_t num_pairs = 0;
  std::int64_t begin = 0;
  std::int64_t num_bytes = 0;  // >= 1
};

// Pairs [begin, end). Thread-safe over disjoint pairs; allocates nothing. Large parts are written past the caches.
void copy_blocks_cpu(const BlockCopyParams& params, std::int64_t begin, std::int64_t end) noexcept;

// All pairs, on a stream of the arenas' device; a pair of which one part is outside its arena is skipped. Every pointer is device
// memory. `op`: for the error. Throws CudaError if the launch is refused. Thread-safe, allocates nothing, does not block; may be
// captured.
void copy_blocks_cuda(const char* op, const BlockCopyParams& params, void* stream);

// The builds of cpu/levels: one copy between places that do not overlap.
using CopyApartFn = void(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
namespace portable {
CopyApartFn copy_apart;
}
namespace avx2 {
CopyApartFn copy_apart;
}
namespace avx512 {
CopyApartFn copy_apart;
}

}  // namespace hetkv
