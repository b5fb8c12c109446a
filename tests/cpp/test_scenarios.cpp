// Failures that users of other cache systems reported, replayed: each test is named by its class and number, and the line above it
// says what hetkv guarantees instead. Rows that need a lower tier, a draft group, streams or graphs come with those.
//
//   A  stale companion state   A1 A3 A4 A6
//   B  granularity and hash    B1 B2 B5 B6 B8 B10
//   C  joint lookup            C1 C4 C6 C7 C9 C10 C14
//   D  check to use            D1 D2 D17 D19 D21
//   E  counts and free lists   E1 E3 E7 E9 E11 E12 E13 E15 E16 E17
//   G  identity                G1 G7
//   J  admission and progress  J1 J3 J5 J7 J8 J10
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "base/error.h"
#include "shadow_engine.h"
#include "stop_thread.h"

namespace hetkv::testing {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

std::vector<std::int32_t> text(std::uint64_t seed, std::size_t n) {
  std::mt19937_64 random(seed);
  return random_tokens(random, n);
}

AllocatorConfig keep(const char* retention, std::uint64_t slab_bytes = 0) {
  AllocatorConfig config;
  config.retention = RetentionPolicy::parse(retention);
  config.arena.slab_bytes = slab_bytes;
  return config;
}

const Loss* loss_of(const HitReport& report, LossReason reason) {
  for (const Loss& loss : report.losses()) {
    if (loss.reason == reason) return &loss;
  }
  return nullptr;
}

GroupId group(ShadowEngine& engine, const char* name) { return engine.allocator().layout().find_group(name)->id; }
HitReport probe(ShadowEngine& engine, const std::vector<std::int32_t>& tokens) {
  return engine.allocator().probe(tokens, engine.space());
}

// Blocks of a pool in use, the scratch block apart.
std::uint64_t live(ShadowEngine& engine, PoolId pool) { return engine.allocator().arena().usage(pool).blocks_reserved - 1; }

CacheLayout two_states() {
  return CacheLayout::build("two states", 16,
                            {make_group("full", ObjectKind::kFullKv, Retention::kHistory),
                             make_group("gdn", ObjectKind::kRecurrentState, Retention::kSnapshot),
                             make_group("ssm", ObjectKind::kRecurrentState, Retention::kSnapshot)});
}

CacheLayout two_windows() {
  return CacheLayout::build(
      "two windows", 16,
      {make_group("full", ObjectKind::kFullKv, Retention::kHistory), window_group(17, "narrow"), window_group(100, "wide")});
}

// --- A: stale companion state ---

// A prefix whose window rows are gone is no hit, however much of its history is there; foreign rows are never read.
TEST(Scenario, A1_WindowRowsAreContentAddressed) {
  ShadowEngine engine(v4_layout(), 4 * kMiB);
  const auto a = text(1, 481);
  engine.turn(a);
  EXPECT_EQ(probe(engine, a).num_recoverable_tokens, 480);
  EXPECT_GT(engine.allocator().evict(ObjectKind::kSwaWindow, 1000), 0u);
  for (std::uint64_t i = 0; i < 5; ++i) engine.turn(text(100 + i, 200));  // others use the memory
  const HitReport report = engine.turn(a);                                // the engine checks every row that it resumes from
  EXPECT_EQ(report.num_hash_hit_tokens, 480);
  EXPECT_EQ(report.num_recoverable_tokens, 0);
  ASSERT_NE(loss_of(report, LossReason::kWindowEvicted), nullptr);
  EXPECT_EQ(loss_of(report, LossReason::kWindowEvicted)->group, group(engine, "swa"));
  EXPECT_EQ(engine.turn(a).num_recoverable_tokens, 480) << "computed anew, it is whole again";
}

// History without the state that belongs to it is no hit, whatever lies in the state's old memory.
TEST(Scenario, A3_StateThatWasOverwrittenIsNotServed) {
  ShadowEngine engine(snapshot_layout(), kMiB);
  const auto a = text(2, 97);
  engine.turn(a);
  engine.allocator().evict(ObjectKind::kRecurrentState, 1000);
  for (std::uint64_t i = 0; i < 5; ++i) engine.turn(text(200 + i, 97));
  const HitReport report = engine.turn(a);
  EXPECT_EQ(report.num_hash_hit_tokens, 96);
  EXPECT_EQ(report.num_recoverable_tokens, 0);
  ASSERT_NE(loss_of(report, LossReason::kSnapshotEvicted), nullptr);
}

// Entries that were published without the compressor's state name the missing group.
TEST(Scenario, A4_HistoryWithoutTailIsNoHit) {
  ShadowEngine engine(
      CacheLayout::build("csa", 16,
                         {make_group("csa_kv", ObjectKind::kCompressedKv, Retention::kHistory, 4), tail_group("csa_tail", 4, 4)}),
      kMiB);
  const auto a = text(3, 97);
  AdmitResult result = engine.admit(a);
  StepStamp stamp;
  ASSERT_FALSE(result.sequence->schedule(96, &stamp));
  result.sequence->settle(stamp);  // no stage_point, no commit_point
  EXPECT_EQ(result.sequence->publish(96).published_tokens, 96);
  result.sequence->free(true);
  const HitReport report = probe(engine, a);
  EXPECT_EQ(report.num_history_tokens, 96);
  EXPECT_EQ(report.num_recoverable_tokens, 0);
  ASSERT_NE(loss_of(report, LossReason::kGroupMissing), nullptr);
  EXPECT_EQ(loss_of(report, LossReason::kGroupMissing)->group, group(engine, "csa_tail"));
}

// Index and content stand and fall together: without the index of one block nothing from there on is a hit.
TEST(Scenario, A6_ContentWithoutItsIndexIsRefused) {
  ShadowEngine engine(v4_layout(), 4 * kMiB, keep("all"));
  const auto a = text(4, 129);
  engine.turn(a);
  EXPECT_GT(engine.allocator().quarantine(a, engine.space(), 96, group(engine, "csa_index"), LossReason::kIndexStale), 0u);
  const HitReport report = engine.turn(a);
  EXPECT_EQ(report.num_recoverable_tokens, 80);
  ASSERT_NE(loss_of(report, LossReason::kIndexStale), nullptr);
  EXPECT_EQ(loss_of(report, LossReason::kIndexStale)->group, group(engine, "csa_index"));
  EXPECT_EQ(loss_of(report, LossReason::kIndexStale)->tokens, 48);
}

// --- B: granularity and hash ---

// An entry that covers 64 tokens is only found by who shares all 64, though blocks are found by 16.
TEST(Scenario, B1_AnEntryIsSharedOnlyByWhoSharesAllItsTokens) {
  ShadowEngine engine(CacheLayout::build("coarse", 16,
                                         {make_group("fine", ObjectKind::kCompressedKv, Retention::kHistory, 4),
                                          make_group("coarse", ObjectKind::kCompressedKv, Retention::kHistory, 64)}),
                      kMiB);
  const auto a = text(5, 129);
  engine.turn(a);
  for (const std::size_t shared : {16u, 32u, 48u, 63u, 64u, 100u, 128u}) {
    auto b = a;
    std::fill(b.begin() + static_cast<std::ptrdiff_t>(shared), b.end(), 7);
    b.resize(160, 9);
    AdmitResult result = engine.admit(b);
    EXPECT_EQ(result.report.num_recoverable_tokens, static_cast<std::int64_t>(shared / 16 * 16));
    EXPECT_EQ(result.sequence->block_table(group(engine, "coarse")).size(), shared / 64);
  }
}

// A coarse group does not round the others' hit down to its own multiple.
TEST(Scenario, B2_EveryGroupHitsAtItsOwnGranularity) {
  ShadowEngine engine(v4_layout(), 4 * kMiB);
  auto a = text(6, 48);
  engine.turn(a);
  a.resize(60, 3);
  const HitReport report = engine.turn(a);
  EXPECT_EQ(report.num_recoverable_tokens, 48) << "no multiple of 32";
  ASSERT_EQ(report.losses().size(), 1u);
  EXPECT_EQ(report.losses()[0].reason, LossReason::kGranularity);
  EXPECT_EQ(report.losses()[0].tokens, 12);
}

// A hit that is cut by the state's position takes each history block by its own name.
TEST(Scenario, B5_HistoryIsReadByItsOwnKeyWhereTheStateCutsTheHit) {
  ShadowEngine engine(snapshot_layout(), kMiB, keep("all"));
  const auto a = text(7, 161);
  engine.turn(a);
  for (std::int64_t p = 112; p <= 160; p += 16)
    EXPECT_TRUE(engine.allocator().evict_object(a, engine.space(), p, group(engine, "gdn")));
  AdmitResult result = engine.admit(a);
  EXPECT_EQ(result.report.num_history_tokens, 160);
  EXPECT_EQ(result.report.num_recoverable_tokens, 96);
  EXPECT_EQ(result.sequence->block_table(0).size(), 6u);
}

// Of a block that is shared in part, nothing is used.
TEST(Scenario, B6_PartOfABlockIsNoHit) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(8, 65);
  engine.turn(a);
  for (std::size_t shared = 0; shared <= 64; shared += 4) {
    std::vector<std::int32_t> b(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(shared));
    b.resize(80, 5);
    EXPECT_EQ(probe(engine, b).num_recoverable_tokens, static_cast<std::int64_t>(shared / 16 * 16)) << shared;
  }
}

