#include "base/checksum.h"

#include <algorithm>
#include <array>
#include <bit>

namespace hetkv {

static_assert(std::endian::native == std::endian::little, "words are read in native order");

std::uint64_t checksum_segment(const std::byte* data, std::size_t length, std::uint64_t segment) noexcept {
  std::array<std::uint64_t, kChecksumLanes> lanes{};
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) lanes[lane] = checksum_seed(segment, lane);
  for (std::size_t word = 0; word * 8 < length; ++word) {
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

}  // namespace hetkv
