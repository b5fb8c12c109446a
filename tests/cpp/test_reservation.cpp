// One suite over both reservations: the rules, a random walk beside a plain model, threads, and threads stopped inside an operation.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <latch>
#include <random>
#include <set>
#include <thread>
#include <type_traits>
#include <vector>

#include "allocator/locked_reservation.h"
#include "allocator/reservation.h"
#include "stop_thread.h"

namespace hetkv {
namespace {

using Status = ReserveOutcome::Status;
using Limits = std::array<KindLimits, kNumKinds>;
constexpr BlockCounts kNone{};

constexpr std::size_t at(ObjectKind kind) { return static_cast<std::size_t>(kind); }

BlockCounts blocks(std::initializer_list<std::uint32_t> counts) {
  BlockCounts need{};
  std::copy(counts.begin(), counts.end(), need.begin());
  return need;
}

PoolGeometry pool(ObjectKind kind, std::uint32_t per_slab) { return {kind, 4096 / per_slab, per_slab}; }

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
TYPED_TEST_SUITE(ReservationTest, Twins);

static_assert(!std::is_copy_constructible_v<VectorReservation> && !std::is_move_constructible_v<VectorReservation>);

TYPED_TEST(ReservationTest, AllPoolsOrNone) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 4), pool(ObjectKind::kSwaWindow, 4)}, 2);
  EXPECT_EQ(w.reserve({3, 4}), Status::kReserved);
  EXPECT_EQ(w.reserve({1, 1}), Status::kShort);
  const ReservationNumbers now = w.reservation.numbers();
  EXPECT_EQ(now.used[0], 3u);
  EXPECT_EQ(now.used[1], 4u);
  EXPECT_EQ(w.reserve({1, 0}), Status::kReserved) << "the refused request took nothing";
  w.check();
}

TYPED_TEST(ReservationTest, ShortNamesTheFirstPoolThatLacksBlocks) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 4), pool(ObjectKind::kSwaWindow, 4)}, 2);
  ASSERT_EQ(w.reserve({2, 4}), Status::kReserved);
  const ReserveOutcome outcome = w.reservation.reserve(blocks({1, 1}), kNone);
  EXPECT_EQ(outcome.status, Status::kShort);
  EXPECT_EQ(outcome.pool, 1);
}

TYPED_TEST(ReservationTest, HeadroomIsKeptButNotReserved) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 4)}, 2);
  EXPECT_EQ(w.reservation.reserve(blocks({6}), blocks({2})).status, Status::kReserved);
  EXPECT_EQ(w.reservation.reserve(blocks({1}), blocks({2})).status, Status::kShort);
  EXPECT_EQ(w.reservation.reserve(blocks({1}), blocks({1})).status, Status::kReserved);
  EXPECT_EQ(w.reservation.numbers().used[0], 7u);
  EXPECT_EQ(w.reserve({1}), Status::kReserved) << "the step that headroom kept";
}

TYPED_TEST(ReservationTest, HeadroomTakesNoSlab) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 4), pool(ObjectKind::kSwaWindow, 4)}, 3);
  EXPECT_EQ(w.reservation.reserve(blocks({4, 0}), blocks({1, 1})).status, Status::kReserved);
  EXPECT_EQ(w.reservation.numbers().free_slabs, 2u);
  EXPECT_EQ(w.reservation.reserve(blocks({1, 0}), blocks({0, 5})).status, Status::kShort);
  w.check();
}

TYPED_TEST(ReservationTest, FloorsAreOfTheKindAndStayFree) {
  Limits limits{};
  limits[at(ObjectKind::kSwaWindow)].floor_slabs = 2;
  // Two pools share the kind with the floor.
  World<TypeParam> w({pool(ObjectKind::kFullKv, 2), pool(ObjectKind::kSwaWindow, 2), pool(ObjectKind::kSwaWindow, 4)}, 4, limits);
  EXPECT_EQ(w.reserve({4, 0, 0}), Status::kReserved);
  EXPECT_EQ(w.reserve({1, 0, 0}), Status::kShort) << "the last two slabs are the windows' floor";
  EXPECT_EQ(w.reserve({0, 1, 1}), Status::kReserved);
  EXPECT_EQ(w.reserve({0, 2, 0}), Status::kShort);
  w.check();
}

