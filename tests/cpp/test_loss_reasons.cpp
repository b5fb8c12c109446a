// A quarantined point object keeps its own reason in reports, until it is published again or its node goes.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "shadow_engine.h"

namespace hetkv::testing {
namespace {

constexpr std::int64_t kEnd = 64;  // four blocks

struct Kind {
  const char* name;
  GroupSpec (*group)();
  LossReason evicted;
};

class LossReasons : public ::testing::TestWithParam<Kind> {
 protected:
  LossReasons()
      : engine(CacheLayout::build("two", 16,
                                  {make_group("kv", ObjectKind::kCompressedKv, Retention::kHistory, 4), GetParam().group()}),
               1 << 18, keep_all()) {
    std::mt19937_64 random(1);
    tokens = random_tokens(random, kEnd + 1);
  }
  static AllocatorConfig keep_all() {
    AllocatorConfig config;
    config.retention = RetentionPolicy::parse("all");
    return config;
  }
  KvAllocator& allocator() { return engine.allocator(); }
  std::uint64_t quarantine(LossReason reason) { return allocator().quarantine(tokens, engine.space(), kEnd, 1, reason); }
  bool evict(GroupId group) { return allocator().evict_object(tokens, engine.space(), kEnd, group); }
  // The one loss in group 1, of a forecast and of an admission.
  void expect_loss(LossReason reason, const char* when) {
    const AdmitResult promise = engine.admit(tokens);
    ASSERT_TRUE(promise.sequence);
    for (const HitReport& report : {allocator().probe(tokens, engine.space()), promise.report}) {
      ASSERT_EQ(report.losses().size(), 2u) << when << ": " << report.to_string(allocator().layout());
      EXPECT_EQ(report.losses()[0].reason, LossReason::kGranularity);
      EXPECT_EQ(report.losses()[1].reason, reason) << when << ": " << report.to_string(allocator().layout());
      EXPECT_EQ(report.losses()[1].group, 1);
    }
  }

  ShadowEngine engine;
  std::vector<std::int32_t> tokens;
};

TEST_P(LossReasons, AQuarantineIsNotAnEviction) {
  for (const LossReason reason :
       {LossReason::kChecksum, LossReason::kIncomplete, LossReason::kIndexStale, LossReason::kNotRestored}) {
    engine.turn(tokens);
    ASSERT_EQ(engine.turn(tokens).num_recoverable_tokens, kEnd);
    ASSERT_EQ(quarantine(reason), 1u);
    expect_loss(reason, "quarantined");
    EXPECT_EQ(quarantine(LossReason::kIncomplete), 0u) << "it is gone";
    EXPECT_FALSE(evict(1));
    expect_loss(reason, "still");
    engine.turn(tokens);
    ASSERT_EQ(engine.turn(tokens).num_recoverable_tokens, kEnd) << "published again";
    ASSERT_TRUE(evict(1));
    expect_loss(GetParam().evicted, "published again, then evicted");
  }
  allocator().check_invariants();
}

TEST_P(LossReasons, TheReasonOutlivesTheLastReader) {
  engine.turn(tokens);
  AdmitResult reader = engine.admit(tokens);
  ASSERT_EQ(reader.sequence->num_computed_tokens(), kEnd);
  ASSERT_EQ(quarantine(LossReason::kChecksum), 1u);
  EXPECT_FALSE(reader.sequence->ok());
  expect_loss(LossReason::kChecksum, "broken, and read");
  reader.sequence.reset();
  expect_loss(LossReason::kChecksum, "broken, and gone");
  allocator().check_invariants();
}

TEST_P(LossReasons, TheReasonGoesWithItsNode) {
  engine.turn(tokens);
  ASSERT_EQ(quarantine(LossReason::kChecksum), 1u);
  ASSERT_TRUE(evict(0)) << "the node";
  // Published again, in the same record, without the checkpoint of its end where one has to be staged.
  const AdmitResult again = engine.admit(tokens);
  ASSERT_TRUE(again.sequence);
  StepStamp stamp;
  ASSERT_FALSE(again.sequence->schedule(kEnd, &stamp));
  again.sequence->confirm_cleared();
  ASSERT_TRUE(again.sequence->settle(stamp));
  ASSERT_EQ(again.sequence->publish(kEnd).published_tokens, kEnd);
  const HitReport report = allocator().probe(tokens, engine.space());
  EXPECT_EQ(report.num_history_tokens, kEnd);
  for (const Loss& loss : report.losses()) {
    EXPECT_NE(loss.reason, LossReason::kChecksum) << report.to_string(allocator().layout());
    EXPECT_NE(loss.reason, GetParam().evicted) << "of this node it never was there";
  }
  allocator().check_invariants();
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, LossReasons,
    ::testing::Values(Kind{"window", [] { return window_group(17); }, LossReason::kWindowEvicted},
                      Kind{"tail", [] { return tail_group("tail", 4, 4); }, LossReason::kTailEvicted},
                      Kind{"snapshot", [] { return make_group("gdn", ObjectKind::kRecurrentState, Retention::kSnapshot); },
                           LossReason::kSnapshotEvicted}),
    [](const ::testing::TestParamInfo<Kind>& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace hetkv::testing
