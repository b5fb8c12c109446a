// KvAllocator: quotas, reservations on behalf of sequences, and what callers evict or quarantine by name.
#include <algorithm>
#include <utility>

#include "allocator/kv_allocator.h"
#include "base/error.h"

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
  const Refusal refusal = device_.reserve(need, headroom, charge);
  if (refusal)
    counters_.add(refusal.cause == Refusal::Cause::kImpossible ? Counters::kRefusedImpossible : Counters::kRefusedNoRoom);
  return refusal;
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
  return store_.quarantine_point(found.node, static_cast<std::uint32_t>(g.point_slot), reason) ? 1 : 0;
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