// A state is published at the position that it holds, or not at all.
TEST(Scenario, B8_StateOfAnotherPositionIsRefused) {
  ShadowEngine engine(snapshot_layout(), kMiB, keep("all"));
  const auto a = text(9, 97);
  AdmitResult result = engine.admit(a);
  Sequence& s = *result.sequence;
  StepStamp stamp;
  ASSERT_FALSE(s.schedule(64, &stamp));
  ASSERT_EQ(s.stage_point(64).size(), 1u);
  EXPECT_THROW(s.commit_point(64, group(engine, "gdn"), 36), PositionError);
  s.settle(stamp);
  s.publish(64);
  s.free(true);
  EXPECT_EQ(probe(engine, a).num_recoverable_tokens, 0) << "an uncommitted state is not published";
}

// Block sizes are facts of groups: each has its own rows per block and bytes, and its own table length.
TEST(Scenario, B10_NoCommonBlockSize) {
  ShadowEngine engine(v4_layout(), 4 * kMiB);
  const auto a = text(10, 128);
  AdmitResult result = engine.admit(a);
  ASSERT_TRUE(engine.run(*result.sequence, a, 128));
  const CacheLayout& layout = engine.allocator().layout();
  EXPECT_EQ(layout.find_group("csa_kv")->entries_per_block, 4u);
  EXPECT_EQ(layout.find_group("hca_kv")->entries_per_block, 1u);
  EXPECT_EQ(layout.find_group("swa")->entries_per_block, 16u);
  EXPECT_EQ(result.sequence->block_table(group(engine, "csa_kv")).size(), 8u);
  EXPECT_EQ(result.sequence->block_table(group(engine, "hca_kv")).size(), 4u);
  EXPECT_EQ(result.sequence->block_table(group(engine, "swa")).size(), 8u);
}

