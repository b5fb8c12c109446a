#include "allocator/memory_tier.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace hetkv {

MemoryTier::MemoryTier(const CacheLayout& layout, const ArenaConfig& config, NamespaceTable& spaces, std::uint32_t max_nodes,
                       bool charges_namespaces)
    : layout_(layout), arena_(layout, config),
      store_(layout, arena_, spaces, nodes_for(layout, arena_, max_nodes), charges_namespaces) {}

// The node pool: as many nodes as the arena's history could fill, and some for nodes that hold no block of their own.
std::uint32_t MemoryTier::nodes_for(const CacheLayout& layout, const Arena& arena, std::uint32_t asked) {
  if (asked != 0) return asked;
  std::uint64_t per_node = 0;  // bytes
  for (const GroupId id : layout.history_groups()) {
    const Group& group = layout.group(id);
    per_node += group.block_bytes * layout.block_size() / std::max(layout.block_size(), group.spec.compress_ratio);
  }
  if (per_node == 0) {
    per_node = ~std::uint64_t{0};
    for (const Group& group : layout.groups()) per_node = std::min(per_node, group.block_bytes);
  }
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(arena.bytes() / per_node + arena.bytes() / per_node / 8 + 64, 64, 1U << 28));
}

std::uint64_t MemoryTier::bytes_of(const BlockCounts& counts) const {
  std::uint64_t bytes = 0;
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool)
    bytes += std::uint64_t{counts[pool]} * layout_.pools()[pool].block_bytes;
  return bytes;
}

Refusal MemoryTier::reserve(const BlockCounts& need, const BlockCounts& headroom, Charge& charge) {
  bool thinned = false;
  for (;;) {
    const ReserveOutcome outcome = arena_.reserve(need, headroom, charge);
    switch (outcome.status) {
      case ReserveOutcome::Status::kReserved:
        return {};
      case ReserveOutcome::Status::kImpossible:
        return {Refusal::Cause::kImpossible, outcome.pool, outcome.need, outcome.cap};
      case ReserveOutcome::Status::kShort:
        break;
    }
    const std::uint32_t blocks = std::max<std::uint32_t>(need[outcome.pool] + headroom[outcome.pool], 1);
    if (make_room(outcome, blocks, false)) continue;
    store_.sweep_into_queues();
    if (make_room(outcome, blocks, true)) continue;
    if (evict_kind_of(outcome.pool)) continue;
    if (!std::exchange(thinned, true) && thin_out(outcome, need, headroom)) continue;
    const bool over_cap = outcome.cap > 0;
    return {Refusal::Cause::kNoRoom, outcome.pool, over_cap ? outcome.need : bytes_of(need),
            over_cap ? outcome.cap : arena_.bytes(), true};
  }
}

// Evicts something that helps the pool that is short: objects of its own group first, then a whole slab of another pool.
bool MemoryTier::make_room(const ReserveOutcome& shortage, std::uint32_t blocks, bool after_sweep) {
  const PoolSpec& pool = layout_.pools()[shortage.pool];
  if (!pool.ring && evict_coldest_of(pool.group, shortage.lacking, after_sweep) > 0) return true;
  return reclaim_slab(shortage.pool, blocks, after_sweep);
}

std::uint64_t MemoryTier::evict_coldest_of(GroupId id, std::uint64_t at_most, bool after_sweep) {
  const Group& group = layout_.group(id);
  if (group.history_slot >= 0) return store_.evict_coldest_history(at_most, after_sweep);
  std::uint64_t gone = 0;
  if (group.point_slot >= 0) {
    while (gone < at_most && store_.evict_coldest_point(static_cast<std::uint32_t>(group.point_slot), after_sweep)) ++gone;
  }
  return gone;
}

// One object of any group of the pool's kind: where the kind's cap is short, or its slabs are held by a sister group.
bool MemoryTier::evict_kind_of(PoolId pool) {
  for (const Group& group : layout_.groups()) {
    if (group.spec.kind == layout_.pools()[pool].kind && evict_coldest_of(group.id, 1, true) > 0) return true;
  }
  return false;
}

