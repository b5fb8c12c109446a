#include "kernels/verify.h"

#include "base/checksum.h"
#include "kernels/cpu/levels/simd.h"

namespace hetkv::HETKV_LEVEL {
namespace {

using Words = std::uint64_t __attribute__((vector_size(kLanes * 4)));
constexpr int kWords = kLanes / 2;                // of a vector
constexpr int kVectors = 8;                       // lanes that fit the registers at once
constexpr int kPart = kVectors * kWords;          // lanes
constexpr std::size_t kAhead = kChecksumSegment;  // bytes to prefetch

inline Words mix(Words x) {  // checksum_mix
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93u;
  x ^= x >> 29;
  x *= 0xa0761d6478bd642fu;
  return x ^ x >> 32;
}

}  // namespace

std::uint64_t checksum_segments(const std::byte* data, std::uint64_t first, std::uint64_t count) noexcept {
  Words index;
  for (int i = 0; i < kWords; ++i) index[i] = static_cast<std::uint64_t>(i);
  Words sums{};
  for (std::uint64_t segment = first; segment < first + count; ++segment, data += kChecksumSegment) {
    for (int part = 0; part < kChecksumLanes; part += kPart) {
      Words lanes[std::size_t{kVectors}];
      for (int v = 0; v < kVectors; ++v) {
        lanes[v] = mix(index + (segment * kChecksumLanes + static_cast<std::uint64_t>(part + v * kWords) + 1));
      }
      for (int round = 0; round < kChecksumRounds; ++round) {
        const std::byte* const stripe = data + (round * kChecksumLanes + part) * 8;
        for (int v = 0; v < kVectors; ++v) {
          __builtin_prefetch(stripe + v * kWords * 8 + kAhead);
          Words x = lanes[v] ^ load<Words>(stripe + v * kWords * 8);
          x ^= x >> 32;
          x *= kChecksumFactor;
          lanes[v] = x << 32 | x >> 32;
        }
      }
      for (int v = 0; v < kVectors; ++v) sums += mix(lanes[v]);
    }
  }
  std::uint64_t sum = 0;
  for (int i = 0; i < kWords; ++i) sum += sums[i];
  return sum;
}

}  // namespace hetkv::HETKV_LEVEL
