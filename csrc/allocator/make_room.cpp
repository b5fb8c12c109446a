// KvAllocator: quotas, the reservation with eviction behind it, and what callers evict or quarantine by name.
#include <algorithm>
#include <utility>

#include "allocator/kv_allocator.h"
#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {

Refusal KvAllocator::charge_quota(std::uint64_t bytes, Namespace* space) {
  const auto more = static_cast<std::int64_t>(bytes);
  std::int64_t used = space->used_bytes.load(std::memory_order_relaxed);
  for (;;) {
    const std::uint64_t quota = space->quota_bytes.load(std::memory_order_relaxed);
    if (static_cast<std::uint64_t>(std::max<std::int64_t>(0, used + more)) <= quota) {
      if (space->used_bytes.compare_exchange_weak(used, used + more, std::memory_order_relaxed)) return {};
      continue;
    }
    // What can never fit evicts nothing. Else its own prefixes go, never another's.
    if (bytes > quota) {
      counters_.add(Counters::kRefusedQuota);
      return {Refusal::Cause::kQuota, 0, bytes, quota};
    }
    if (store_.evict_space(space, kEveryInstance, 16) == 0) {
      counters_.add(Counters::kRefusedQuota);
      return {Refusal::Cause::kQuota, 0, static_cast<std::uint64_t>(std::max<std::int64_t>(0, used + more)), quota, true};
    }
    used = space->used_bytes.load(std::memory_order_relaxed);
  }
}

Refusal KvAllocator::reserve(const BlockCounts& need, std::uint64_t ticket, Namespace* space, Charge& charge) {
  const std::uint64_t bytes = bytes_of(need);
  if (bytes == 0) return {};
  if (const Refusal refusal = charge_quota(bytes, space)) return refusal;
  try {
    const Refusal refusal = reserve_blocks(need, ticket, charge);
    if (refusal) return_quota(bytes, space);
    return refusal;
  } catch (...) {  // out of memory inside a sweep
    return_quota(bytes, space);
    throw;
  }
}

Refusal KvAllocator::reserve_blocks(const BlockCounts& need, std::uint64_t ticket, Charge& charge) {
  BlockCounts headroom{};
  if (older_than(ticket)) {
    // The oldest sequence can always take one more step.
    for (const Group& group : layout_.groups()) {
      const Retention r = group.spec.retention;
      headroom[group.id] = r == Retention::kHistory || r == Retention::kWindow ? 1 : 0;
    }
  }
  bool thinned = false;
  for (;;) {
    const ReserveOutcome outcome = arena_.reserve(need, headroom, charge);
    switch (outcome.status) {
      case ReserveOutcome::Status::kReserved:
        return {};
      case ReserveOutcome::Status::kImpossible:
        counters_.add(Counters::kRefusedImpossible);
        return {Refusal::Cause::kImpossible, outcome.pool, outcome.need, outcome.cap};
      case ReserveOutcome::Status::kShort:
        break;
    }
    const std::uint32_t blocks = std::max<std::uint32_t>(need[outcome.pool] + headroom[outcome.pool], 1);
    if (make_room(outcome.pool, blocks, false)) continue;
    store_.sweep_into_queues();
    if (make_room(outcome.pool, blocks, true)) continue;
    if (evict_kind_of(outcome.pool)) continue;
    if (!std::exchange(thinned, true) && thin_out(outcome.pool, blocks)) continue;
    counters_.add(Counters::kRefusedNoRoom);
    return {Refusal::Cause::kNoRoom, outcome.pool, bytes_of(need), arena_.bytes(), true};
  }
}

// Evicts something that helps `pool`: objects of its own group first, then a whole slab of another pool.
bool KvAllocator::make_room(PoolId pool, std::uint32_t blocks, bool after_sweep) {
  // A few at a time: the reservation needs no more than it lacks, which may be less than it asks for.
  const std::uint32_t batch = std::min<std::uint32_t>(blocks, 16);
  std::uint32_t evicted = 0;
  if (!layout_.pools()[pool].ring) {
    while (evicted < batch && evict_coldest_of(layout_.pools()[pool].group, after_sweep)) ++evicted;
  }
  return evicted > 0 || reclaim_slab(pool, blocks, after_sweep);
}

bool KvAllocator::evict_coldest_of(GroupId id, bool after_sweep) {
  const Group& group = layout_.group(id);
  if (group.history_slot >= 0) return store_.evict_coldest_history(after_sweep);
  return group.point_slot >= 0 && store_.evict_coldest_point(static_cast<std::uint32_t>(group.point_slot), after_sweep);
}

