// The facade end to end, over real memory (shadow_engine.h): hits, losses and their reasons, eviction, versions, namespaces.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <thread>

#include "shadow_engine.h"

namespace hetkv::testing {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

std::string losses(const HitReport& report) {
  std::string text;
  for (const Loss& loss : report.losses()) {
    text +=
        std::string(loss_reason_name(loss.reason)) + ":" + std::to_string(loss.group) + ":" + std::to_string(loss.tokens) + " ";
  }
  return text;
}

class Layouts : public ::testing::TestWithParam<int> {
 public:
  static CacheLayout layout() {
    switch (GetParam()) {
      case 0:
        return full_layout();
      case 1:
        return window_layout();
      case 2:
        return v4_layout();
      default:
        return snapshot_layout();
    }
  }
};

TEST_P(Layouts, SecondTurnResumesAtTheEndOfTheFirst) {
  ShadowEngine engine(layout(), 4 * kMiB);
  std::mt19937_64 random(1);
  std::vector<std::int32_t> tokens = random_tokens(random, 100);
  const HitReport cold = engine.turn(tokens, 30);
  EXPECT_EQ(cold.num_recoverable_tokens, 0);
  EXPECT_EQ(cold.num_hash_hit_tokens, 0);
  for (std::size_t i = 100; i < 130; ++i) tokens.push_back(static_cast<std::int32_t>(i * 7 % 50000));
  tokens.push_back(1);
  const HitReport warm = engine.turn(tokens, 10);
  EXPECT_EQ(warm.num_hash_hit_tokens, 128) << warm.to_string(engine.allocator().layout());
  EXPECT_EQ(warm.num_recoverable_tokens, 128) << warm.to_string(engine.allocator().layout());
  engine.allocator().check_invariants();
}

TEST_P(Layouts, ProbeForetellsWhatAdmitPromises) {
  ShadowEngine engine(layout(), 4 * kMiB);
  std::mt19937_64 random(2);
  const std::vector<std::int32_t> shared = random_tokens(random, 70);
  for (int i = 0; i < 20; ++i) {
    std::vector<std::int32_t> tokens(shared.begin(), shared.begin() + static_cast<std::ptrdiff_t>(random() % 70 + 1));
    const std::vector<std::int32_t> own = random_tokens(random, random() % 90);
    tokens.insert(tokens.end(), own.begin(), own.end());
    const HitReport forecast = engine.allocator().probe(tokens, engine.space());
    const HitReport promise = engine.turn(tokens, random() % 40);
    EXPECT_EQ(forecast.num_hash_hit_tokens, promise.num_hash_hit_tokens);
    EXPECT_EQ(forecast.num_recoverable_tokens, promise.num_recoverable_tokens);
    EXPECT_EQ(losses(forecast), losses(promise));
  }
  engine.allocator().check_invariants();
}

TEST_P(Layouts, MoreLoadThanFitsStaysRight) {
  AllocatorConfig config;
  config.arena.slab_bytes = 8192;
  ShadowEngine engine(layout(), 160 << 10, config);
  std::mt19937_64 random(3);
  std::vector<std::vector<std::int32_t>> talks(12);
  std::int64_t hits = 0;
  for (int i = 0; i < 400; ++i) {
    auto& talk = talks[random() % talks.size()];
    if (talk.size() > 400) talk.clear();
    const auto more = random_tokens(random, 1 + random() % 60);
    talk.insert(talk.end(), more.begin(), more.end());
    bool refused = false;
    hits += engine.turn(talk, random() % 20, nullptr, &refused).num_recoverable_tokens;
    EXPECT_FALSE(refused);
    if (i % 50 == 0) engine.allocator().check_invariants();
  }
  engine.allocator().check_invariants();
  EXPECT_GT(hits, 0);
  EXPECT_GT(engine.allocator().store().counters().history_evicted.load(), 0U);
}

TEST_P(Layouts, ThreadsOverOneSmallArena) {
  AllocatorConfig config;
  config.arena.slab_bytes = 8192;
  ShadowEngine engine(layout(), 512 << 10, config);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&engine, t] {
      std::mt19937_64 random(static_cast<std::uint64_t>(t) + 10);
      std::mt19937_64 common(99);
      const auto system = random_tokens(common, 96);  // the same for all
      std::vector<std::int32_t> talk = system;
      for (int i = 0; i < 120; ++i) {
        if (talk.size() > 300 || random() % 4 == 0) talk = system;
        const auto more = random_tokens(random, random() % 40 + 1);
        talk.insert(talk.end(), more.begin(), more.end());
        bool refused = false;
        engine.turn(talk, random() % 10, nullptr, &refused);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  engine.allocator().check_invariants();
}

INSTANTIATE_TEST_SUITE_P(All, Layouts, ::testing::Values(0, 1, 2, 3));

TEST(KvAllocator, LastTokenIsComputed) {
  ShadowEngine engine(full_layout(), kMiB);
  std::mt19937_64 random(4);
  const auto tokens = random_tokens(random, 64);
  engine.turn(tokens);
  const HitReport again = engine.turn(tokens);
  EXPECT_EQ(again.num_hash_hit_tokens, 64);
  EXPECT_EQ(again.num_recoverable_tokens, 48);
  EXPECT_EQ(losses(again), "last_token:-1:16 ");
}

TEST(KvAllocator, VersionsComeAndGo) {
  ShadowEngine engine(full_layout(), kMiB);
  std::mt19937_64 random(5);
  const auto tokens = random_tokens(random, 65);
  engine.turn(tokens);
  engine.allocator().set_model_version("1");
  HitReport report = engine.allocator().probe(tokens, engine.space());
  EXPECT_EQ(report.num_hash_hit_tokens, 64);
  EXPECT_EQ(losses(report), "granularity:-1:1 model_version:-1:64 ");
  engine.allocator().set_abi("window_attention", 2);
  report = engine.allocator().probe(tokens, engine.space());
  EXPECT_EQ(losses(report), "granularity:-1:1 abi:-1:64 ");
  engine.allocator().declare_alignment("window_attention", 64);
  report = engine.allocator().probe(tokens, engine.space());
  EXPECT_EQ(losses(report), "granularity:-1:1 layout:-1:64 ");
  // A running sequence keeps its old bytes, and rows written under other weights are not published.
}

TEST(KvAllocator, GoingBackToAnEarlierVersionMatchesAgain) {
  ShadowEngine engine(v4_layout(), 4 * kMiB);
  std::mt19937_64 random(6);
  const auto tokens = random_tokens(random, 65);
  engine.turn(tokens);
  engine.allocator().set_model_version("1");
  EXPECT_EQ(engine.turn(tokens).num_recoverable_tokens, 0);
  engine.allocator().set_model_version("0");
  EXPECT_EQ(engine.turn(tokens).num_recoverable_tokens, 64);
}

TEST(KvAllocator, RowsOfOtherWeightsAreNotPublished) {
  ShadowEngine engine(full_layout(), kMiB);
  std::mt19937_64 random(7);
  const auto tokens = random_tokens(random, 100);
  AdmitResult result = engine.admit(tokens);
  ASSERT_TRUE(result.sequence);
  engine.run(*result.sequence, tokens, 48);
  engine.allocator().set_model_version("1");
  engine.run(*result.sequence, tokens, 100);
  const PublishResult published = result.sequence->publish(96);
  EXPECT_EQ(published.published_tokens, 48);
  EXPECT_EQ(published.outcome, PublishOutcome::kForeignVersion);
}

TEST(KvAllocator, WhatWasDecodedIsNotCanonical) {
  ShadowEngine engine(v4_layout(), 4 * kMiB);
  std::mt19937_64 random(15);
  std::vector<std::int32_t> tokens = random_tokens(random, 80);
  engine.turn(tokens, 30);
  for (std::size_t i = 80; i < 110; ++i) tokens.push_back(static_cast<std::int32_t>(i * 7 % 50000));
  // The prompt's whole blocks were computed one chunk each; the block in which decoding began was not, nor was anything after it.
  AdmitResult prompt = engine.admit(std::span(tokens).first(81));
  EXPECT_EQ(prompt.report.num_recoverable_tokens, 64);
  EXPECT_TRUE(prompt.report.canonical);
  AdmitResult all = engine.admit(tokens);
  EXPECT_EQ(all.report.num_recoverable_tokens, 96);
  EXPECT_FALSE(all.report.canonical);
}

TEST(KvAllocator, NamespacesDoNotMeet) {
  ShadowEngine engine(full_layout(), kMiB);
  std::mt19937_64 random(8);
  const auto tokens = random_tokens(random, 65);
  Namespace* salted = engine.allocator().space({{"salt", "x"}});
  Namespace* adapted = engine.allocator().space({{"adapter", "x"}});
  EXPECT_NE(salted, adapted);
  engine.turn(tokens, 0, salted);
  EXPECT_EQ(engine.turn(tokens, 0, adapted).num_hash_hit_tokens, 0);
  EXPECT_EQ(engine.turn(tokens, 0, salted).num_recoverable_tokens, 64);
  engine.allocator().clear(salted);
  EXPECT_EQ(engine.turn(tokens, 0, salted).num_hash_hit_tokens, 0);
  EXPECT_EQ(engine.turn(tokens, 0, adapted).num_recoverable_tokens, 64);
}

TEST(KvAllocator, QuarantineTakesEverythingBelow) {
  ShadowEngine engine(v4_layout(), 4 * kMiB);
  std::mt19937_64 random(9);
  const auto tokens = random_tokens(random, 129);
  AllocatorConfig config;
  engine.turn(tokens);
  const GroupId index = engine.allocator().layout().find_group("csa_index")->id;
  EXPECT_EQ(engine.allocator().quarantine(tokens, engine.space(), 64, index, LossReason::kIncomplete), 5U);
  const HitReport report = engine.allocator().probe(tokens, engine.space());
  EXPECT_EQ(report.num_hash_hit_tokens, 128);
  EXPECT_EQ(report.num_history_tokens, 48);
  EXPECT_EQ(report.losses()[1].reason, LossReason::kIncomplete);
  EXPECT_EQ(report.losses()[1].group, index);
  engine.allocator().check_invariants();
  engine.turn(tokens);
  EXPECT_EQ(engine.turn(tokens).num_recoverable_tokens, 128);
}

TEST(KvAllocator, ALeaseLearnsOfAQuarantine) {
  ShadowEngine engine(full_layout(), kMiB);
  std::mt19937_64 random(10);
  const auto tokens = random_tokens(random, 65);
  engine.turn(tokens);
  AdmitResult reader = engine.admit(tokens);
  ASSERT_TRUE(reader.sequence->ok());
  engine.allocator().quarantine(tokens, engine.space(), 32, 0, LossReason::kChecksum);
  EXPECT_FALSE(reader.sequence->ok());
  EXPECT_EQ(engine.allocator().probe(tokens, engine.space()).num_recoverable_tokens, 16);
  reader.sequence.reset();
  engine.allocator().check_invariants();
  EXPECT_EQ(engine.allocator().store().live_nodes(), 1U);
}

TEST(KvAllocator, ImpossibleIsRefusedAtOnceAndNoRoomChangesNothing) {
  AllocatorConfig config;
  config.arena.slab_bytes = 4096;
  ShadowEngine engine(full_layout(), 64 << 10, config);
  std::mt19937_64 random(11);
  const auto huge = random_tokens(random, 16 * 1000);
  const AdmitResult never = engine.admit(huge);
  EXPECT_EQ(never.refusal.cause, Refusal::Cause::kImpossible);
  EXPECT_GT(never.refusal.need, never.refusal.cap);
  const auto large = random_tokens(random, 16 * 80);
  AdmitResult first = engine.admit(large);
  ASSERT_TRUE(first.sequence);
  const std::uint64_t used = engine.allocator().arena().kind_bytes(ObjectKind::kFullKv);
  const AdmitResult second = engine.admit(large);
  EXPECT_EQ(second.refusal.cause, Refusal::Cause::kNoRoom);
  EXPECT_EQ(engine.allocator().arena().kind_bytes(ObjectKind::kFullKv), used);
  first.sequence.reset();
  EXPECT_TRUE(engine.admit(large).sequence);
}

TEST(KvAllocator, TheConversationIsNotHashedTwice) {
  ShadowEngine engine(full_layout(), kMiB);
  std::mt19937_64 random(12);
  auto tokens = random_tokens(random, 100);
  AdmitResult first = engine.admit(tokens);
  engine.run(*first.sequence, tokens, 100);
  AdmitOptions options;
  options.previous = first.sequence->hashed_prefix();
  first.sequence->free(true);
  tokens.push_back(5);
  EXPECT_EQ(engine.admit(tokens, options).report.num_recoverable_tokens, 96);
  tokens[50] ^= 1;  // the handle is only a hint: where the text differs it is not used
  EXPECT_EQ(engine.admit(tokens, options).report.num_recoverable_tokens, 48);
}

TEST(KvAllocator, PinnedPrefixSurvivesPressure) {
  AllocatorConfig config;
  config.arena.slab_bytes = 4096;
  ShadowEngine engine(window_layout(), 256 << 10, config);
  std::mt19937_64 random(13);
  const auto system = random_tokens(random, 64);
  engine.turn(system);
  auto longer = system;
  longer.push_back(1);
  engine.turn(longer);
  auto pin = engine.allocator().pin_prefix(system, engine.space());
  EXPECT_EQ(pin->num_tokens(), 64);
  for (int i = 0; i < 60; ++i) engine.turn(random_tokens(random, 300));
  EXPECT_EQ(engine.allocator().probe(longer, engine.space()).num_recoverable_tokens, 64);
  pin.reset();
  for (int i = 0; i < 60; ++i) engine.turn(random_tokens(random, 300));
  EXPECT_EQ(engine.allocator().probe(longer, engine.space()).num_recoverable_tokens, 0);
}

TEST(KvAllocator, QuotaIsPerNamespace) {
  ShadowEngine engine(full_layout(), kMiB);
  std::mt19937_64 random(14);
  Namespace* small = engine.allocator().space({{"salt", "small"}});
  const std::uint64_t block = engine.allocator().layout().group(0).block_bytes;
  engine.allocator().set_quota(small, block * 10);
  const auto mine = random_tokens(random, 65);
  engine.turn(mine);
  for (int i = 0; i < 20; ++i) {
    bool refused = false;
    engine.turn(random_tokens(random, 100), 0, small, &refused);
    EXPECT_FALSE(refused);
    EXPECT_LE(small->used_bytes.load(), static_cast<std::int64_t>(block * 10));
  }
  EXPECT_EQ(engine.allocator().probe(mine, engine.space()).num_recoverable_tokens, 64);
  const AdmitResult over = engine.admit(random_tokens(random, 400), {}, small);
  EXPECT_EQ(over.refusal.cause, Refusal::Cause::kQuota);
  EXPECT_EQ(small->used_bytes.load() >= 0, true);
}

TEST(KvAllocator, NoDeadSequenceKeepsTheRightOfTheOldest) {
  AllocatorConfig config;
  config.arena.slab_bytes = 4096;
  ShadowEngine engine(full_layout(), 64 << 10, config);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&engine, t] {
        std::mt19937_64 random(static_cast<std::uint64_t>(t));
        for (int i = 0; i < 50; ++i) engine.allocator().admit(random_tokens(random, 20), engine.space());
      });
    }
    for (auto& thread : threads) thread.join();
    // All blocks but the scratch block: it fits only if nobody older is thought to be running.
    const std::uint64_t blocks = engine.allocator().arena().bytes() / engine.allocator().layout().group(0).block_bytes - 1;
    std::mt19937_64 random(7);
    ASSERT_TRUE(engine.admit(random_tokens(random, 16 * blocks)).sequence) << round;
  }
}

