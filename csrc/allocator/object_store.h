// ObjectStore: nodes, their objects and the index of one tier: find, pin, publish, evict, quarantine (protocol.md section 5).
//
// Owns the node pool, the index, the eviction queues and the memory of what was lost (ghosts, broken objects). Holds blocks of the
// arena on behalf of sealed objects. Does not know sequences, requests or reports. The arena must outlive it.
// Methods are thread-safe and never wait for another thread unless said.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator/arena.h"
#include "allocator/eviction_queue.h"
#include "allocator/layout.h"
#include "allocator/loss.h"
#include "allocator/namespace_table.h"
#include "allocator/node_store.h"
#include "allocator/prefix_index.h"
#include "allocator/version_table.h"

namespace hetkv {

struct Found {
  NodeId node = 0;
  std::uint32_t gen = 0;
  std::uint8_t flags = 0;  // point sets that look sealed
};

enum class PublishStatus : std::uint8_t {
  kPublished,     // ours is in the index, pinned
  kFoundEqual,    // another's is; it is pinned now, our blocks stay private
  kBusy,          // try again at the next boundary
  kCollision,     // same key, other tokens: counted, never published
  kParentBroken,  // a quarantine took the parent
  kNoNode,        // every node record is in use
};

struct NodeContent {
  Key128 key;
  VersionId version = 0;
  std::uint32_t space = 0;                      // namespace instance
  NodeId parent = 0;                            // pinned by the caller, or 0
  std::uint32_t depth = 0;                      // in blocks, >= 1
  const std::int32_t* tokens = nullptr;         // block_size of them
  std::span<const std::uint32_t> history_refs;  // one per required history group, kNoBlock where the layout stores none
  bool canonical = false;                       // every row of it and of its ancestors was computed in whole-block chunks
};

struct PointContent {
  std::uint32_t gap_tokens = 0;  // to the next shallower checkpoint
  bool probation = false;
  bool canonical = false;
};

// Told of every object that was sealed, by the thread that sealed it: must be quick, and may not call back into the store.
class PublicationObserver {
 public:
  virtual ~PublicationObserver() = default;
  // The caller has the node pinned, and the point object where `part` names a point set. turn_end: it belongs to the checkpoint of
  // the end of a prompt or of an answer; may be told again for that alone.
  virtual void published(NodeId node, std::uint8_t part, bool turn_end) noexcept = 0;
  // An admission resumed from this node, which the caller has pinned.
  virtual void used(NodeId node) noexcept = 0;
};

inline constexpr std::uint32_t kEveryInstance = ~std::uint32_t{0};

// Flags of an object word: one of a sealed object, and the reason of one that was broken (0: none), which outlives it.
inline constexpr std::uint32_t kCanonicalFlag = 1;
inline constexpr unsigned kReasonShift = 1;
static_assert(kNumLossReasons << kReasonShift <= ObjectWord::mask(ObjectWord::kFlagBits) + 1, "a reason fits the flags");
static_assert(ObjectWord::kLastingFlags == (ObjectWord::mask(ObjectWord::kFlagBits) & ~std::uint64_t{kCanonicalFlag}));

// A lost object that is still remembered by name: broken, not evicted.
struct BrokenRecord {
  VersionId version = 0;
  LossReason reason = LossReason::kIncomplete;
  std::int32_t group = -1;
};

class ObjectStore {
 public:
  ObjectStore(const CacheLayout& layout, Arena& arena, NamespaceTable& spaces, std::uint32_t max_nodes,
              bool charges_namespaces = true);
  ~ObjectStore();  // evicts everything; checks that nothing is pinned
  ObjectStore(const ObjectStore&) = delete;
  ObjectStore& operator=(const ObjectStore&) = delete;

  // --- search (loads only) ---
  Found lookup(const Key128& key, VersionId version, std::uint32_t space) const;
  // Deepest sealed node among keys[0..limit), by binary search over depth; `depth` is 0 if none.
  Found find_deepest(std::span<const Key128> keys, std::uint32_t limit, VersionId version, std::uint32_t space,
                     std::uint32_t* depth) const;