TYPED_TEST(ReservationTest, CapsAreOfTheKind) {
  Limits limits{};
  limits[at(ObjectKind::kSwaWindow)].cap_bytes = 4096 + 1024;
  World<TypeParam> w({pool(ObjectKind::kSwaWindow, 1), pool(ObjectKind::kSwaWindow, 4), pool(ObjectKind::kFullKv, 1)}, 8, limits);
  EXPECT_EQ(w.reserve({1, 1, 0}), Status::kReserved);
  const ReserveOutcome outcome = w.reservation.reserve(blocks({0, 1, 1}), kNone);
  EXPECT_EQ(outcome.status, Status::kShort);
  EXPECT_EQ(outcome.pool, 1);
  EXPECT_EQ(w.reserve({0, 0, 6}), Status::kReserved);
  w.reservation.release(0, 1);
  EXPECT_EQ(w.reserve({0, 3, 0}), Status::kReserved);
  w.check();
}

// J5: a request waits only for what could come; what can never fit is refused at once, with kind, need and cap.
TYPED_TEST(ReservationTest, J5_ShortIfItCouldFitImpossibleIfNever) {
  Limits limits{};
  limits[at(ObjectKind::kFullKv)].floor_slabs = 1;
  limits[at(ObjectKind::kSwaWindow)].cap_bytes = 2048;
  World<TypeParam> w({pool(ObjectKind::kFullKv, 4), pool(ObjectKind::kSwaWindow, 4), pool(ObjectKind::kCompressedKv, 4)}, 4,
                     limits);
  ASSERT_EQ(w.reserve({8, 0, 0}), Status::kReserved);
  EXPECT_EQ(w.reserve({0, 0, 12}), Status::kShort) << "12 blocks fit an empty arena";
  ReserveOutcome outcome = w.reservation.reserve(blocks({0, 0, 13}), kNone);
  EXPECT_EQ(outcome.status, Status::kImpossible);
  EXPECT_EQ(outcome.pool, 2);
  EXPECT_EQ(outcome.need, 4u * 4096);
  EXPECT_EQ(outcome.cap, 3u * 4096) << "the arena without the floor of full_kv";
  outcome = w.reservation.reserve(blocks({0, 3, 0}), kNone);
  EXPECT_EQ(outcome.status, Status::kImpossible);
  EXPECT_EQ(outcome.pool, 1);
  EXPECT_EQ(outcome.need, 3u * 1024);
  EXPECT_EQ(outcome.cap, 2048u);
  // Each kind alone fits, together they never do.
  outcome = w.reservation.reserve(blocks({5, 1, 5}), kNone);
  EXPECT_EQ(outcome.status, Status::kImpossible);
  EXPECT_GT(outcome.need, outcome.cap);
  EXPECT_EQ(w.reservation.numbers().used[0], 8u);
}

// E15: a negative size that reaches the arena as a huge count is refused, and changes nothing.
TYPED_TEST(ReservationTest, E15_NegativeCountIsRefusedWithoutAChange) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 4), pool(ObjectKind::kSwaWindow, 4)}, 2);
  ASSERT_EQ(w.reserve({1, 1}), Status::kReserved);
  const ReserveOutcome outcome = w.reservation.reserve(blocks({static_cast<std::uint32_t>(-1), 1}), kNone);
  EXPECT_EQ(outcome.status, Status::kImpossible);
  EXPECT_EQ(outcome.pool, 0);
  EXPECT_EQ(w.reservation.numbers().used[0], 1u);
  EXPECT_EQ(w.reservation.numbers().used[1], 1u);
  w.check();
}

TYPED_TEST(ReservationTest, EmptySlabsStayWithTheirOwnerUntilStolen) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 2), pool(ObjectKind::kSwaWindow, 4)}, 2);
  ASSERT_EQ(w.reserve({4, 0}), Status::kReserved);
  w.reservation.release(0, 4);
  EXPECT_EQ(w.reservation.numbers().owned[0], 2u);
  ASSERT_EQ(w.reserve({0, 1}), Status::kReserved);
  EXPECT_EQ(w.reservation.numbers().owned[0], 1u);
  EXPECT_EQ(w.reservation.numbers().owned[1], 1u);
  w.check();
}

// The rest of a slab's owner must still cover its credits, though no block of the slab is taken yet.
TYPED_TEST(ReservationTest, NoSlabIsStolenFromUnderACredit) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 1), pool(ObjectKind::kSwaWindow, 1)}, 2);
  ASSERT_EQ(w.reserve({2, 0}), Status::kReserved);
  EXPECT_EQ(w.reserve({0, 1}), Status::kShort);
  const SlabTable::Place a = w.take(0), b = w.take(0);
  EXPECT_NE(a.slab, b.slab);
  w.free_block(0, a);
  w.free_block(0, b);
  EXPECT_EQ(w.reserve({0, 2}), Status::kReserved);
  w.check();
}