// --- C: joint lookup ---

// The hit is the largest end that all groups have in common, never the smallest of their largest ends.
TEST(Scenario, C1_IntersectionOfEnds) {
  struct Row {
    std::set<std::int64_t> gdn, ssm;
    std::int64_t hit;
  };
  for (const Row& row : {Row{{1, 3}, {1, 2}, 1}, Row{{3}, {2}, 0}, Row{{3}, {3}, 3}, Row{{1, 2, 3}, {2}, 2}}) {
    ShadowEngine engine(two_states(), kMiB, keep("all"));
    const auto a = text(11, 49);
    engine.turn(a);
    ASSERT_EQ(probe(engine, a).num_recoverable_tokens, 48);
    for (std::int64_t end = 1; end <= 3; ++end) {
      if (row.gdn.count(end) == 0) engine.allocator().evict_object(a, engine.space(), end * 16, group(engine, "gdn"));
      if (row.ssm.count(end) == 0) engine.allocator().evict_object(a, engine.space(), end * 16, group(engine, "ssm"));
    }
    EXPECT_EQ(probe(engine, a).num_recoverable_tokens, row.hit * 16);
    EXPECT_EQ(engine.turn(a).num_recoverable_tokens, row.hit * 16);
  }
}

// A deeper survivor of one group cannot lift the hit over what another has lost.
TEST(Scenario, C4_ADeeperSurvivorDoesNotLiftTheHit) {
  ShadowEngine engine(snapshot_layout(), kMiB, keep("all"));
  const auto a = text(12, 65);
  engine.turn(a);
  for (const std::int64_t p : {64, 48}) EXPECT_TRUE(engine.allocator().evict_object(a, engine.space(), p, group(engine, "full")));
  EXPECT_TRUE(engine.allocator().evict_object(a, engine.space(), 32, group(engine, "gdn")));
  AdmitResult result = engine.admit(a);
  EXPECT_EQ(result.report.num_recoverable_tokens, 16);
  EXPECT_EQ(result.sequence->num_computed_tokens(), 16) << "what is computed anew starts there";
}