  // --- pins ---
  // Pins the node and compares key, version, namespace and depth under the pin; on failure nothing is pinned.
  bool pin_node(const Found& found, const Key128& key, VersionId version, std::uint32_t space, std::uint32_t depth);
  // Pins a node by number and generation only: for one who was told of both.
  bool pin_node_by_generation(NodeId node, std::uint32_t gen) { return store_.history(node).pin(gen) == Transition::kDone; }
  // One more pin, by one who holds a pin on it or on a descendant; false only at 65535 pins.
  bool pin_node_again(NodeId node);
  void unpin_node(NodeId node);
  // By one who holds a pin on the node or on a descendant of it.
  bool pin_point(NodeId node, std::uint32_t set);
  void unpin_point(NodeId node, std::uint32_t set);
  bool node_ok(NodeId node) const { return store_.history(node).load().state() == ObjectState::kSealed; }
  // Of an object that the caller has pinned.
  bool node_canonical(NodeId node) const { return (store_.history(node).load().flags() & kCanonicalFlag) != 0; }
  bool point_canonical(NodeId node, std::uint32_t set) const {
    return (store_.point(node, set).load().flags() & kCanonicalFlag) != 0;
  }
  bool point_ok(NodeId node, std::uint32_t set) const { return store_.point(node, set).load().state() == ObjectState::kSealed; }

  // The chain of a node that the caller has pinned, at depth keys.size(): node ids and flags, and a comparison of tokens (all
  // blocks, or only the deepest). Returns the shallowest depth whose tokens differ or that a quarantine has taken out of the index,
  // or 0. `each(depth, node, flags)` is called for every depth above that, in order. Reads bodies of pinned nodes only.
  template <class Each>
  std::uint32_t gather(NodeId pinned, std::span<const Key128> keys, const std::int32_t* tokens, bool compare_all,
                       Each&& each) const;

  // --- publication ---
  // On kPublished and kFoundEqual `node` is pinned for the caller. The content's blocks move their hold on kPublished only.
  void prefetch_publication(const Key128& key) const { index_.prefetch_for_write(key); }
  PublishStatus publish_node(const NodeContent& content, NodeId* node);
  // Publishes one block as point set `set` of a node that the caller has pinned. On true the hold moved and the caller has a pin.
  bool publish_point(NodeId node, std::uint32_t set, std::uint32_t block, const PointContent& content);

  // Before the first publication.
  void set_observer(PublicationObserver* observer) { observer_ = observer; }
  bool observed() const { return observer_ != nullptr; }
  void note_use(NodeId node) {
    if (observer_ != nullptr) observer_->used(node);
  }
  // By one who holds a pin on the node: the point object belongs to the checkpoint of the end of a turn.
  void note_turn_end(NodeId node, std::uint32_t set) {
    if (observer_ != nullptr) observer_->published(node, static_cast<std::uint8_t>(set), true);
  }

  // --- eviction ---
  // Evicts the coldest history leaf / point object of a set. False if there is no victim now. `after_sweep`: if the queues yield
  // none, takes any that it meets; O(nodes). What a stopped thread keeps in a queue's shard is found that way.
  bool evict_coldest_history(bool after_sweep) { return evict_coldest_history(1, after_sweep) != 0; }
  bool evict_coldest_point(std::uint32_t set, bool after_sweep);
  // Up to at_most of the coldest history leaves, one after the other; returns how many went.
  std::uint64_t evict_coldest_history(std::uint64_t at_most, bool after_sweep);
  bool evict_node(NodeId node, std::uint32_t gen);
  bool evict_point(NodeId node, std::uint32_t set, std::uint32_t gen);
  // Evicts these nodes and all below them, deepest first. False, and nothing goes, if something there is pinned; false also if others
  // take or use some of it meanwhile. One sweep over all nodes unless the roots have no other children: for slab moves only.
  bool evict_subtrees(std::span<const NodeId> roots);
  // Puts every evictable object back into the queues (what a busy shard dropped). O(nodes).
  void sweep_into_queues();
  // Evicts unpinned nodes of a namespace, of one instance or of kEveryInstance, leaf first; returns how many went. O(nodes log nodes).
  std::uint64_t evict_space(const Namespace* space, std::uint32_t only, std::uint64_t at_most_nodes);

