// Failures that users of other cache systems reported, replayed: each test is named by its class and number, and the line above it
// says what hetkv guarantees instead. Rows that need a lower tier, a draft group, streams or graphs come with those.
//
//   D  check to use            D1 D2 D17 D19 D21
//   E  counts and free lists   E1 E3 E7 E9 E11 E12 E13 E15 E16 E17
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "scenario_engine.h"
#include "stop_thread.h"

namespace hetkv::testing {
namespace {

// --- D: check to use ---

// A request's hit is pinned in all groups before any block is reserved: its own reservation cannot evict it.
TEST(Scenario, D1_TheReservationCannotTakeItsOwnHit) {
  for (const CacheLayout& layout : {full_layout(), v4_layout()}) {
    ShadowEngine engine(layout, 96 << 10, keep("adaptive", 8192));
    auto a = text(40, 193);
    engine.turn(a);
    bool tight = false;
    for (std::size_t extra = 64; extra < 3000; extra += 64) {  // up to the last that fits
      auto longer = a;
      longer.resize(193 + extra, 5);
      const std::int64_t forecast = probe(engine, longer).num_recoverable_tokens;
      AdmitResult result = engine.admit(longer);
      if (!result.sequence) {
        tight = true;
        break;
      }
      EXPECT_EQ(result.report.num_recoverable_tokens, forecast);
      engine.run(*result.sequence, longer, static_cast<std::int64_t>(longer.size()), false);
      // The rows of the hit are still what they were. (Window rows have slid.)
      if (engine.allocator().layout().point_groups().empty()) engine.check_resume(*result.sequence, longer);
      const auto table = result.sequence->block_table(0);
      EXPECT_EQ(std::set<std::int32_t>(table.begin(), table.end()).size(), table.size()) << "one block in two places";
    }
    EXPECT_TRUE(tight);
    engine.allocator().check_invariants();
  }
}

// There is no way to reserve first and pin later: a probe is a forecast, and admit looks again.
TEST(Scenario, D2_AForecastIsNotAPromise) {
  ShadowEngine engine(window_layout(), kMiB);
  const auto a = text(41, 129);
  engine.turn(a);
  ASSERT_EQ(probe(engine, a).num_recoverable_tokens, 128);
  engine.allocator().evict(ObjectKind::kFullKv, 3);
  EXPECT_LT(engine.turn(a).num_recoverable_tokens, 128);
  const auto b = text(42, 129);
  engine.turn(b);
  // Evicted between look-up and pin: the pin fails, and the search is made again.
  HitReport report;
  StoppedThread request("admit: found, not pinned", [&] { report = engine.turn(b); });
  ASSERT_TRUE(request.stopped());
  for (const std::int64_t p : {128, 112}) EXPECT_TRUE(engine.allocator().evict_object(b, engine.space(), p, 0));
  request.finish();
  EXPECT_LE(report.num_recoverable_tokens, 96);
  engine.allocator().check_invariants();
}

// Allocating and freeing have one entry point each, safe from any thread.
TEST(Scenario, D17_TwoThreadsAdmitAndFree) {
  ShadowEngine engine(window_layout(), 256 << 10, keep("adaptive", 8192));
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < 100; ++i) engine.turn(text(50 + (i + t) % 7, 60 + i % 40));
    });
  }
  for (auto& thread : threads) thread.join();
  engine.allocator().check_invariants();
}

// What a running sequence has published is pinned by it: pressure cannot take a block that its table names.
TEST(Scenario, D19_PublishedDuringPrefillStays) {
  ShadowEngine engine(window_layout(), kMiB, keep("all"));
  const auto a = text(60, 200);
  AdmitResult result = engine.admit(a);
  ASSERT_TRUE(engine.run(*result.sequence, a, 96));
  EXPECT_EQ(result.sequence->published_tokens(), 96);
  EXPECT_EQ(engine.allocator().evict(ObjectKind::kFullKv, 1000), 0u);
  for (std::int64_t p = 16; p <= 96; p += 16) EXPECT_FALSE(engine.allocator().evict_object(a, engine.space(), p, 0));
  for (std::uint64_t i = 0; i < 60; ++i) engine.turn(text(600 + i, 300));
  ASSERT_TRUE(engine.run(*result.sequence, a, 200));
  result.sequence->free(true);
  EXPECT_EQ(engine.turn(a).num_recoverable_tokens, 192);
}

