// Keys are unique 64-bit integers, score above inverted index, so an exact selection is the right one whatever it does with ties.
// Two histograms find a threshold that leaves few candidates; those are selected and sorted.
#include "kernels/top_k.h"

#include <algorithm>
#include <array>
#include <functional>

namespace hetkv {
namespace {

constexpr int kDigitBits = 11;
constexpr std::size_t kBins = std::size_t{1} << kDigitBits;
constexpr std::int64_t kFewScores = 256;  // below that, sorting is cheaper than counting

std::uint64_t unique_key(std::uint32_t key, std::int64_t index) {
  return std::uint64_t{key} << 32 | (0xffffffffu - static_cast<std::uint32_t>(index));
}

// The lowest bin of the digit at `shift` such that it and the bins above hold at least `wanted` of the keys with these upper bits; and
// how many lie above it.
struct Threshold {
  std::uint32_t bin;
  std::int64_t above;
};

Threshold threshold_of(const std::uint32_t* keys, std::int64_t count, int shift, std::uint32_t prefix, int prefix_shift,
                       std::int64_t wanted, std::uint32_t bins) {
  std::array<std::array<std::uint32_t, kBins>, 4> tables{};
  const std::uint32_t mask = bins - 1;
  const bool all = prefix_shift >= 32;
  for (std::int64_t i = 0; i < count; ++i) {
    if (all || keys[i] >> prefix_shift == prefix) ++tables[static_cast<std::size_t>(i & 3)][(keys[i] >> shift) & mask];
  }
  std::int64_t above = 0;
  for (std::uint32_t bin = bins; bin-- > 0;) {
    const std::int64_t here = std::int64_t{tables[0][bin]} + tables[1][bin] + tables[2][bin] + tables[3][bin];
    if (above + here >= wanted) return {bin, above};
    above += here;
  }
  return {0, above};
}

void fill_sorted(std::uint64_t* candidates, std::int64_t count, std::int32_t k, std::int32_t* indices) {
  const std::int64_t taken = std::min<std::int64_t>(count, k);
  std::uint64_t* const end = candidates + count;
  if (taken < count) std::nth_element(candidates, candidates + taken, end, std::greater<>());
  std::sort(candidates, candidates + taken, std::greater<>());
  for (std::int64_t i = 0; i < taken; ++i)
    indices[i] = static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(candidates[i]));
  std::fill(indices + taken, indices + k, -1);
}

}  // namespace

std::int64_t top_k_scratch_words(std::int64_t width) noexcept { return width + (width + 1) / 2; }

void top_k_row_cpu(const float* scores, std::int64_t count, std::int32_t k, std::int32_t* indices,
                   std::uint64_t* scratch) noexcept {
  std::uint64_t* const candidates = scratch;
  auto* const keys = reinterpret_cast<std::uint32_t*>(scratch + count);
  for (std::int64_t i = 0; i < count; ++i) keys[i] = score_key(scores[i]);
  if (count <= k || count <= kFewScores) {
    for (std::int64_t i = 0; i < count; ++i) candidates[i] = unique_key(keys[i], i);
    return fill_sorted(candidates, count, k, indices);
  }
  // Three digits of 11, 11 and 10 bits name the k-th score exactly; of equal scores the first ones are taken.
  const Threshold high = threshold_of(keys, count, 21, 0, 32, k, kBins);
  const Threshold middle = threshold_of(keys, count, 10, high.bin, 21, k - high.above, kBins);
  const std::uint32_t prefix = high.bin << kDigitBits | middle.bin;
  const Threshold low = threshold_of(keys, count, 0, prefix, 10, k - high.above - middle.above, 1u << 10);
  const std::uint32_t kth = prefix << 10 | low.bin;
  std::int64_t ties = k - high.above - middle.above - low.above, found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (keys[i] < kth) continue;
    if (keys[i] == kth && ties-- <= 0) continue;
    candidates[found++] = unique_key(keys[i], i);
  }
  fill_sorted(candidates, found, k, indices);
}

void top_k_cpu(const TopKParams& params, std::int64_t begin, std::int64_t end, std::uint64_t* scratch) noexcept {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t count =
        params.counts == nullptr ? params.width : std::clamp<std::int64_t>(params.counts[row], 0, params.width);
    top_k_row_cpu(params.scores + row * params.stride, count, params.k, params.indices + row * params.k, scratch);
  }
}

}  // namespace hetkv
