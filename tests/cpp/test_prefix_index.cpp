// The hash table from keys to nodes: equal tags, full buckets, overflow, flags, and threads against a plain map.
#include "allocator/prefix_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

namespace hetkv {
namespace {

// Bucket `at` of `buckets`, tag `tag`.
Key128 key_in(std::size_t buckets, std::size_t at, std::uint64_t tag) {
  const auto low = static_cast<std::uint64_t>(((static_cast<unsigned __int128>(at) << 64) + buckets) / buckets);
  return {tag << 40 | tag, low};
}

std::multimap<NodeId, std::uint8_t> seen(const PrefixIndex& index, const Key128& key) {
  std::multimap<NodeId, std::uint8_t> found;
  index.visit(key, [&](const PrefixIndex::Entry& entry) {
    found.emplace(entry.node, entry.flags);
    return false;
  });
  return found;
}

bool insert(PrefixIndex& index, const Key128& key, NodeId node, std::uint8_t flags = 0) {
  const auto writer = index.try_write(key);
  return writer && index.insert(*writer, key, node, flags);
}

TEST(PrefixIndex, FindsWhatWasInsertedAndNothingElse) {
  PrefixIndex index(1000);
  std::mt19937_64 random(1);
  std::map<NodeId, Key128> all;
  for (NodeId node = 1; node <= 1000; ++node) {
    all[node] = {random(), random()};
    ASSERT_TRUE(insert(index, all[node], node, static_cast<std::uint8_t>(node)));
  }
  for (const auto& [node, key] : all) {
    const auto found = seen(index, key);
    const auto it = found.find(node);
    ASSERT_NE(it, found.end());
    EXPECT_EQ(it->second, static_cast<std::uint8_t>(node));
    EXPECT_LE(found.size(), 2u) << "other entries with the same 24-bit tag nearby are rare";
  }
  for (NodeId node = 1; node <= 1000; node += 2) index.remove(all[node], node);
  for (const auto& [node, key] : all) EXPECT_EQ(seen(index, key).count(node), node % 2 == 0 ? 1u : 0u);
  for (int i = 0; i < 1000; ++i) EXPECT_TRUE(seen(index, {random(), random()}).empty());
}

TEST(PrefixIndex, SameTagAndBucketAreAllVisited) {
  PrefixIndex index(100);
  const Key128 key = key_in(21, 3, 77);
  for (NodeId node = 1; node <= 20; ++node) ASSERT_TRUE(insert(index, key, node, static_cast<std::uint8_t>(node)));
  EXPECT_EQ(seen(index, key).size(), 20u);
  index.remove(key, 13);
  EXPECT_EQ(seen(index, key).size(), 19u);
  EXPECT_EQ(seen(index, key).count(13), 0u);
  // Visiting stops where it is told to.
  int visits = 0;
  EXPECT_TRUE(index.visit(key, [&](const PrefixIndex::Entry&) { return ++visits == 4; }));
  EXPECT_EQ(visits, 4);
}

TEST(PrefixIndex, OverflowIsFollowedAcrossBucketsAndTheEndOfTheTable) {
  PrefixIndex index(100);  // 21 buckets of 7
  const std::size_t buckets = 21;
  std::vector<std::pair<Key128, NodeId>> entries;
  NodeId node = 0;
  // 40 entries at home in the last bucket: they spill over the end into buckets 0..4, where others are at home too.
  for (std::uint64_t tag = 1; tag <= 40; ++tag) entries.emplace_back(key_in(buckets, buckets - 1, tag), ++node);
  for (std::uint64_t tag = 100; tag < 120; ++tag) entries.emplace_back(key_in(buckets, 2, tag), ++node);
  for (const auto& [key, id] : entries) ASSERT_TRUE(insert(index, key, id));
  for (const auto& [key, id] : entries) EXPECT_EQ(seen(index, key).count(id), 1u) << id;
  // Removing in a mixed order never hides what lies behind.
  std::mt19937_64 random(2);
  std::shuffle(entries.begin(), entries.end(), random);
  while (!entries.empty()) {
    index.remove(entries.back().first, entries.back().second);
    const auto gone = entries.back();
    entries.pop_back();
    EXPECT_EQ(seen(index, gone.first).count(gone.second), 0u);
    for (const auto& [key, id] : entries) ASSERT_EQ(seen(index, key).count(id), 1u) << id;
  }
  // Empty again: no bucket says any more that a reader must go on.
  for (std::uint64_t tag = 1; tag <= 40; ++tag) EXPECT_TRUE(seen(index, key_in(buckets, buckets - 1, tag)).empty());
}

TEST(PrefixIndex, AFullTableRefusesAndStaysRight) {
  PrefixIndex index(1);  // 8 buckets of 7
  std::mt19937_64 random(3);
  std::map<NodeId, Key128> all;
  for (NodeId node = 1; node <= 56; ++node) {
    all[node] = {random(), random()};
    ASSERT_TRUE(insert(index, all[node], node));
  }
  const Key128 more{random(), random()};
  EXPECT_FALSE(insert(index, more, 57));
  EXPECT_TRUE(seen(index, more).empty());
  for (const auto& [node, key] : all) EXPECT_EQ(seen(index, key).count(node), 1u);
  for (const auto& [node, key] : all) index.remove(key, node);
  for (const auto& [node, key] : all) EXPECT_TRUE(seen(index, key).empty());
  for (const auto& [node, key] : all) EXPECT_TRUE(insert(index, key, node));
}

TEST(PrefixIndex, TheWriterBitIsHeldOncePerBucketAndNeverWaitedFor) {
  PrefixIndex index(100);
  const Key128 key = key_in(21, 3, 1), same_bucket = key_in(21, 3, 2), other = key_in(21, 4, 1);
  {
    const auto writer = index.try_write(key);
    ASSERT_TRUE(writer);
    EXPECT_FALSE(index.try_write(key));
    EXPECT_FALSE(index.try_write(same_bucket));
    EXPECT_TRUE(index.try_write(other));
    EXPECT_TRUE(seen(index, key).empty()) << "readers ignore the bit";
  }
  EXPECT_TRUE(index.try_write(key));
}

TEST(PrefixIndex, FlagsAreRefreshedInPlace) {
  PrefixIndex index(100);
  const Key128 key = key_in(21, 3, 1);
  ASSERT_TRUE(insert(index, key, 9, 0));
  ASSERT_TRUE(insert(index, key, 10, 0));
  index.refresh_flags(key, 9, [] { return std::uint8_t{0x81}; });
  EXPECT_EQ(seen(index, key).find(9)->second, 0x81);
  EXPECT_EQ(seen(index, key).find(10)->second, 0);
  index.refresh_flags(key, 11, [] { return std::uint8_t{0xFF}; });  // not there: nothing happens
  EXPECT_EQ(seen(index, key).size(), 2u);
  // The words may change while the slot is written: the last store agrees with them.
  int calls = 0;
  index.refresh_flags(key, 9, [&] { return static_cast<std::uint8_t>(++calls < 5 ? calls : 5); });
  EXPECT_EQ(seen(index, key).find(9)->second, 5);
}

// Threads insert, remove and look up in a table so small that buckets overflow all the time. Each thread owns some nodes, so it
// knows what must be found; foreign ones may come and go.
TEST(PrefixIndex, ThreadsAlwaysFindTheirOwn) {
  PrefixIndex index(160);  // 33 buckets, 231 slots, at most 160 entries
  constexpr int kThreads = 4, kEach = 40;
  std::atomic<std::uint64_t> refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<std::uint64_t>(t) + 5);
      std::map<NodeId, Key128> mine;
      for (int i = 0; i < 8000; ++i) {
        const auto node = static_cast<NodeId>(1 + t * kEach + static_cast<int>(random() % kEach));
        const auto it = mine.find(node);
        if (it == mine.end()) {
          const Key128 key = key_in(33, random() % 3 == 0 ? 32 : random() % 33, 1 + random() % 3);  // few tags, one hot bucket
          if (insert(index, key, node, static_cast<std::uint8_t>(node))) {
            mine[node] = key;
          } else {
            refused.fetch_add(1);
          }
        } else if (random() % 3 == 0) {
          index.remove(it->second, node);
          ASSERT_EQ(seen(index, it->second).count(node), 0u);
          mine.erase(it);
        } else {
          const auto flags = static_cast<std::uint8_t>(random());
          index.refresh_flags(it->second, node, [&] { return flags; });
          const auto found = seen(index, it->second);
          ASSERT_EQ(found.count(node), 1u);
          ASSERT_EQ(found.find(node)->second, flags);
        }
      }
      for (const auto& [node, key] : mine) index.remove(key, node);
    });
  }
  for (auto& thread : threads) thread.join();
  for (std::size_t at = 0; at < 33; ++at) {
    for (std::uint64_t tag = 1; tag <= 3; ++tag) EXPECT_TRUE(seen(index, key_in(33, at, tag)).empty());
  }
  EXPECT_LT(refused.load(), 8000u) << "only where another held the writer bit";
}

}  // namespace
}  // namespace hetkv