// One object of any group of the pool's kind: where the kind's cap is short, or its slabs are held by a sister group.
bool KvAllocator::evict_kind_of(PoolId pool) {
  for (const Group& group : layout_.groups()) {
    if (group.spec.kind == layout_.pools()[pool].kind && evict_coldest_of(group.id, true)) return true;
  }
  return false;
}

// No slab can be emptied at once: takes one object from a pool that may give a slab.
bool KvAllocator::thin_out(PoolId pool, std::uint32_t blocks) {
  for (const auto& groups : {layout_.point_groups(), layout_.history_groups()}) {
    for (const GroupId id : groups) {
      if (id != pool && arena_.may_steal(id, pool, blocks) && evict_coldest_of(id, false)) return true;
    }
  }
  return false;
}

// Whether every block of the slab belongs to an object that nobody pins now.
bool KvAllocator::drainable(std::span<const Block> blocks) const {
  return std::all_of(blocks.begin(), blocks.end(), [&](const Block& block) {
    const NodeId node = arena_.owner(block);
    if (node == 0 || layout_.pools()[block.pool].ring) return false;
    const Group& group = layout_.group(layout_.pools()[block.pool].group);
    if (group.point_slot < 0) return store_.nodes().history(node).load().pins() == 0;
    return store_.nodes().point(node, static_cast<std::uint32_t>(group.point_slot)).load().pins() == 0;
  });
}

// Evicts every object of one slab; false if something in it turned out to be in use.
bool KvAllocator::drain_slab(std::uint32_t slab, std::span<const Block> blocks) {
  for (const Block block : blocks) {
    const NodeId node = arena_.owner(block);
    const Group& group = layout_.group(layout_.pools()[block.pool].group);
    if (node == 0) continue;
    if (group.point_slot >= 0) {
      const auto set = static_cast<std::uint32_t>(group.point_slot);
      if (!store_.evict_point(node, set, store_.nodes().point(node, set).load().gen())) return false;
    } else if (store_.nodes().history(node).load().state() == ObjectState::kSealed && !store_.evict_subtree(node)) {
      return false;
    }
  }
  return arena_.slab_used(slab) == 0;
}

bool KvAllocator::reclaim_slab(PoolId to, std::uint32_t needed, bool try_all) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> candidates;  // used, slab
  for (std::uint32_t slab = 0; slab < arena_.num_slabs(); ++slab) {
    const auto from = arena_.slab_owner(slab);
    if (!from || *from == to || !arena_.may_steal(*from, to, needed)) continue;
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
      counters_.add(Counters::kSlabsReclaimed);
      return true;
    }
    if (++tried == kTried && !try_all) break;
  }
  return false;
}

std::uint64_t KvAllocator::evict(ObjectKind kind, std::uint64_t blocks) {
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
      while (gone < blocks && store_.evict_coldest_history(false)) ++gone;
    }
  }
  return gone;
}

bool KvAllocator::evict_object(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position,
                               GroupId group) {
  const Found found = object_at(tokens, space, position, group);
  if (found.node == 0) return false;
  const Group& g = layout_.group(group);
  require_route(g.spec.kind, Operation::kEvict);
  if (g.point_slot < 0) return store_.evict_node(found.node, found.gen);
  const auto set = static_cast<std::uint32_t>(g.point_slot);
  return store_.evict_point(found.node, set, store_.nodes().point(found.node, set).load().gen());
}

std::uint64_t KvAllocator::quarantine(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position,
                                      GroupId group, LossReason reason) {
  const Found found = object_at(tokens, space, position, group);
  if (found.node == 0) return 0;
  const Group& g = layout_.group(group);
  if (g.point_slot < 0) return store_.quarantine_node(found.node, found.gen, reason, group);
  return store_.quarantine_point(found.node, static_cast<std::uint32_t>(g.point_slot)) ? 1 : 0;
}

Found KvAllocator::object_at(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position,
                             GroupId group) const {
  check_tokens(tokens);
  const std::int64_t b = layout_.block_size();
  if (group >= layout_.groups().size()) throw ArgumentError("group", std::to_string(group), "a group of the layout");
  if (position <= 0 || position % b != 0 || position > static_cast<std::int64_t>(tokens.size())) {
    throw ArgumentError("position", std::to_string(position),
                        "a multiple of block_size " + std::to_string(b) + " in (0, " + std::to_string(tokens.size()) + "]");
  }
  const NamespaceInstance& instance = *space->instance.load(std::memory_order_acquire);
  std::vector<Key128> keys;
  hash_blocks(tokens.first(static_cast<std::size_t>(position)), instance, nullptr, keys);
  return store_.lookup(keys.back(), versions_.current(), instance.id);
}

}  // namespace hetkv
