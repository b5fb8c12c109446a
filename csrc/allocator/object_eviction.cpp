// ObjectStore: eviction, its scores and queues, and sweeps.
#include <algorithm>
#include <bit>

#include "allocator/object_store.h"
#include "base/check.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

constexpr std::uint16_t kHistoryQueued = std::uint16_t{1} << 15;

std::uint32_t ghost_tag(const Key128& key) { return static_cast<std::uint32_t>(key.high) | 1; }

}  // namespace

bool ObjectStore::evict_node(NodeId node, std::uint32_t gen) { return evict_upwards(node, gen, 1) == 1; }

// Evicts a leaf, and then its ancestors as long as each becomes a leaf that is at least as cold as all that is queued: chains are
// published and left as a whole, so most victims follow their child and never pass through the queue.
std::uint64_t ObjectStore::evict_upwards(NodeId node, std::uint32_t gen, std::uint64_t at_most) {
  for (std::uint64_t gone = 0;;) {
    const NodeId parent = store_.header(node).parent.load(std::memory_order_relaxed);
#ifdef HETKV_PLANT_KID_FIRST
    if (parent != 0) store_.history(parent).drop_kid();
#endif
    HETKV_TEST_POINT("evict: before the claim");
    if (store_.history(node).begin_evict(gen) != Transition::kDone) return gone;
    HETKV_TEST_POINT("evict: claimed");
    finish_evict_node(node);
    ++gone;
#ifdef HETKV_PLANT_KID_FIRST
    return gone;
#endif
    const Unused next = release_history(parent, &ObjectControl::drop_kid);
    if (next.node == 0) return gone;
    if (gone == at_most || history_score(next.node) > history_queue_.lowest()) {
      enqueue_history(next.node);
      return gone;
    }
    node = next.node;
    gen = next.gen;
  }
}

// Chains go leaf by leaf, so the parent and then its parent are the likely next victims: what evicting them writes comes into cache
// while their child is taken apart. Each is there while a child of it is.
void ObjectStore::prefetch_eviction(NodeId parent) const {
  for (int ahead = 0; ahead < 2 && parent != 0; ++ahead) {
    const Key128 key = key_of(parent);
    index_.prefetch_for_write(key);
    __builtin_prefetch(&ghosts_[key.low % kGhosts], 1);
    parent = store_.header(parent).parent.load(std::memory_order_relaxed);
  }
  store_.prefetch_record(parent);
}

// The node is EVICTING and ours. Leaves it ABSENT and its record free; the caller lowers the parent's child count after.
void ObjectStore::finish_evict_node(NodeId node) {
  NodeHeader& h = store_.header(node);
  const Key128 key = key_of(node);
  index_.remove(key, node);
  const NodeId parent = h.parent.load(std::memory_order_relaxed);
  prefetch_eviction(parent);
  ghosts_[key.low % kGhosts].store(ghost_tag(key), std::memory_order_relaxed);
  for (std::uint32_t s = 0; s < store_.point_sets(); ++s) {
    ObjectControl point = store_.point(node, s);
    const ObjectWord w = point.load();
    // Nobody pins a point without a pin on its node or below it (protocol.md invariant 4); another evictor may be at it.
    if (point.begin_evict(w.gen()) == Transition::kDone) {
      drop_point_block(node, s, h.space.load(std::memory_order_relaxed));
      point.finish_evict();
    }
    // A reason dies with the node, also where another evictor is still at the point.
    if ((point.load().flags() & ObjectWord::kLastingFlags) != 0) point.set_flags(0, ObjectWord::kLastingFlags);
  }
  std::uint64_t bytes = 0;
  for (std::uint32_t slot = 0; slot < store_.history_groups(); ++slot) {
    const std::uint32_t ref = store_.history_ref(node, slot);
    if (ref == kNoBlock) continue;
    const GroupId group = layout_.history_groups()[slot];
    arena_.drop(Block{ref, group});
    bytes += layout_.group(group).block_bytes;
  }
  return_quota(h.space.load(std::memory_order_relaxed), bytes);
  live_by_version_[h.version.load(std::memory_order_relaxed)].fetch_sub(1, std::memory_order_relaxed);
  counters_.history_evicted.fetch_add(1, std::memory_order_relaxed);
  if (parent != 0) {
    std::atomic<std::uint64_t>& theirs = store_.header(parent).last_use;
    const std::uint64_t mine = h.last_use.load(std::memory_order_relaxed);
    if (theirs.load(std::memory_order_relaxed) < mine) theirs.store(mine, std::memory_order_relaxed);  // as touch_node does
  }
  store_.history(node).finish_evict();
  store_.release(node);
}

