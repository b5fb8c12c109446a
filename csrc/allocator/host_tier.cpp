#include "allocator/host_tier.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/test_point.h"

namespace hetkv {

HostTier::HostTier(const CacheLayout& layout, const ArenaConfig& arena, NamespaceTable& spaces, std::uint32_t max_nodes,
                   CopyEngine& engine)
    : layout_(layout), engine_(engine), memory_(layout, arena, spaces, max_nodes, false) {}

std::uint32_t HostTier::parts(const Key128& key, VersionId version, std::uint32_t space) const {
  const Found found = memory_.store().lookup(key, version, space);
  return found.node == 0 ? 0 : kHistoryPart | found.flags;
}

std::uint32_t HostTier::find_deepest(std::span<const Key128> keys, std::uint32_t limit, VersionId version,
                                     std::uint32_t space) const {
  std::uint32_t depth = 0;
  memory_.store().find_deepest(keys, limit, version, space, &depth);
  return depth;
}

NodeId HostTier::pin(const Key128& key, const ObjectName& name, std::uint32_t depth) {
  ObjectStore& store = memory_.store();
  const Found found = store.lookup(key, name.version, name.space);
  return found.node != 0 && store.pin_node(found, key, name.version, name.space, depth) ? found.node : 0;
}

StoreOutcome HostTier::store(const ObjectName& name, const ObjectFacts& facts, std::span<const GroupBytes> bytes) {
  ObjectStore& store = memory_.store();
  const bool history = name.part == kHistorySet;
  const std::uint32_t there = parts(name.key, name.version, name.space);
  if ((there & (history ? kHistoryPart : 1U << name.part)) != 0) return StoreOutcome::kAlreadyThere;
  // A history set hangs under its parent, a point object on its node.
  NodeId beside = 0;
  if (!history || name.depth > 1) {
    beside = history ? pin(facts.parent, name, name.depth - 1) : pin(name.key, name, name.depth);
    if (beside == 0) return StoreOutcome::kNoParent;
  }
  BlockCounts need{};
  for (const GroupBytes& group : bytes) ++need[group.group];
  Charge charge;
  if (memory_.reserve(need, {}, charge)) {
    if (beside != 0) store.unpin_node(beside);
    return StoreOutcome::kNoRoom;
  }
  std::array<Block, kMaxGroups> blocks;
  std::array<ByteCopy, kMaxGroups> copies;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    blocks[i] = charge.take(bytes[i].group);
    memory_.arena().set_owner(blocks[i], 0);
    copies[i] = {memory_.address(blocks[i]), bytes[i].data, bytes[i].bytes};
  }
  const Fence fence = engine_.copy(std::span(copies.data(), bytes.size()), {});
  HETKV_TEST_POINT("host store: copying");
  StoreOutcome outcome = StoreOutcome::kFailed;
  if (fence.wait() == FenceStatus::kPassed) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      if (memory_.arena().must_clear(blocks[i])) memory_.arena().confirm_cleared(blocks[i]);
    }
    outcome = publish(name, facts, beside, std::span(blocks.data(), bytes.size()), bytes);
  }
  if (outcome != StoreOutcome::kStored) {
    for (std::size_t i = 0; i < bytes.size(); ++i) memory_.arena().drop(blocks[i]);
  }
  if (beside != 0) store.unpin_node(beside);
  return outcome;
}

StoreOutcome HostTier::publish(const ObjectName& name, const ObjectFacts& facts, NodeId beside, std::span<const Block> blocks,
                               std::span<const GroupBytes> bytes) {
  ObjectStore& store = memory_.store();
  if (name.part != kHistorySet) {
    PointContent content;
    content.gap_tokens = facts.gap_tokens;
    content.canonical = facts.canonical;
    if (!store.publish_point(beside, name.part, blocks[0].offset, content)) return StoreOutcome::kAlreadyThere;
    store.unpin_point(beside, name.part);
    return StoreOutcome::kStored;
  }
  std::array<std::uint32_t, kMaxGroups> refs;
  refs.fill(kNoBlock);
  for (std::size_t i = 0; i < bytes.size(); ++i)
    refs[static_cast<std::size_t>(layout_.group(bytes[i].group).history_slot)] = blocks[i].offset;
  NodeContent content;
  content.key = name.key;
  content.version = name.version;
  content.space = name.space;
  content.parent = beside;
  content.depth = name.depth;
  content.tokens = facts.tokens.data();
  content.history_refs = std::span(refs.data(), layout_.history_groups().size());
  content.canonical = facts.canonical;
  NodeId node = 0;
  switch (store.publish_node(content, &node)) {
    case PublishStatus::kPublished:
      store.unpin_node(node);
      return StoreOutcome::kStored;
    case PublishStatus::kFoundEqual:
      store.unpin_node(node);
      return StoreOutcome::kAlreadyThere;
    case PublishStatus::kNoNode:
      return StoreOutcome::kNoRoom;
    case PublishStatus::kParentBroken:
      return StoreOutcome::kNoParent;
    case PublishStatus::kBusy:
    case PublishStatus::kCollision:
      break;
  }
  return StoreOutcome::kFailed;
}

LoadOutcome HostTier::load(const ObjectName& name, std::span<const std::int32_t> tokens, std::span<const GroupBytes> targets,
                           ObjectFacts* facts) {
  ObjectStore& store = memory_.store();
  const NodeStore& nodes = store.nodes();
  const NodeId node = pin(name.key, name, name.depth);
  if (node == 0) return LoadOutcome::kMissing;
  const bool history = name.part == kHistorySet;
  if (!history && !store.pin_point(node, name.part)) {
    store.unpin_node(node);
    return LoadOutcome::kMissing;
  }
  const std::span<const std::int32_t> stored = nodes.tokens(node);
  LoadOutcome outcome = LoadOutcome::kRefused;
  if (std::equal(tokens.begin(), tokens.end(), stored.begin(), stored.end())) {
    std::array<ByteCopy, kMaxGroups> copies;
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const GroupId group = targets[i].group;
      const std::uint32_t ref = history ? nodes.history_ref(node, static_cast<std::uint32_t>(layout_.group(group).history_slot))
                                        : nodes.point_ref(node, name.part);
      HETKV_CHECK(ref != kNoBlock, "a host object lacks a block that its layout gives it");
      copies[i] = {targets[i].data, memory_.address(Block{ref, group}), targets[i].bytes};
    }
    facts->canonical = history ? store.node_canonical(node) : store.point_canonical(node, name.part);
    facts->gap_tokens = nodes.header(node).gap.load(std::memory_order_relaxed);
    facts->tokens.assign(stored.begin(), stored.end());
    const Fence fence = engine_.copy(std::span(copies.data(), targets.size()), {});
    HETKV_TEST_POINT("host load: copying");
    outcome = fence.wait() == FenceStatus::kPassed ? LoadOutcome::kLoaded : LoadOutcome::kFailed;
  }
  if (!history) store.unpin_point(node, name.part);
  store.unpin_node(node);
  return outcome;
}

void HostTier::touch(std::span<const Key128> chain, VersionId version, std::uint32_t space) {
  // As on the device: the deepest node carries the chain's recency up when it goes.
  if (chain.empty()) return;
  const ObjectName name{chain.back(), version, space, static_cast<std::uint32_t>(chain.size()), kHistorySet};
  const NodeId node = pin(chain.back(), name, name.depth);
  if (node == 0) return;
  memory_.store().touch_node(node, memory_.store().tick());
  memory_.store().unpin_node(node);
}

}  // namespace hetkv
