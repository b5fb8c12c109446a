// One running request: counters, windows, checkpoints, tables, publication, the batch step, and that everything goes back.
#include "allocator/sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "allocator/kv_allocator.h"
#include "base/error.h"
#include "shadow_engine.h"
#include "stop_thread.h"

namespace hetkv::testing {
namespace {

static_assert(!std::is_copy_constructible_v<Sequence> && !std::is_move_constructible_v<Sequence>);
static_assert(!std::is_copy_constructible_v<Lease> && std::is_nothrow_move_constructible_v<Lease>);

constexpr std::uint64_t kMiB = 1 << 20;

std::vector<std::int32_t> text(std::uint64_t seed, std::size_t n) {
  std::mt19937_64 random(seed);
  return random_tokens(random, n);
}

AllocatorConfig keep(const char* retention) {
  AllocatorConfig config;
  config.retention = RetentionPolicy::parse(retention);
  return config;
}

std::uint64_t live(ShadowEngine& engine, PoolId pool) { return engine.allocator().arena().usage(pool).blocks_reserved - 1; }

TEST(Sequence, CountersMoveInOrderOnly) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(1, 100);
  AdmitResult result = engine.admit(a);
  Sequence& s = *result.sequence;
  StepStamp one, two;
  ASSERT_FALSE(s.schedule(20, &one));
  ASSERT_FALSE(s.schedule(50, &two));
  EXPECT_EQ(s.scheduled(), 50);
  EXPECT_EQ(s.settled(), 0);
  EXPECT_THROW(s.settle(two), ArgumentError) << "the step before has not settled";
  EXPECT_TRUE(s.settle(one));
  EXPECT_TRUE(s.settle(two));
  EXPECT_EQ(s.settled(), 50);
  EXPECT_THROW(s.schedule(49, &one), ArgumentError);
  EXPECT_THROW(s.schedule(101, &one), ArgumentError);
  s.append_one(5);
  EXPECT_FALSE(s.schedule(101, &one));
  StepStamp future = one;
  future.end = 200;
  EXPECT_THROW(s.settle(future), ArgumentError);
  s.free(false);
  EXPECT_THROW(s.schedule(101, &one), ArgumentError);
  EXPECT_THROW(s.publish(16), ArgumentError);
  EXPECT_FALSE(s.wants_point(96));
}

TEST(Sequence, LateResultsOfAnOldEpochAreDropped) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(2, 100);
  AdmitResult result = engine.admit(a);
  Sequence& s = *result.sequence;
  StepStamp late;
  ASSERT_TRUE(engine.run(s, a, 32));
  ASSERT_FALSE(s.schedule(64, &late));
  s.restart_from_settled();
  EXPECT_EQ(s.scheduled(), 32);
  EXPECT_FALSE(s.settle(late));
  EXPECT_EQ(s.settled(), 32);
  EXPECT_EQ(engine.allocator().counters().get(Counters::kStaleSteps), 1u);
  ASSERT_TRUE(engine.run(s, a, 100));
  s.free(true);
  EXPECT_EQ(engine.turn(a).num_recoverable_tokens, 96);
}

TEST(Sequence, WhatMayBeRolledBackIsNotPublished) {
  ShadowEngine engine(window_layout(), kMiB, keep("all"));
  const auto a = text(3, 200);
  AdmitResult result = engine.admit(a);
  Sequence& s = *result.sequence;
  ASSERT_TRUE(engine.run(s, a, 32));
  s.hold_acceptance();
  ASSERT_TRUE(engine.run(s, a, 128));
  EXPECT_EQ(s.accepted(), 32);
  EXPECT_EQ(s.publish(128).published_tokens, 32);
  const auto scratch = static_cast<std::int32_t>(engine.allocator().scratch(1));
  EXPECT_NE(s.block_table(1)[0], scratch) << "the window of what may come back is kept";
  EXPECT_THROW(s.accept(201), ArgumentError);
  s.accept(100);
  EXPECT_EQ(s.publish(128).published_tokens, 96);
  s.accept(50);
  EXPECT_EQ(s.accepted(), 100) << "never lowers";
}