void ObjectStore::drop_point_block(NodeId node, std::uint32_t set, std::uint32_t space) {
  const GroupId group = layout_.point_groups()[set];
  const std::uint32_t ref = store_.point_ref(node, set);
  arena_.drop(Block{ref, group});
  return_quota(space, layout_.group(group).block_bytes);
  counters_.points_evicted[set].fetch_add(1, std::memory_order_relaxed);
}

bool ObjectStore::evict_point(NodeId node, std::uint32_t set, std::uint32_t gen) {
  ObjectControl control = store_.point(node, set);
  // Before the claim: once the point is EVICTING its node may go, and its record serve another namespace.
  const std::uint32_t space = store_.header(node).space.load(std::memory_order_relaxed);
  if (control.begin_evict(gen) != Transition::kDone) return false;
  HETKV_TEST_POINT("evict: point claimed");
  drop_point_block(node, set, space);
  control.finish_evict();
  refresh_flags(node);
  return true;
}

std::uint64_t ObjectStore::history_score(NodeId node) const {
  const NodeHeader& h = store_.header(node);
  // Recency, and a bounded preference for what many prefixes share: at most a quarter of a full turn of the pool.
  const auto shared =
      static_cast<std::uint64_t>(std::min<int>(static_cast<int>(std::bit_width(h.uses.load(std::memory_order_relaxed))), 4));
  return h.last_use.load(std::memory_order_relaxed) + shared * (store_.max_nodes() / 16);
}

// Greedy-dual: what was evicted last sets the water line; a checkpoint stands above it by the tokens it saves, weighted by reuse.
std::uint64_t ObjectStore::point_score(NodeId node, std::uint32_t set) const {
  const NodeHeader& h = store_.header(node);
  const std::uint64_t blocks = std::clamp<std::uint64_t>(h.gap.load(std::memory_order_relaxed) / layout_.block_size(), 1, 1024);
  const std::uint64_t reuse = 1 + std::min<std::uint64_t>(h.uses.load(std::memory_order_relaxed), 7);
  std::uint64_t value = blocks * reuse * 16;
  if ((h.probation.load(std::memory_order_relaxed) >> set & 1) != 0) value /= 4;
  return store_.point_use(node, set).load(std::memory_order_relaxed) + value;
}

void ObjectStore::touch_node(NodeId node, std::uint64_t now) {
  NodeHeader& h = store_.header(node);
  h.last_use.store(now, std::memory_order_relaxed);
  const std::uint32_t uses = h.uses.load(std::memory_order_relaxed);
  if (uses < 0xFFFF) h.uses.store(uses + 1, std::memory_order_relaxed);
}

void ObjectStore::touch_point(NodeId node, std::uint32_t set) {
  store_.point_use(node, set).store(inflation_[set].load(std::memory_order_relaxed), std::memory_order_relaxed);
  store_.header(node).probation.fetch_and(static_cast<std::uint8_t>(~(1U << set)), std::memory_order_relaxed);
}

void ObjectStore::enqueue_history(NodeId node) {
  std::atomic<std::uint16_t>& queued = store_.header(node).queued;
  if ((queued.fetch_or(kHistoryQueued, std::memory_order_acq_rel) & kHistoryQueued) != 0) return;
  if (!history_queue_.push({history_score(node), node, store_.history(node).load().gen()})) {
    queued.fetch_and(static_cast<std::uint16_t>(~kHistoryQueued), std::memory_order_acq_rel);
  }
}

void ObjectStore::enqueue_point(NodeId node, std::uint32_t set) {
  const auto bit = static_cast<std::uint16_t>(1U << set);
  std::atomic<std::uint16_t>& queued = store_.header(node).queued;
  if ((queued.fetch_or(bit, std::memory_order_acq_rel) & bit) != 0) return;
  if (!point_queues_[set].push({point_score(node, set), node, store_.point(node, set).load().gen()})) {
    queued.fetch_and(static_cast<std::uint16_t>(~bit), std::memory_order_acq_rel);
  }
}

