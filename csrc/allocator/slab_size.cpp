#include "allocator/slab_size.h"

#include <algorithm>
#include <cmath>

namespace hetkv {
namespace {

constexpr std::uint64_t kMostBlocks = 4096, kLeastSlabs = 16, kUsualSlabs = 512, kMostSlabs = 4096;
constexpr std::uint64_t kSlabsPerPool = 8;  // so that every pool can hold a few beside the others
constexpr std::uint64_t kTrials = 256;      // multiples of each block size
constexpr double kSizeWeight = 0.004;       // what a factor of two in the number of slabs may cost in remainder

constexpr std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// Share of a slab that no block of a pool can use, averaged over the pools.
double remainder(std::uint64_t slab, std::span<const std::uint64_t> block_bytes) {
  double sum = 0;
  for (const std::uint64_t block : block_bytes) sum += static_cast<double>(slab % block) / static_cast<double>(slab);
  return sum / static_cast<double>(block_bytes.size());
}

}  // namespace

std::uint64_t choose_slab_bytes(std::uint64_t arena_bytes, std::span<const std::uint64_t> block_bytes, std::uint64_t alignment) {
  const auto [smallest, largest] = std::minmax_element(block_bytes.begin(), block_bytes.end());
  const std::uint64_t least = round_up(std::max(*largest, arena_bytes / kMostSlabs), alignment);
  const std::uint64_t most =
      std::max(least, std::min(kMostBlocks * *smallest, arena_bytes / kLeastSlabs) / alignment * alignment);
  if (least > arena_bytes) return 0;
  const std::uint64_t slabs = std::max(kUsualSlabs, kSlabsPerPool * block_bytes.size());
  const double wanted = static_cast<double>(std::clamp(arena_bytes / slabs, least, most));

  std::uint64_t best = 0;
  double best_cost = 0;
  const auto consider = [&](std::uint64_t slab) {
    if (slab < least || slab > most) return;
    const double lost = static_cast<double>(arena_bytes % slab) / static_cast<double>(arena_bytes);
    const double cost =
        remainder(slab, block_bytes) + lost + kSizeWeight * std::abs(std::log2(static_cast<double>(slab) / wanted));
    if (best != 0 && cost >= best_cost) return;
    best = slab;
    best_cost = cost;
  };
  consider(least);
  consider(most);
  for (const std::uint64_t block : block_bytes) {
    const std::uint64_t last = most / block, first = std::max<std::uint64_t>(1, least / block);
    const std::uint64_t step = std::max<std::uint64_t>(1, (last - std::min(first, last)) / kTrials);
    for (std::uint64_t k = first; k <= last; k += step) consider(round_up(k * block, alignment));
  }
  return best;
}

}  // namespace hetkv