// All windows resume at one common position, whichever group is asked.
TEST(Scenario, C6_OneLengthForAllWindows) {
  ShadowEngine engine(two_windows(), kMiB, keep("all"));
  const auto a = text(13, 257);
  engine.turn(a);
  EXPECT_TRUE(engine.allocator().evict_object(a, engine.space(), 208, group(engine, "wide")));
  AdmitResult result = engine.admit(a);  // checks the rows of both windows at the same position
  EXPECT_EQ(result.report.num_recoverable_tokens, 192);
  EXPECT_EQ(loss_of(result.report, LossReason::kWindowEvicted)->group, group(engine, "wide"));
  for (const char* name : {"full", "narrow", "wide"}) EXPECT_EQ(result.sequence->block_table(group(engine, name)).size(), 12u);
}

// Rows that a narrow window has dropped are not published, though a wide window still holds its own there.
TEST(Scenario, C7_WhatSlidOutIsNotPublished) {
  ShadowEngine engine(two_windows(), kMiB, keep("none"));
  const auto a = text(14, 300);
  AdmitResult result = engine.admit(a);
  ASSERT_TRUE(engine.run(*result.sequence, a, 300, false));
  const auto scratch = static_cast<std::int32_t>(engine.allocator().scratch(group(engine, "narrow")));
  EXPECT_EQ(result.sequence->block_table(group(engine, "narrow"))[14], scratch) << "slid";
  EXPECT_NE(result.sequence->block_table(group(engine, "wide"))[14],
            static_cast<std::int32_t>(engine.allocator().scratch(group(engine, "wide"))));
  result.sequence->free(true);
  const HitReport report = probe(engine, a);
  EXPECT_EQ(report.num_history_tokens, 288);
  EXPECT_EQ(report.num_recoverable_tokens, 0);
  EXPECT_EQ(loss_of(report, LossReason::kGroupMissing)->group, group(engine, "narrow"));
}

// Where there is room, every session keeps its window; where there is none, the loss says which group cut the hit.
TEST(Scenario, C9_SessionsKeepTheirWindowsOrTheReportSaysSo) {
  for (const std::uint64_t bytes : {4 * kMiB, kMiB / 8}) {
    ShadowEngine engine(window_layout(), bytes, keep("adaptive", 8192));
    std::vector<std::vector<std::int32_t>> sessions;
    for (std::uint64_t i = 0; i < 8; ++i) sessions.push_back(text(20 + i, 200));
    for (const auto& session : sessions) engine.turn(session);
    engine.turn(text(19, 40));
    for (const auto& session : sessions) {
      const HitReport report = probe(engine, session);
      if (bytes > kMiB) {
        EXPECT_EQ(report.num_recoverable_tokens, 192);
      } else if (report.num_recoverable_tokens < report.num_history_tokens) {
        EXPECT_TRUE(loss_of(report, LossReason::kWindowEvicted) != nullptr ||
                    loss_of(report, LossReason::kGroupMissing) != nullptr);
      }
    }
  }
}

// Windows are bounded by their own cap: however many there are, they push out no history.
TEST(Scenario, C10_WindowsDoNotPushOutHistory) {
  AllocatorConfig config = keep("all", 8192);
  config.arena.limits[static_cast<std::size_t>(ObjectKind::kSwaWindow)].cap_bytes = 64 << 10;
  ShadowEngine engine(window_layout(), kMiB, config);
  std::vector<std::vector<std::int32_t>> sessions;
  for (std::uint64_t i = 0; i < 8; ++i) sessions.push_back(text(30 + i, 600));
  for (const auto& session : sessions) engine.turn(session);
  const auto& counters = engine.allocator().store().counters();
  EXPECT_EQ(counters.history_evicted.load(), 0u);
  EXPECT_GT(counters.points_evicted[0].load(), 0u);
  EXPECT_LE(engine.allocator().arena().kind_bytes(ObjectKind::kSwaWindow), 64u << 10);
  for (const auto& session : sessions) {
    const HitReport report = probe(engine, session);
    EXPECT_EQ(report.num_history_tokens, 592);
    if (report.num_recoverable_tokens < 592) {
      EXPECT_EQ(report.losses()[1].group, group(engine, "swa"));
    }
  }
}