// A prefix is visible when its bytes are settled, not when its blocks are allotted.
TEST(Scenario, D21_NotVisibleBeforeTheFence) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(61, 65);
  AdmitResult result = engine.admit(a);
  StepStamp stamp;
  ASSERT_FALSE(result.sequence->schedule(64, &stamp));
  EXPECT_EQ(result.sequence->publish(64).published_tokens, 0);
  EXPECT_EQ(probe(engine, a).num_hash_hit_tokens, 0);
  EXPECT_TRUE(result.sequence->settle(stamp));
  EXPECT_EQ(result.sequence->publish(64).published_tokens, 64);
  EXPECT_EQ(probe(engine, a).num_recoverable_tokens, 64);
}

// --- E: counts and free lists ---

// A block with two holds that is released twice is freed once.
TEST(Scenario, E1_FreedOnceByTheLastHold) {
  ShadowEngine engine(full_layout(), kMiB);
  Arena& arena = engine.allocator().arena();
  BlockCounts need{};
  need[0] = 1;
  Charge charge;
  ASSERT_EQ(arena.reserve(need, {}, charge).status, ReserveOutcome::Status::kReserved);
  const Block block = charge.take(0);
  arena.hold(block);
  EXPECT_EQ(live(engine, 0), 1u);
  EXPECT_FALSE(arena.drop(block));
  EXPECT_EQ(live(engine, 0), 1u);
  EXPECT_TRUE(arena.drop(block));
  EXPECT_EQ(live(engine, 0), 0u);
  arena.check_invariants();
}

// Two that compute one prefix at once both own what they wrote; the index keeps one copy, and evicting it touches nobody's table.
TEST(Scenario, E3_TwoCopiesOfOnePrefix) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto text_a = text(62, 65), other = text(63, 65);
  AdmitResult a = engine.admit(text_a), b = engine.admit(text_a);
  ASSERT_TRUE(engine.run(*a.sequence, text_a, 64));
  ASSERT_TRUE(engine.run(*b.sequence, text_a, 64));
  EXPECT_EQ(b.sequence->published_tokens(), 64);
  EXPECT_NE(a.sequence->block_table(0)[0], b.sequence->block_table(0)[0]);
  a.sequence->free(true);
  EXPECT_EQ(engine.allocator().evict(ObjectKind::kFullKv, 100), 0u) << "the other has it pinned too";
  b.sequence->free(true);
  EXPECT_EQ(live(engine, 0), 4u) << "one copy is left";
  EXPECT_EQ(engine.allocator().evict(ObjectKind::kFullKv, 100), 4u);
  EXPECT_EQ(live(engine, 0), 0u);
  engine.turn(other);
  EXPECT_EQ(probe(engine, text_a).num_recoverable_tokens, 0);
  EXPECT_EQ(engine.turn(text_a).num_recoverable_tokens, 0);
  EXPECT_EQ(engine.turn(text_a).num_recoverable_tokens, 64);
}

