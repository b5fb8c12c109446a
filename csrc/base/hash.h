// The keyed, chained 128-bit hash of token prefixes.
//
// key(depth 0) = root of a namespace; key(i) = mix(key(i-1), content hash of block i). Content hashes do not depend on their
// parent, so the pass over the tokens has no serial dependency but the short mix. The secret is per store: without it nobody can
// choose two blocks that collide, and names derived from keys reveal no tokens. Collisions cost time, never correctness: whoever
// trusts a key compares the tokens first (prefix_index.h).
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>

namespace hetkv {

struct Key128 {
  std::uint64_t high = 0, low = 0;
  friend bool operator==(const Key128&, const Key128&) = default;
};

class ChainHasher {
 public:
  // A seed of 0 draws a secret from the system's random device; any other value gives a reproducible secret (tests only).
  explicit ChainHasher(std::uint64_t seed);

  // Key of a namespace's root. Thread-safe, no allocation.
  Key128 root(std::span<const std::byte> framed_namespace, std::uint32_t instance) const;
  // Keys of the blocks [first, first + out.size()) of `tokens`, block_size tokens each; `parent` is the key before `first`.
  // Thread-safe, no allocation. Reads 4 * block_size bytes a block.
  void chain(Key128 parent, const std::int32_t* tokens, std::uint32_t block_size, std::span<Key128> out) const;

 private:
  static constexpr std::size_t kSecretBytes = 192;
  alignas(64) std::array<std::byte, kSecretBytes> secret_;
};

}  // namespace hetkv
