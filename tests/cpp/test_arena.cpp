// The arena: sizes and refusals of its constructor, charges, holds, typed blocks, clearing, slabs, and a random walk over real bytes.
#include "allocator/arena.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <type_traits>

#include "base/error.h"
#include "layout_groups.h"

namespace hetkv {
namespace {

using Status = ReserveOutcome::Status;
constexpr BlockCounts kNone{};

static_assert(!std::is_copy_constructible_v<Charge> && std::is_nothrow_move_constructible_v<Charge>);
static_assert(!std::is_copy_constructible_v<Arena> && !std::is_move_constructible_v<Arena>);
static_assert(!std::is_convertible_v<TypedBlock<ObjectKind::kCompressedKv>, TypedBlock<ObjectKind::kFullKv>>);

BlockCounts blocks(std::initializer_list<std::uint32_t> counts) {
  BlockCounts need{};
  std::copy(counts.begin(), counts.end(), need.begin());
  return need;
}

GroupSpec group(std::string name, ObjectKind kind, std::uint32_t width) {
  GroupSpec g = kind == ObjectKind::kSwaWindow ? test::window(std::move(name), 128) : test::history(std::move(name), 1, kind);
  g.fields[0].shape = {width};  // 64 rows, 2 layers, 4 bytes: a block of 512 * width bytes
  return g;
}

// Pools: 0 full_kv with blocks of 4096 bytes, 1 swa_window of 2048, 2 compressed_kv of 8192.
CacheLayout three_pools() {
  return test::build({group("full", ObjectKind::kFullKv, 8), group("swa", ObjectKind::kSwaWindow, 4),
                      group("ckv", ObjectKind::kCompressedKv, 16)});
}

ArenaConfig config(std::uint64_t bytes, std::uint64_t slab_bytes, bool lock_free = true) {
  ArenaConfig c;
  c.bytes = bytes;
  c.slab_bytes = slab_bytes;
  c.lock_free = lock_free;
  return c;
}

// ---- construction ----

TEST(ArenaConstruction, PoolsAndSlabs) {
  const Arena arena(three_pools(), config(10 * 16384 + 100, 16384));
  EXPECT_EQ(arena.num_slabs(), 10u);
  EXPECT_EQ(arena.bytes(), 10u * 16384) << "rounded down to slabs";
  EXPECT_EQ(arena.free_slabs(), 10u);
  EXPECT_EQ(arena.usage(0).blocks_per_slab, 4u);
  EXPECT_EQ(arena.usage(1).blocks_per_slab, 8u);
  EXPECT_EQ(arena.usage(2).blocks_per_slab, 2u);
}

TEST(ArenaConstruction, RefusesSizes) {
  const CacheLayout layout = three_pools();
  EXPECT_THROW(Arena(layout, config(8192, 16384)), ArgumentError) << "less than one slab";
  EXPECT_THROW(Arena(layout, config(1 << 20, 16384 + 100)), ArgumentError) << "no multiple of 256";
  EXPECT_THROW(Arena(layout, config(100, 0)), ArgumentError);
  EXPECT_THROW(Arena(layout, config(std::uint64_t{1} << 40, 0)), ArgumentError) << "offsets would not fit int32";
  EXPECT_THROW(Arena(layout.with_alignment("full", 4096), config(1 << 20, 16384 + 256)), ArgumentError)
      << "blocks would lose their alignment";
  try {
    Arena(layout, config(1 << 20, 4096));
    FAIL() << "a block larger than a slab";
  } catch (const LayoutError& error) {
    EXPECT_EQ(error.group, "ckv");
  }
}

// J3: an arena below the floors is refused when it is made, not found out by a hang.
TEST(ArenaConstruction, J3_FloorsAboveTheArenaAreRefused) {
  ArenaConfig c = config(4 * 16384, 16384);
  c.limits[static_cast<std::size_t>(ObjectKind::kFullKv)].floor_slabs = 2;
  c.limits[static_cast<std::size_t>(ObjectKind::kSwaWindow)].floor_slabs = 2;
  EXPECT_NO_THROW(Arena(three_pools(), c));
  c.limits[static_cast<std::size_t>(ObjectKind::kSwaWindow)].floor_slabs = 3;
  try {
    Arena(three_pools(), c);
    FAIL() << "floors of 5 slabs in an arena of 4";
  } catch (const AdmissionError& error) {
    EXPECT_EQ(error.kind, "swa_window");
    EXPECT_EQ(error.need, 3u * 16384);
    EXPECT_EQ(error.cap, 2u * 16384);
    EXPECT_FALSE(error.retryable);
  }
  c.limits = {};
  c.limits[static_cast<std::size_t>(ObjectKind::kRecurrentState)].floor_slabs = 1;
  EXPECT_THROW(Arena(three_pools(), c), ArgumentError) << "a floor of a kind that the layout lacks";
}

TEST(ArenaConstruction, ChosenSlabsFitEveryPoolAndWasteLittle) {
  for (const CacheLayout& layout : {three_pools(), test::build(test::v4_groups(), 128), test::build(test::sound_groups(), 64)}) {
    std::uint64_t largest = 0;
    for (const PoolSpec& pool : layout.pools()) largest = std::max(largest, pool.block_bytes);
    for (const std::uint64_t mib : {1u, 4u, 64u, 256u, 4096u}) {
      const Arena arena(layout, config(mib << 20, 0));
      EXPECT_EQ(arena.slab_bytes() % kOffsetUnit, 0u);
      EXPECT_GE(arena.slab_bytes(), largest);
      EXPECT_LE(arena.num_slabs(), 4096u);
      if (largest * 16 <= mib << 20) {
        EXPECT_GE(arena.num_slabs(), 16u) << layout.model() << " " << mib;
      }
      EXPECT_GE(arena.bytes(), (mib << 20) * 9 / 10);
      double lost = 0;
      for (std::size_t p = 0; p < layout.pools().size(); ++p) {
        const PoolUsage usage = arena.usage(static_cast<PoolId>(p));
        EXPECT_GE(usage.blocks_per_slab, 1u);
        EXPECT_LE(usage.blocks_per_slab, 4096u);
        lost += 1.0 - static_cast<double>(usage.blocks_per_slab * usage.block_bytes) / static_cast<double>(arena.slab_bytes());
      }
      EXPECT_LT(lost / static_cast<double>(layout.pools().size()), 0.1) << mib << " MiB, slabs of " << arena.slab_bytes();
    }
  }
}

TEST(ArenaConstruction, MetadataIsSmallAndFollowsUse) {
  const CacheLayout layout = three_pools();
  Arena arena(layout, config(std::uint64_t{64} << 20, 0));
  const std::uint64_t before = arena.metadata_bytes();
  Charge charge;
  const auto per_slab = static_cast<std::uint32_t>(arena.usage(1).blocks_per_slab);
  ASSERT_EQ(arena.reserve(blocks({0, per_slab * arena.num_slabs(), 0}), kNone, charge).status, Status::kReserved);
  const std::uint64_t after = arena.metadata_bytes();
  EXPECT_GT(after, before + std::uint64_t{6} * per_slab * arena.num_slabs()) << "hold and owner of every block";
  EXPECT_LT(after, std::uint64_t{32} * per_slab * arena.num_slabs()) << "bytes a block";
}

// ---- behaviour, over both twins ----

class ArenaTest : public ::testing::TestWithParam<bool> {
 protected:
  Charge reserved(Arena& arena, std::initializer_list<std::uint32_t> need) {
    Charge charge;
    EXPECT_EQ(arena.reserve(blocks(need), kNone, charge).status, Status::kReserved);
    return charge;
  }
  CacheLayout layout_ = three_pools();
  Arena arena_{layout_, config(4 * 16384, 16384, GetParam())};
};
INSTANTIATE_TEST_SUITE_P(Twins, ArenaTest, ::testing::Bool(),
                         [](const auto& param_info) { return param_info.param ? "LockFree" : "Locked"; });
using ArenaDeathTest = ArenaTest;
INSTANTIATE_TEST_SUITE_P(Twins, ArenaDeathTest, ::testing::Bool(),
                         [](const auto& param_info) { return param_info.param ? "LockFree" : "Locked"; });

TEST_P(ArenaTest, AChargeReturnsWhatIsLeft) {
  {
    Charge charge = reserved(arena_, {3, 2, 1});
    const Block block = charge.take(0);
    EXPECT_EQ(charge.left(0), 2u);
    EXPECT_EQ(arena_.usage(0).blocks_reserved, 3u);
    EXPECT_EQ(arena_.usage(0).blocks_live, 1u);
    EXPECT_EQ(arena_.kind_bytes(ObjectKind::kCompressedKv), 8192u);
    charge.give_back(0, 1);
    EXPECT_EQ(arena_.usage(0).blocks_reserved, 2u);
    EXPECT_TRUE(arena_.drop(block));
    EXPECT_EQ(arena_.usage(0).blocks_reserved, 1u);
  }
  for (PoolId p = 0; p < 3; ++p) EXPECT_EQ(arena_.usage(p).blocks_reserved, 0u);
  arena_.check_invariants();
}

TEST_P(ArenaTest, ChargesMoveAndMerge) {
  Charge a = reserved(arena_, {2, 0, 0}), b = reserved(arena_, {1, 1, 0});
  a.merge(std::move(b));
  EXPECT_EQ(a.left(0), 3u);
  EXPECT_EQ(a.left(1), 1u);
  Charge c = std::move(a);
  EXPECT_EQ(c.left(0), 3u);
  EXPECT_EQ(a.left(0), 0u);  // NOLINT: what a moved-from charge holds is the point
  c = reserved(arena_, {1, 0, 0});
  EXPECT_EQ(arena_.usage(0).blocks_reserved, 1u) << "assignment returned the old credits";
  EXPECT_EQ(arena_.usage(1).blocks_reserved, 0u);
  ASSERT_EQ(arena_.reserve(blocks({1, 0, 0}), kNone, c).status, Status::kReserved);
  EXPECT_EQ(c.left(0), 2u) << "a second reservation adds to the charge";
}

TEST_P(ArenaTest, ARefusalLeavesTheChargeAsItWas) {
  Charge charge = reserved(arena_, {1, 0, 0});
  EXPECT_EQ(arena_.reserve(blocks({0, 0, 7}), kNone, charge).status, Status::kShort);
  const ReserveOutcome outcome = arena_.reserve(blocks({0, 0, 9}), kNone, charge);
  EXPECT_EQ(outcome.status, Status::kImpossible);
  EXPECT_EQ(outcome.need, 5u * 16384);
  EXPECT_EQ(outcome.cap, 4u * 16384);
  EXPECT_EQ(arena_.possible(blocks({0, 0, 9})).status, Status::kImpossible);
  EXPECT_EQ(arena_.possible(blocks({0, 0, 8})).status, Status::kReserved);
  EXPECT_EQ(charge.left(0), 1u);
  EXPECT_EQ(charge.left(2), 0u);
}

// E15: a size of -1 arrives as a huge count.
TEST_P(ArenaTest, E15_NegativeCountIsRefusedWithoutAChange) {
  Charge charge;
  EXPECT_EQ(arena_.reserve(blocks({1, static_cast<std::uint32_t>(-1), 0}), kNone, charge).status, Status::kImpossible);
  for (PoolId p = 0; p < 3; ++p) EXPECT_EQ(arena_.usage(p).blocks_reserved, 0u);
  EXPECT_EQ(arena_.free_slabs(), 4u);
  arena_.check_invariants();
}

// E1: release [X, X] with two holds frees X once.
TEST_P(ArenaTest, E1_TwoReleasesOfTwoHoldsFreeOnce) {
  Charge charge = reserved(arena_, {2, 0, 0});
  const Block x = charge.take(0);
  arena_.hold(x);
  EXPECT_EQ(arena_.holds(x), 2u);
  int freed = 0;
  for (const Block block : {x, x}) freed += arena_.drop(block) ? 1 : 0;
  EXPECT_EQ(freed, 1);
  EXPECT_EQ(arena_.usage(0).blocks_reserved, 1u);
  EXPECT_EQ(arena_.usage(0).blocks_live, 0u);
  const Block y = charge.take(0);
  EXPECT_EQ(y, x) << "it is free, and the lowest";
  EXPECT_TRUE(arena_.drop(y));
  arena_.check_invariants();
}

TEST_P(ArenaDeathTest, E1_AReleaseTooManyIsCaught) {
  Charge charge = reserved(arena_, {2, 0, 0});
  const Block x = charge.take(0);
  ASSERT_TRUE(arena_.drop(x));
  EXPECT_DEATH(arena_.drop(x), "released twice");
  EXPECT_DEATH(arena_.hold(x), "free block");
}

TEST_P(ArenaDeathTest, BrokenRulesAbort) {
  Charge charge = reserved(arena_, {1, 0, 0});
  EXPECT_DEATH(charge.take(1), "without a credit");
  EXPECT_DEATH(charge.give_back(0, 2), "more credits");
  EXPECT_DEATH(arena_.holds(Block{1, 0}), "no block");
  EXPECT_DEATH(arena_.holds(Block{0, 7}), "no pool");
  EXPECT_DEATH(
      {
        auto* arena = new Arena(layout_, config(4 * 16384, 16384));
        Charge held;
        arena->reserve(blocks({1, 0, 0}), kNone, held);
        delete arena;
      },
      "credits or blocks out");
}

TEST_P(ArenaTest, BlocksKnowTheirKind) {
  Charge charge = reserved(arena_, {1, 0, 1});
  const Block full = charge.take(0), compressed = charge.take(2);
  EXPECT_EQ(arena_.kind_of(full), ObjectKind::kFullKv);
  EXPECT_EQ(arena_.as<ObjectKind::kCompressedKv>(compressed).offset, compressed.offset);
  EXPECT_THROW(arena_.as<ObjectKind::kFullKv>(compressed), RouteError);
  arena_.drop(full);
  arena_.drop(compressed);
}

TEST_P(ArenaTest, OwnersAndSlabsForEviction) {
  Charge charge = reserved(arena_, {5, 1, 0});
  std::vector<Block> taken;
  for (int i = 0; i < 5; ++i) taken.push_back(charge.take(0));
  taken.push_back(charge.take(1));
  for (std::uint32_t i = 0; i < taken.size(); ++i) arena_.set_owner(taken[i], 100 + i);
  EXPECT_EQ(arena_.owner(taken[3]), 103u);
  EXPECT_EQ(arena_.slab_owner(0), std::optional<PoolId>(0));
  EXPECT_EQ(arena_.slab_owner(2), std::optional<PoolId>(1));
  EXPECT_EQ(arena_.slab_owner(3), std::nullopt);
  EXPECT_EQ(arena_.slab_used(0), 4u);
  EXPECT_EQ(arena_.slab_used(1), 1u);
  std::vector<Block> found;
  arena_.live_blocks(0, found);
  EXPECT_EQ(found, std::vector<Block>(taken.begin(), taken.begin() + 4));
  arena_.live_blocks(3, found);
  EXPECT_TRUE(found.empty());
  EXPECT_EQ(arena_.stranded_bytes(), 16384u - 4096 + 16384 - 2048);
  EXPECT_TRUE(arena_.may_steal(0, 1));
  EXPECT_FALSE(arena_.may_steal(2, 1)) << "it owns none";
  EXPECT_FALSE(arena_.may_steal(0, 0));
  for (const Block block : taken) EXPECT_TRUE(arena_.drop(block));
  const Charge again = reserved(arena_, {1, 0, 0});
  EXPECT_EQ(arena_.owner(taken[0]), 0u) << "a freed block has no owner";
}

TEST(ArenaLimits, StealingRespectsFloorsAndCaps) {
  ArenaConfig c = config(4 * 16384, 16384);
  c.limits[static_cast<std::size_t>(ObjectKind::kFullKv)].floor_slabs = 1;
  c.limits[static_cast<std::size_t>(ObjectKind::kSwaWindow)].cap_bytes = 2048;
  Arena arena(three_pools(), c);
  Charge charge;
  ASSERT_EQ(arena.reserve(blocks({4, 1, 0}), kNone, charge).status, Status::kReserved);
  EXPECT_FALSE(arena.may_steal(0, 2)) << "full_kv is at its floor";
  EXPECT_FALSE(arena.may_steal(2, 1)) << "swa_window is at its cap";
  EXPECT_TRUE(arena.may_steal(1, 2));
}

TEST_P(ArenaTest, ASlabThatChangedHandsIsClearedBeforeUse) {
  std::vector<Block> taken;
  {
    Charge charge = reserved(arena_, {16, 0, 0});
    for (int i = 0; i < 16; ++i) {
      taken.push_back(charge.take(0));
      EXPECT_FALSE(arena_.must_clear(taken.back()));
    }
  }
  for (const Block block : taken) arena_.drop(block);
  Charge charge = reserved(arena_, {0, 0, 1});
  const Block block = charge.take(2);
  EXPECT_TRUE(arena_.must_clear(block));
  const ClearRange range = arena_.range(block);
  EXPECT_EQ(range.offset, block.offset * kOffsetUnit);
  EXPECT_EQ(range.bytes, 8192u);
  arena_.confirm_cleared(block);
  EXPECT_FALSE(arena_.must_clear(block));
  arena_.drop(block);
}

// Random reservations, takes, holds and drops beside a plain account; live byte ranges must never overlap.
TEST_P(ArenaTest, RandomWalkKeepsBytesApart) {
  std::mt19937 random(11);
  const auto pick = [&](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
  Arena arena(layout_, config(24 * 16384, 16384, GetParam()));
  struct Live {
    Block block;
    std::uint32_t holds;
  };
  std::vector<Live> live;
  std::vector<Charge> charges;
  std::map<std::uint64_t, std::uint64_t> ranges;  // begin, end
  std::array<std::uint64_t, 3> used{};
  int grants = 0, refusals = 0;
  for (int step = 0; step < 20000; ++step) {
    switch (pick(5)) {
      case 0: {
        const BlockCounts need = blocks({pick(8), pick(8), pick(4)});
        Charge charge;
        if (arena.reserve(need, kNone, charge).status != Status::kReserved) {
          ++refusals;
          break;
        }
        ++grants;
        for (std::size_t p = 0; p < 3; ++p) used[p] += need[p];
        charges.push_back(std::move(charge));
        break;
      }
      case 1:
      case 2: {
        const auto p = static_cast<PoolId>(pick(3));
        if (charges.empty()) break;
        Charge& charge = charges[pick(charges.size())];
        if (charge.left(p) == 0) break;
        const Block block = charge.take(p);
        const ClearRange range = arena.range(block);
        const auto next = ranges.lower_bound(range.offset);
        ASSERT_TRUE(next == ranges.end() || next->first >= range.offset + range.bytes);
        ASSERT_TRUE(next == ranges.begin() || std::prev(next)->second <= range.offset);
        ASSERT_LE(range.offset + range.bytes, arena.bytes());
        ranges.emplace(range.offset, range.offset + range.bytes);
        live.push_back({block, 1});
        break;
      }
      case 3: {
        if (live.empty()) break;
        Live& l = live[pick(live.size())];
        if (pick(4) == 0) {
          arena.hold(l.block);
          ++l.holds;
          break;
        }
        ASSERT_EQ(arena.drop(l.block), l.holds == 1);
        if (--l.holds > 0) break;
        --used[l.block.pool];
        ranges.erase(arena.range(l.block).offset);
        l = live.back();
        live.pop_back();
        break;
      }
      default: {
        if (charges.empty() || pick(2) == 0) break;
        Charge& charge = charges[pick(charges.size())];
        for (std::size_t p = 0; p < 3; ++p) used[p] -= charge.left(static_cast<PoolId>(p));
        charge = std::move(charges.back());
        charges.pop_back();
      }
    }
    if (step % 500 == 0) arena.check_invariants();
    for (std::size_t p = 0; p < 3; ++p) ASSERT_EQ(arena.usage(static_cast<PoolId>(p)).blocks_reserved, used[p]);
  }
  EXPECT_GT(grants, 500);
  EXPECT_GT(refusals, 100);
  charges.clear();
  for (const Live& l : live)
    for (std::uint32_t i = 0; i < l.holds; ++i) arena.drop(l.block);
  arena.check_invariants();
}

}  // namespace
}  // namespace hetkv