// Pins on windows are counted per object: whatever order readers branch and leave in, every count returns to 0.
TEST(Scenario, E7_EveryPinComesBack) {
  ShadowEngine engine(two_windows(), kMiB, keep("all"));
  const auto a = text(64, 161);
  engine.turn(a);
  std::vector<std::unique_ptr<Sequence>> readers;
  for (std::size_t i = 0; i < 12; ++i) {
    auto branch = a;
    branch.resize(48 + 8 * i);
    branch.resize(200, static_cast<std::int32_t>(i));
    AdmitResult result = engine.admit(branch);
    ASSERT_TRUE(result.sequence);
    engine.run(*result.sequence, branch, static_cast<std::int64_t>(100 + 8 * i));
    readers.push_back(std::move(result.sequence));
  }
  std::mt19937_64 random(65);
  std::shuffle(readers.begin(), readers.end(), random);
  readers.clear();
  engine.allocator().check_invariants();
  while (engine.allocator().evict(ObjectKind::kSwaWindow, 1000) > 0) {
  }
  while (engine.allocator().evict(ObjectKind::kFullKv, 1000) > 0) {
  }
  for (PoolId pool = 0; pool < 3; ++pool) EXPECT_EQ(live(engine, pool), 0u);
  EXPECT_EQ(engine.allocator().store().live_nodes(), 0u);
  EXPECT_EQ(engine.space()->used_bytes.load(), 0);
}

// A pinned window whose nodes are branched from twice, inside the window: the pins stay where they were put, and all come back.
TEST(Scenario, E7_BranchesInsideAPinnedWindow) {
  ShadowEngine engine(two_windows(), kMiB, keep("all"));
  KvAllocator& allocator = engine.allocator();
  const auto a = text(64, 161);
  engine.turn(a);
  const auto pinned_windows = [&] {  // positions whose window objects refuse to go, and go if nobody holds them
    std::vector<std::int64_t> stay;
    for (std::int64_t p = 16; p <= 160; p += 16) {
      if (!allocator.evict_object(a, engine.space(), p, group(engine, "wide"))) stay.push_back(p);
    }
    return stay;
  };
  auto first = allocator.pin_prefix(a, engine.space()), second = allocator.pin_prefix(a, engine.space());
  ASSERT_EQ(first->num_tokens(), 160);
  for (const std::size_t shared : {96u, 128u, 136u}) {  // the third one ends inside a block
    auto branch = a;
    branch.resize(shared);
    branch.resize(200, static_cast<std::int32_t>(shared));
    engine.turn(branch);
  }
  const std::vector<std::int64_t> last{64, 80, 96, 112, 128, 144, 160};  // rows [61, 160) of the 100 that end there
  EXPECT_EQ(pinned_windows(), last);
  first.reset();
  EXPECT_EQ(pinned_windows(), (std::vector<std::int64_t>{16, 32, 48, 64, 80, 96, 112, 128, 144, 160}))
      << "what was free is gone already, the rest has one pin more";
  EXPECT_EQ(probe(engine, a).num_recoverable_tokens, 160);
  second.reset();
  for (const std::int64_t p : last) EXPECT_TRUE(allocator.evict_object(a, engine.space(), p, group(engine, "wide"))) << p;
  while (allocator.evict(ObjectKind::kSwaWindow, 1000) > 0) {
  }
  while (allocator.evict(ObjectKind::kFullKv, 1000) > 0) {
  }
  for (PoolId pool = 0; pool < 3; ++pool) EXPECT_EQ(live(engine, pool), 0u);
  EXPECT_EQ(allocator.store().live_nodes(), 0u);
  allocator.check_invariants();
}

// What slid out of the window before the first publication is a hole, never a published block.
TEST(Scenario, E9_SlidBlocksAreHoles) {
  ShadowEngine engine(window_layout(16, 40), kMiB, keep("turn_ends"));
  const auto a = text(66, 400);
  AdmitResult result = engine.admit(a);
  ASSERT_TRUE(engine.run(*result.sequence, a, 400, false));
  result.sequence->free(true);
  const HitReport report = engine.turn(a);  // the engine checks the bytes
  EXPECT_EQ(report.num_recoverable_tokens, 384);
  for (std::int64_t p = 16; p <= 336; p += 16)
    EXPECT_FALSE(engine.allocator().evict_object(a, engine.space(), p, group(engine, "swa"))) << p;
}

