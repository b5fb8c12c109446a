// The queue of eviction candidates: order, shards, nothing lost and nothing twice.
#include "allocator/eviction_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>
#include <vector>

namespace hetkv {
namespace {

TEST(EvictionQueue, LowestScoreFirstAcrossShards) {
  EvictionQueue queue;
  std::mt19937_64 random(1);
  std::vector<std::uint64_t> scores;
  // Every thread has a shard of its own: the order must hold over all of them.
  for (std::uint32_t t = 0; t < 12; ++t) {
    std::thread([&, t] {
      for (std::uint32_t i = 0; i < 50; ++i) {
        const std::uint64_t score = random() % 100000;
        scores.push_back(score);
        ASSERT_TRUE(queue.push({score, t * 100 + i + 1, i}));
      }
    }).join();
  }
  std::sort(scores.begin(), scores.end());
  EXPECT_EQ(queue.lowest(), scores.front());
  for (const std::uint64_t score : scores) {
    const auto entry = queue.pop();
    ASSERT_TRUE(entry);
    EXPECT_EQ(entry->score, score);
  }
  EXPECT_FALSE(queue.pop());
  EXPECT_EQ(queue.lowest(), ~std::uint64_t{0});
}

TEST(EvictionQueue, EntriesComeBackWhole) {
  EvictionQueue queue;
  ASSERT_TRUE(queue.push({3, 30, 300}));
  ASSERT_TRUE(queue.push({1, 10, 100}));
  ASSERT_TRUE(queue.push({1, 10, 101}));  // stale entries of one node may stand side by side
  auto a = queue.pop(), b = queue.pop(), c = queue.pop();
  EXPECT_EQ(a->node, 10u);
  EXPECT_EQ(b->node, 10u);
  EXPECT_EQ(a->gen + b->gen, 201u);
  EXPECT_EQ(c->gen, 300u);
  EXPECT_GT(queue.bytes(), sizeof queue);
}

TEST(EvictionQueue, ThreadsLoseNothingAndGetNothingTwice) {
  EvictionQueue queue;
  constexpr int kThreads = 4;
  constexpr std::uint32_t kEach = 5000;
  std::vector<std::vector<NodeId>> popped(kThreads);
  std::vector<std::vector<NodeId>> pushed(kThreads);
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (std::uint32_t i = 0; i < kEach; ++i) {
        const NodeId node = t * kEach + i + 1;
        if (queue.push({random() % 1000, node, 0})) pushed[t].push_back(node);
        if (random() % 2 == 0) {
          if (const auto entry = queue.pop()) popped[t].push_back(entry->node);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::map<NodeId, int> balance;
  for (const auto& nodes : pushed) {
    for (const NodeId node : nodes) ++balance[node];
  }
  for (const auto& nodes : popped) {
    for (const NodeId node : nodes) --balance[node];
  }
  while (const auto entry = queue.pop()) --balance[entry->node];
  for (const auto& [node, count] : balance) EXPECT_EQ(count, 0) << node;
}

}  // namespace
}  // namespace hetkv
