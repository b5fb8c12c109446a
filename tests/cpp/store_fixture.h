// An object store over a small arena, and the publications that its tests make.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "allocator/object_store.h"
#include "shadow_engine.h"

namespace hetkv::testing {

inline constexpr std::uint32_t kBlock = 16;

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

}  // namespace hetkv::testing
