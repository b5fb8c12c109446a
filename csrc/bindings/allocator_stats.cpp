#include <pybind11/pybind11.h>

#include <string>

#include "bindings/bind_allocator.h"

namespace py = pybind11;
using namespace py::literals;

namespace hetkv {

namespace {

py::str text(std::string_view view) { return {view.data(), view.size()}; }

std::uint64_t load(const std::atomic<std::uint64_t>& counter) { return counter.load(std::memory_order_relaxed); }

// Objects evicted per kind: history sets (once for every history kind, since a set leaves as a whole) and point objects.
py::dict evictions(const CacheLayout& layout, const ObjectStore::Counters& counters) {
  std::array<std::uint64_t, kNumKinds> by_kind{};
  for (const GroupId id : layout.history_groups())
    by_kind[static_cast<std::size_t>(layout.group(id).spec.kind)] = load(counters.history_evicted);
  for (const GroupId id : layout.point_groups()) {
    const Group& group = layout.group(id);
    by_kind[static_cast<std::size_t>(group.spec.kind)] +=
        load(counters.points_evicted[static_cast<std::size_t>(group.point_slot)]);
  }
  py::dict result;
  for (const Group& group : layout.groups())
    result[text(kind_name(group.spec.kind))] = by_kind[static_cast<std::size_t>(group.spec.kind)];
  return result;
}

py::dict pools(KvAllocator& allocator) {
  const CacheLayout& layout = allocator.layout();
  py::dict result;
  for (std::size_t i = 0; i < layout.pools().size(); ++i) {
    const PoolSpec& pool = layout.pools()[i];
    const PoolUsage use = allocator.arena().usage(static_cast<PoolId>(i));
    result[text(pool.name)] = py::dict("kind"_a = text(kind_name(pool.kind)), "block_bytes"_a = use.block_bytes,
                                       "blocks_per_slab"_a = use.blocks_per_slab, "blocks_reserved"_a = use.blocks_reserved,
                                       "blocks_live"_a = use.blocks_live, "slabs_owned"_a = use.slabs_owned);
  }
  return result;
}

py::dict spills(const Spiller::Counters& c) {
  return py::dict("stored"_a = load(c.stored), "stored_bytes"_a = load(c.stored_bytes), "already_there"_a = load(c.already_there),
                  "no_room"_a = load(c.no_room), "failed"_a = load(c.failed), "gone"_a = load(c.gone),
                  "no_parent"_a = load(c.no_parent), "missed"_a = load(c.missed));
}

py::dict outcomes(const std::array<std::uint64_t, kNumDiskOutcomes>& counts) {
  py::dict result;
  for (std::size_t i = 0; i < kNumDiskOutcomes; ++i) result[text(disk_outcome_name(static_cast<DiskOutcome>(i)))] = counts[i];
  return result;
}

// What lies below the device, by tier; empty without lower tiers.
py::dict tiers(KvAllocator& allocator) {
  py::dict result;
  LowerTiers* lower = allocator.lower();
  if (lower == nullptr) return result;
  for (std::size_t i = 0; i < lower->tiers().size(); ++i)
    result[text(lower->tiers()[i]->name())] = py::dict("spills"_a = spills(lower->spiller(i)->counters()));
  if (HostTier* host = lower->host()) {
    py::dict used;
    Arena& arena = host->memory().arena();
    for (const Group& group : allocator.layout().groups())
      used[text(kind_name(group.spec.kind))] = arena.kind_bytes(group.spec.kind);
    py::dict mine = result["host"];
    mine["used_bytes"] = used;
    mine["arena_bytes"] = arena.bytes();
    mine["live_nodes"] = host->memory().store().live_nodes();
    mine["evictions"] = evictions(allocator.layout(), host->memory().store().counters());
  }
  if (BundleDirectory* directory = lower->directory()) {
    const BundleDirectory::Stats stats = directory->stats();
    py::dict mine = result["disk"];
    mine["used_bytes"] = directory->used_bytes();
    mine["bundles"] = directory->bundles();
    mine["written_bytes"] = stats.written_bytes;
    mine["read_bytes"] = stats.read_bytes;
    mine["evicted"] = stats.evicted;
    mine["evicted_bytes"] = stats.evicted_bytes;
    mine["writes"] = outcomes(stats.writes);
    mine["reads"] = outcomes(stats.reads);
  }
  return result;
}

py::dict restores(KvAllocator& allocator) {
  LowerTiers* lower = allocator.lower();
  if (lower == nullptr) return {};
  const Restorer::Counters& c = lower->restorer().counters();
  return py::dict("restores"_a = load(c.restores), "objects"_a = load(c.objects), "bytes"_a = load(c.bytes),
                  "shared"_a = load(c.shared));
}

}  // namespace

py::dict allocator_stats(KvAllocator& allocator) {
  const CacheLayout& layout = allocator.layout();
  const Counters& counters = allocator.counters();
  const ObjectStore::Counters& objects = allocator.store().counters();
  Arena& arena = allocator.arena();

  py::dict used, losses, points;
  for (const Group& group : layout.groups()) used[text(kind_name(group.spec.kind))] = arena.kind_bytes(group.spec.kind);
  for (std::size_t i = 0; i < kNumLossReasons; ++i) {
    const auto reason = static_cast<LossReason>(i);
    losses[text(loss_reason_name(reason))] = counters.loss(reason);
  }
  for (const GroupId id : layout.point_groups()) {
    const Group& group = layout.group(id);
    points[text(group.spec.name)] = load(objects.points_published[static_cast<std::size_t>(group.point_slot)]);
  }

  py::dict stats;
  stats["used_bytes"] = used;
  stats["pools"] = pools(allocator);
  stats["probes"] = counters.get(Counters::kProbes);
  stats["admissions"] = counters.get(Counters::kAdmissions);
  stats["prompt_tokens"] = counters.get(Counters::kPromptTokens);
  stats["hash_hit_tokens"] = counters.get(Counters::kHashHitTokens);
  stats["recoverable_tokens"] = counters.get(Counters::kRecoverableTokens);
  stats["losses"] = losses;
  stats["evictions"] = evictions(layout, objects);
  stats["refusals"] =
      py::dict("impossible"_a = counters.get(Counters::kRefusedImpossible), "no_room"_a = counters.get(Counters::kRefusedNoRoom),
               "quota"_a = counters.get(Counters::kRefusedQuota));
  stats["published_nodes"] = load(objects.nodes_published);
  stats["published_points"] = points;
  stats["found_equal"] = load(objects.nodes_found_equal);
  stats["publish_busy"] = load(objects.publish_busy);
  stats["collisions"] = load(objects.collisions);
  stats["verify_mismatches"] = counters.get(Counters::kVerifyMismatches);
  stats["broken"] = load(objects.broken);
  stats["stale_steps"] = counters.get(Counters::kStaleSteps);
  stats["foreign_steps"] = counters.get(Counters::kForeignSteps);
  stats["live_nodes"] = allocator.store().live_nodes();
  stats["metadata_bytes"] = allocator.metadata_bytes();
  stats["arena_bytes"] = arena.bytes();
  stats["slab_bytes"] = arena.slab_bytes();
  stats["slabs"] = arena.num_slabs();
  stats["free_slabs"] = arena.free_slabs();
  stats["slabs_reclaimed"] = allocator.slabs_reclaimed();
  stats["stranded_bytes"] = arena.stranded_bytes();
  stats["tiers"] = tiers(allocator);
  stats["restores"] = restores(allocator);
  return stats;
}

}  // namespace hetkv
