// The keyed chain of prefix hashes, and the zero-filled array beneath the index.
#include "base/hash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "base/hash_block.h"
#include "base/lazy_array.h"

namespace hetkv {
namespace {

std::vector<std::byte> random_bytes(std::mt19937_64& random, std::size_t n) {
  std::vector<std::byte> bytes(n);
  for (auto& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::int32_t> random_tokens(std::mt19937_64& random, std::size_t n) {
  std::vector<std::int32_t> tokens(n);
  for (auto& t : tokens) t = static_cast<std::int32_t>(random());
  return tokens;
}

// A store written by one machine's instruction set must be found by another's.
TEST(HashBlock, EveryInstructionSetGivesTheSameValue) {
  std::mt19937_64 random(1);
  const std::vector<std::byte> secret = random_bytes(random, 192);
  const std::vector<std::byte> data = random_bytes(random, 5000);
  for (const std::size_t n :
       {0u, 1u, 3u, 4u, 8u, 9u, 16u, 17u, 32u, 64u, 128u, 129u, 240u, 241u, 256u, 512u, 1024u, 1025u, 4096u, 5000u}) {
    const Key128 expected = hash_block_baseline(data.data(), n, secret.data(), secret.size());
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
      EXPECT_EQ(hash_block_avx2(data.data(), n, secret.data(), secret.size()), expected) << n;
    }
    if (__builtin_cpu_supports("avx512f")) {
      EXPECT_EQ(hash_block_avx512(data.data(), n, secret.data(), secret.size()), expected) << n;
    }
#endif
    if (n > 0) {
      std::vector<std::byte> other(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(n));
      other[n / 2] ^= std::byte{1};
      EXPECT_NE(hash_block_baseline(other.data(), n, secret.data(), secret.size()), expected) << n;
    }
  }
}

TEST(ChainHasher, AChainCanBeContinuedAnywhere) {
  std::mt19937_64 random(2);
  const ChainHasher hasher(7);
  const Key128 root = hasher.root({}, 0);
  for (const std::uint32_t block : {1u, 16u, 64u, 256u}) {
    const std::size_t n = 20;
    const auto tokens = random_tokens(random, n * block);
    std::vector<Key128> whole(n);
    hasher.chain(root, tokens.data(), block, whole);
    for (std::size_t cut = 1; cut < n; ++cut) {
      std::vector<Key128> rest(n - cut);
      hasher.chain(whole[cut - 1], tokens.data() + cut * block, block, rest);
      EXPECT_TRUE(std::equal(rest.begin(), rest.end(), whole.begin() + static_cast<std::ptrdiff_t>(cut))) << cut;
    }
  }
}

TEST(ChainHasher, AKeyDependsOnEveryTokenBeforeItAndOnNoneAfter) {
  std::mt19937_64 random(3);
  const ChainHasher hasher(7);
  const std::uint32_t block = 16;
  const auto tokens = random_tokens(random, 8 * block);
  std::vector<Key128> keys(8), changed(8);
  hasher.chain(hasher.root({}, 0), tokens.data(), block, keys);
  for (std::size_t at = 0; at < tokens.size(); ++at) {
    auto other = tokens;
    other[at] ^= 1 << (at % 31);
    hasher.chain(hasher.root({}, 0), other.data(), block, changed);
    for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(keys[i] == changed[i], i < at / block) << at << " " << i;
  }
}

TEST(ChainHasher, EqualBlocksAtOtherDepthsHaveOtherKeys) {
  const ChainHasher hasher(7);
  const std::vector<std::int32_t> tokens(64 * 16, 5);
  std::vector<Key128> keys(64);
  hasher.chain(hasher.root({}, 0), tokens.data(), 16, keys);
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  for (const Key128& key : keys) seen.emplace(key.high, key.low);
  EXPECT_EQ(seen.size(), 64u);
}

TEST(ChainHasher, TheSecretDecidesEveryKey) {
  const std::vector<std::int32_t> tokens(16, 5);
  auto first_key = [&](const ChainHasher& hasher) {
    Key128 key;
    hasher.chain(hasher.root({}, 0), tokens.data(), 16, std::span(&key, 1));
    return key;
  };
  EXPECT_EQ(first_key(ChainHasher(7)), first_key(ChainHasher(7)));
  EXPECT_NE(first_key(ChainHasher(7)), first_key(ChainHasher(8)));
  EXPECT_NE(first_key(ChainHasher(0)), first_key(ChainHasher(0))) << "a seed of 0 draws a secret";
  // The secret is used in the content hash too, not only in the root: continuing from one parent differs.
  Key128 a, b;
  ChainHasher(7).chain({1, 2}, tokens.data(), 16, std::span(&a, 1));
  ChainHasher(8).chain({1, 2}, tokens.data(), 16, std::span(&b, 1));
  EXPECT_NE(a, b);
}

TEST(ChainHasher, RootsOfNamespacesAndInstancesDiffer) {
  const ChainHasher hasher(7);
  const auto bytes = [](const char* text) { return std::as_bytes(std::span(text, std::strlen(text))); };
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  for (const char* name : {"", "a", "b", "aa", "ab"}) {
    for (std::uint32_t instance = 0; instance < 4; ++instance) {
      const Key128 root = hasher.root(bytes(name), instance);
      EXPECT_TRUE(seen.emplace(root.high, root.low).second) << name << " " << instance;
      EXPECT_EQ(root, hasher.root(bytes(name), instance));
    }
  }
}

TEST(LazyArray, IsZeroFilledMovableAndVirtual) {
  LazyArray<std::uint64_t> array(std::size_t{1} << 32);  // 32 GiB that nobody touches
  EXPECT_EQ(array.size(), std::size_t{1} << 32);
  EXPECT_EQ(array[0], 0u);
  EXPECT_EQ(array[(std::size_t{1} << 32) - 1], 0u);
  array[12345] = 7;
  LazyArray<std::uint64_t> other(std::move(array));
  EXPECT_EQ(array.data(), nullptr);
  EXPECT_EQ(other[12345], 7u);
  LazyArray<std::uint64_t> third;
  third = std::move(other);
  EXPECT_EQ(third[12345], 7u);
  EXPECT_EQ(LazyArray<int>(0).data(), nullptr);
}

}  // namespace
}  // namespace hetkv