// F2's half of the rule: rows that an unsettled step still reads stay in the table.
TEST(Sequence, WindowsSlideOnSettledNotOnScheduled) {
  ShadowEngine engine(window_layout(16, 40), kMiB, keep("none"));
  const auto a = text(4, 400);
  AdmitOptions options;
  options.chunk_tokens = 400;
  AdmitResult result = engine.admit(a, options);
  Sequence& s = *result.sequence;
  StepStamp first, second;
  ASSERT_FALSE(s.schedule(64, &first));
  ASSERT_FALSE(s.schedule(320, &second));
  s.settle(first);
  const auto scratch = static_cast<std::int32_t>(engine.allocator().scratch(1));
  // Token 64 reads rows [25, 64): blocks 1 to 3.
  EXPECT_EQ(s.block_table(1)[0], scratch);
  for (std::size_t block = 1; block < 20; ++block) EXPECT_NE(s.block_table(1)[block], scratch) << block;
  s.settle(second);
  EXPECT_EQ(s.block_table(1)[16], scratch);
  EXPECT_NE(s.block_table(1)[17], scratch);
}

TEST(Sequence, AWindowCostsTheSameHoweverLongTheTextIs) {
  ShadowEngine engine(window_layout(16, 40), kMiB, keep("none"));
  std::uint64_t most = 0;
  for (const std::size_t n : {200u, 2000u}) {
    const auto a = text(5, n);
    AdmitResult result = engine.admit(a);
    for (std::int64_t upto = 16; upto < static_cast<std::int64_t>(n); upto += 16) {
      ASSERT_TRUE(engine.run(*result.sequence, a, upto));
      if (n == 200) most = std::max(most, live(engine, 1));
      EXPECT_LE(live(engine, 1), most);
    }
    EXPECT_LE(most, 8u);
    result.sequence.reset();
    EXPECT_EQ(live(engine, 1), 0u);
  }
}

TEST(Sequence, CheckpointsAreStagedCommittedAndProved) {
  ShadowEngine engine(v4_layout(), 4 * kMiB, keep("all"));
  const CacheLayout& layout = engine.allocator().layout();
  const auto a = text(6, 100);
  AdmitResult result = engine.admit(a);
  Sequence& s = *result.sequence;
  const GroupId csa = layout.find_group("csa_tail")->id, hca = layout.find_group("hca_tail")->id,
                swa = layout.find_group("swa")->id;
  StepStamp stamp;
  ASSERT_FALSE(s.schedule(64, &stamp));
  EXPECT_THROW(s.stage_point(10), ArgumentError);
  EXPECT_THROW(s.stage_point(0), ArgumentError);
  EXPECT_THROW(s.stage_point(112), ArgumentError) << "not known yet";
  const auto odd = s.stage_point(48), even = s.stage_point(64);
  EXPECT_EQ(odd.size(), 2u) << "both tails: 48 lies inside a window of 32";
  ASSERT_EQ(even.size(), 1u) << "at aligned positions only the overlap";
  EXPECT_EQ(even[0].group, csa);
  EXPECT_EQ(s.stage_point(64)[0].offset, even[0].offset) << "staged once";
  EXPECT_THROW(s.commit_point(64, csa, 48), PositionError);
  EXPECT_THROW(s.commit_point(64, hca, 64), ArgumentError) << "not staged there";
  EXPECT_THROW(s.commit_point(64, swa, 64), ArgumentError) << "windows are not staged";
  EXPECT_THROW(s.commit_point(64, layout.find_group("csa_kv")->id, 64), RouteError);
  EXPECT_THROW(s.commit_point(64, 99, 64), ArgumentError);
  s.commit_point(48, csa, 48);  // hca is missing: the checkpoint at 48 stays incomplete
  s.commit_point(64, csa, 64);
  s.settle(stamp);
  s.publish(64);
  s.free(true);
  EXPECT_EQ(engine.allocator().probe(a, engine.space()).num_recoverable_tokens, 64);
  std::vector<std::int32_t> shorter(a.begin(), a.begin() + 49);
  EXPECT_EQ(engine.allocator().probe(shorter, engine.space()).num_recoverable_tokens, 0);
}