// A group's layers have one window; mixed ones are refused when the layout is made.
TEST(Scenario, C14_MixedWindowsAreRefused) {
  GroupSpec mixed = window_group(1024);
  mixed.layer_windows = {1024, 4096};
  EXPECT_THROW(CacheLayout::build("mixed", 16, {mixed}), LayoutError);
}

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

// --- G: identity ---

// Entries of other weights do not match, and the report says that this is why.
TEST(Scenario, G1_NewWeightsMatchNothingOld) {
  for (const CacheLayout& layout : {full_layout(), v4_layout()}) {
    ShadowEngine engine(layout, 4 * kMiB);
    const auto a = text(80, 65);
    engine.turn(a);
    engine.allocator().set_model_version("1");
    const HitReport report = engine.turn(a);
    EXPECT_EQ(report.num_recoverable_tokens, 0);
    ASSERT_NE(loss_of(report, LossReason::kModelVersion), nullptr);
    EXPECT_EQ(loss_of(report, LossReason::kModelVersion)->tokens, 64);
    EXPECT_EQ(engine.turn(a).num_recoverable_tokens, 64) << "what the new weights wrote";
  }
}

// Equal placeholder ids with another digest are another text; and a shared block is never written by who shares it in part.
TEST(Scenario, G7_DigestsAreIdentityAndSharedBlocksAreReadOnly) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(81, 65);
  Namespace* cat = engine.allocator().space({{"digest:0", "cat"}});
  Namespace* dog = engine.allocator().space({{"digest:0", "dog"}});
  engine.turn(a, 0, cat);
  EXPECT_EQ(engine.turn(a, 0, dog).num_hash_hit_tokens, 0);
  EXPECT_EQ(engine.turn(a, 0, cat).num_recoverable_tokens, 64);
  auto b = a;
  b[40] ^= 1;  // leaves inside the third block
  AdmitResult reader = engine.admit(a, {}, cat), writer = engine.admit(b, {}, cat);
  EXPECT_EQ(writer.report.num_recoverable_tokens, 32);
  ASSERT_TRUE(engine.run(*writer.sequence, b, 65));
  EXPECT_EQ(writer.sequence->block_table(0)[1], reader.sequence->block_table(0)[1]);
  EXPECT_NE(writer.sequence->block_table(0)[2], reader.sequence->block_table(0)[2]);
  engine.check_resume(*reader.sequence, a);
}

// --- J: admission and progress ---

// A prompt much longer than its window needs the window, not the prompt: one function sizes the arena and guards the door.
TEST(Scenario, J1_ALongPromptNeedsOnlyItsWindow) {
  const CacheLayout layout = CacheLayout::build("window only", 16, {window_group(40)});
  std::uint64_t bytes = 0;
  {
    ShadowEngine sizing(layout, kMiB);
    bytes = sizing.allocator().bytes_for(5000, 16, false) + layout.group(0).block_bytes;  // and a scratch block
    EXPECT_EQ(sizing.allocator().bytes_for(5000, 16, false), sizing.allocator().bytes_for(500, 16, false));
  }
  AllocatorConfig config;
  config.arena.slab_bytes = layout.group(0).block_bytes;
  ShadowEngine engine(layout, bytes, config);
  const auto a = text(90, 5000);
  AdmitResult result = engine.admit(a);
  ASSERT_TRUE(result.sequence);
  EXPECT_TRUE(engine.run(*result.sequence, a, 5000));
  EXPECT_EQ(result.sequence->settled(), 5000);
}

// An arena that cannot hold one block of every group is refused when it is made.
TEST(Scenario, J3_TooSmallIsAnErrorOfTheConstructor) {
  AllocatorConfig config;
  config.arena.slab_bytes = 2048;
  config.arena.bytes = 4096;
  try {
    KvAllocator allocator(v4_layout(), config);
    FAIL() << "two slabs for eight pools";
  } catch (const AdmissionError& error) {
    EXPECT_FALSE(error.retryable);
  }
}