std::uint64_t ObjectStore::evict_coldest_history(std::uint64_t at_most, bool after_sweep) {
  std::uint64_t gone = 0;
  while (gone < at_most) {
    const auto entry = history_queue_.pop();
    if (!entry) break;
    NodeHeader& h = store_.header(entry->node);
    // The bit goes first: a release that comes after sees it clear and queues the object anew.
    h.queued.fetch_and(static_cast<std::uint16_t>(~kHistoryQueued), std::memory_order_acq_rel);
    const ObjectWord w = store_.history(entry->node).load();
    if (w.state() != ObjectState::kSealed || w.pins() > 0 || w.kids() > 0) continue;
    if (w.gen() != entry->gen || history_score(entry->node) > entry->score) {
      enqueue_history(entry->node);
      continue;
    }
    gone += evict_upwards(entry->node, w.gen(), at_most - gone);
  }
  for (NodeId id = 1; after_sweep && gone == 0 && id < store_.high_water(); ++id) {
    const ObjectWord w = store_.history(id).load();
    if (w.state() == ObjectState::kSealed && w.pins() == 0 && w.kids() == 0) gone += evict_upwards(id, w.gen(), at_most);
  }
  return gone;
}

bool ObjectStore::evict_coldest_point(std::uint32_t set, bool after_sweep) {
  const auto bit = static_cast<std::uint16_t>(1U << set);
  while (const auto entry = point_queues_[set].pop()) {
    store_.header(entry->node).queued.fetch_and(static_cast<std::uint16_t>(~bit), std::memory_order_acq_rel);
    const ObjectWord w = store_.point(entry->node, set).load();
    if (w.state() != ObjectState::kSealed || w.pins() > 0) continue;
    const std::uint64_t score = point_score(entry->node, set);
    if (w.gen() != entry->gen || score > entry->score) {
      enqueue_point(entry->node, set);
      continue;
    }
    if (evict_point(entry->node, set, w.gen())) {
      std::uint64_t line = inflation_[set].load(std::memory_order_relaxed);
      while (line < score && !inflation_[set].compare_exchange_weak(line, score, std::memory_order_relaxed)) {
      }
      return true;
    }
  }
  for (NodeId id = 1; after_sweep && id < store_.high_water(); ++id) {
    const ObjectWord w = store_.point(id, set).load();
    if (w.state() == ObjectState::kSealed && w.pins() == 0 && evict_point(id, set, w.gen())) return true;
  }
  return false;
}

void ObjectStore::sweep_into_queues() {
  for (NodeId id = 1; id < store_.high_water(); ++id) {
    const ObjectWord w = store_.history(id).load();
    if (w.state() != ObjectState::kSealed) continue;
    if (w.pins() == 0 && w.kids() == 0) enqueue_history(id);
    for (std::uint32_t s = 0; s < store_.point_sets(); ++s) {
      const ObjectWord p = store_.point(id, s).load();
      if (p.state() == ObjectState::kSealed && p.pins() == 0) enqueue_point(id, s);
    }
  }
}

