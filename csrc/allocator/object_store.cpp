#include "allocator/object_store.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/test_point.h"

namespace hetkv {
ObjectStore::ObjectStore(const CacheLayout& layout, Arena& arena, NamespaceTable& spaces, std::uint32_t max_nodes,
                         bool charges_namespaces)
    : layout_(layout), arena_(arena), spaces_(spaces), charges_namespaces_(charges_namespaces),
      store_(max_nodes, layout.block_size(), static_cast<std::uint32_t>(layout.point_groups().size()),
             static_cast<std::uint32_t>(layout.history_groups().size())),
      index_(max_nodes), ghosts_(kGhosts) {}

ObjectStore::~ObjectStore() {
  const std::vector<NodeId> nodes = live_by_depth();
  for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) {
    const ObjectWord w = store_.history(*it).load();
    HETKV_CHECK(w.pins() == 0, "an object is still pinned when its store ends");
    evict_node(*it, w.gen());
  }
  HETKV_CHECK(live_nodes() == 0, "a node outlived its store");
}

// --- search ---

bool ObjectStore::same_identity(NodeId node, const Key128& key, VersionId version, std::uint32_t space) const {
  const NodeHeader& h = store_.header(node);
#ifdef HETKV_PLANT_NO_VERSION
  version = h.version.load(std::memory_order_relaxed);
#endif
  return h.key_low.load(std::memory_order_relaxed) == key.low && h.key_high.load(std::memory_order_relaxed) == key.high &&
         h.version.load(std::memory_order_relaxed) == version && h.space.load(std::memory_order_relaxed) == space;
}

Found ObjectStore::lookup(const Key128& key, VersionId version, std::uint32_t space) const {
  Found found;
  index_.visit(key, [&](const PrefixIndex::Entry& entry) {
    const ObjectWord w = store_.history(entry.node).load();
    if (w.state() != ObjectState::kSealed || !same_identity(entry.node, key, version, space)) return false;
    found = {entry.node, w.gen(), entry.flags};
    return true;
  });
  return found;
}

Found ObjectStore::find_deepest(std::span<const Key128> keys, std::uint32_t limit, VersionId version, std::uint32_t space,
                                std::uint32_t* depth) const {
  *depth = 0;
  if (limit == 0) return {};
  // The two common answers first: everything is here, nothing is.
  if (const Found all = lookup(keys[limit - 1], version, space); all.node != 0) {
    *depth = limit;
    return all;
  }
  Found best = lookup(keys[0], version, space);
  if (best.node == 0) return {};
  std::uint32_t low = 1, high = limit;  // low is present, high is not
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (const Found found = lookup(keys[middle - 1], version, space); found.node != 0) {
      best = found;
      low = middle;
    } else {
      high = middle;
    }
  }
  *depth = low;
  return best;
}

// --- pins ---

bool ObjectStore::pin_node(const Found& found, const Key128& key, VersionId version, std::uint32_t space, std::uint32_t depth) {
#ifdef HETKV_PLANT_PIN_UNCHECKED
  return store_.history(found.node).pin(store_.history(found.node).load().gen()) == Transition::kDone;
#endif
  if (store_.history(found.node).pin(found.gen) != Transition::kDone) return false;
  if (same_identity(found.node, key, version, space) &&
      store_.header(found.node).depth.load(std::memory_order_relaxed) == depth) {
    return true;
  }
  unpin_node(found.node);
  return false;
}

bool ObjectStore::pin_node_again(NodeId node) { return store_.history(node).pin_again() == Transition::kDone; }

void ObjectStore::unpin_node(NodeId node) { enqueue_unused(release_history(node, &ObjectControl::unpin)); }

bool ObjectStore::pin_point(NodeId node, std::uint32_t set) {
  ObjectControl control = store_.point(node, set);
  return control.pin(control.load().gen()) == Transition::kDone;
}

void ObjectStore::unpin_point(NodeId node, std::uint32_t set) {
  ObjectControl control = store_.point(node, set);
  const std::uint32_t gen = control.load().gen();
  switch (control.unpin()) {
    case Released::kReapBroken:
      evict_point(node, set, gen);
      break;
    case Released::kLastOfSealed:
      enqueue_point(node, set);
      break;
    case Released::kAlive:
      break;
  }
}

// Climbs iteratively: reaping a broken chain must not recurse to its depth.
ObjectStore::Unused ObjectStore::release_history(NodeId node, Released (ObjectControl::*release)()) {
  while (node != 0) {
    ObjectControl control = store_.history(node);
    // Read while the caller's pin or child count still holds the node: after it, another may reap and recycle it.
    const std::uint32_t gen = control.load().gen();
    const NodeId parent = store_.header(node).parent.load(std::memory_order_relaxed);
    const Released released = (control.*release)();
    if (released == Released::kLastOfSealed) return {node, gen};
    if (released != Released::kReapBroken) return {};
    HETKV_TEST_POINT("release: to reap");
    if (control.begin_evict(gen) != Transition::kDone) return {};  // another reaper was first
    finish_evict_node(node);
    node = parent;
    release = &ObjectControl::drop_kid;
  }
  return {};
}

