// The rounds of a checksum over whole rows of words, compiled once per instruction set (checksum_words_*.cpp); checksum.cpp picks one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/checksum.h"

namespace hetkv {

// Takes `rounds` rows of kChecksumLanes words, one word into each lane.
void checksum_words_baseline(const std::byte* data, std::size_t rounds, std::uint64_t* lanes) noexcept;
void checksum_words_avx2(const std::byte* data, std::size_t rounds, std::uint64_t* lanes) noexcept;
void checksum_words_avx512(const std::byte* data, std::size_t rounds, std::uint64_t* lanes) noexcept;

namespace {

// Unnamed: every file that is compiled for another instruction set has its own. Lanes in the outer loop stay in registers.
[[gnu::always_inline]] inline void checksum_words(const std::byte* data, std::size_t rounds, std::uint64_t* lanes) noexcept {
  constexpr std::size_t kTogether = 16;
  for (std::size_t first = 0; first < kChecksumLanes; first += kTogether) {
    std::uint64_t mine[kTogether];
    std::memcpy(mine, lanes + first, sizeof mine);
    for (std::size_t round = 0; round < rounds; ++round) {
      std::uint64_t words[kTogether];
      std::memcpy(words, data + (round * kChecksumLanes + first) * 8, sizeof words);
      for (std::size_t i = 0; i < kTogether; ++i) mine[i] = checksum_round(mine[i], words[i]);
    }
    std::memcpy(lanes + first, mine, sizeof mine);
  }
}

}  // namespace
}  // namespace hetkv
