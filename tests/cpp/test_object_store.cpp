// Nodes and their objects on one tier: publication, pins, eviction, quarantine; and the interleavings that the protocol names, each
// forced by stopping a thread in the middle.
#include "allocator/object_store.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "shadow_engine.h"
#include "stop_thread.h"

namespace hetkv::testing {
namespace {

constexpr std::uint32_t kBlock = 16;

// A store of full_kv history and one window set over a small arena, with one namespace.
class StoreTest : public ::testing::Test {
 protected:
  StoreTest()
      : layout(window_layout(kBlock, 40)), arena(layout, config()), hasher(1), spaces(hasher), space(spaces.intern({})),
        store(layout, arena, spaces, 300) {}

  static ArenaConfig config() {
    ArenaConfig c;
    c.bytes = 1 << 20;
    return c;
  }
  std::uint32_t instance(const Namespace* of = nullptr) const { return (of != nullptr ? of : space)->instance.load()->id; }
  std::vector<Key128> keys(const std::vector<std::int32_t>& tokens, const Namespace* of = nullptr) const {
    std::vector<Key128> out(tokens.size() / kBlock);
    hasher.chain((of != nullptr ? of : space)->instance.load()->root, tokens.data(), kBlock, out);
    return out;
  }
  std::vector<std::int32_t> tokens(std::uint64_t seed, std::size_t blocks) const {
    std::mt19937_64 random(seed);
    return random_tokens(random, blocks * kBlock);
  }
  Block take(PoolId pool) {
    BlockCounts need{};
    need[pool] = 1;
    Charge charge;
    EXPECT_EQ(arena.reserve(need, {}, charge).status, ReserveOutcome::Status::kReserved);
    return charge.take(pool);
  }
  PublishStatus publish(const NodeContent& content, NodeId* node, Namespace* of = nullptr) {
    NodeContent mine = content;
    const Block block = take(0);
    mine.history_refs = std::span(&block.offset, 1);
    const PublishStatus status = store.publish_node(mine, node);
    if (status == PublishStatus::kPublished) {
      (of != nullptr ? of : space)->used_bytes += static_cast<std::int64_t>(layout.group(0).block_bytes);
    } else {
      arena.drop(block);
    }
    return status;
  }
  NodeContent content(const std::vector<std::int32_t>& text, const std::vector<Key128>& chain, std::uint32_t depth, NodeId parent,
                      const Namespace* of = nullptr) const {
    NodeContent c;
    c.key = chain[depth - 1];
    c.space = instance(of);
    c.parent = parent;
    c.depth = depth;
    c.tokens = text.data() + std::size_t{depth - 1} * kBlock;
    return c;
  }
  // Publishes the whole text and leaves nothing pinned. Returns the nodes.
  std::vector<NodeId> publish_all(const std::vector<std::int32_t>& text, Namespace* of = nullptr, VersionId version = 0) {
    const auto chain = keys(text, of);
    std::vector<NodeId> nodes;
    for (std::uint32_t depth = 1; depth <= chain.size(); ++depth) {
      const NodeId parent = nodes.empty() ? 0 : nodes.back();
      NodeContent c = content(text, chain, depth, parent, of);
      c.version = version;
      NodeId node = 0;
      const PublishStatus status = publish(c, &node, of);
      EXPECT_TRUE(status == PublishStatus::kPublished || status == PublishStatus::kFoundEqual) << static_cast<int>(status);
      if (parent != 0) store.unpin_node(parent);
      nodes.push_back(node);
    }
    store.unpin_node(nodes.back());
    return nodes;
  }
  bool add_point(NodeId node, Namespace* of = nullptr, PointContent c = {}) {
    const Block block = take(1);
    if (!store.publish_point(node, 0, block.offset, c)) {
      arena.drop(block);
      return false;
    }
    (of != nullptr ? of : space)->used_bytes += static_cast<std::int64_t>(layout.group(1).block_bytes);
    store.unpin_point(node, 0);
    return true;
  }
  std::uint32_t gen(NodeId node) const { return store.nodes().history(node).load().gen(); }
  std::uint32_t point_gen(NodeId node) const { return store.nodes().point(node, 0).load().gen(); }
  Found find(const std::vector<Key128>& chain, std::uint32_t depth) const {
    return store.lookup(chain[depth - 1], 0, instance());
  }