// Short now is "try again", and changes nothing; only what exceeds the capacity is impossible.
TEST(Scenario, J5_ShortNowIsNotImpossible) {
  ShadowEngine engine(full_layout(), 64 << 10, keep("adaptive", 4096));
  const std::uint64_t blocks = (64 << 10) / engine.allocator().layout().group(0).block_bytes - 1;
  AdmitResult holder = engine.admit(text(91, 16 * (blocks / 2)));
  ASSERT_TRUE(holder.sequence);
  const auto b = text(92, 16 * (blocks * 3 / 4));
  for (int i = 0; i < 3; ++i) {
    const std::uint64_t before = live(engine, 0);
    const AdmitResult refused = engine.admit(b);
    EXPECT_EQ(refused.refusal.cause, Refusal::Cause::kNoRoom);
    EXPECT_EQ(live(engine, 0), before);
    EXPECT_TRUE(holder.sequence->live()) << "nobody is thrown out for it";
  }
  EXPECT_EQ(engine.admit(text(93, 16 * (blocks + 1))).refusal.cause, Refusal::Cause::kImpossible);
  holder.sequence.reset();
  EXPECT_TRUE(engine.admit(b).sequence);
}

// The check is the reservation: if another drains the arena in between, the answer is "no room", never a crash.
TEST(Scenario, J7_DrainedBetweenCheckAndTake) {
  ShadowEngine engine(full_layout(), 64 << 10, keep("adaptive", 4096));
  const std::uint64_t blocks = (64 << 10) / engine.allocator().layout().group(0).block_bytes - 1;
  AdmitResult late;
  StoppedThread request("admit: pinned, not reserved", [&] { late = engine.admit(text(94, 16 * (blocks / 2))); });
  ASSERT_TRUE(request.stopped());
  AdmitResult drain = engine.admit(text(95, 16 * (blocks - 2)));
  ASSERT_TRUE(drain.sequence);
  request.finish();
  EXPECT_FALSE(late.sequence);
  EXPECT_EQ(late.refusal.cause, Refusal::Cause::kNoRoom);
  EXPECT_EQ(late.refusal.pool, 0);
  drain.sequence.reset();
  EXPECT_TRUE(engine.admit(text(94, 16 * (blocks / 2))).sequence);
  engine.allocator().check_invariants();
}

// Eviction is addressed to a kind and takes that kind alone.
TEST(Scenario, J8_EvictionIsAddressedToAKind) {
  ShadowEngine engine(v4_layout(), 4 * kMiB, keep("all"));
  const auto a = text(96, 129);
  engine.turn(a);
  const PoolId swa = group(engine, "swa"), kv = group(engine, "csa_kv"), tail = group(engine, "csa_tail");
  const std::uint64_t windows = live(engine, swa), history = live(engine, kv), tails = live(engine, tail);
  EXPECT_EQ(engine.allocator().evict(ObjectKind::kSwaWindow, 3), 3u);
  EXPECT_EQ(live(engine, swa), windows - 3);
  EXPECT_EQ(engine.allocator().evict(ObjectKind::kSwaWindow, 1000), windows - 3);
  EXPECT_EQ(live(engine, swa), 0u);
  EXPECT_EQ(live(engine, kv), history);
  EXPECT_EQ(live(engine, tail), tails);
  EXPECT_GT(engine.allocator().evict(ObjectKind::kUncompressedTail, 1000), 0u);
  EXPECT_EQ(live(engine, tail), 0u);
  EXPECT_EQ(live(engine, kv), history);
}

// A request's windows cost their steady size and one step, whatever the prompt's length.
TEST(Scenario, J10_WindowsAreCountedOnce) {
  std::vector<GroupSpec> groups{make_group("full", ObjectKind::kFullKv, Retention::kHistory)};
  for (const char* name : {"a", "b", "c", "d"}) groups.push_back(window_group(128, name));
  ShadowEngine engine(CacheLayout::build("four windows", 64, groups), 4 * kMiB, keep("none"));
  const BlockCounts need = engine.allocator().blocks_for(33792, 64, false);
  EXPECT_EQ(need[0], 528u);
  for (GroupId id = 1; id <= 4; ++id) {
    EXPECT_LE(need[id], 2u + 1u + 1u) << "two blocks of window, one step, and the block that it straddles";
    EXPECT_EQ(need[id], engine.allocator().blocks_for(3000, 64, false)[id]);
  }
}

}  // namespace
}  // namespace hetkv::testing
