#include "base/checksum.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/checksum_words.h"

namespace hetkv {

static_assert(std::endian::native == std::endian::little, "words are read in native order");

namespace {

auto* pick() noexcept {
#ifdef HETKV_HAVE_X86_VARIANTS
  if (__builtin_cpu_supports("avx512dq")) return checksum_words_avx512;  // 64-bit products
  if (__builtin_cpu_supports("avx2")) return checksum_words_avx2;
#endif
  return checksum_words_baseline;
}

}  // namespace

std::uint64_t checksum_segment(const std::byte* data, std::size_t length, std::uint64_t segment) noexcept {
  std::array<std::uint64_t, kChecksumLanes> lanes{};
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) lanes[lane] = checksum_seed(segment, lane);
  const std::size_t rounds = length / (kChecksumLanes * 8);
  static const auto take_words = pick();
  take_words(data, rounds, lanes.data());
  for (std::size_t word = rounds * kChecksumLanes; word * 8 < length; ++word) {
    std::uint64_t value = 0;
    std::memcpy(&value, data + word * 8, std::min<std::size_t>(8, length - word * 8));
    std::uint64_t& lane = lanes[word % kChecksumLanes];
    lane = checksum_round(lane, value);
  }
  std::uint64_t sum = 0;
  for (const std::uint64_t lane : lanes) sum += checksum_mix(lane);
  return sum;
}

std::uint64_t checksum(const std::byte* data, std::size_t length) noexcept {
  std::uint64_t sum = 0;
  for (std::size_t begin = 0; begin < length; begin += kChecksumSegment) {
    sum += checksum_segment(data + begin, std::min(kChecksumSegment, length - begin), begin / kChecksumSegment);
  }
  return checksum_finish(sum, length);
}

std::uint64_t checksum_copy(std::byte* to, const std::byte* from, std::size_t length) noexcept {
  std::uint64_t sum = 0;
  for (std::size_t begin = 0; begin < length; begin += kChecksumSegment) {
    const std::size_t bytes = std::min(kChecksumSegment, length - begin);
    std::memcpy(to + begin, from + begin, bytes);
    sum += checksum_segment(to + begin, bytes, begin / kChecksumSegment);
  }
  return checksum_finish(sum, length);
}

}  // namespace hetkv
