// A reservation over slabs without memory, and its invariants: what the tests of both reservations start from.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "allocator/locked_reservation.h"
#include "allocator/reservation.h"

namespace hetkv {

using Status = ReserveOutcome::Status;
using Limits = std::array<KindLimits, kNumKinds>;
inline constexpr BlockCounts kNone{};

constexpr std::size_t at(ObjectKind kind) { return static_cast<std::size_t>(kind); }

inline BlockCounts blocks(std::initializer_list<std::uint32_t> counts) {
  BlockCounts need{};
  std::copy(counts.begin(), counts.end(), need.begin());
  return need;
}

inline PoolGeometry pool(ObjectKind kind, std::uint32_t per_slab) { return {kind, 4096 / per_slab, per_slab}; }

template <class R>
struct World {
  World(std::vector<PoolGeometry> pools, std::uint32_t slabs_count, const Limits& limits = {})
      : rules(pools, slabs_count, 4096, limits), slabs(rules.pools(), slabs_count), reservation(rules, slabs) {}

  Status reserve(std::initializer_list<std::uint32_t> need) { return reservation.reserve(blocks(need), kNone).status; }
  SlabTable::Place take(PoolId p) { return slabs.take(p); }
  void free_block(PoolId p, SlabTable::Place place) {
    slabs.put_back(p, place);
    reservation.release(p, 1);
  }
  // Invariants 7 and 9 of the protocol, at a quiescent point.
  void check() {
    const ReservationNumbers now = reservation.numbers();
    std::array<std::uint64_t, kMaxPools> live{}, owned{};
    std::uint64_t nobody = 0;
    for (std::uint32_t s = 0; s < rules.slabs(); ++s) {
      const SlabWord w = slabs.word(s);
      std::uint32_t set = 0;
      for (std::uint32_t i = 0; i < slabs.most_blocks(); ++i) set += slabs.is_set({s, i}) ? 1u : 0u;
      EXPECT_EQ(set, w.used()) << "slab " << s;
      if (w.owner() == SlabWord::kNobody) {
        ++nobody;
        EXPECT_EQ(w.used(), 0u);
      } else {
        live[w.owner()] += set;
        ++owned[w.owner()];
      }
    }
    EXPECT_EQ(nobody, now.free_slabs);
    for (std::size_t p = 0; p < rules.num_pools(); ++p) {
      EXPECT_EQ(owned[p], now.owned[p]) << "pool " << p;
      EXPECT_LE(live[p], now.used[p]) << "pool " << p;
      EXPECT_LE(now.used[p], now.owned[p] * rules.pool(static_cast<PoolId>(p)).blocks_per_slab) << "pool " << p;
    }
    for (std::size_t k = 0; k < kNumKinds; ++k)
      EXPECT_LE(rules.kind_bytes(now, static_cast<ObjectKind>(k)), rules.limits(static_cast<ObjectKind>(k)).cap_bytes);
    EXPECT_LE(rules.unfilled_floors(now), now.free_slabs);
  }

  ReservationRules rules;
  SlabTable slabs;
  R reservation;
};

template <class R>
class ReservationTest : public ::testing::Test {};
using Twins = ::testing::Types<VectorReservation, LockedReservation>;

}  // namespace hetkv
