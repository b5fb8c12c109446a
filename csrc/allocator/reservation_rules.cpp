#include "allocator/reservation_rules.h"

#include <algorithm>

#include "base/check.h"

namespace hetkv {
namespace {

constexpr std::size_t index(ObjectKind kind) { return static_cast<std::size_t>(kind); }
constexpr std::uint64_t slabs_for(std::uint64_t blocks, std::uint64_t per_slab) { return (blocks + per_slab - 1) / per_slab; }

}  // namespace

ReservationRules::ReservationRules(std::span<const PoolGeometry> pools, std::uint32_t slabs, std::uint64_t slab_bytes,
                                   const std::array<KindLimits, kNumKinds>& limits)
    : num_pools_(pools.size()), slabs_(slabs), slab_bytes_(slab_bytes), limits_(limits) {
  HETKV_CHECK(pools.size() <= kMaxPools, "too many pools");
  std::copy(pools.begin(), pools.end(), pools_.begin());
}

SlabPlan ReservationRules::check(const ReservationNumbers& now, const BlockCounts& need,
                                 const BlockCounts& headroom) const noexcept {
  SlabPlan plan;
  std::array<std::uint64_t, kNumKinds> bytes{}, slabs{};  // per kind, with need and headroom
  std::uint64_t extra_all = 0;
  for (std::size_t p = 0; p < num_pools_; ++p) {
    const PoolGeometry& pool = pools_[p];
    const std::uint64_t after = now.used[p] + need[p];
    const std::uint64_t wanted = after + headroom[p];
    std::uint64_t extra = 0;
    plan.grant[p] = 0;
    if (wanted > now.owned[p] * pool.blocks_per_slab) {  // divisions only where slabs are short
      extra = slabs_for(wanted, pool.blocks_per_slab) - now.owned[p];
      const std::uint64_t bare = std::max(slabs_for(after, pool.blocks_per_slab), now.owned[p]) - now.owned[p];
      // What does not fit the narrower type is more than there are slabs, and refused below.
      plan.grant[p] = static_cast<std::uint32_t>(bare);
      plan.grants += bare;
    }
    if (extra > 0 && plan.extra == 0) {
      plan.pool = static_cast<PoolId>(p);
      plan.extra = extra;
      plan.over = wanted - now.owned[p] * pool.blocks_per_slab;
    }
    bytes[index(pool.kind)] += wanted * pool.block_bytes;
    slabs[index(pool.kind)] += now.owned[p] + extra;
    extra_all += extra;
  }
  std::uint64_t unfilled = 0;
  for (std::size_t k = 0; k < kNumKinds; ++k) {
    const std::uint64_t floor = limits_[k].floor_slabs;
    unfilled += floor > slabs[k] ? floor - slabs[k] : 0;
    plan.kind_surplus[k] = slabs[k] > floor ? slabs[k] - floor : 0;
    if (bytes[k] <= limits_[k].cap_bytes) continue;
    plan.verdict = SlabPlan::Verdict::kShort;
    for (std::size_t p = num_pools_; p-- > 0;)
      if (index(pools_[p].kind) == k && (need[p] > 0 || headroom[p] > 0)) plan.pool = static_cast<PoolId>(p);
    const std::uint64_t block = pools_[plan.pool].block_bytes;
    plan.over = (bytes[k] - limits_[k].cap_bytes + block - 1) / block;
    return plan;
  }
  // Granting `extra` slabs one by one, each only to a kind below its floor or from free slabs above all unfilled floors, succeeds
  // exactly if the free slabs left cover the floors left.
  if (extra_all == 0 || extra_all + unfilled <= now.free_slabs) return plan;
  plan.verdict = SlabPlan::Verdict::kStealFirst;
  plan.missing = extra_all + unfilled - now.free_slabs;
  for (std::size_t p = 0; p < num_pools_; ++p) {
#ifdef HETKV_PLANT_NO_CREDIT_CHECK
    plan.surplus[p] = now.owned[p];
#else
    const std::uint64_t kept = slabs_for(now.used[p] + need[p] + headroom[p], pools_[p].blocks_per_slab);
    plan.surplus[p] = now.owned[p] > kept ? now.owned[p] - kept : 0;
#endif
  }
  return plan;
}

ReserveOutcome ReservationRules::refuse(const SlabPlan& plan, const BlockCounts& need) const noexcept {
  ReserveOutcome outcome{ReserveOutcome::Status::kShort, plan.pool, 0, 0, plan.over, 0};
  if (plan.verdict == SlabPlan::Verdict::kShort) {
    const ObjectKind kind = pools_[plan.pool].kind;
    outcome.need = kind_bytes(need, kind);
    outcome.cap = limits(kind).cap_bytes;
  } else {
    // The slabs that can be had now count; the blocks of the others would have to go.
    outcome.missing = plan.missing;
    outcome.lacking -= (plan.extra - std::min(plan.extra, plan.missing - plan.found)) * pools_[plan.pool].blocks_per_slab;
  }
  return outcome;
}

ReserveOutcome ReservationRules::possible(const BlockCounts& need) const noexcept {
  ReservationNumbers empty{};
  empty.free_slabs = slabs_;
  const SlabPlan plan = check(empty, need, BlockCounts{});
  if (plan.verdict == SlabPlan::Verdict::kFits) return {};
  ReserveOutcome refused{ReserveOutcome::Status::kImpossible, plan.pool, 0, 0};
  std::array<std::uint64_t, kNumKinds> slabs{};
  for (std::size_t p = 0; p < num_pools_; ++p) slabs[index(pools_[p].kind)] += slabs_for(need[p], pools_[p].blocks_per_slab);
  if (plan.verdict == SlabPlan::Verdict::kShort) {
    const ObjectKind kind = pools_[plan.pool].kind;
    refused.need = kind_bytes(need, kind);
    refused.cap = limits(kind).cap_bytes;
    return refused;
  }
  // Name the kind that asks for most above its floor; its cap is what floors and the rest of the request leave of the arena.
  std::size_t worst = kNumKinds;
  for (std::size_t k = 0; k < kNumKinds; ++k)
    if (slabs[k] > limits_[k].floor_slabs && (worst == kNumKinds || slabs[k] > slabs[worst])) worst = k;
  HETKV_CHECK(worst < kNumKinds, "floors alone exceed the arena");
  std::uint64_t others = 0;
  for (std::size_t k = 0; k < kNumKinds; ++k)
    if (k != worst) others += std::max<std::uint64_t>(limits_[k].floor_slabs, slabs[k]);
  for (std::size_t p = num_pools_; p-- > 0;)
    if (index(pools_[p].kind) == worst && need[p] > 0) refused.pool = static_cast<PoolId>(p);
  refused.need = slabs[worst] * slab_bytes_;
  refused.cap = (others < slabs_ ? slabs_ - others : 0) * slab_bytes_;
  return refused;
}

std::uint64_t ReservationRules::unfilled_floors(const ReservationNumbers& now) const noexcept {
  std::uint64_t unfilled = 0;
  for (std::size_t k = 0; k < kNumKinds; ++k) {
    const std::uint64_t have = kind_slabs(now, static_cast<ObjectKind>(k));
    if (limits_[k].floor_slabs > have) unfilled += limits_[k].floor_slabs - have;
  }
  return unfilled;
}

std::uint64_t ReservationRules::kind_bytes(const ReservationNumbers& now, ObjectKind kind) const noexcept {
  std::uint64_t bytes = 0;
  for (std::size_t p = 0; p < num_pools_; ++p)
    if (pools_[p].kind == kind) bytes += now.used[p] * pools_[p].block_bytes;
  return bytes;
}

std::uint64_t ReservationRules::kind_bytes(const BlockCounts& blocks, ObjectKind kind) const noexcept {
  std::uint64_t bytes = 0;
  for (std::size_t p = 0; p < num_pools_; ++p)
    if (pools_[p].kind == kind) bytes += std::uint64_t{blocks[p]} * pools_[p].block_bytes;
  return bytes;
}

std::uint64_t ReservationRules::kind_slabs(const ReservationNumbers& now, ObjectKind kind) const noexcept {
  std::uint64_t slabs = 0;
  for (std::size_t p = 0; p < num_pools_; ++p)
    if (pools_[p].kind == kind) slabs += now.owned[p];
  return slabs;
}

}  // namespace hetkv
