// Both reservations under threads, and the lock-free one with a thread stopped inside an operation.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cctype>
#include <functional>
#include <latch>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "reservation_world.h"
#include "stop_thread.h"

namespace hetkv {
namespace {

TYPED_TEST_SUITE(ReservationTest, Twins);

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

void PrintTo(const StopCase& stop, std::ostream* out) { *out << stop.point; }

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

std::string stop_name(const ::testing::TestParamInfo<StopCase>& row) {
  constexpr std::array verbs{"grants", "steals", "takes", "frees"};
  std::string name = std::string(verbs[static_cast<std::size_t>(row.param.victim)]) + "_" + row.param.point;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

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
                                           StopCase{"put_back: between bit and count", Victim::kFrees}),
                         stop_name);

}  // namespace
}  // namespace hetkv