TEST(Sequence, TablesAreAppendOnlyForTheLoserToo) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(7, 100);
  AdmitResult winner = engine.admit(a), loser = engine.admit(a);
  ASSERT_TRUE(engine.run(*loser.sequence, a, 64, false));
  const std::vector<std::int32_t> before(loser.sequence->block_table(0).begin(), loser.sequence->block_table(0).end());
  ASSERT_TRUE(engine.run(*winner.sequence, a, 64));
  ASSERT_TRUE(engine.run(*loser.sequence, a, 100));
  const auto after = loser.sequence->block_table(0);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), after.begin()));
  EXPECT_EQ(loser.sequence->published_tokens(), 96) << "on the winner's nodes";
}

TEST(Sequence, ThePublisherHoldsItsParent) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(8, 100);
  AdmitResult result = engine.admit(a);
  ASSERT_TRUE(engine.run(*result.sequence, a, 16));
  bool done = false;
  StoppedThread publisher("publish: no equal node", [&] { done = engine.run(*result.sequence, a, 64); });
  ASSERT_TRUE(publisher.stopped());
  EXPECT_FALSE(engine.allocator().evict_object(a, engine.space(), 16, 0)) << "no child yet, but its publisher is there";
  EXPECT_EQ(engine.allocator().evict(ObjectKind::kFullKv, 10), 0u);
  publisher.finish();
  EXPECT_TRUE(done);
  EXPECT_EQ(result.sequence->published_tokens(), 64);
  result.sequence->free(true);
  engine.allocator().check_invariants();
}

TEST(Sequence, ABusyNodeIsTriedAgainAtTheNextBoundary) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(9, 100);
  AdmitResult one = engine.admit(a), two = engine.admit(a);
  StoppedThread publisher("publish: before the seal", [&] { engine.run(*one.sequence, a, 16); });
  ASSERT_TRUE(publisher.stopped());
  ASSERT_TRUE(engine.run(*two.sequence, a, 32));
  EXPECT_EQ(two.sequence->published_tokens(), 0);
  EXPECT_EQ(two.sequence->publish(32).outcome, PublishOutcome::kBusy);
  publisher.finish();
  EXPECT_EQ(two.sequence->publish(32).published_tokens, 32);
  EXPECT_EQ(two.sequence->publish(32).outcome, PublishOutcome::kDone);
}

// Stopped between pin and gather: a quarantine takes the chain and another publishes the same text. What the request then gets is
// one chain under its own pin.
TEST(Sequence, AdmissionBesideQuarantineAndRepublication) {
  ShadowEngine engine(window_layout(), kMiB, keep("all"));
  const auto a = text(10, 129);
  engine.turn(a);
  AdmitResult result;
  StoppedThread request("admit: pinned, not gathered", [&] { result = engine.admit(a); });
  ASSERT_TRUE(request.stopped());
  EXPECT_EQ(engine.allocator().quarantine(a, engine.space(), 48, 0, LossReason::kChecksum), 6u);
  engine.turn(a);
  request.finish();
  ASSERT_TRUE(result.sequence);
  EXPECT_TRUE(result.sequence->ok());
  EXPECT_EQ(result.report.num_recoverable_tokens, 128);
  EXPECT_EQ(engine.allocator().evict(ObjectKind::kFullKv, 100), 0u) << "all of it is pinned";
  engine.check_resume(*result.sequence, a);
  result.sequence.reset();
  engine.allocator().check_invariants();
}

TEST(Sequence, SlotsAndPadding) {
  ShadowEngine engine(v4_layout(), 4 * kMiB);
  const CacheLayout& layout = engine.allocator().layout();
  const auto a = text(11, 64);
  AdmitOptions options;
  options.live_state = true;
  AdmitResult result = engine.admit(a, options);
  Sequence& s = *result.sequence;
  ASSERT_TRUE(engine.run(s, a, 64));
  const Group& csa = *layout.find_group("csa_kv");
  std::vector<std::int64_t> rows(16), tokens(64);
  s.slot_mapping(csa.id, 0, 16, rows.data());
  s.token_slots(csa.id, 0, 64, tokens.data());
  const std::int64_t scratch = std::int64_t{engine.allocator().scratch(csa.id)} * csa.entries_per_block;
  for (std::int64_t t = 0; t < 64; ++t) {
    const std::int64_t expected = t % 4 == 3 ? rows[static_cast<std::size_t>(t / 4)] : scratch;
    EXPECT_EQ(tokens[static_cast<std::size_t>(t)], expected) << t;
  }
  for (std::int64_t row = 0; row < 16; ++row) {
    EXPECT_EQ(rows[static_cast<std::size_t>(row)],
              std::int64_t{s.block_table(csa.id)[static_cast<std::size_t>(row / 4)]} * 4 + row % 4);
  }
  EXPECT_THROW(s.slot_mapping(csa.id, 0, 17, rows.data()), ArgumentError);
  EXPECT_THROW(s.slot_mapping(csa.id, 5, 4, rows.data()), ArgumentError);
  const Group& tail = *layout.find_group("csa_tail");
  s.token_slots(tail.id, 0, 64, tokens.data());
  std::set<std::int64_t> ring(tokens.begin(), tokens.end());
  EXPECT_EQ(ring.size(), tail.ring_entries);
  EXPECT_EQ(*ring.begin(), s.live_block(tail.id) * tail.ring_entries);
}

