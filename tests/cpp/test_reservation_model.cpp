// A random walk of both reservations beside a plain model of their rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "reservation_world.h"

namespace hetkv {
namespace {

TYPED_TEST_SUITE(ReservationTest, Twins);

// A plain model of the rules, written from their text: grants one slab at a time, steals one slab at a time.
struct Model {
  const ReservationRules& rules;
  std::vector<std::uint64_t> used;  // blocks and credits
  std::vector<int> slab_owner;      // -1: nobody
  std::vector<std::uint32_t> slab_used;

  std::uint64_t owned(std::size_t p) const {
    return static_cast<std::uint64_t>(std::count(slab_owner.begin(), slab_owner.end(), static_cast<int>(p)));
  }
  std::uint64_t kind_owned(ObjectKind kind) const {
    std::uint64_t sum = 0;
    for (std::size_t p = 0; p < used.size(); ++p) sum += rules.pools()[p].kind == kind ? owned(p) : 0;
    return sum;
  }
  bool fits(const BlockCounts& need, const BlockCounts& headroom) const {
    for (std::size_t k = 0; k < kNumKinds; ++k) {
      std::uint64_t bytes = 0;
      for (std::size_t p = 0; p < used.size(); ++p)
        if (at(rules.pools()[p].kind) == k) bytes += (used[p] + need[p] + headroom[p]) * rules.pools()[p].block_bytes;
      if (bytes > rules.limits(static_cast<ObjectKind>(k)).cap_bytes) return false;
    }
    Model m = *this;  // the slabs as they would move
    const auto wanted = [&](std::size_t p) { return used[p] + need[p] + headroom[p]; };
    const auto room = [&](std::size_t p, std::uint64_t slabs) { return slabs * rules.pools()[p].blocks_per_slab; };
    for (std::size_t p = 0; p < used.size(); ++p) {
      const ObjectKind kind = rules.pools()[p].kind;
      while (wanted(p) > room(p, m.owned(p))) {
        std::uint64_t unfilled = 0;
        for (std::size_t k = 0; k < kNumKinds; ++k) {
          const std::uint64_t have = m.kind_owned(static_cast<ObjectKind>(k)),
                              floor = rules.limits(static_cast<ObjectKind>(k)).floor_slabs;
          unfilled += floor > have ? floor - have : 0;
        }
        const auto free = std::find(m.slab_owner.begin(), m.slab_owner.end(), -1);
        const auto free_count = static_cast<std::uint64_t>(std::count(m.slab_owner.begin(), m.slab_owner.end(), -1));
        if (free != m.slab_owner.end() && (m.kind_owned(kind) < rules.limits(kind).floor_slabs || free_count > unfilled)) {
          *free = static_cast<int>(p);
          m.slab_used[static_cast<std::size_t>(free - m.slab_owner.begin())] = 1;  // not empty any more: spoken for
          continue;
        }
        bool stolen = false;
        for (std::size_t s = 0; s < m.slab_owner.size() && !stolen; ++s) {
          const int h = m.slab_owner[s];
          if (h < 0 || static_cast<std::size_t>(h) == p || m.slab_used[s] > 0) continue;
          const auto giver = static_cast<std::size_t>(h);
          if (wanted(giver) > room(giver, m.owned(giver) - 1)) continue;
          const ObjectKind other = rules.pools()[giver].kind;
          if (other != kind && m.kind_owned(other) <= rules.limits(other).floor_slabs) continue;
          m.slab_owner[s] = static_cast<int>(p);
          m.slab_used[s] = 1;
          stolen = true;
        }
        if (!stolen) return false;
      }
    }
    return true;
  }
};

TYPED_TEST(ReservationTest, RandomWalkBesideThePlainModel) {
  std::mt19937 random(7);
  const auto pick = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
  constexpr std::array kinds{ObjectKind::kFullKv, ObjectKind::kSwaWindow, ObjectKind::kUncompressedTail};
  std::uint64_t reserved = 0, refused = 0, never = 0;
  for (int world = 0; world < 40; ++world) {
    const std::uint32_t num_pools = 1 + pick(5), num_slabs = 1 + pick(12);
    std::vector<PoolGeometry> pools;
    for (std::uint32_t p = 0; p < num_pools; ++p) pools.push_back(pool(kinds[pick(3)], 1u << pick(8)));
    Limits limits{};
    std::uint32_t floors = 0;
    for (const ObjectKind kind : kinds) {
      const bool present = std::any_of(pools.begin(), pools.end(), [&](const PoolGeometry& g) { return g.kind == kind; });
      if (present && pick(2) == 0 && floors < num_slabs) {
        limits[at(kind)].floor_slabs = pick(std::min(3u, num_slabs - floors) + 1);
        floors += limits[at(kind)].floor_slabs;
      }
      if (pick(3) == 0) limits[at(kind)].cap_bytes = 4096u * (1 + pick(num_slabs));
    }
    World<TypeParam> w(pools, num_slabs, limits);
    Model model{w.rules, std::vector<std::uint64_t>(num_pools), std::vector<int>(num_slabs, -1),
                std::vector<std::uint32_t>(num_slabs)};
    const Model empty = model;
    std::vector<std::uint32_t> credits(num_pools);
    std::vector<std::set<std::pair<std::uint32_t, std::uint32_t>>> live(num_pools);

    for (int step = 0; step < 400; ++step) {
      const auto p = static_cast<PoolId>(pick(num_pools));
      switch (pick(5)) {
        case 0:
        case 1: {
          BlockCounts need{}, headroom{};
          for (std::uint32_t q = 0; q < num_pools; ++q) {
            if (pick(2) == 0) need[q] = pick(2 * pools[q].blocks_per_slab + 1);
            if (pick(4) == 0) headroom[q] = pick(pools[q].blocks_per_slab + 1);
          }
          const ReserveOutcome outcome = w.reservation.reserve(need, headroom);
          const bool could = empty.fits(need, kNone);
          ASSERT_EQ(w.rules.possible(need).status == Status::kReserved, could);
          const bool fits = model.fits(need, headroom);
          ASSERT_EQ(outcome.status, fits    ? Status::kReserved
                                    : could ? Status::kShort
                                            : Status::kImpossible)
              << "world " << world << " step " << step;
          if (outcome.status == Status::kImpossible) {
            ASSERT_GT(outcome.need, outcome.cap);
          }
          ++(fits ? reserved : could ? refused : never);
          if (!fits) break;
          for (std::uint32_t q = 0; q < num_pools; ++q) {
            model.used[q] += need[q];
            credits[q] += need[q];
          }
          break;
        }
        case 2:
          for (std::uint32_t n = pick(credits[p] + 1); n > 0; --n) {
            const SlabTable::Place place = w.take(p);
            ASSERT_EQ(w.slabs.word(place.slab).owner(), p);
            ASSERT_LT(place.index, pools[p].blocks_per_slab);
            ASSERT_TRUE(live[p].emplace(place.slab, place.index).second) << "a block in two hands";
            for (std::uint32_t s = 0; s < place.slab; ++s)
              ASSERT_FALSE(model.slab_owner[s] == p && model.slab_used[s] < pools[p].blocks_per_slab) << "a lower slab had room";
            ++model.slab_used[place.slab];
            --credits[p];
          }
          break;
        case 3:
          for (std::size_t n = pick(static_cast<std::uint32_t>(live[p].size()) + 1); n > 0; --n) {
            auto victim = std::next(live[p].begin(), pick(static_cast<std::uint32_t>(live[p].size())));
            w.free_block(p, {victim->first, victim->second});
            --model.slab_used[victim->first];
            --model.used[p];
            live[p].erase(victim);
          }
          break;
        default: {
          const std::uint32_t n = pick(credits[p] + 1);
          w.reservation.release(p, n);
          credits[p] -= n;
          model.used[p] -= n;
        }
      }
      // Which slab moved is the table's choice; that a slab in use never does is checked here.
      for (std::uint32_t s = 0; s < num_slabs; ++s) {
        const SlabWord word = w.slabs.word(s);
        const int owner = word.owner() == SlabWord::kNobody ? -1 : word.owner();
        if (model.slab_used[s] > 0) {
          ASSERT_EQ(owner, model.slab_owner[s]);
        }
        ASSERT_EQ(word.used(), model.slab_used[s]);
        model.slab_owner[s] = owner;
      }
      const ReservationNumbers now = w.reservation.numbers();
      for (std::uint32_t q = 0; q < num_pools; ++q) {
        ASSERT_EQ(now.used[q], model.used[q]);
        ASSERT_EQ(now.owned[q], model.owned(q));
      }
    }
    w.check();
  }
  EXPECT_GT(reserved, 1000u);
  EXPECT_GT(refused, 500u);
  EXPECT_GT(never, 100u);
}

}  // namespace
}  // namespace hetkv
