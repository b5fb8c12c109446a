// MemoryTier: one tier of memory: an arena, the index of the objects in it, and making room for more.
//
// The device and the host each have one. Owns arena bookkeeping and index, not the memory itself and not the decision who may ask.
// The layout and the table of namespaces must outlive it. Thread-safe; lock-free.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

#include "allocator/arena.h"
#include "allocator/layout.h"
#include "allocator/object_store.h"
#include "allocator/refusal.h"

namespace hetkv {

class MemoryTier {
 public:
  // max_nodes: 0 = from the arena. charges_namespaces: evicted objects give their bytes back to their namespace's quota.
  // Throws as Arena does.
  MemoryTier(const CacheLayout& layout, const ArenaConfig& config, NamespaceTable& spaces, std::uint32_t max_nodes,
             bool charges_namespaces);

  Arena& arena() { return arena_; }
  const Arena& arena() const { return arena_; }
  ObjectStore& store() { return store_; }
  const ObjectStore& store() const { return store_; }

  // need[p] blocks of every pool p, or nothing; evicts as needed. `headroom`: as for Arena::reserve. A refusal changes nothing
  // but may have evicted idle objects. Allocates only while it evicts.
  Refusal reserve(const BlockCounts& need, const BlockCounts& headroom, Charge& charge);
  // Evicts up to `blocks` of the coldest objects of a kind. RouteError if the kind cannot be evicted. Returns how many went.
  std::uint64_t evict(ObjectKind kind, std::uint64_t blocks);
  std::uint64_t bytes_of(const BlockCounts& counts) const;
  std::byte* address(Block block) const {
    return reinterpret_cast<std::byte*>(arena_.base_address() + std::uint64_t{block.offset} * kOffsetUnit);
  }

  std::uint64_t slabs_reclaimed() const { return slabs_reclaimed_.load(std::memory_order_relaxed); }
  std::size_t metadata_bytes() const { return store_.metadata_bytes() + arena_.metadata_bytes(); }
  void check_invariants() const {  // at quiescent moments: aborts with the rule
    arena_.check_invariants();
    store_.check_invariants();
  }

 private:
  static std::uint32_t nodes_for(const CacheLayout& layout, const Arena& arena, std::uint32_t asked);
  bool make_room(const ReserveOutcome& shortage, std::uint32_t blocks, bool after_sweep);
  bool thin_out(const ReserveOutcome& shortage, const BlockCounts& need, const BlockCounts& headroom);
  bool reclaim_slab(PoolId to, std::uint32_t needed, bool try_all);
  std::uint64_t evict_coldest_of(GroupId id, std::uint64_t at_most, bool after_sweep);
  bool evict_kind_of(PoolId pool);
  bool drainable(std::span<const Block> blocks) const;
  bool drain_slab(std::uint32_t slab, std::span<const Block> blocks);

  const CacheLayout& layout_;
  Arena arena_;
  ObjectStore store_;
  std::atomic<std::uint64_t> slabs_reclaimed_{0};
};

}  // namespace hetkv