// No slab can be drained. An empty one may still be promised to the credits of its pool: fewer objects in its other slabs, and their
// room covers the credits. Takes as many objects as the missing slabs need; false if no slab came free of its promise.
bool MemoryTier::thin_out(const ReserveOutcome& shortage, const BlockCounts& need, const BlockCounts& headroom) {
  std::array<std::uint64_t, kMaxPools> empty{};
  for (std::uint32_t slab = 0; slab < arena_.num_slabs(); ++slab) {
    if (const auto owner = arena_.slab_owner(slab); owner && arena_.slab_used(slab) == 0) ++empty[*owner];
  }
  std::uint64_t missing = shortage.missing;
  bool helped = false;
  for (const auto& groups : {layout_.point_groups(), layout_.history_groups()}) {
    for (const GroupId id : groups) {
      if (id == shortage.pool || !arena_.may_steal(id, shortage.pool)) continue;
      for (std::uint64_t given = 1; given <= empty[id] && missing > 0; ++given) {
        const PoolUsage use = arena_.usage(id);
        if (given > use.slabs_owned) break;
        const std::uint64_t promised = use.blocks_reserved + need[id] + headroom[id];
        const std::uint64_t room = (use.slabs_owned - given) * use.blocks_per_slab;
        if (promised > room) {
          if (evict_coldest_of(id, promised - room, false) < promised - room) break;
          helped = true;
        }
        --missing;
      }
    }
  }
  return helped;
}

// Whether every block of the slab belongs to an object that nobody pins now.
bool MemoryTier::drainable(std::span<const Block> blocks) const {
  return std::all_of(blocks.begin(), blocks.end(), [&](const Block& block) {
    const NodeId node = arena_.owner(block);
    if (node == 0 || layout_.pools()[block.pool].ring) return false;
    const Group& group = layout_.group(layout_.pools()[block.pool].group);
    if (group.point_slot < 0) return store_.nodes().history(node).load().pins() == 0;
    return store_.nodes().point(node, static_cast<std::uint32_t>(group.point_slot)).load().pins() == 0;
  });
}

// Evicts every object of one slab; false if something in it turned out to be in use.
bool MemoryTier::drain_slab(std::uint32_t slab, std::span<const Block> blocks) {
  std::vector<NodeId> nodes;
  for (const Block block : blocks) {
    const NodeId node = arena_.owner(block);
    const Group& group = layout_.group(layout_.pools()[block.pool].group);
    if (node == 0) continue;
    if (group.point_slot >= 0) {
      const auto set = static_cast<std::uint32_t>(group.point_slot);
      if (!store_.evict_point(node, set, store_.nodes().point(node, set).load().gen())) return false;
    } else if (store_.nodes().history(node).load().state() == ObjectState::kSealed) {
      nodes.push_back(node);
    }
  }
  if (!nodes.empty() && !store_.evict_subtrees(nodes)) return false;
  return arena_.slab_used(slab) == 0;
}

bool MemoryTier::reclaim_slab(PoolId to, std::uint32_t needed, bool try_all) {
  std::array<bool, kMaxPools> may_give{};
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool)
    may_give[pool] = arena_.may_steal(static_cast<PoolId>(pool), to, needed);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> candidates;  // used, slab
  for (std::uint32_t slab = 0; slab < arena_.num_slabs(); ++slab) {
    const auto from = arena_.slab_owner(slab);
    if (!from || !may_give[*from]) continue;
    // An empty one that the reservation did not take is promised to its pool. Only what is evicted here counts as progress.
    if (const std::uint32_t used = arena_.slab_used(slab); used > 0) candidates.emplace_back(used, slab);
  }
  std::sort(candidates.begin(), candidates.end());
  constexpr int kTried = 8;
  int tried = 0;
  std::vector<Block> blocks;
  for (const auto& [used, slab] : candidates) {
    blocks.clear();
    arena_.live_blocks(slab, blocks);
    if (!drainable(blocks)) continue;
    if (drain_slab(slab, blocks)) {
      slabs_reclaimed_.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
    if (++tried == kTried && !try_all) break;
  }
  return false;
}

std::uint64_t MemoryTier::evict(ObjectKind kind, std::uint64_t blocks) {
  require_route(kind, Operation::kEvict);
  std::uint64_t gone = 0;
  bool history_done = false;
  for (const Group& group : layout_.groups()) {
#ifndef HETKV_PLANT_EVICT_ANY_KIND
    if (group.spec.kind != kind) continue;
#endif
    if (group.point_slot >= 0) {
      const auto set = static_cast<std::uint32_t>(group.point_slot);
      while (gone < blocks && store_.evict_coldest_point(set, false)) ++gone;
    } else if (!std::exchange(history_done, true)) {
      gone += store_.evict_coldest_history(blocks - gone, false);
    }
  }
  return gone;
}

}  // namespace hetkv
