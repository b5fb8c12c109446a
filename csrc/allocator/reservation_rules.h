// ReservationRules: what a reservation checks, as pure arithmetic on one consistent view of the counters. No atomics, no slabs.
//
// Owns pool geometry and the limits per kind; immutable. Both reservations (lock-free and locked), `possible` and the tests' model
// of the empty arena use this one function. All methods: thread-safe, no allocation, never block.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "allocator/layout.h"
#include "allocator/object_kind.h"

namespace hetkv {

inline constexpr std::size_t kMaxPools = 2 * kMaxGroups;
using BlockCounts = std::array<std::uint32_t, kMaxPools>;  // blocks per pool

struct KindLimits {
  std::uint32_t floor_slabs = 0;                // always available to the kind
  std::uint64_t cap_bytes = ~std::uint64_t{0};  // never exceeded by the kind's blocks
};

struct ReserveOutcome {
  enum class Status : std::uint8_t { kReserved, kShort, kImpossible };
  Status status = Status::kReserved;
  PoolId pool = 0;  // kShort: the first pool that lacks blocks; kImpossible: a pool of the kind that can never fit
  // Bytes, of the pool's kind. kImpossible: always; kShort: only if the kind's own cap is what is short, else 0.
  std::uint64_t need = 0, cap = 0;
  std::uint64_t lacking = 0;  // kShort: blocks of `pool` that would have to go
  std::uint64_t missing = 0;  // kShort: empty slabs of other pools that would do instead; 0 if a cap is short
};

struct PoolGeometry {
  ObjectKind kind = ObjectKind::kFullKv;
  std::uint64_t block_bytes = 0;
  std::uint32_t blocks_per_slab = 0;
};

// One consistent view. Blocks are live blocks and credits. Entries beyond the number of pools are not read.
struct ReservationNumbers {
  std::array<std::uint64_t, kMaxPools> used;   // blocks
  std::array<std::uint64_t, kMaxPools> owned;  // slabs
  std::uint64_t free_slabs;
};

struct SlabPlan {
  enum class Verdict : std::uint8_t {
    kFits,        // after granting grant[p] free slabs to each pool
    kStealFirst,  // `missing` empty slabs of other pools must become free first
    kShort,       // over a cap
  };
  Verdict verdict = Verdict::kFits;
  PoolId pool = 0;                             // the first pool that lacks blocks
  std::uint64_t over = 0;                      // blocks of `pool` beyond what its slabs or its kind's cap hold
  std::uint64_t extra = 0;                     // slabs that these need
  std::uint64_t found = 0;                     // empty slabs that a theft has found: fewer than missing
  std::array<std::uint32_t, kMaxPools> grant;  // slabs for the need alone, not for the headroom
  std::uint64_t grants = 0;                    // their sum
  std::uint64_t missing = 0;
  std::array<std::uint64_t, kMaxPools> surplus;       // kStealFirst: slabs a pool can lose with all its credits still covered
  std::array<std::uint64_t, kNumKinds> kind_surplus;  // kStealFirst: slabs a kind can lose and keep its floor
};

class ReservationRules {
 public:
  // At most kMaxPools pools; floors and caps per kind.
  ReservationRules(std::span<const PoolGeometry> pools, std::uint32_t slabs, std::uint64_t slab_bytes,
                   const std::array<KindLimits, kNumKinds>& limits);

  // The check: caps per kind, and slabs per pool, for need + headroom; what to grant for need.
  SlabPlan check(const ReservationNumbers& now, const BlockCounts& need, const BlockCounts& headroom) const noexcept;
  // What a plan that does not fit tells the caller of a reservation.
  ReserveOutcome refuse(const SlabPlan& plan, const BlockCounts& need) const noexcept;
  // The same check against an empty arena; kImpossible carries need and cap in bytes.
  ReserveOutcome possible(const BlockCounts& need) const noexcept;
  // Slabs that the kinds still lack to their floors.
  std::uint64_t unfilled_floors(const ReservationNumbers& now) const noexcept;
  std::uint64_t kind_bytes(const ReservationNumbers& now, ObjectKind kind) const noexcept;
  std::uint64_t kind_slabs(const ReservationNumbers& now, ObjectKind kind) const noexcept;
  std::uint64_t kind_bytes(const BlockCounts& blocks, ObjectKind kind) const noexcept;

  std::size_t num_pools() const noexcept { return num_pools_; }
  const PoolGeometry& pool(PoolId p) const noexcept { return pools_[p]; }
  std::span<const PoolGeometry> pools() const noexcept { return {pools_.data(), num_pools_}; }
  const KindLimits& limits(ObjectKind kind) const noexcept { return limits_[static_cast<std::size_t>(kind)]; }
  std::uint32_t slabs() const noexcept { return slabs_; }
  std::uint64_t slab_bytes() const noexcept { return slab_bytes_; }

 private:
  std::array<PoolGeometry, kMaxPools> pools_{};
  std::size_t num_pools_ = 0;
  std::uint32_t slabs_ = 0;
  std::uint64_t slab_bytes_ = 0;
  std::array<KindLimits, kNumKinds> limits_{};
};

}  // namespace hetkv
