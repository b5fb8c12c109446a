// Failures that users of other cache systems reported, replayed: each test is named by its class and number, and the line above it
// says what hetkv guarantees instead. Rows that need a lower tier, a draft group, streams or graphs come with those.
//
//   G  identity                G1 G7
//   J  admission and progress  J1 J3 J5 J7 J8 J10
#include <gtest/gtest.h>

#include <vector>

#include "base/error.h"
#include "scenario_engine.h"
#include "stop_thread.h"

namespace hetkv::testing {
namespace {

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
