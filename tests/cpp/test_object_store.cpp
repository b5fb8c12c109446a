// Nodes and their objects on one tier: publication, pins, eviction, quarantine, and the walk over a pinned chain.
#include <gtest/gtest.h>

#include <vector>

#include "store_fixture.h"

namespace hetkv::testing {
namespace {

TEST_F(StoreTest, DeepestNodeByAnyPrefixVersionAndNamespace) {
  const auto text = tokens(1, 20);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  std::uint32_t depth = 0;
  for (std::uint32_t limit = 0; limit <= 20; ++limit) {
    const Found found = store.find_deepest(chain, limit, 0, instance(), &depth);
    EXPECT_EQ(depth, limit);
    EXPECT_EQ(found.node, limit == 0 ? 0 : nodes[limit - 1]);
  }
  for (std::uint32_t same = 0; same <= 20; ++same) {  // a prompt that departs after `same` blocks
    auto other = text;
    if (same < 20) other[same * kBlock] ^= 1;
    store.find_deepest(keys(other), 20, 0, instance(), &depth);
    EXPECT_EQ(depth, same);
  }
  EXPECT_EQ(store.find_deepest(chain, 20, 1, instance(), &depth).node, 0u) << "another version";
  EXPECT_EQ(store.find_deepest(chain, 20, 0, instance() + 1, &depth).node, 0u) << "another namespace";
  store.check_invariants();
}

TEST_F(StoreTest, TwoVersionsOfOneContentStandSideBySide) {
  const auto text = tokens(1, 3);
  publish_all(text);
  publish_all(text, nullptr, 1);
  EXPECT_EQ(store.live_nodes(), 6u);
  EXPECT_EQ(store.live_nodes(0), 3u);
  EXPECT_EQ(store.live_nodes(1), 3u);
  std::uint32_t depth = 0;
  const NodeId mine = store.find_deepest(keys(text), 3, 0, instance(), &depth).node;
  const NodeId theirs = store.find_deepest(keys(text), 3, 1, instance(), &depth).node;
  EXPECT_NE(mine, theirs);
  EXPECT_EQ(depth, 3u);
  store.check_invariants();
}

TEST_F(StoreTest, LeafFirstAndNeverAPinnedOne) {
  const auto text = tokens(2, 4);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  for (int i = 0; i < 3; ++i)
    EXPECT_FALSE(store.evict_node(nodes[static_cast<std::size_t>(i)], gen(nodes[static_cast<std::size_t>(i)]))) << i;
  ASSERT_TRUE(store.pin_node(find(chain, 4), chain[3], 0, instance(), 4));
  EXPECT_FALSE(store.evict_node(nodes[3], gen(nodes[3])));
  EXPECT_FALSE(store.evict_coldest_history(false));
  EXPECT_FALSE(store.evict_coldest_history(true));
  store.unpin_node(nodes[3]);
  EXPECT_FALSE(store.evict_node(nodes[3], gen(nodes[3]) + 1)) << "another generation";
  for (std::uint32_t depth = 4; depth > 0; --depth) {
    EXPECT_TRUE(store.evict_coldest_history(false));
    EXPECT_EQ(find(chain, depth).node, 0u);
    store.check_invariants();
  }
  EXPECT_FALSE(store.evict_coldest_history(true));
  EXPECT_EQ(arena.kind_bytes(ObjectKind::kFullKv), 0u);
  EXPECT_EQ(space->used_bytes, 0);
}

// Protocol: a pin carries the generation, and compares the key under the pin.
TEST_F(StoreTest, PinRefusesARecycledNode) {
  const auto text = tokens(3, 1);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  const Found old = find(chain, 1);
  ASSERT_TRUE(store.evict_node(nodes[0], gen(nodes[0])));
  const auto other = tokens(4, 1);
  ASSERT_EQ(publish_all(other)[0], nodes[0]) << "the record serves again";
  const bool pinned = store.pin_node(old, chain[0], 0, instance(), 1);
  EXPECT_FALSE(pinned);
  if (pinned) store.unpin_node(old.node);
  // The right generation alone is not enough: key, version, namespace and depth are compared too.
  const Found now = store.lookup(keys(other)[0], 0, instance());
  EXPECT_FALSE(store.pin_node(now, chain[0], 0, instance(), 1));
  EXPECT_FALSE(store.pin_node(now, keys(other)[0], 1, instance(), 1));
  EXPECT_FALSE(store.pin_node(now, keys(other)[0], 0, instance() + 1, 1));
  EXPECT_FALSE(store.pin_node(now, keys(other)[0], 0, instance(), 2));
  EXPECT_EQ(store.nodes().history(now.node).load().pins(), 0u) << "a refused pin leaves nothing behind";
}

TEST_F(StoreTest, TheSecondPublisherPinsTheFirstOnesNode) {
  const auto text = tokens(5, 2);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  NodeId node = 0;
  EXPECT_EQ(publish(content(text, chain, 1, 0), &node), PublishStatus::kFoundEqual);
  EXPECT_EQ(node, nodes[0]);
  EXPECT_EQ(store.nodes().history(node).load().pins(), 1u);
  store.unpin_node(node);
  EXPECT_EQ(store.live_nodes(), 2u);
  EXPECT_EQ(store.counters().nodes_found_equal.load(), 1u);
}

TEST_F(StoreTest, SameKeyOtherTokensIsNeverPublished) {
  const auto text = tokens(5, 1);
  const auto chain = keys(text);
  publish_all(text);
  auto other = text;
  other[7] ^= 1;
  NodeId node = 9;
  EXPECT_EQ(publish(content(other, chain, 1, 0), &node), PublishStatus::kCollision);
  EXPECT_EQ(node, 0u);
  EXPECT_EQ(store.counters().collisions.load(), 1u);
  EXPECT_EQ(store.nodes().history(find(chain, 1).node).load().pins(), 0u);
  NodeContent deeper = content(text, chain, 1, 0);
  deeper.depth = 2;
  EXPECT_EQ(publish(deeper, &node), PublishStatus::kCollision) << "a key never stands for two depths";
  store.check_invariants();
}

TEST_F(StoreTest, EveryRecordInUseIsANamedRefusal) {
  for (std::uint64_t i = 0; i < 300; ++i) publish_all(tokens(100 + i, 1));
  const auto text = tokens(99, 1);
  NodeId node = 0;
  EXPECT_EQ(publish(content(text, keys(text), 1, 0), &node), PublishStatus::kNoNode);
  EXPECT_TRUE(store.evict_coldest_history(false));
  EXPECT_EQ(publish(content(text, keys(text), 1, 0), &node), PublishStatus::kPublished);
  store.unpin_node(node);
  store.check_invariants();
}

TEST_F(StoreTest, AChildIsNotInsertedUnderAnotherParent) {
  const auto text = tokens(6, 2), stranger = tokens(7, 1);
  const auto chain = keys(text);
  publish_all(text);
  const NodeId other = publish_all(stranger)[0];
  ASSERT_TRUE(store.pin_node(store.lookup(keys(stranger)[0], 0, instance()), keys(stranger)[0], 0, instance(), 1));
  NodeId node = 0;
  EXPECT_EQ(publish(content(text, chain, 2, other), &node), PublishStatus::kBusy);
  store.unpin_node(other);
}

// --- points ---

TEST_F(StoreTest, PointsComeAndGoWithTheirFlags) {
  const auto text = tokens(8, 2);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  ASSERT_TRUE(store.pin_node(find(chain, 2), chain[1], 0, instance(), 2));
  EXPECT_EQ(find(chain, 1).flags, 0);
  EXPECT_FALSE(store.pin_point(nodes[0], 0));
  EXPECT_TRUE(add_point(nodes[0]));
  EXPECT_EQ(find(chain, 1).flags, 1);
  EXPECT_FALSE(add_point(nodes[0])) << "the second publisher keeps its block";
  ASSERT_TRUE(store.pin_point(nodes[0], 0));
  EXPECT_FALSE(store.evict_point(nodes[0], 0, point_gen(nodes[0])));
  EXPECT_FALSE(store.evict_coldest_point(0, true));
  store.unpin_point(nodes[0], 0);
  EXPECT_FALSE(store.evict_point(nodes[0], 0, point_gen(nodes[0]) + 1));
  EXPECT_TRUE(store.evict_coldest_point(0, false));
  EXPECT_EQ(find(chain, 1).flags, 0);
  EXPECT_EQ(store.nodes().header(nodes[0]).ever_published.load(), 1)
      << "what was there once has another reason than what never was";
  EXPECT_TRUE(add_point(nodes[0]));
  EXPECT_EQ(find(chain, 1).flags, 1);
  store.unpin_node(nodes[1]);
  EXPECT_TRUE(store.evict_node(nodes[1], gen(nodes[1])));
  EXPECT_TRUE(store.evict_node(nodes[0], gen(nodes[0]))) << "its points go with it";
  EXPECT_EQ(arena.kind_bytes(ObjectKind::kSwaWindow), 0u);
  EXPECT_EQ(space->used_bytes, 0);
  publish_all(text);
  EXPECT_EQ(find(chain, 1).flags, 0) << "a recycled record starts without points";
  EXPECT_EQ(store.nodes().header(find(chain, 1).node).ever_published.load(), 0);
}

TEST_F(StoreTest, ABrokenPointIsOutOfSightAtOnceAndGoesWithItsLastReader) {
  const auto text = tokens(9, 1);
  const auto chain = keys(text);
  const NodeId node = publish_all(text)[0];
  ASSERT_TRUE(store.pin_node(find(chain, 1), chain[0], 0, instance(), 1));
  ASSERT_TRUE(add_point(node));
  ASSERT_TRUE(store.pin_point(node, 0));
  EXPECT_TRUE(store.quarantine_point(node, 0, LossReason::kChecksum));
  EXPECT_FALSE(store.quarantine_point(node, 0, LossReason::kChecksum));
  EXPECT_EQ(find(chain, 1).flags, 0);
  EXPECT_FALSE(store.point_ok(node, 0));
  EXPECT_FALSE(store.pin_point(node, 0));
  EXPECT_FALSE(add_point(node)) << "its word is still taken";
  EXPECT_GT(arena.kind_bytes(ObjectKind::kSwaWindow), 0u) << "a reader still has it";
  store.unpin_point(node, 0);
  EXPECT_EQ(arena.kind_bytes(ObjectKind::kSwaWindow), 0u);
  EXPECT_TRUE(add_point(node));
  store.unpin_node(node);
  store.check_invariants();
}

// --- order of eviction ---

TEST_F(StoreTest, ColdestHistoryFirst) {
  std::vector<NodeId> nodes;
  std::vector<Key128> key;
  for (std::uint64_t i = 0; i < 10; ++i) {
    nodes.push_back(publish_all(tokens(20 + i, 1))[0]);
    key.push_back(keys(tokens(20 + i, 1))[0]);
  }
  // Used again, in another order: entries already queued are stale, and must not decide.
  for (const std::size_t i : {7u, 3u, 0u}) {
    ASSERT_TRUE(store.pin_node(store.lookup(key[i], 0, instance()), key[i], 0, instance(), 1));
    store.touch_node(nodes[i], store.tick());
    store.unpin_node(nodes[i]);
  }
  for (const std::size_t i : {1u, 2u, 4u, 5u, 6u, 8u, 9u, 7u, 3u, 0u}) {
    EXPECT_NE(store.lookup(key[i], 0, instance()).node, 0u) << i;
    EXPECT_TRUE(store.evict_coldest_history(false));
    EXPECT_EQ(store.lookup(key[i], 0, instance()).node, 0u) << i;
  }
}

TEST_F(StoreTest, WhatManyShareStaysLongerButNotForEver) {
  const auto shared = tokens(30, 1);
  const auto key = keys(shared)[0];
  const NodeId node = publish_all(shared)[0];
  for (int i = 0; i < 50; ++i) store.touch_node(node, store.tick());
  std::uint64_t outlived = 0;
  for (std::uint64_t i = 0; i < 400 && store.lookup(key, 0, instance()).node != 0; ++i) {
    publish_all(tokens(1000 + i, 1));
    EXPECT_TRUE(store.evict_coldest_history(false));
    ++outlived;
  }
  EXPECT_GT(outlived, 20u) << "a preference";
  EXPECT_LT(outlived, 300u) << "bounded by a quarter of a turn of the pool";
}

TEST_F(StoreTest, TheCheckpointThatSavesLeastGoesFirst) {
  std::vector<NodeId> nodes;
  for (std::uint64_t i = 0; i < 4; ++i) nodes.push_back(publish_all(tokens(40 + i, 1))[0]);
  ASSERT_TRUE(add_point(nodes[0], nullptr, {.gap_tokens = 64 * kBlock}));
  ASSERT_TRUE(add_point(nodes[1], nullptr, {.gap_tokens = 2 * kBlock}));
  ASSERT_TRUE(add_point(nodes[2], nullptr, {.gap_tokens = 16 * kBlock}));
  ASSERT_TRUE(add_point(nodes[3], nullptr, {.gap_tokens = 16 * kBlock, .probation = true}));
  for (const std::size_t i : {1u, 3u, 2u, 0u}) {
    EXPECT_TRUE(store.point_ok(nodes[i], 0)) << i;
    EXPECT_TRUE(store.evict_coldest_point(0, false));
    EXPECT_FALSE(store.point_ok(nodes[i], 0)) << i;
  }
  EXPECT_FALSE(store.evict_coldest_point(0, true));
  // Use ends probation.
  ASSERT_TRUE(add_point(nodes[2], nullptr, {.gap_tokens = 16 * kBlock}));
  ASSERT_TRUE(add_point(nodes[3], nullptr, {.gap_tokens = 16 * kBlock, .probation = true}));
  store.touch_point(nodes[3], 0);
  EXPECT_EQ(store.nodes().header(nodes[3]).probation.load(), 0);
}

TEST_F(StoreTest, ANamespaceIsEvictedAloneAndASubtreeWhole) {
  Namespace* other = spaces.intern({{"salt", "x"}});
  publish_all(tokens(50, 5));
  publish_all(tokens(50, 5), other);
  publish_all(tokens(51, 3), other);
  EXPECT_EQ(store.evict_space(other, kEveryInstance, 2), 2u);
  EXPECT_EQ(store.evict_space(other, kEveryInstance, 100), 6u);
  EXPECT_EQ(other->used_bytes, 0);
  EXPECT_EQ(store.live_nodes(), 5u);
  const auto text = tokens(52, 6);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  auto branch = text;
  branch[3 * kBlock] ^= 1;  // leaves after three blocks
  publish_all(branch);
  ASSERT_TRUE(store.pin_node(find(chain, 6), chain[5], 0, instance(), 6));
  EXPECT_FALSE(store.evict_subtrees({&nodes[3], 1}));
  store.unpin_node(nodes[5]);
  EXPECT_TRUE(store.evict_subtrees({&nodes[2], 1}));
  std::uint32_t depth = 0;
  store.find_deepest(chain, 6, 0, instance(), &depth);
  EXPECT_EQ(depth, 2u);
  EXPECT_EQ(store.live_nodes(), 7u);
  store.check_invariants();
}

// --- what was lost is remembered by name ---

TEST_F(StoreTest, GhostsAndBrokenRecords) {
  const auto text = tokens(60, 3);
  const auto chain = keys(text);
  auto nodes = publish_all(text);
  EXPECT_FALSE(store.recently_evicted(chain[2]));
  store.evict_node(nodes[2], gen(nodes[2]));
  EXPECT_TRUE(store.recently_evicted(chain[2]));
  EXPECT_FALSE(store.recently_evicted(chain[1]));
  EXPECT_FALSE(store.any_broken());
  EXPECT_EQ(store.quarantine_node(nodes[0], gen(nodes[0]), LossReason::kChecksum, 0), 2u);
  EXPECT_TRUE(store.any_broken());
  ASSERT_TRUE(store.broken(chain[1]));
  EXPECT_EQ(store.broken(chain[1])->reason, LossReason::kChecksum);
  EXPECT_EQ(store.quarantine_node(nodes[0], gen(nodes[0]), LossReason::kChecksum, 0), 0u);
  EXPECT_EQ(store.live_nodes(), 0u) << "nobody read them";
  publish_all(text);
  EXPECT_FALSE(store.any_broken()) << "published anew, it is no longer broken";
  store.check_invariants();
}

TEST_F(StoreTest, ABrokenChainIsReapedFromItsLastReaderUpwards) {
  const auto text = tokens(61, 200);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  ASSERT_TRUE(store.pin_node(find(chain, 200), chain[199], 0, instance(), 200));
  EXPECT_EQ(store.quarantine_node(nodes[0], gen(nodes[0]), LossReason::kChecksum, -1), 200u);
  EXPECT_EQ(store.live_nodes(), 200u);
  EXPECT_FALSE(store.node_ok(nodes[199]));
  std::uint32_t depth = 0;
  EXPECT_EQ(store.find_deepest(chain, 200, 0, instance(), &depth).node, 0u);
  store.unpin_node(nodes[199]);
  EXPECT_EQ(store.live_nodes(), 0u);
  EXPECT_EQ(space->used_bytes, 0);
  store.check_invariants();
}

// --- gather ---

TEST_F(StoreTest, GatherComparesTokensAndFollowsParents) {
  const auto text = tokens(90, 40);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  ASSERT_TRUE(store.pin_node(find(chain, 40), chain[39], 0, instance(), 40));
  std::vector<NodeId> seen;
  auto note = [&](std::uint32_t depth, NodeId node, std::uint8_t) {
    EXPECT_EQ(depth, seen.size() + 1);
    seen.push_back(node);
  };
  EXPECT_EQ(store.gather(nodes[39], chain, text.data(), true, note), 0u);
  EXPECT_EQ(seen, nodes);
  for (const std::uint32_t at : {0u, 1u, 8u, 17u, 38u, 39u}) {  // a collision of keys, as it would look
    auto other = text;
    other[at * kBlock + 3] ^= 1;
    seen.clear();
    EXPECT_EQ(store.gather(nodes[39], chain, other.data(), true, note), at + 1);
    EXPECT_EQ(seen.size(), at);
    seen.clear();
    EXPECT_EQ(store.gather(nodes[39], chain, other.data(), false, note), at == 39 ? 40u : 0u)
        << "the deepest block is compared always";
  }
  store.unpin_node(nodes[39]);
}

// A quarantine takes the pinned chain and another publishes the same text: equal in every byte, but not under this pin.
TEST_F(StoreTest, GatherDoesNotMixAPinnedChainWithItsRepublication) {
  const auto text = tokens(91, 6);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  ASSERT_TRUE(store.pin_node(find(chain, 6), chain[5], 0, instance(), 6));
  store.quarantine_node(nodes[3], gen(nodes[3]), LossReason::kChecksum, 0);
  publish_all(std::vector<std::int32_t>(text.begin(), text.begin() + 5 * kBlock));  // depths 4 and 5 anew
  std::vector<NodeId> seen;
  const std::uint32_t differs =
      store.gather(nodes[5], chain, text.data(), true, [&](std::uint32_t, NodeId node, std::uint8_t) { seen.push_back(node); });
  EXPECT_TRUE(differs != 0 || seen == nodes) << differs;
  store.unpin_node(nodes[5]);
  store.check_invariants();
}

}  // namespace
}  // namespace hetkv::testing