TEST(KvAllocator, ACapOfAKindIsSharedByItsGroups) {
  const CacheLayout layout = v4_layout();
  AllocatorConfig config;
  config.arena.slab_bytes = 8192;
  const std::uint64_t tail = layout.find_group("csa_tail")->block_bytes;
  const std::uint64_t ring = layout.find_group("hca_tail")->ring_block_bytes + layout.find_group("csa_tail")->ring_block_bytes;
  config.arena.limits[static_cast<std::size_t>(ObjectKind::kUncompressedTail)].cap_bytes = 12 * tail + 4 * ring;
  config.retention = RetentionPolicy::parse("all");
  ShadowEngine engine(layout, 2 * kMiB, config);
  std::mt19937_64 random(16);
  for (int i = 0; i < 20; ++i) engine.turn(random_tokens(random, 100));
  AdmitOptions options;
  options.live_state = true;
  for (int i = 0; i < 5; ++i) {
    // Rings and cached tails are of one kind: cached ones give way.
    EXPECT_TRUE(engine.admit(random_tokens(random, 40), options).sequence);
  }
}

TEST(KvAllocator, ASequenceThatCannotPublishKeepsNoCheckpoints) {
  AllocatorConfig config;
  config.retention = RetentionPolicy::parse("all");
  for (const bool clears : {true, false}) {
    ShadowEngine engine(window_layout(16, 32), 4 * kMiB, config);
    std::mt19937_64 random(17);
    const auto tokens = random_tokens(random, 16 * 100);
    AdmitResult result = engine.admit(tokens);
    engine.run(*result.sequence, tokens, 64);
    if (clears) {
      engine.allocator().clear(engine.space());
    } else {
      engine.allocator().set_model_version("1");
    }
    engine.run(*result.sequence, tokens, 16 * 100);
    const auto table = result.sequence->block_table(1);
    const auto scratch = static_cast<std::int32_t>(engine.allocator().scratch(1));
    EXPECT_LE(std::count_if(table.begin(), table.end(), [&](std::int32_t block) { return block != scratch; }), 8) << clears;
  }
}

TEST(KvAllocator, WhatAClearLeftPinnedIsEvictedForTheQuota) {
  ShadowEngine engine(full_layout(), kMiB);
  std::mt19937_64 random(18);
  const auto tokens = random_tokens(random, 65);
  const std::uint64_t block = engine.allocator().layout().group(0).block_bytes;
  engine.turn(tokens);
  AdmitResult reader = engine.admit(tokens);
  engine.allocator().clear(engine.space());
  reader.sequence.reset();
  EXPECT_GT(engine.space()->used_bytes.load(), 0);
  engine.allocator().set_quota(engine.space(), block * 5);
  EXPECT_TRUE(engine.admit(tokens).sequence);
}

}  // namespace
}  // namespace hetkv::testing