// A block that two parts of a request touch goes back once, and a second free is nothing.
TEST(Scenario, E11_ABlockIsFreedOnce) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(67, 100);
  AdmitResult result = engine.admit(a);
  ASSERT_TRUE(engine.run(*result.sequence, a, 41, false));
  ASSERT_TRUE(engine.run(*result.sequence, a, 43, false));
  result.sequence->free(false);
  result.sequence->free(true);
  EXPECT_EQ(live(engine, 0), 0u);
  EXPECT_EQ(engine.space()->used_bytes.load(), 0);
  engine.allocator().check_invariants();
}

// A window's edge and a request's end that meet inside a large block: blocks are released whole, by one of the two, once.
TEST(Scenario, E11_ReleasesThatMeetInsideABlock) {
  for (const bool publish : {false, true}) {
    ShadowEngine engine(window_layout(512, 64), 4 * kMiB, keep("none"));
    const PoolId swa = group(engine, "swa");
    const auto scratch = static_cast<std::int32_t>(engine.allocator().scratch(swa));
    const auto holds = [&](std::int32_t offset) {
      return engine.allocator().arena().holds(Block{static_cast<std::uint32_t>(offset), swa});
    };
    const auto a = text(67, 1100);
    AdmitResult result = engine.admit(a);
    Sequence& s = *result.sequence;
    ASSERT_TRUE(engine.run(s, a, 576, publish));
    const std::int32_t first = s.block_table(swa)[0], second = s.block_table(swa)[1];
    EXPECT_NE(second, scratch) << "its window begins inside it";
    EXPECT_EQ(holds(second), 1u);
    ASSERT_TRUE(engine.run(s, a, 1024, publish));
    EXPECT_EQ(s.block_table(swa)[0], scratch) << "[0, 512) slid";
    EXPECT_EQ(s.block_table(swa)[1], second) << "[512, 1024) is still read, from 961 on";
    ASSERT_TRUE(engine.run(s, a, 1100, publish));
    EXPECT_EQ(s.block_table(swa)[1], second);
    EXPECT_EQ(holds(second), 1u);
    s.free(false);
    s.free(true);
    for (const std::int32_t block : {first, second}) EXPECT_EQ(holds(block), 0u);
    EXPECT_EQ(live(engine, swa), 0u);
    EXPECT_EQ(live(engine, 0), publish ? 2u : 0u);
    engine.allocator().evict(ObjectKind::kFullKv, 10);
    EXPECT_EQ(live(engine, 0), 0u);
    EXPECT_EQ(engine.space()->used_bytes.load(), 0);
    engine.allocator().check_invariants();
  }
}

// The index holds the blocks of the node, not those of whoever finishes the same prefix last.
TEST(Scenario, E12_TheNodeKeepsItsOwnBlocks) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(68, 65);
  AdmitResult first = engine.admit(a), second = engine.admit(a);
  ASSERT_TRUE(engine.run(*first.sequence, a, 64));
  ASSERT_TRUE(engine.run(*second.sequence, a, 64));
  const std::vector<std::int32_t> x(first.sequence->block_table(0).begin(), first.sequence->block_table(0).begin() + 4);
  first.sequence->free(true);
  second.sequence->free(true);
  AdmitResult third = engine.admit(a);
  EXPECT_TRUE(std::equal(x.begin(), x.end(), third.sequence->block_table(0).begin()));
  for (const std::int32_t offset : x)
    EXPECT_EQ(engine.allocator().arena().holds(Block{static_cast<std::uint32_t>(offset), 0}), 1u);
}

// The pinned node itself is safe, not only what lies above it.
TEST(Scenario, E13_ThePinnedLeafSurvives) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(69, 65);
  engine.turn(a);
  AdmitResult reader = engine.admit(a);
  EXPECT_EQ(reader.report.num_recoverable_tokens, 64);
  EXPECT_EQ(engine.allocator().evict(ObjectKind::kFullKv, 100), 0u);
  EXPECT_FALSE(engine.allocator().evict_object(a, engine.space(), 64, 0));
  EXPECT_EQ(probe(engine, a).num_recoverable_tokens, 64);
}