// Blocks that changed hands between kinds must be cleared first.
TEST(Sequence, PublishRefusesWhatWasNotCleared) {
  AllocatorConfig config;
  config.arena.slab_bytes = 4096;
  ShadowEngine engine(window_layout(), 96 << 10, config);
  for (std::uint64_t i = 0; i < 30; ++i) engine.turn(text(100 + i, 400));  // nearly every slab is the history's
  engine.allocator().evict(ObjectKind::kSwaWindow, 1000);
  engine.allocator().evict(ObjectKind::kFullKv, 1000);
  bool seen = false;
  for (std::uint64_t i = 0; i < 40 && !seen; ++i) {
    const auto a = text(200 + i, 1200);
    AdmitOptions options;
    options.chunk_tokens = 1200;  // one step that needs as many window blocks as history blocks
    AdmitResult result = engine.admit(a, options);
    ASSERT_TRUE(result.sequence);
    StepStamp stamp;
    ASSERT_FALSE(result.sequence->schedule(static_cast<std::int64_t>(a.size()), &stamp));
    if (!result.sequence->ranges_to_clear().empty()) {
      seen = true;
      result.sequence->settle(stamp);
      EXPECT_THROW(result.sequence->publish(32), NotClearedError);
      result.sequence->confirm_cleared();
      EXPECT_EQ(result.sequence->publish(32).published_tokens, 32);
    }
  }
  EXPECT_TRUE(seen);
}

TEST(Sequence, ABatchIsScheduledWholeOrNotAtAll) {
  AllocatorConfig config;
  config.arena.slab_bytes = 4096;
  ShadowEngine engine(window_layout(), 64 << 10, config);
  KvAllocator& allocator = engine.allocator();
  const auto a = text(12, 40), b = text(13, 20);
  AdmitResult one = engine.admit(a), two = engine.admit(b);
  std::vector<std::int32_t> table(4 * 64), queries(5), keys(4);
  std::vector<std::int64_t> slots(64);
  StepBuffers buffers;
  buffers.groups[0] = {table.data(), 64, slots.data()};
  buffers.cu_seqlens_q = queries.data();
  buffers.seqused_k = keys.data();
  buffers.padded_sequences = 4;
  buffers.padded_tokens = 64;
  std::array<StepStamp, 4> stamps;
  std::vector<StepItem> items{{one.sequence.get(), 40}, {two.sequence.get(), 20}};
  ASSERT_FALSE(allocator.prepare_step(items, buffers, stamps.data()));
  EXPECT_EQ(queries, (std::vector<std::int32_t>{0, 40, 60, 60, 60}));
  EXPECT_EQ(keys, (std::vector<std::int32_t>{40, 20, 0, 0}));
  EXPECT_EQ(one.sequence->scheduled(), 40);
  const auto scratch = static_cast<std::int32_t>(allocator.scratch(0));
  for (std::size_t i = 0; i < 64; ++i) {
    EXPECT_EQ(table[i], i < 3 ? one.sequence->block_table(0)[i] : scratch);
    EXPECT_EQ(table[128 + i], scratch) << "a row of no sequence";
  }
  std::vector<std::int64_t> expected(60);
  one.sequence->slot_mapping(0, 0, 40, expected.data());
  two.sequence->slot_mapping(0, 0, 20, expected.data() + 40);
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), slots.begin()));
  for (std::size_t i = 60; i < 64; ++i) EXPECT_EQ(slots[i], std::int64_t{scratch} * 16);
  for (const StepStamp& stamp : {stamps[0]}) EXPECT_TRUE(one.sequence->settle(stamp));

  // Refusals change nothing.
  items = {{one.sequence.get(), 0}, {one.sequence.get(), 0}};
  EXPECT_THROW(allocator.prepare_step(items, buffers, stamps.data()), ArgumentError);
  for (int i = 0; i < 2000; ++i) one.sequence->append_one(i);
  buffers.padded_tokens = 16;
  items = {{one.sequence.get(), 17}};
  EXPECT_THROW(allocator.prepare_step(items, buffers, stamps.data()), ArgumentError);
  items = {{one.sequence.get(), 2000}};
  buffers.padded_tokens = 2000;
  EXPECT_THROW(allocator.prepare_step(items, buffers, stamps.data()), ArgumentError) << "the table is too narrow";
  table.resize(4 * 200);
  slots.resize(2000);
  buffers.groups[0] = {table.data(), 200, slots.data()};
  const std::uint64_t before = live(engine, 0);
  items = {{two.sequence.get(), 0}, {one.sequence.get(), 2000}};
  EXPECT_EQ(allocator.prepare_step(items, buffers, stamps.data()).cause, Refusal::Cause::kImpossible);
  EXPECT_EQ(live(engine, 0), before);
  EXPECT_EQ(one.sequence->scheduled(), 40);
  one.sequence.reset();
  two.sequence.reset();
  EXPECT_EQ(engine.space()->used_bytes.load(), 0);
}