TYPED_TEST(ReservationTest, NoSlabIsStolenBelowAFloorOfAnotherKind) {
  Limits limits{};
  limits[at(ObjectKind::kFullKv)].floor_slabs = 1;
  World<TypeParam> w({pool(ObjectKind::kFullKv, 1), pool(ObjectKind::kSwaWindow, 1), pool(ObjectKind::kFullKv, 2)}, 2, limits);
  ASSERT_EQ(w.reserve({2, 0, 0}), Status::kReserved);
  w.reservation.release(0, 2);
  EXPECT_EQ(w.reserve({0, 1, 0}), Status::kReserved);
  EXPECT_EQ(w.reserve({0, 1, 0}), Status::kShort) << "the last empty slab is the floor of full_kv";
  EXPECT_EQ(w.reserve({0, 0, 1}), Status::kReserved) << "inside its kind it may move";
  w.check();
}

TYPED_TEST(ReservationTest, ASlabInUseIsNotStolen) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 2), pool(ObjectKind::kSwaWindow, 1)}, 2);
  ASSERT_EQ(w.reserve({4, 0}), Status::kReserved);
  std::vector<SlabTable::Place> places;
  for (int i = 0; i < 4; ++i) places.push_back(w.take(0));
  w.free_block(0, places[0]);
  w.free_block(0, places[2]);  // one block left in each slab
  EXPECT_EQ(w.reserve({0, 1}), Status::kShort) << "room for two blocks, but no empty slab";
  w.free_block(0, places[1]);
  EXPECT_EQ(w.reserve({0, 1}), Status::kReserved);
  w.check();
}

TYPED_TEST(ReservationTest, LowestSlabAndLowestBlockFirst) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 2)}, 3);
  ASSERT_EQ(w.reserve({6}), Status::kReserved);
  std::vector<SlabTable::Place> places;
  for (std::uint32_t i = 0; i < 6; ++i) {
    places.push_back(w.take(0));
    EXPECT_EQ(places.back().slab, i / 2);
    EXPECT_EQ(places.back().index, i % 2);
  }
  w.free_block(0, places[5]);
  w.free_block(0, places[3]);
  w.free_block(0, places[0]);
  ASSERT_EQ(w.reserve({3}), Status::kReserved);
  for (const std::size_t expected : {0u, 3u, 5u}) {
    const SlabTable::Place place = w.take(0);
    EXPECT_EQ(place.slab, places[expected].slab);
    EXPECT_EQ(place.index, places[expected].index);
  }
}

TYPED_TEST(ReservationTest, ClearBeforeUseFollowsTheHandOver) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 1), pool(ObjectKind::kSwaWindow, 64)}, 1);
  ASSERT_EQ(w.reserve({1, 0}), Status::kReserved);
  const SlabTable::Place fresh = w.take(0);
  EXPECT_FALSE(w.slabs.must_clear(fresh)) << "memory is fresh at the start";
  w.free_block(0, fresh);

  ASSERT_EQ(w.reserve({0, 64}), Status::kReserved);
  std::vector<SlabTable::Place> places;
  for (int i = 0; i < 64; ++i) {
    places.push_back(w.take(1));
    EXPECT_TRUE(w.slabs.must_clear(places.back()));
  }
  w.slabs.confirm_cleared(places[40]);
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(w.slabs.must_clear(places[i]), i != 40);
  w.free_block(1, places[40]);
  ASSERT_EQ(w.reserve({0, 1}), Status::kReserved);
  EXPECT_FALSE(w.slabs.must_clear(w.take(1))) << "cleared once per hand-over";
  // A refused theft must not bring the marks of live blocks back.
  EXPECT_EQ(w.reserve({1, 0}), Status::kShort);
  EXPECT_FALSE(w.slabs.must_clear(places[40]));
  for (const SlabTable::Place place : places) w.free_block(1, place);

  ASSERT_EQ(w.reserve({1, 0}), Status::kReserved);
  EXPECT_TRUE(w.slabs.must_clear(w.take(0))) << "back at its first owner it holds another's bytes";
}

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

// ---- threads ----

void run_threads(int count, const std::function<void(int)>& work) {
  std::latch gate(count);
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t)
    threads.emplace_back([&, t] {
      gate.arrive_and_wait();
      work(t);
    });
  for (std::thread& thread : threads) thread.join();
}