  // --- quarantine ---
  // Takes a node (or one of its point sets) and everything below it out of sight. Returns the number of objects marked.
  std::uint64_t quarantine_node(NodeId node, std::uint32_t gen, LossReason reason, std::int32_t group);
  bool quarantine_point(NodeId node, std::uint32_t set, LossReason reason);
  // Why a point object that is not there was quarantined: known until it is published again or its node goes.
  std::optional<LossReason> broken_point(NodeId node, std::uint32_t set) const;
  std::optional<BrokenRecord> broken(const Key128& key) const;
  bool any_broken() const { return broken_count_.load(std::memory_order_acquire) != 0; }
  bool recently_evicted(const Key128& key) const;

  // --- use ---
  std::uint64_t tick() { return tick_.fetch_add(1, std::memory_order_relaxed) + 1; }
  void touch_node(NodeId node, std::uint64_t now);
  void touch_point(NodeId node, std::uint32_t set);

  const NodeStore& nodes() const { return store_; }
  std::uint64_t live_nodes() const {  // O(versions)
    std::uint64_t live = 0;
    for (const auto& of_version : live_by_version_) live += of_version.load(std::memory_order_relaxed);
    return live;
  }
  std::uint64_t live_nodes(VersionId version) const { return live_by_version_[version].load(std::memory_order_relaxed); }
  std::size_t metadata_bytes() const;

  struct Counters {
    std::atomic<std::uint64_t> nodes_published{0}, nodes_found_equal{0}, publish_busy{0}, collisions{0};
    std::atomic<std::uint64_t> history_evicted{0}, broken{0};
    std::array<std::atomic<std::uint64_t>, kMaxPointSets> points_published{}, points_evicted{};
  };
  const Counters& counters() const { return counters_; }
  // Closure, counts and flags at a quiescent moment: aborts with the rule that is broken. O(nodes).
  void check_invariants() const;

 private:
  struct Unused {
    NodeId node = 0;
    std::uint32_t gen = 0;
  };
  Key128 key_of(NodeId node) const {
    const NodeHeader& h = store_.header(node);
    return {h.key_high.load(std::memory_order_relaxed), h.key_low.load(std::memory_order_relaxed)};
  }
  bool same_identity(NodeId node, const Key128& key, VersionId version, std::uint32_t space) const;
  void finish_evict_node(NodeId node);
  void prefetch_eviction(NodeId parent) const;
  std::uint64_t evict_upwards(NodeId node, std::uint32_t gen, std::uint64_t at_most);
  void return_quota(std::uint32_t space, std::uint64_t bytes) const {
    if (charges_namespaces_)
      spaces_.of_instance(space)->used_bytes.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }
  void drop_point_block(NodeId node, std::uint32_t set, std::uint32_t space);
  // Takes one pin or child count off `node`, and reaps what is broken, up the chain. Returns the sealed leaf that nobody uses any
  // more, if that is what it came to. 0 does nothing.
  Unused release_history(NodeId node, Released (ObjectControl::*release)());
  void enqueue_unused(const Unused& unused) {
    if (unused.node != 0) enqueue_history(unused.node);
  }
  void refresh_flags(NodeId node);
  void enqueue_history(NodeId node);
  void enqueue_point(NodeId node, std::uint32_t set);
  std::uint64_t history_score(NodeId node) const;
  std::uint64_t point_score(NodeId node, std::uint32_t set) const;
  void remember_broken(const Key128& key, const BrokenRecord& record);
  void forget_broken(const Key128& key);
  std::vector<NodeId> live_by_depth() const;
  std::vector<std::pair<std::uint32_t, NodeId>> nodes_below(std::span<const NodeId> roots) const;
  bool closed_downwards(std::span<const NodeId> roots) const;

