// Keys are unique 64-bit integers, score above inverted index. One pass over the scores keeps those that may still be among the k best, in
// order of their index; whenever the room for them is full, the k best of them stay, and the k-th is the bar for what follows: of
// equal scores the first ones win. Long rows start with a bar guessed from a sample. What is left is sorted by score alone, stably.
#include "kernels/top_k.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "kernels/cpu/pick_level.h"

namespace hetkv {
namespace {

constexpr int kDigitBits = 8;
constexpr std::uint32_t kBins = 1u << kDigitBits;
constexpr std::int64_t kSpare = 1024;    // room for candidates beyond k: too little of it means many selections
constexpr std::int64_t kSample = 1024;   // scores to guess a bar from
constexpr std::int64_t kVector = 16;     // take_scores may write as many words more
constexpr std::int64_t kFewToSort = 64;  // below that, comparing is cheaper than counting

std::uint32_t score_of(std::uint64_t candidate) { return static_cast<std::uint32_t>(candidate >> 32); }

// Words for the candidates of a row of `width` scores.
std::int64_t candidate_room(std::int64_t width, std::int64_t k) { return std::min(width, k + kSpare) + kVector; }

// The k-th largest of count keys, 1 <= k <= count. Uses up the keys.
std::uint32_t kth_largest(std::uint32_t* keys, std::int64_t count, std::int64_t k) {
  std::uint32_t prefix = 0;
  for (int shift = 32 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    std::array<std::uint32_t, kBins> bins{};
    for (std::int64_t i = 0; i < count; ++i) ++bins[(keys[i] >> shift) & (kBins - 1)];
    std::uint32_t bin = kBins - 1;
    for (; bins[bin] < k; --bin) k -= bins[bin];
    std::int64_t left = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      keys[left] = keys[i];
      left += ((keys[i] >> shift) & (kBins - 1)) == bin ? 1 : 0;
    }
    count = left;
    prefix |= bin << shift;
  }
  return prefix;
}

// Keeps the k best of count > k candidates, in their order. Returns the k-th score.
std::uint32_t keep_best(std::uint64_t* candidates, std::int64_t count, std::int64_t k, std::uint32_t* space) {
  for (std::int64_t i = 0; i < count; ++i) space[i] = score_of(candidates[i]);
  const std::uint32_t kth = kth_largest(space, count, k);
  std::int64_t ties = k;
  for (std::int64_t i = 0; i < count; ++i) ties -= score_of(candidates[i]) > kth ? 1 : 0;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < count && kept < k; ++i) {
    const std::uint32_t score = score_of(candidates[i]);
    const bool stays = score > kth || (score == kth && ties > 0);
    ties -= score == kth ? 1 : 0;
    candidates[kept] = candidates[i];
    kept += stays ? 1 : 0;
  }
  return kth;
}

// Candidates in order of their index, to descending scores; equal ones stay in order.
void sort_descending(std::uint64_t* candidates, std::int64_t count, std::uint64_t* space) {
  if (count <= kFewToSort) {
    std::sort(candidates, candidates + count, std::greater<>());
    return;
  }
  for (int shift = 32; shift < 64; shift += 2 * kDigitBits) {  // there and back
    for (int half = 0; half < 2; ++half) {
      std::uint64_t *const from = half == 0 ? candidates : space, *const to = half == 0 ? space : candidates;
      const int digit = shift + half * kDigitBits;
      std::array<std::uint32_t, kBins> starts{};
      for (std::int64_t i = 0; i < count; ++i) ++starts[(from[i] >> digit) & (kBins - 1)];
      std::uint32_t start = 0;
      for (std::uint32_t bin = kBins; bin-- > 0;) start += std::exchange(starts[bin], start);
      for (std::int64_t i = 0; i < count; ++i) to[starts[(from[i] >> digit) & (kBins - 1)]++] = from[i];
    }
  }
}

// A score that more than k scores probably reach, from a sample; 0 if none is worth the work. keys: kSample.
std::uint32_t guess_bar(const float* scores, std::int64_t count, std::int64_t k, std::uint32_t* keys) {
  if (count < 8 * kSample || count < 16 * k) return 0;
  const std::int64_t stride = count / kSample;
  for (std::int64_t i = 0; i < kSample; ++i) keys[i] = score_key(scores[i * stride]);
  std::int64_t spread = 1;  // about the root of the rank in the sample, its standard deviation
  const std::int64_t rank = k / stride + 1;
  while (spread * spread < rank) ++spread;
  return kth_largest(keys, kSample, rank + 4 * spread);
}

// The best k of the scores that reach the bar, or all of them if they are fewer, in order of their index. Returns how many.
std::int64_t take_best(const float* scores, std::int64_t count, std::int64_t k, std::uint32_t bar, std::uint64_t* candidates,
                       std::int64_t room, std::uint32_t* keys) {
  const auto take = pick_level(portable::take_scores, avx2::take_scores, avx512::take_scores);
  std::int64_t held = 0;
  for (std::int64_t at = 0; at < count;) {
    held += take(scores, at, count, bar, candidates + held, room - held, &at);
    if (held <= k) continue;
    bar = keep_best(candidates, held, k, keys) + 1;  // no score has the largest key
    held = k;
  }
  return held;
}

}  // namespace

std::int64_t top_k_scratch_words(std::int64_t width, std::int64_t k) noexcept {
  const std::int64_t room = candidate_room(width, k);
  return 2 * room + (room + 1) / 2;
}

void top_k_row_cpu(const float* scores, std::int64_t count, std::int32_t k, std::int32_t* indices,
                   std::uint64_t* scratch) noexcept {
  const std::int64_t room = candidate_room(count, k);
  std::uint64_t *const candidates = scratch, *const space = candidates + room;
  auto* const keys = reinterpret_cast<std::uint32_t*>(space + room);
  const std::uint32_t bar = guess_bar(scores, count, k, keys);
  std::int64_t held = take_best(scores, count, k, bar, candidates, room, keys);
  if (held < k && bar > 0) held = take_best(scores, count, k, 0, candidates, room, keys);
  sort_descending(candidates, held, space);
  for (std::int64_t i = 0; i < held; ++i)
    indices[i] = static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(candidates[i]));
  std::fill(indices + held, indices + k, -1);
}

void top_k_cpu(const TopKParams& params, std::int64_t begin, std::int64_t end, std::uint64_t* scratch) noexcept {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t count =
        params.counts == nullptr ? params.width : std::clamp<std::int64_t>(params.counts[row], 0, params.width);
    top_k_row_cpu(params.scores + row * params.stride, count, params.k, params.indices + row * params.k, scratch);
  }
}

}  // namespace hetkv
