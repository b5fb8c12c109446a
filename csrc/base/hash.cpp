#define XXH_INLINE_ALL
#include "base/hash.h"

#include <xxhash.h>

#include <cstring>
#include <random>

#include "base/hash_block.h"

namespace hetkv {
namespace {

std::uint64_t splitmix(std::uint64_t& state) {
  std::uint64_t z = (state += 0x9E3779B97F4A7C15ULL);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

using ContentHash = Key128 (*)(const void* data, std::size_t bytes, const std::byte* secret, std::size_t secret_bytes);

// The same function compiled for several instruction sets; all give the same value.
ContentHash pick_content_hash() {
#if defined(HETKV_HAVE_X86_VARIANTS)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f")) return hash_block_avx512;
  if (__builtin_cpu_supports("avx2")) return hash_block_avx2;
#endif
  return hash_block_baseline;
}

const ContentHash content_hash = pick_content_hash();

// One short keyed mix of 32 bytes: the serial part of the chain, so its latency counts and it is compiled in here.
Key128 mix(const Key128& parent, const Key128& content, const std::byte* secret, std::size_t secret_bytes) {
  const std::uint64_t words[4] = {parent.high, parent.low, content.high, content.low};
  const XXH128_hash_t hash = XXH3_128bits_withSecret(words, sizeof words, secret, secret_bytes);
  return {hash.high64, hash.low64};
}

}  // namespace

ChainHasher::ChainHasher(std::uint64_t seed) {
  std::random_device device;
  for (std::size_t i = 0; i < kSecretBytes; i += 8) {
    const std::uint64_t word = seed != 0 ? splitmix(seed) : (std::uint64_t{device()} << 32) | device();
    std::memcpy(secret_.data() + i, &word, 8);
  }
}

Key128 ChainHasher::root(std::span<const std::byte> framed_namespace, std::uint32_t instance) const {
  const Key128 name = hash_block_baseline(framed_namespace.data(), framed_namespace.size(), secret_.data(), kSecretBytes);
  return mix(name, Key128{0x726F6F74ULL, instance}, secret_.data(), kSecretBytes);
}

void ChainHasher::chain(Key128 parent, const std::int32_t* tokens, std::uint32_t block_size, std::span<Key128> out) const {
  const std::size_t bytes = std::size_t{block_size} * sizeof(std::int32_t);
  const auto* data = reinterpret_cast<const std::byte*>(tokens);
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i] = mix(parent, content_hash(data + i * bytes, bytes, secret_.data(), kSecretBytes), secret_.data(), kSecretBytes);
    parent = out[i];
  }
}

}  // namespace hetkv
