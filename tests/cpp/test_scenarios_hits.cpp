// Failures that users of other cache systems reported, replayed: each test is named by its class and number, and the line above it
// says what hetkv guarantees instead. Rows that need a lower tier, a draft group, streams or graphs come with those.
//
//   A  stale companion state   A1 A3 A4 A6
//   B  granularity and hash    B1 B2 B5 B6 B8 B10
//   C  joint lookup            C1 C4 C6 C7 C9 C10 C14
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "base/error.h"
#include "scenario_engine.h"

namespace hetkv::testing {
namespace {

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

// Entries and index are all there, but the compressor's rolling state was written over by others: the groups' intersection is empty.
TEST(Scenario, A3_EntriesAndIndexWithoutTheirCompressorState) {
  ShadowEngine engine(v4_layout(), 4 * kMiB, keep("all"));
  const auto a = text(2, 129);
  engine.turn(a);
  const PoolId tail = group(engine, "csa_tail");
  EXPECT_TRUE(engine.allocator().evict_object(a, engine.space(), 128, tail));
  HitReport report = probe(engine, a);
  EXPECT_EQ(report.num_history_tokens, 128);
  EXPECT_EQ(report.num_recoverable_tokens, 112) << "where the state is still there";
  EXPECT_EQ(loss_of(report, LossReason::kTailEvicted)->group, tail);
  EXPECT_EQ(loss_of(report, LossReason::kTailEvicted)->tokens, 16);
  while (engine.allocator().evict(ObjectKind::kUncompressedTail, 1000) > 0) {
  }
  for (std::uint64_t i = 0; i < 5; ++i) engine.turn(text(220 + i, 129));  // their states lie in the old one's memory
  report = engine.turn(a);
  EXPECT_EQ(report.num_history_tokens, 128) << "entries and index";
  EXPECT_EQ(report.num_recoverable_tokens, 0);
  ASSERT_NE(loss_of(report, LossReason::kTailEvicted), nullptr);
  EXPECT_EQ(loss_of(report, LossReason::kTailEvicted)->tokens, 128);
  EXPECT_EQ(loss_of(report, LossReason::kWindowEvicted), nullptr) << "the windows are not to blame";
  EXPECT_EQ(engine.turn(a).num_recoverable_tokens, 128);
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

// An index that is being made anew is used after its fence only; whoever read by the old one is told.
TEST(Scenario, A6_TheIndexIsNotReadBeforeItsFence) {
  ShadowEngine engine(v4_layout(), 4 * kMiB, keep("all"));
  const auto a = text(4, 129);
  engine.turn(a);
  AdmitResult reader = engine.admit(a);
  ASSERT_EQ(reader.report.num_recoverable_tokens, 128);
  EXPECT_TRUE(reader.sequence->ok());
  EXPECT_GT(engine.allocator().quarantine(a, engine.space(), 96, group(engine, "csa_index"), LossReason::kIndexStale), 0u);
  EXPECT_FALSE(reader.sequence->ok()) << "a running reader of the old index";
  AdmitResult writer = engine.admit(a);
  ASSERT_EQ(writer.report.num_recoverable_tokens, 80);
  StepStamp stamp;
  ASSERT_FALSE(writer.sequence->schedule(112, &stamp));
  writer.sequence->publish(112);
  HitReport report = probe(engine, a);
  EXPECT_EQ(report.num_recoverable_tokens, 80) << "its blocks are allotted, its bytes are not there";
  EXPECT_EQ(loss_of(report, LossReason::kIndexStale)->group, group(engine, "csa_index"));
  writer.sequence.reset();
  engine.turn(a);
  EXPECT_EQ(probe(engine, a).num_recoverable_tokens, 128);
  EXPECT_FALSE(reader.sequence->ok()) << "new objects do not mend what it reads";
  reader.sequence.reset();
  engine.allocator().check_invariants();
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

}  // namespace
}  // namespace hetkv::testing
