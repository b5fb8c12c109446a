// The rules of a reservation, over both: what is granted, what is short, what can never fit; floors, caps and stolen slabs.
#include <gtest/gtest.h>

#include <type_traits>
#include <vector>

#include "reservation_world.h"

namespace hetkv {
namespace {

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

}  // namespace
}  // namespace hetkv