TEST(Sequence, ABatchOfSeveralNamespacesIsChargedToEach) {
  ShadowEngine engine(full_layout(), kMiB);
  KvAllocator& allocator = engine.allocator();
  Namespace* small = allocator.space({{"salt", "small"}});
  const std::uint64_t block = allocator.layout().group(0).block_bytes;
  allocator.set_quota(small, 3 * block);
  const auto a = text(14, 16), b = text(15, 16);
  AdmitResult limited = engine.admit(a, {}, small), free = engine.admit(b);
  for (int i = 0; i < 200; ++i) {
    limited.sequence->append_one(i);
    free.sequence->append_one(i);
  }
  std::vector<std::int32_t> queries(3), keys(2);
  StepBuffers buffers;
  buffers.cu_seqlens_q = queries.data();
  buffers.seqused_k = keys.data();
  buffers.padded_sequences = 2;
  buffers.padded_tokens = 400;
  std::array<StepStamp, 2> stamps;
  std::vector<StepItem> items{{limited.sequence.get(), 40}, {free.sequence.get(), 200}};
  EXPECT_FALSE(allocator.prepare_step(items, buffers, stamps.data())) << "the other's growth is not the small one's";
  EXPECT_EQ(small->used_bytes.load(), static_cast<std::int64_t>(3 * block));
  items = {{limited.sequence.get(), 40}, {free.sequence.get(), 1}};
  const std::int64_t others = engine.space()->used_bytes.load();
  EXPECT_EQ(allocator.prepare_step(items, buffers, stamps.data()).cause, Refusal::Cause::kQuota);
  EXPECT_EQ(engine.space()->used_bytes.load(), others);
  limited.sequence.reset();
  free.sequence.reset();
  EXPECT_EQ(small->used_bytes.load(), 0);
  EXPECT_EQ(engine.space()->used_bytes.load(), 0);
}

TEST(Sequence, AClearedNamespaceIsPublishedIntoNoMore) {
  ShadowEngine engine(full_layout(), kMiB);
  const auto a = text(16, 100);
  AdmitResult result = engine.admit(a);
  ASSERT_TRUE(engine.run(*result.sequence, a, 48));
  engine.allocator().clear(engine.space());
  ASSERT_TRUE(engine.run(*result.sequence, a, 100));
  EXPECT_EQ(result.sequence->publish(96).outcome, PublishOutcome::kUnpublishable);
  result.sequence->free(true);
  EXPECT_EQ(engine.allocator().probe(a, engine.space()).num_hash_hit_tokens, 0);
  engine.allocator().check_invariants();
}

}  // namespace
}  // namespace hetkv::testing