std::vector<NodeId> ObjectStore::live_by_depth() const {
  std::vector<std::pair<std::uint32_t, NodeId>> found;
  for (NodeId id = 1; id < store_.high_water(); ++id) {
    const ObjectState state = store_.history(id).load().state();
    if (state == ObjectState::kSealed || state == ObjectState::kBroken) {
      found.emplace_back(store_.header(id).depth.load(std::memory_order_relaxed), id);
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<NodeId> nodes;
  nodes.reserve(found.size());
  for (const auto& [depth, id] : found) nodes.push_back(id);
  return nodes;
}

// Every node at or below one of `roots` (sorted, at least one), with its depth. Climbs each node's parents to the first whose side is known; depths fall on
// the way, so records that are recycled meanwhile cannot send it in circles.
std::vector<std::pair<std::uint32_t, NodeId>> ObjectStore::nodes_below(std::span<const NodeId> roots) const {
  HETKV_TEST_POINT("evict: looking for all that is below");
  enum Side : std::uint8_t { kUnknown, kInside, kOutside };
  std::vector<Side> sides(std::max<std::size_t>(store_.high_water(), roots.back() + 1), kUnknown);
  std::vector<std::pair<std::uint32_t, NodeId>> found;
  std::vector<NodeId> path;
  auto depth_of = [&](NodeId id) { return store_.header(id).depth.load(std::memory_order_relaxed); };
  for (const NodeId root : roots) sides[root] = kInside;
  for (NodeId id = 1; id < sides.size(); ++id) {
    const ObjectState state = store_.history(id).load().state();
    if (state != ObjectState::kSealed && state != ObjectState::kBroken) continue;
    Side side = sides[id];
    for (NodeId at = id; side == kUnknown;) {
      path.push_back(at);
      const NodeId parent = store_.header(at).parent.load(std::memory_order_relaxed);
      const bool up = parent != 0 && parent < sides.size() && depth_of(parent) < depth_of(at);
      side = up ? sides[parent] : kOutside;
      at = parent;
    }
    for (const NodeId at : path) sides[at] = side;
    path.clear();
    if (side == kInside) found.emplace_back(depth_of(id), id);
  }
  return found;
}

// Whether no node outside `roots` (sorted) hangs on one of them: as many children as roots that name them as their parent.
bool ObjectStore::closed_downwards(std::span<const NodeId> roots) const {
  std::vector<std::uint32_t> kids(roots.size(), 0);
  for (const NodeId root : roots) {
    const auto at = std::lower_bound(roots.begin(), roots.end(), store_.header(root).parent.load(std::memory_order_relaxed));
    if (at != roots.end() && *at == store_.header(root).parent.load(std::memory_order_relaxed))
      ++kids[static_cast<std::size_t>(at - roots.begin())];
  }
  for (std::size_t i = 0; i < roots.size(); ++i) {
    if (store_.history(roots[i]).load().kids() != kids[i]) return false;
  }
  return true;
}

bool ObjectStore::evict_subtrees(std::span<const NodeId> roots) {
  std::vector<NodeId> sorted(roots.begin(), roots.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  if (sorted.empty() || sorted.back() >= store_.high_water()) return false;
  std::vector<std::pair<std::uint32_t, NodeId>> found;  // depth first, so that a sort puts ancestors first
  if (closed_downwards(sorted)) {
    for (const NodeId id : sorted) found.emplace_back(store_.header(id).depth.load(std::memory_order_relaxed), id);
  } else {
    found = nodes_below(sorted);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::uint32_t> gens;
  gens.reserve(found.size());
  for (const auto& [depth, id] : found) {
    const ObjectWord w = store_.history(id).load();
    if (w.pins() > 0) return false;
    gens.push_back(w.gen());
  }
  for (std::size_t i = found.size(); i-- > 0;) {
    if (!evict_node(found[i].second, gens[i])) return false;
  }
  return !found.empty();
}

std::uint64_t ObjectStore::evict_space(const Namespace* space, std::uint32_t only, std::uint64_t at_most_nodes) {
  auto belongs = [&](const NodeHeader& h) {
    const std::uint32_t instance = h.space.load(std::memory_order_relaxed);
    return (only == kEveryInstance || only == instance) && spaces_.of_instance(instance) == space;
  };
  // Sorted by copies: others change depths and uses meanwhile, and a sort needs an order that stands still.
  struct Candidate {
    std::uint32_t depth;
    std::uint64_t last_use;
    NodeId id;
  };
  std::vector<Candidate> mine;
  for (const NodeId id : live_by_depth()) {
    const NodeHeader& h = store_.header(id);
    if (!belongs(h)) continue;
    mine.push_back({h.depth.load(std::memory_order_relaxed), h.last_use.load(std::memory_order_relaxed), id});
  }
  // Deepest first keeps every step legal; among equals the colder goes first.
  std::sort(mine.begin(), mine.end(), [](const Candidate& a, const Candidate& b) {
    return a.depth != b.depth ? a.depth > b.depth : a.last_use < b.last_use;
  });
  std::uint64_t gone = 0;
  for (const auto& [depth, last_use, id] : mine) {
    if (gone == at_most_nodes) break;
    const ObjectWord w = store_.history(id).load();
    if (belongs(store_.header(id)) && evict_node(id, w.gen())) ++gone;
  }
  return gone;
}

bool ObjectStore::recently_evicted(const Key128& key) const {
  return ghosts_[key.low % kGhosts].load(std::memory_order_relaxed) == ghost_tag(key);
}

}  // namespace hetkv
