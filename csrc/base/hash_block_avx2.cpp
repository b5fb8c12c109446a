#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/hash_block.h"

namespace hetkv {

Key128 hash_block_avx2(const void* data, std::size_t bytes, const std::byte* secret, std::size_t secret_bytes) {
  const XXH128_hash_t hash = XXH3_128bits_withSecret(data, bytes, secret, secret_bytes);
  return {hash.high64, hash.low64};
}

}  // namespace hetkv