  CacheLayout layout;
  Arena arena;
  ChainHasher hasher;
  NamespaceTable spaces;
  Namespace* space;
  ObjectStore store;
};

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
  EXPECT_TRUE(store.quarantine_point(node, 0));
  EXPECT_FALSE(store.quarantine_point(node, 0));
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
  EXPECT_FALSE(store.evict_subtree(nodes[3]));
  store.unpin_node(nodes[5]);
  EXPECT_TRUE(store.evict_subtree(nodes[2]));
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

// --- interleavings ---

// A child counts in its parent's word until it is gone, so a parent can never be taken from under it.
TEST_F(StoreTest, TheParentStaysWhileItsChildIsBeingEvicted) {
  const auto text = tokens(70, 2);
  const auto nodes = publish_all(text);
  for (const char* point : {"evict: before the claim", "evict: claimed"}) {
    StoppedThread evictor(point, [&] { store.evict_node(nodes[1], gen(nodes[1])); });
    ASSERT_TRUE(evictor.stopped()) << point;
    EXPECT_FALSE(store.evict_node(nodes[0], gen(nodes[0]))) << point;
    EXPECT_TRUE(store.node_ok(nodes[0])) << point;
    evictor.finish();
    publish_all(text);
  }
  store.check_invariants();
}

// "Look for an equal node, else insert" is one step: with one publisher in it, another is told to come back.
TEST_F(StoreTest, OnlyOneOfTwoPublishersInserts) {
  const auto text = tokens(71, 1);
  const auto chain = keys(text);
  for (const char* point :
       {"publish: writer bit held", "publish: no equal node", "publish: before the seal", "publish: sealed, not inserted"}) {
    PublishStatus first{}, second{};
    NodeId a = 0, b = 0;
    StoppedThread publisher(point, [&] { first = publish(content(text, chain, 1, 0), &a); });
    ASSERT_TRUE(publisher.stopped()) << point;
    second = publish(content(text, chain, 1, 0), &b);
    EXPECT_EQ(second, PublishStatus::kBusy) << point;
    EXPECT_EQ(find(chain, 1).node, 0u) << "not visible before the slot is stored";
    publisher.finish();
    EXPECT_EQ(first, PublishStatus::kPublished);
    EXPECT_EQ(store.live_nodes(), 1u) << point;
    if (b != 0) store.unpin_node(b);
    store.unpin_node(a);
    store.evict_coldest_history(true);
    if (second == PublishStatus::kPublished) store.evict_coldest_history(true);
  }
}

// A quarantine that passes while the child is FILLING wins: its seal fails, and it undoes what it counted.
TEST_F(StoreTest, AQuarantineBeatsTheSealOfAChild) {
  for (const char* point : {"publish: no equal node", "publish: before the seal", "publish: sealed, not inserted"}) {
    const auto text = tokens(72, 2);
    const auto chain = keys(text);
    NodeId parent = 0, child = 0;
    ASSERT_EQ(publish(content(text, chain, 1, 0), &parent), PublishStatus::kPublished);
    PublishStatus status{};
    StoppedThread publisher(point, [&] { status = publish(content(text, chain, 2, parent), &child); });
    ASSERT_TRUE(publisher.stopped()) << point;
    EXPECT_GE(store.quarantine_node(parent, gen(parent), LossReason::kChecksum, 0), 1u);
    publisher.finish();
    if (child != 0) {  // sealed before the quarantine came: broken with its parent
      EXPECT_FALSE(store.node_ok(child)) << point;
      EXPECT_STREQ(point, "publish: sealed, not inserted");
      store.unpin_node(child);
    } else {
      EXPECT_EQ(status, PublishStatus::kParentBroken) << point;
    }
    EXPECT_EQ(find(chain, 2).node, 0u) << point;
    store.unpin_node(parent);
    EXPECT_EQ(store.live_nodes(), 0u) << point;
    store.check_invariants();
  }
}

TEST_F(StoreTest, BesideAnEvictionTheKeyIsBusyAndThenFree) {
  const auto text = tokens(73, 1);
  const auto chain = keys(text);
  const NodeId node = publish_all(text)[0];
  StoppedThread evictor("evict: claimed", [&] { store.evict_node(node, gen(node)); });
  ASSERT_TRUE(evictor.stopped());
  EXPECT_EQ(find(chain, 1).node, 0u) << "out of sight at the claim";
  NodeId again = 0;
  EXPECT_EQ(publish(content(text, chain, 1, 0), &again), PublishStatus::kBusy);
  evictor.finish();
  EXPECT_EQ(publish(content(text, chain, 1, 0), &again), PublishStatus::kPublished);
  store.unpin_node(again);
  store.check_invariants();
}

// Two may want to reap a broken node. The late one must not touch what its record serves by then.
TEST_F(StoreTest, ALateReaperLeavesTheRecycledRecordAlone) {
  const auto text = tokens(74, 2), other = tokens(75, 2);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  ASSERT_TRUE(store.pin_node(find(chain, 2), chain[1], 0, instance(), 2));
  store.quarantine_node(nodes[1], gen(nodes[1]), LossReason::kChecksum, 0);
  StoppedThread reader("release: to reap", [&] { store.unpin_node(nodes[1]); });
  ASSERT_TRUE(reader.stopped());
  ASSERT_TRUE(store.evict_node(nodes[1], gen(nodes[1]))) << "the other reaper";
  const auto fresh = publish_all(other);
  ASSERT_EQ(fresh[0], nodes[1]) << "the record serves again";
  ASSERT_TRUE(store.evict_node(fresh[1], gen(fresh[1])));  // now a leaf that nobody pins
  reader.finish();
  EXPECT_NE(store.lookup(keys(other)[0], 0, instance()).node, 0u);
  store.check_invariants();
}

// The bytes of a point go back to the namespace that paid, even if the node's record serves another one meanwhile.
TEST_F(StoreTest, APointsBytesGoBackToItsOwnNamespace) {
  Namespace* other = spaces.intern({{"salt", "x"}});
  const NodeId node = publish_all(tokens(76, 1))[0];
  ASSERT_TRUE(add_point(node));
  StoppedThread evictor("evict: point claimed", [&] { store.evict_point(node, 0, point_gen(node)); });
  ASSERT_TRUE(evictor.stopped());
  ASSERT_TRUE(store.evict_node(node, gen(node)));
  ASSERT_EQ(publish_all(tokens(77, 1), other)[0], node);
  evictor.finish();
  EXPECT_EQ(space->used_bytes, 0);
  EXPECT_EQ(other->used_bytes, static_cast<std::int64_t>(layout.group(0).block_bytes));
  store.check_invariants();
}

// What lies in the shard of a thread that stopped there is found by looking at the nodes themselves.
TEST_F(StoreTest, AStoppedThreadHidesNoVictims) {
  for (std::uint64_t i = 0; i < 20; ++i) {
    const NodeId node = publish_all(tokens(80 + i, 1))[0];
    ASSERT_TRUE(add_point(node));
  }
  for (int kind = 0; kind < 2; ++kind) {
    StoppedThread evictor("queue: in a shard, popping",
                          [&] { kind == 0 ? store.evict_coldest_point(0, false) : store.evict_coldest_history(false); });
    ASSERT_TRUE(evictor.stopped());
    const int most = 20 - 1;  // the stopped one has one in hand
    int gone = 0;
    while (kind == 0 ? store.evict_coldest_point(0, true) : store.evict_coldest_history(true)) ++gone;
    EXPECT_GE(gone, most);
  }
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
  EXPECT_EQ(store.gather(chain, text.data(), 0, instance(), true, note), 0u);
  EXPECT_EQ(seen, nodes);
  for (const std::uint32_t at : {0u, 1u, 8u, 17u, 38u, 39u}) {  // a collision of keys, as it would look
    auto other = text;
    other[at * kBlock + 3] ^= 1;
    seen.clear();
    EXPECT_EQ(store.gather(chain, other.data(), 0, instance(), true, note), at + 1);
    EXPECT_EQ(seen.size(), at);
    seen.clear();
    EXPECT_EQ(store.gather(chain, other.data(), 0, instance(), false, note), at == 39 ? 40u : 0u)
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
  const std::uint32_t differs = store.gather(chain, text.data(), 0, instance(), true,
                                             [&](std::uint32_t, NodeId node, std::uint8_t) { seen.push_back(node); });
  EXPECT_TRUE(differs != 0 || seen == nodes) << differs;
  store.unpin_node(nodes[5]);
  store.check_invariants();
}

}  // namespace
}  // namespace hetkv::testing
