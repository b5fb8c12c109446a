#include "base/checksum_words.h"

namespace hetkv {

void checksum_words_avx512(const std::byte* data, std::size_t rounds, std::uint64_t* lanes) noexcept {
  checksum_words(data, rounds, lanes);
}

}  // namespace hetkv