  const CacheLayout& layout_;
  Arena& arena_;
  PublicationObserver* observer_ = nullptr;
  NamespaceTable& spaces_;
  const bool charges_namespaces_;
  NodeStore store_;
  PrefixIndex index_;
  EvictionQueue history_queue_;
  std::array<EvictionQueue, kMaxPointSets> point_queues_;
  std::array<std::atomic<std::uint64_t>, kMaxPointSets> inflation_{};  // score of the last evicted point, per set
  std::atomic<std::uint64_t> tick_{0};
  std::array<std::atomic<std::uint32_t>, VersionTable::kMaxVersions> live_by_version_{};
  Counters counters_;

  static constexpr std::size_t kGhosts = std::size_t{1} << 16;
  LazyArray<std::atomic<std::uint32_t>> ghosts_;  // tags of evicted keys: only to name a reason
  mutable std::mutex broken_mutex_;               // never taken by a request unless something is broken
  std::unordered_map<std::uint64_t, BrokenRecord> broken_;
  std::atomic<std::uint64_t> broken_count_{0};
};

template <class Each>
std::uint32_t ObjectStore::gather(NodeId pinned, std::span<const Key128> keys, const std::int32_t* tokens, bool compare_all,
                                  Each&& each) const {
  // From the pinned node up, by parent links: those name exactly what the pin keeps. Beside a quarantine the index may already name
  // an equal node, published anew, that no pin of ours keeps; so the index gives only flags, and addresses early: three stages, each a
  // fixed distance ahead of the next, so that buckets, records and tokens are in cache when they are read.
  constexpr std::size_t kAhead = 8;
  const std::size_t n = keys.size();
  const std::size_t block_size = layout_.block_size();
  thread_local std::vector<PrefixIndex::Entry> chain;
  chain.resize(n);
  auto resolve = [&](std::size_t i) {
    PrefixIndex::Entry entry;
    index_.visit(keys[i], [&](const PrefixIndex::Entry& e) {
      entry = e;  // the tag decides for the prefetch; identity is compared below
      return true;
    });
    chain[i] = entry;
    store_.prefetch(entry.node);
  };
  for (std::size_t i = n; i-- > 0 && i + 2 * kAhead >= n;) index_.prefetch(keys[i]);
  for (std::size_t i = n; i-- > 0 && i + kAhead >= n;) resolve(i);
  std::size_t differs = 0;
  NodeId ours = pinned;
  for (std::size_t i = n; i-- > 0;) {
    if (i >= 2 * kAhead) index_.prefetch(keys[i - 2 * kAhead]);
    if (i >= kAhead) resolve(i - kAhead);
    if (chain[i].node != ours) [[unlikely]] {
      PrefixIndex::Entry entry;
      index_.visit(keys[i], [&](const PrefixIndex::Entry& e) {
        if (e.node == ours) entry = e;
        return e.node == ours;
      });
      if (entry.node == 0) differs = i + 1;  // a quarantine is taking the chain away
      chain[i] = entry;
    }
    if (compare_all || i + 1 == n) {
      const std::span<const std::int32_t> stored = store_.tokens(ours);
      if (__builtin_memcmp(stored.data(), tokens + i * block_size, block_size * sizeof(std::int32_t)) != 0) [[unlikely]]
        differs = i + 1;
    }
    ours = store_.header(ours).parent.load(std::memory_order_relaxed);
  }
  const std::size_t same = differs == 0 ? n : differs - 1;
  for (std::size_t i = 0; i < same; ++i) each(static_cast<std::uint32_t>(i + 1), chain[i].node, chain[i].flags);
  return static_cast<std::uint32_t>(differs);
}

}  // namespace hetkv