// As many slabs as threads, a slab is one block, every thread holds at most one block of any pool: nobody may ever be refused,
// although nearly every reservation must steal.
TYPED_TEST(ReservationTest, ThreadsARefusalIsExact) {
  constexpr int kThreads = 4, kRounds = 3000;
  World<TypeParam> w({pool(ObjectKind::kFullKv, 1), pool(ObjectKind::kSwaWindow, 1), pool(ObjectKind::kCompressedKv, 1)},
                     kThreads);
  std::atomic<int> refused{0};
  run_threads(kThreads, [&](int t) {
    std::mt19937 random(static_cast<unsigned>(t));
    for (int i = 0; i < kRounds; ++i) {
      const auto p = static_cast<PoolId>(random() % 3);
      BlockCounts need{};
      need[p] = 1;
      if (w.reservation.reserve(need, kNone).status != Status::kReserved) {
        ++refused;
        continue;
      }
      if (random() % 4 == 0)
        w.reservation.release(p, 1);
      else
        w.free_block(p, w.take(p));
    }
  });
  EXPECT_EQ(refused, 0);
  w.check();
}

// A large request that can never get its second pool must not make a small one fail on the first.
TYPED_TEST(ReservationTest, ThreadsALargeRefusalFailsNobodyElse) {
  World<TypeParam> w({pool(ObjectKind::kFullKv, 4), pool(ObjectKind::kSwaWindow, 4)}, 2);
  ASSERT_EQ(w.reserve({1, 1}), Status::kReserved);
  std::atomic<int> wrong{0};
  run_threads(4, [&](int t) {
    for (int i = 0; i < 3000; ++i) {
      if (t < 2) {
        if (w.reserve({3, 4}) != Status::kShort) ++wrong;
      } else {
        if (w.reserve({1, 1}) != Status::kReserved) ++wrong;
        w.reservation.release(0, 1);
        w.reservation.release(1, 1);
      }
    }
  });
  EXPECT_EQ(wrong, 0);
  w.check();
}

TYPED_TEST(ReservationTest, ThreadsNeverPassACap) {
  Limits limits{};
  limits[at(ObjectKind::kFullKv)].cap_bytes = 3 * 1024;
  World<TypeParam> w({pool(ObjectKind::kFullKv, 4), pool(ObjectKind::kFullKv, 4), pool(ObjectKind::kSwaWindow, 8)}, 6, limits);
  std::atomic<int> inside{0}, over{0};
  run_threads(4, [&](int t) {
    std::mt19937 random(static_cast<unsigned>(t) + 100);
    for (int i = 0; i < 3000; ++i) {
      BlockCounts need{};
      const std::size_t p = random() % 2;
      need[p] = 1 + static_cast<std::uint32_t>(random() % 2);
      need[2] = static_cast<std::uint32_t>(random() % 3);
      if (w.reservation.reserve(need, kNone).status != Status::kReserved) continue;
      if (inside.fetch_add(static_cast<int>(need[p])) + static_cast<int>(need[p]) > 3) ++over;
      inside.fetch_sub(static_cast<int>(need[p]));
      w.reservation.release(static_cast<PoolId>(p), need[p]);
      w.reservation.release(2, need[2]);
    }
  });
  EXPECT_EQ(over, 0);
  w.check();
}

// ---- threads stopped inside an operation: only the lock-free twin promises progress ----

// J7: another thread drains the pool between this thread's check and its success.
TEST(VectorReservationTest, J7_NoGapBetweenCheckAndTake) {
  World<VectorReservation> w({pool(ObjectKind::kFullKv, 4)}, 1);
  Status outcome = Status::kReserved;
  StoppedThread stopped("reserve: before the head moves", [&] { outcome = w.reserve({4}); });
  ASSERT_TRUE(stopped.stopped());
  ASSERT_EQ(w.reserve({1}), Status::kReserved);
  stopped.finish();
  EXPECT_EQ(outcome, Status::kShort);
  EXPECT_EQ(w.reservation.numbers().used[0], 1u);
  w.check();
}

// The head's slot is in use again, for another vector: only its tag tells.
TEST(VectorReservationTest, ACopyOfAReusedSlotDoesNotPass) {
  World<VectorReservation> w({pool(ObjectKind::kFullKv, 64)}, 1);
  for (const int later : {1, 2, 3, 4, 5, 6}) {
    ASSERT_EQ(w.reserve({1}), Status::kReserved);  // the head is in one of the two slots that this thread uses in turn
    const std::uint64_t before = w.reservation.numbers().used[0];
    StoppedThread stopped("reserve: before the head moves", [&] { w.reserve({1}); });
    ASSERT_TRUE(stopped.stopped());
    for (int i = 0; i < later; ++i) ASSERT_EQ(w.reserve({1}), Status::kReserved);
    stopped.finish();
    EXPECT_EQ(w.reservation.numbers().used[0], before + static_cast<std::uint64_t>(later) + 1);
  }
  w.check();
}

