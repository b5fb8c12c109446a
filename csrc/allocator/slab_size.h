// Choosing the bytes of a slab from the block sizes that must share it.
#pragma once

#include <cstdint>
#include <span>

namespace hetkv {

// The slab size for an arena of `arena_bytes` that holds blocks of all these sizes: a multiple of `alignment` (a power of two), no
// smaller than the largest block, at most 4,096 blocks of the smallest size where that is possible, arena / slab between 16 and
// 4,096 where that is possible, and little left over behind the last block of any size. 0 if the largest block does not fit.
// Thread-safe; no allocation.
std::uint64_t choose_slab_bytes(std::uint64_t arena_bytes, std::span<const std::uint64_t> block_bytes, std::uint64_t alignment);

}  // namespace hetkv
