// The pool of node records: layout of a record, recycling, exhaustion, threads.
#include "allocator/node_store.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <thread>
#include <vector>

namespace hetkv {
namespace {

TEST(NodeStore, PartsOfARecordDoNotOverlap) {
  for (std::uint32_t sets = 0; sets <= 8; ++sets) {
    for (std::uint32_t groups = 0; groups <= 5; ++groups) {
      NodeStore store(10, 16, sets, groups);
      EXPECT_EQ(store.record_bytes() % 8, 0u);
      for (NodeId id = 1; id <= 10; ++id) {
        std::uint64_t value = id * 1000;
        store.header(id).key_high = ++value;
        store.header(id).gap = static_cast<std::uint32_t>(++value);
        for (std::uint32_t s = 0; s < sets; ++s) store.point_use(id, s) = ++value;
        for (std::uint32_t s = 0; s < sets; ++s) store.point_ref(id, s) = static_cast<std::uint32_t>(++value);
        for (std::uint32_t g = 0; g < groups; ++g) store.history_ref(id, g) = static_cast<std::uint32_t>(++value);
        std::uint32_t gen = 0;
        for (std::uint32_t s = 0; s < sets; ++s) EXPECT_EQ(store.point(id, s).begin_fill(&gen), Transition::kDone);
        for (auto& token : store.tokens(id)) token = static_cast<std::int32_t>(++value);
      }
      for (NodeId id = 1; id <= 10; ++id) {
        std::uint64_t value = id * 1000;
        EXPECT_EQ(store.header(id).key_high, ++value);
        EXPECT_EQ(store.header(id).gap, ++value);
        for (std::uint32_t s = 0; s < sets; ++s) EXPECT_EQ(store.point_use(id, s), ++value);
        for (std::uint32_t s = 0; s < sets; ++s) EXPECT_EQ(store.point_ref(id, s), ++value);
        for (std::uint32_t g = 0; g < groups; ++g) EXPECT_EQ(store.history_ref(id, g), ++value);
        for (std::uint32_t s = 0; s < sets; ++s) EXPECT_EQ(store.point(id, s).load().state(), ObjectState::kFilling);
        EXPECT_EQ(store.history(id).load().state(), ObjectState::kAbsent);
        for (const std::int32_t token : store.tokens(id)) EXPECT_EQ(token, static_cast<std::int32_t>(++value));
      }
    }
  }
}

TEST(NodeStore, MetadataFitsTheTarget) {
  // At most 128 bytes a block of metadata, token ids apart: 64 of header, and a 64-byte bucket for five nodes.
  EXPECT_LE(NodeStore(1, 64, 1, 1).record_bytes() + 13, 128u);
  EXPECT_LE(NodeStore(1, 64, 3, 3).record_bytes(), 152u);
}

TEST(NodeStore, EveryIdOnceThenNoneThenRecycled) {
  NodeStore store(100, 16, 1, 1);
  std::set<NodeId> ids;
  for (int i = 0; i < 100; ++i) {
    const NodeId id = store.allocate();
    EXPECT_GE(id, 1u);
    EXPECT_LE(id, 100u);
    EXPECT_TRUE(ids.insert(id).second);
  }
  EXPECT_EQ(store.allocate(), 0u);
  EXPECT_EQ(store.high_water(), 101u);
  store.header(42).parent = 7;
  store.release(42);
  EXPECT_EQ(store.header(42).parent, 0u) << "a record in the pool is nobody's child";
  EXPECT_EQ(store.allocate(), 42u);
  EXPECT_EQ(store.allocate(), 0u);
}

TEST(NodeStore, NoRecordInTwoHands) {
  NodeStore store(64, 16, 0, 0);
  std::vector<std::atomic<int>> held(65);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(static_cast<std::uint64_t>(t));
      std::vector<NodeId> mine;
      for (int i = 0; i < 20000; ++i) {
        if (mine.size() < 16 && random() % 2 == 0) {
          const NodeId id = store.allocate();
          ASSERT_NE(id, 0u);
          ASSERT_EQ(held[id].fetch_add(1), 0);
          mine.push_back(id);
        } else if (!mine.empty()) {
          const std::size_t at = random() % mine.size();
          ASSERT_EQ(held[mine[at]].fetch_sub(1), 1);
          store.release(mine[at]);
          mine[at] = mine.back();
          mine.pop_back();
        }
      }
      for (const NodeId id : mine) {
        ASSERT_EQ(held[id].fetch_sub(1), 1);
        store.release(id);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::set<NodeId> ids;
  for (int i = 0; i < 64; ++i) EXPECT_TRUE(ids.insert(store.allocate()).second);
  EXPECT_EQ(store.allocate(), 0u);
}

}  // namespace
}  // namespace hetkv