// Bit first, count second: a slab whose count has room has a clear bit.
TEST(VectorReservationTest, AStoppedFreeLeavesAPromisedBit) {
  World<VectorReservation> w({pool(ObjectKind::kFullKv, 1)}, 2);
  ASSERT_EQ(w.reserve({2}), Status::kReserved);
  const SlabTable::Place held = w.take(0);
  ASSERT_EQ(held.slab, 0u);
  StoppedThread stopped("put_back: between bit and count", [&] { w.free_block(0, held); });
  ASSERT_TRUE(stopped.stopped());
  EXPECT_EQ(w.take(0).slab, 1u);
  stopped.finish();
  w.check();
}

struct StopCase {
  const char* point;
  enum class Victim { kGrants, kSteals, kTakes, kFrees } victim;
};

class StoppedInside : public ::testing::TestWithParam<StopCase> {};

// One thread stops at the point; another must finish a thousand rounds of every operation, grants and thefts among them.
TEST_P(StoppedInside, OthersProgress) {
  using Victim = StopCase::Victim;
  World<VectorReservation> w({pool(ObjectKind::kFullKv, 2), pool(ObjectKind::kSwaWindow, 1), pool(ObjectKind::kCompressedKv, 4)},
                             6);
  const Victim victim = GetParam().victim;
  // Empty slabs of pool 0, so that there is something to steal; the victim's own block in pool 2.
  ASSERT_EQ(w.reserve({8, 0, 1}), Status::kReserved);
  w.reservation.release(0, 8);
  const SlabTable::Place held = w.take(2);
  if (victim == Victim::kTakes) {
    ASSERT_EQ(w.reserve({0, 0, 1}), Status::kReserved);
  }
  Status outcome = Status::kReserved;
  SlabTable::Place taken;
  StoppedThread stopped(GetParam().point, [&] {
    switch (victim) {
      case Victim::kGrants:
        outcome = w.reserve({0, 1, 0});
        break;  // one slab is free
      case Victim::kSteals:
        outcome = w.reserve({0, 2, 0});
        break;  // one free, one stolen
      case Victim::kTakes:
        taken = w.take(2);
        break;
      case Victim::kFrees:
        w.free_block(2, held);
        break;
    }
  });
  ASSERT_TRUE(stopped.stopped()) << "the operation never came to this point";
  // Three slabs' worth in turn for pool 0 and for pool 1: with what the victim may hold, each turn must steal from the other pool.
  const auto owner_changes = [&] {
    std::uint64_t sum = 0;
    for (std::uint32_t s = 0; s < w.rules.slabs(); ++s) sum += w.slabs.word(s).gen();
    return sum;
  };
  const std::uint64_t changes = owner_changes();
  for (int i = 0; i < 1000; ++i) {
    const auto p = static_cast<PoolId>(i % 2);
    const std::uint32_t count = p == 0 ? 6 : 3;
    BlockCounts need{};
    need[p] = count;
    ASSERT_EQ(w.reservation.reserve(need, kNone).status, Status::kReserved) << "round " << i;
    std::vector<SlabTable::Place> places;
    for (std::uint32_t k = 0; k < count; ++k) places.push_back(w.take(p));
    for (const SlabTable::Place place : places) w.free_block(p, place);
    ASSERT_EQ(w.reserve({0, 0, 1}), Status::kReserved);
    w.free_block(2, w.take(2));
  }
  EXPECT_GT(owner_changes(), changes + 1000) << "slabs were stolen all the time";
  stopped.finish();
  EXPECT_EQ(outcome, Status::kReserved);
  w.check();
}

using Victim = StopCase::Victim;
INSTANTIATE_TEST_SUITE_P(EveryPoint, StoppedInside,
                         ::testing::Values(StopCase{"reserve: copied", Victim::kGrants},
                                           StopCase{"reserve: before the head moves", Victim::kGrants},
                                           StopCase{"reserve: reserved, slabs not moved", Victim::kGrants},
                                           StopCase{"reserve: before a slab moves", Victim::kGrants},
                                           StopCase{"grant: before the owner changes", Victim::kGrants},
                                           StopCase{"reserve: before the head moves", Victim::kSteals},
                                           StopCase{"reserve: stealing", Victim::kSteals},
                                           StopCase{"reserve: before a slab moves", Victim::kSteals},
                                           StopCase{"retire: before the decision", Victim::kSteals},
                                           StopCase{"grant: before the owner changes", Victim::kSteals},
                                           StopCase{"take: counted, bit not taken", Victim::kTakes},
                                           StopCase{"put_back: between bit and count", Victim::kFrees}));

}  // namespace
}  // namespace hetkv
