// Which block boundaries deserve a checkpoint: one table per policy.
#include "allocator/retention.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "base/error.h"
#include "shadow_engine.h"

namespace hetkv::testing {
namespace {

using Want = RetentionPlan::Want;
using Depths = std::set<std::uint32_t>;

// Windows of `window` tokens over blocks of 64: a checkpoint costs ceil((window - 1) / 64) blocks, a block of history one.
CacheLayout layout_of(std::uint32_t window) { return window_layout(64, window); }

Depths wanted(const RetentionPlan& plan, Want want, std::uint32_t upto = 200) {
  Depths depths;
  for (std::uint32_t d = 0; d <= upto; ++d) {
    if (plan.want(d) == want) depths.insert(d);
  }
  return depths;
}

Depths all_above(std::uint32_t first, std::uint32_t upto = 200) {
  Depths depths;
  for (std::uint32_t d = first; d <= upto; ++d) depths.insert(d);
  return depths;
}

TEST(RetentionPolicy, NamesGoThereAndBack) {
  for (const char* text : {"all", "every(1)", "every(512)", "every(4294967295)", "turn_ends", "none", "adaptive"}) {
    EXPECT_EQ(RetentionPolicy::parse(text).to_string(), text);
  }
  EXPECT_EQ(RetentionPolicy{}.to_string(), "adaptive") << "the default";
  for (const char* text : {"", "All", "every", "every()", "every(0)", "every(-1)", "every(4294967296)", "every(1e3)", "every(5",
                           "every(99999999999999)", "adaptive "}) {
    EXPECT_THROW(RetentionPolicy::parse(text), ArgumentError) << text;
  }
}

TEST(RetentionPlan, AllNoneAndEvery) {
  const CacheLayout layout = layout_of(128);
  const RetentionPlan all(RetentionPolicy::parse("all"), layout, 1000, 0, 0);
  EXPECT_EQ(wanted(all, Want::kPublish), all_above(1));
  EXPECT_FALSE(all.keeps_turn_ends());
  const RetentionPlan none(RetentionPolicy::parse("none"), layout, 1000, 0, 9);
  EXPECT_EQ(wanted(none, Want::kNo), all_above(0));
  const RetentionPlan every(RetentionPolicy::parse("every(256)"), layout, 1000, 0, 9);
  EXPECT_EQ(wanted(every, Want::kPublish, 20), (Depths{4, 8, 12, 16, 20}));
  // Not a multiple of the block: the first boundary at or after each multiple of 100 tokens.
  const RetentionPlan uneven(RetentionPolicy::parse("every(100)"), layout, 1000, 0, 0);
  EXPECT_EQ(wanted(uneven, Want::kPublish, 12), (Depths{2, 4, 5, 7, 8, 10, 11}));
  const RetentionPlan dense(RetentionPolicy::parse("every(1)"), layout, 1000, 0, 0);
  EXPECT_EQ(wanted(dense, Want::kPublish), all_above(1));
}

TEST(RetentionPlan, TwoPointsAtTheEndOfTheTurn) {
  const CacheLayout layout = layout_of(128);
  struct Row {
    std::int64_t prompt;
    Depths points;
  };
  // The last whole block below the prompt's last token, and the last multiple of 512 tokens (8 blocks) strictly below that.
  for (const Row& row :
       {Row{1, {}}, Row{64, {}}, Row{65, {1}}, Row{128, {1}}, Row{129, {2}}, Row{512, {7}}, Row{513, {8}}, Row{576, {8}},
        Row{577, {8, 9}}, Row{1000, {8, 15}}, Row{1024, {8, 15}}, Row{1025, {8, 16}}, Row{1089, {16, 17}}, Row{5000, {72, 78}}}) {
    for (const char* policy : {"turn_ends", "adaptive"}) {
      const RetentionPlan plan(RetentionPolicy::parse(policy), layout_of(1000), row.prompt, 0, 0);
      EXPECT_EQ(wanted(plan, Want::kPublish), row.points) << policy << " " << row.prompt;
      EXPECT_TRUE(plan.keeps_turn_ends());
      // After the prompt every boundary may become the end of the turn.
      EXPECT_EQ(wanted(plan, Want::kRolling), all_above(static_cast<std::uint32_t>((row.prompt - 1) / 64) + 1))
          << policy << " " << row.prompt;
    }
  }
  const RetentionPlan plan(RetentionPolicy::parse("turn_ends"), layout, 1000, 0, 0);
  EXPECT_EQ(plan.turn_end_low(0), 0u);
  EXPECT_EQ(plan.turn_end_low(8), 0u);
  EXPECT_EQ(plan.turn_end_low(9), 8u);
  EXPECT_EQ(plan.turn_end_low(16), 8u);
  EXPECT_EQ(plan.turn_end_low(17), 16u);
}

TEST(RetentionPlan, OneProbationPointWherePrefixesBranch) {
  const RetentionPolicy adaptive;
  const CacheLayout layout = layout_of(1000);
  EXPECT_EQ(wanted(RetentionPlan(adaptive, layout, 5000, 10, 20), Want::kProbation), (Depths{20}));
  EXPECT_EQ(wanted(RetentionPlan(adaptive, layout, 5000, 20, 20), Want::kProbation), (Depths{})) << "nothing was replayed";
  EXPECT_EQ(wanted(RetentionPlan(adaptive, layout, 5000, 20, 10), Want::kProbation), (Depths{}));
  EXPECT_EQ(wanted(RetentionPlan(adaptive, layout, 5000, 10, 72), Want::kProbation), (Depths{})) << "a turn end already";
  EXPECT_EQ(wanted(RetentionPlan(RetentionPolicy::parse("turn_ends"), layout, 5000, 10, 20), Want::kProbation), (Depths{}));
}

TEST(RetentionPlan, CheapCheckpointsEvery2048Tokens) {
  const RetentionPolicy adaptive;
  // Up to four blocks of history: a window of 257 tokens reads four blocks of 64, of 258 five.
  EXPECT_EQ(wanted(RetentionPlan(adaptive, layout_of(257), 9000, 0, 0), Want::kPublish, 140),
            (Depths{32, 64, 96, 128, 136, 140}));
  EXPECT_EQ(wanted(RetentionPlan(adaptive, layout_of(258), 9000, 0, 0), Want::kPublish, 140), (Depths{136, 140}));
  EXPECT_EQ(wanted(RetentionPlan(RetentionPolicy::parse("turn_ends"), layout_of(257), 9000, 0, 0), Want::kPublish, 140),
            (Depths{136, 140}));
  // They go on below the prompt's end too.
  EXPECT_EQ(RetentionPlan(adaptive, layout_of(257), 100, 0, 0).want(64), Want::kPublish);
}

TEST(RetentionPlan, DepthZeroIsNeverACheckpoint) {
  for (const char* policy : {"all", "every(64)", "turn_ends", "none", "adaptive"}) {
    for (const std::int64_t prompt : {1, 64, 5000}) {
      EXPECT_EQ(RetentionPlan(RetentionPolicy::parse(policy), layout_of(128), prompt, 0, 0).want(0), Want::kNo);
    }
  }
}

}  // namespace
}  // namespace hetkv::testing