// Sizes that make no sense are typed errors and change nothing.
TEST(Scenario, E15_NegativeSizesAreErrors) {
  ShadowEngine engine(window_layout(), kMiB);
  const auto a = text(70, 65);
  AdmitOptions options;
  options.max_new_tokens = -1;
  EXPECT_THROW(engine.admit(a, options), ArgumentError);
  options = {};
  options.chunk_tokens = -16;
  EXPECT_THROW(engine.admit(a, options), ArgumentError);
  EXPECT_THROW(engine.admit({}), ArgumentError);
  EXPECT_THROW(engine.allocator().blocks_for(-1, 16, false), ArgumentError);
  AdmitResult result = engine.admit(a);
  StepStamp stamp;
  const std::uint64_t before = live(engine, 0);
  EXPECT_THROW(result.sequence->schedule(-1, &stamp), ArgumentError);
  EXPECT_THROW(result.sequence->schedule(66, &stamp), ArgumentError);
  const StepItem item{result.sequence.get(), -1};
  EXPECT_THROW(engine.allocator().prepare_step(std::span(&item, 1), {}, &stamp), ArgumentError);
  EXPECT_EQ(live(engine, 0), before);
  EXPECT_EQ(result.sequence->scheduled(), 0);
  result.sequence.reset();
  EXPECT_EQ(live(engine, 0), 0u);
}

// A request that never ran a step gives everything back.
TEST(Scenario, E16_NothingRanEverythingReturns) {
  for (const CacheLayout& layout : {window_layout(), v4_layout(), snapshot_layout()}) {
    ShadowEngine engine(layout, 4 * kMiB);
    const auto a = text(71, 129);
    for (const bool turn_end : {false, true}) {
      AdmitOptions options;
      options.live_state = true;
      options.max_new_tokens = 100;
      AdmitResult result = engine.admit(a, options);
      ASSERT_TRUE(result.sequence);
      StepStamp stamp;
      ASSERT_FALSE(result.sequence->schedule(20, &stamp));  // dispatched, its result never came
      result.sequence->free(turn_end);
      for (std::size_t pool = 0; pool < layout.pools().size(); ++pool) EXPECT_EQ(live(engine, static_cast<PoolId>(pool)), 0u);
      EXPECT_EQ(engine.space()->used_bytes.load(), 0);
    }
    engine.allocator().check_invariants();
  }
}

// Objects of one node are pinned and evicted apart: a pinned state does not keep the window, nor go with it.
TEST(Scenario, E17_OnlyTheUnpinnedObjectGoes) {
  ShadowEngine engine(CacheLayout::build("both", 16,
                                         {make_group("full", ObjectKind::kFullKv, Retention::kHistory), window_group(17),
                                          make_group("gdn", ObjectKind::kRecurrentState, Retention::kSnapshot)}),
                      kMiB, keep("all"));
  const auto a = text(72, 65);
  engine.turn(a);
  auto b = a;
  b.resize(200, 1);
  AdmitResult reader = engine.admit(b);
  ASSERT_EQ(reader.report.num_recoverable_tokens, 64);
  EXPECT_FALSE(engine.allocator().evict_object(a, engine.space(), 64, group(engine, "swa")));
  ASSERT_TRUE(engine.run(*reader.sequence, b, 128));  // its window has left the block, its state is still pinned
  EXPECT_FALSE(engine.allocator().evict_object(a, engine.space(), 64, group(engine, "gdn")));
  EXPECT_TRUE(engine.allocator().evict_object(a, engine.space(), 64, group(engine, "swa")));
  EXPECT_FALSE(engine.allocator().evict_object(a, engine.space(), 64, group(engine, "full")));
  reader.sequence.reset();
  engine.allocator().check_invariants();
}

}  // namespace
}  // namespace hetkv::testing