// --- publication ---

PublishStatus ObjectStore::publish_node(const NodeContent& content, NodeId* node) {
  *node = 0;
  index_.prefetch_for_write(content.key);
  const NodeId id = store_.allocate();
  if (id == 0) return PublishStatus::kNoNode;
  ObjectControl control = store_.history(id);
  std::uint32_t gen = 0;
  HETKV_CHECK(control.begin_fill(&gen) == Transition::kDone, "a free node record is not absent");
  if (content.canonical) control.set_flags(kCanonicalFlag, 0);
  NodeHeader& h = store_.header(id);
  h.key_high.store(content.key.high, std::memory_order_relaxed);
  h.key_low.store(content.key.low, std::memory_order_relaxed);
  h.version.store(content.version, std::memory_order_relaxed);
  h.space.store(content.space, std::memory_order_relaxed);
  h.parent.store(content.parent, std::memory_order_relaxed);
  h.depth.store(content.depth, std::memory_order_relaxed);
  h.last_use.store(tick(), std::memory_order_relaxed);
  h.uses.store(0, std::memory_order_relaxed);
  h.ever_published.store(0, std::memory_order_relaxed);
  h.probation.store(0, std::memory_order_relaxed);
  h.gap.store(0, std::memory_order_relaxed);
  std::copy_n(content.tokens, layout_.block_size(), store_.tokens(id).data());
  for (std::uint32_t slot = 0; slot < store_.history_groups(); ++slot) store_.history_ref(id, slot) = content.history_refs[slot];

  auto give_up = [&](PublishStatus status) {
    HETKV_CHECK(control.abandon_fill(gen) == Transition::kDone, "an unpublished node was taken from its filler");
    store_.release(id);
    return status;
  };

  auto writer = index_.try_write(content.key);
  if (!writer) {
    counters_.publish_busy.fetch_add(1, std::memory_order_relaxed);
    return give_up(PublishStatus::kBusy);
  }
  PublishStatus status = PublishStatus::kPublished;
  HETKV_TEST_POINT("publish: writer bit held");
  index_.visit(content.key, [&](const PrefixIndex::Entry& entry) {
    if (!same_identity(entry.node, content.key, content.version, content.space)) return false;
    ObjectControl other = store_.history(entry.node);
    if (other.pin(other.load().gen()) != Transition::kDone) {
      status = PublishStatus::kBusy;
      return true;
    }
    const NodeHeader& theirs = store_.header(entry.node);
    if (!same_identity(entry.node, content.key, content.version, content.space)) {  // recycled between look and pin
      unpin_node(entry.node);
      status = PublishStatus::kBusy;
    } else if (!std::equal(content.tokens, content.tokens + layout_.block_size(), store_.tokens(entry.node).data()) ||
               theirs.depth.load(std::memory_order_relaxed) != content.depth) {
      unpin_node(entry.node);
      status = PublishStatus::kCollision;
    } else if (theirs.parent.load(std::memory_order_relaxed) != content.parent) {  // a quarantine is sweeping
      unpin_node(entry.node);
      status = PublishStatus::kBusy;
    } else {
      status = PublishStatus::kFoundEqual;
      *node = entry.node;
    }
    return true;
  });
  if (status != PublishStatus::kPublished) {
    auto& counter = status == PublishStatus::kFoundEqual  ? counters_.nodes_found_equal
                    : status == PublishStatus::kCollision ? counters_.collisions
                                                          : counters_.publish_busy;
    counter.fetch_add(1, std::memory_order_relaxed);
    return give_up(status);
  }

  HETKV_TEST_POINT("publish: no equal node");
  if (content.parent != 0) {
    const Transition t = store_.history(content.parent).add_kid();
    if (t != Transition::kDone) return give_up(t == Transition::kFull ? PublishStatus::kBusy : PublishStatus::kParentBroken);
  }
  HETKV_TEST_POINT("publish: before the seal");
#ifdef HETKV_PLANT_BLIND_SEAL
  h.word.store(ObjectWord::make(ObjectState::kSealed, 0, 1, 0, gen).bits);
  if (false) {
#else
  if (control.seal(gen) != Transition::kDone) {
#endif
    // A quarantine marked the node. It stays the filler's to undo, child count last.
    HETKV_CHECK(control.abandon_fill(gen) == Transition::kDone, "an unpublished node was taken from its filler");
    enqueue_unused(release_history(content.parent, &ObjectControl::drop_kid));
    store_.release(id);
    return PublishStatus::kParentBroken;
  }
  HETKV_TEST_POINT("publish: sealed, not inserted");
  HETKV_CHECK(index_.insert(*writer, content.key, id, 0), "the index has fewer slots than nodes");
  writer.reset();
  for (std::uint32_t slot = 0; slot < store_.history_groups(); ++slot) {
    if (content.history_refs[slot] != kNoBlock)
      arena_.set_owner(Block{content.history_refs[slot], layout_.history_groups()[slot]}, id);
  }
  if (any_broken()) forget_broken(content.key);
  live_by_version_[content.version].fetch_add(1, std::memory_order_relaxed);
  counters_.nodes_published.fetch_add(1, std::memory_order_relaxed);
  if (observer_ != nullptr) observer_->published(id, kHistorySet, false);
  *node = id;
  return PublishStatus::kPublished;
}

bool ObjectStore::publish_point(NodeId node, std::uint32_t set, std::uint32_t block, const PointContent& content) {
  ObjectControl control = store_.point(node, set);
  std::uint32_t gen = 0;
  if (control.begin_fill(&gen) != Transition::kDone) return false;  // another's is there, or is going
  if (content.canonical) control.set_flags(kCanonicalFlag, 0);
  HETKV_TEST_POINT("publish: point is filling");
  NodeHeader& h = store_.header(node);
  store_.point_ref(node, set) = block;
  store_.point_use(node, set).store(inflation_[set].load(std::memory_order_relaxed), std::memory_order_relaxed);
  if (h.gap.load(std::memory_order_relaxed) < content.gap_tokens) h.gap.store(content.gap_tokens, std::memory_order_relaxed);
  const auto bit = static_cast<std::uint8_t>(1U << set);
  if (content.probation) {
    h.probation.fetch_or(bit, std::memory_order_relaxed);
  } else {
    h.probation.fetch_and(static_cast<std::uint8_t>(~bit), std::memory_order_relaxed);
  }
  h.ever_published.fetch_or(bit, std::memory_order_relaxed);
  HETKV_CHECK(control.seal(gen) == Transition::kDone, "a point object was taken from its filler");
  arena_.set_owner(Block{block, layout_.point_groups()[set]}, node);
  refresh_flags(node);
  counters_.points_published[set].fetch_add(1, std::memory_order_relaxed);
  if (observer_ != nullptr) observer_->published(node, static_cast<std::uint8_t>(set), false);
  return true;
}

void ObjectStore::refresh_flags(NodeId node) {
  index_.refresh_flags(key_of(node), node, [&] {
    std::uint8_t flags = 0;
    for (std::uint32_t s = 0; s < store_.point_sets(); ++s) {
      if (store_.point(node, s).load().state() == ObjectState::kSealed) flags |= static_cast<std::uint8_t>(1U << s);
    }
    return flags;
  });
}

// --- the whole ---

std::size_t ObjectStore::metadata_bytes() const {
  std::size_t bytes = std::size_t{store_.high_water()} * store_.record_bytes() + index_.bytes() + history_queue_.bytes();
  for (std::uint32_t s = 0; s < store_.point_sets(); ++s) bytes += point_queues_[s].bytes();
  return bytes;
}

void ObjectStore::check_invariants() const {
  std::vector<std::uint32_t> kids(store_.high_water(), 0);
  std::uint64_t live = 0;
  for (NodeId id = 1; id < store_.high_water(); ++id) {
    const ObjectWord w = store_.history(id).load();
    if (w.state() == ObjectState::kAbsent) continue;
    ++live;
    const NodeId parent = store_.header(id).parent.load(std::memory_order_relaxed);
    if (parent == 0) continue;
    ++kids[parent];
    const ObjectState theirs = store_.history(parent).load().state();
    HETKV_CHECK(theirs != ObjectState::kAbsent && theirs != ObjectState::kEvicting,
                "closure: a live node's parent is going or gone");
    HETKV_CHECK(theirs == ObjectState::kSealed || w.state() == ObjectState::kBroken,
                "chain: a sealed node under an unsealed one");
  }
  HETKV_CHECK(live == live_nodes(), "live node count");
  for (NodeId id = 1; id < store_.high_water(); ++id) {
    const ObjectWord w = store_.history(id).load();
    HETKV_CHECK(w.kids() == kids[id], "child count differs from the children");
    for (std::uint32_t s = 0; s < store_.point_sets(); ++s) {
      const ObjectState point = store_.point(id, s).load().state();
      HETKV_CHECK(point == ObjectState::kAbsent || w.state() != ObjectState::kAbsent, "a point object without its node");
    }
    if (w.state() != ObjectState::kSealed) continue;
    std::uint8_t flags = 0, seen = 0;
    for (std::uint32_t s = 0; s < store_.point_sets(); ++s) {
      if (store_.point(id, s).load().state() == ObjectState::kSealed) flags |= static_cast<std::uint8_t>(1U << s);
    }
    bool found = false;
    index_.visit(key_of(id), [&](const PrefixIndex::Entry& entry) {
      if (entry.node != id) return false;
      seen = entry.flags;
      found = true;
      return true;
    });
    HETKV_CHECK(found, "a sealed node is not in the index");
    HETKV_CHECK(flags == seen, "point flags of a slot differ from the words");
  }
}

}  // namespace hetkv
