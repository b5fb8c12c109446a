#include "kernels/verify.h"

#include "base/checksum.h"
#include "kernels/cpu/levels/simd.h"

namespace hetkv::HETKV_LEVEL {
namespace {

using Words = std::uint64_t __attribute__((vector_size(kLanes * 4)));
constexpr int kWords = kLanes / 2;        // of a vector
constexpr int kVectors = 8;               // lanes that fit the registers at once
constexpr int kPart = kVectors * kWords;  // lanes

inline Words mix(Words x) {  // checksum_mix
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93u;
  x ^= x >> 29;
  x *= 0xa0761d6478bd642fu;
  return x ^ x >> 32;
}

inline Words round_of(Words lanes, const std::byte* words) {  // checksum_round
  Words x = lanes ^ load<Words>(words);
  x ^= x >> 32;
  x *= kChecksumFactor;
  return x << 32 | x >> 32;
}

// Lanes [part, part + kPart) of a segment after `rounds` whole rounds.
inline void run_lanes(const std::byte* data, std::uint64_t segment, int part, int rounds, Words (&lanes)[std::size_t{kVectors}]) {
  Words index;
  for (int i = 0; i < kWords; ++i) index[i] = static_cast<std::uint64_t>(i);
  for (int v = 0; v < kVectors; ++v) {
    lanes[v] = mix(index + (segment * kChecksumLanes + static_cast<std::uint64_t>(part + v * kWords) + 1));
  }
  for (int round = 0; round < rounds; ++round) {
    const std::byte* const stripe = data + (round * kChecksumLanes + part) * 8;
    if constexpr (kPart < kChecksumLanes) {  // stripes are read in parts: the machine does not see what comes next
      for (int at = 0; at < kPart * 8; at += 64) __builtin_prefetch(stripe + at + kChecksumSegment, 0, 2);
    }
    for (int v = 0; v < kVectors; ++v) lanes[v] = round_of(lanes[v], stripe + v * kWords * 8);
  }
}

// A segment that ends early: whole rounds as ever, the rest word by word.
std::uint64_t last_segment(const std::byte* data, int length, std::uint64_t segment) {
  constexpr int kRoundBytes = kChecksumLanes * 8;
  std::uint64_t words[kChecksumLanes];
  for (int part = 0; part < kChecksumLanes; part += kPart) {
    Words lanes[std::size_t{kVectors}];
    run_lanes(data, segment, part, length / kRoundBytes, lanes);
    for (int v = 0; v < kVectors; ++v) store(words + part + v * kWords, lanes[v]);
  }
  const int whole = length / kRoundBytes * kRoundBytes;
  for (int at = whole; at < length; at += 8) {
    std::uint64_t word = 0;
    __builtin_memcpy(&word, data + at, static_cast<std::size_t>(length - at < 8 ? length - at : 8));
    std::uint64_t x = words[(at - whole) / 8] ^ word;
    x ^= x >> 32;
    x *= kChecksumFactor;
    words[(at - whole) / 8] = x << 32 | x >> 32;
  }
  Words sums{};
  for (int i = 0; i < kChecksumLanes; i += kWords) sums += mix(load<Words>(words + i));
  std::uint64_t sum = 0;
  for (int i = 0; i < kWords; ++i) sum += sums[i];
  return sum;
}

}  // namespace

std::uint64_t checksum_segments(const std::byte* data, std::size_t length, std::uint64_t first) noexcept {
  Words sums{};
  for (; length >= kChecksumSegment; length -= kChecksumSegment, data += kChecksumSegment, ++first) {
    for (int part = 0; part < kChecksumLanes; part += kPart) {
      Words lanes[std::size_t{kVectors}];
      run_lanes(data, first, part, kChecksumRounds, lanes);
      for (int v = 0; v < kVectors; ++v) sums += mix(lanes[v]);
    }
  }
  std::uint64_t sum = length > 0 ? last_segment(data, static_cast<int>(length), first) : 0;
  for (int i = 0; i < kWords; ++i) sum += sums[i];
  return sum;
}

}  // namespace hetkv::HETKV_LEVEL
