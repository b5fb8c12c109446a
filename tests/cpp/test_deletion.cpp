// Takes every object of a published prefix away in turn, by eviction and by quarantine, and requires the hit to shrink to exactly what
// a naive reading of R(p) leaves, with the right reason and group; the bytes that are resumed from stay right, and one more turn heals.
#include <gtest/gtest.h>

#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <vector>

#include "shadow_engine.h"

namespace hetkv::testing {
namespace {

constexpr std::int64_t kBlocks = 7;

CacheLayout everything_layout() {
  GroupSpec index = make_group("index", ObjectKind::kIndexerState, Retention::kHistory, 4);
  index.indexes = "kv";
  return CacheLayout::build(
      "everything", 16,
      {make_group("kv", ObjectKind::kCompressedKv, Retention::kHistory, 4), index, window_group(17, "narrow"),
       window_group(60, "wide"), tail_group("tail", 4, 4), tail_group("long_tail", 64, 0),
       make_group("gdn", ObjectKind::kRecurrentState, Retention::kSnapshot)});
}

struct Row {
  const char* name;
  CacheLayout (*layout)();
};

// What is there: history up to a depth, and (group, depth) of every point object.
struct Model {
  const CacheLayout& layout;
  std::int64_t history = kBlocks;
  std::set<std::pair<GroupId, std::int64_t>> points;

  bool covered(GroupId id, std::int64_t e) const {
    const RowRange need = layout.need(id, e * 16);
    if (need.empty()) return true;
    if (layout.group(id).spec.retention != Retention::kWindow) return points.count({id, e}) != 0;
    for (std::int64_t row = need.begin; row < need.end; ++row) {
      if (points.count({id, row / 16 + 1}) == 0) return false;
    }
    return true;
  }
  // Largest end at or below `from` that the first `groups` point groups allow.
  std::int64_t largest(std::int64_t from, std::size_t groups) const {
    for (std::int64_t e = from; e > 0; --e) {
      bool all = true;
      for (std::size_t k = 0; k < groups && all; ++k) all = covered(layout.point_groups()[k], e);
      if (all) return e;
    }
    return 0;
  }
  std::int64_t hit() const { return largest(history, layout.point_groups().size()); }
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

class Deletion : public ::testing::TestWithParam<Row> {
 protected:
  struct Setup {
    explicit Setup(const CacheLayout& layout) : engine(layout, 1 << 20, keep_all()) {
      std::mt19937_64 random(5);
      tokens = random_tokens(random, kBlocks * 16 + 1);
      engine.turn(tokens);
    }
    static AllocatorConfig keep_all() {
      AllocatorConfig config;
      config.retention = RetentionPolicy::parse("all");
      return config;
    }
    ShadowEngine engine;
    std::vector<std::int32_t> tokens;
  };
  static Model complete(const CacheLayout& layout) {
    Model model{layout, kBlocks, {}};
    for (const GroupId id : layout.point_groups()) {
      for (std::int64_t e = 1; e <= kBlocks; ++e) {
        if (layout.group(id).spec.retention == Retention::kWindow || !layout.need(id, e * 16).empty())
          model.points.emplace(id, e);
      }
    }
    return model;
  }
  // The report must say what the model says: hash hit, hit, and one loss per check.
  static void check(Setup& setup, const Model& model, const std::vector<Loss>& identity, bool evicted_points,
                    const std::string& what, std::optional<LossReason> quarantined = {}) {
    const CacheLayout& layout = model.layout;
    std::vector<Loss> expected{{LossReason::kGranularity, -1, 1}};
    expected.insert(expected.end(), identity.begin(), identity.end());
    std::int64_t e = model.history;
    for (std::size_t k = 0; k < layout.point_groups().size(); ++k) {
      const GroupId id = layout.point_groups()[k];
      const std::int64_t below = model.largest(e, k + 1);
      LossReason reason = LossReason::kWindowEvicted;
      if (layout.group(id).spec.retention == Retention::kTail) reason = LossReason::kTailEvicted;
      if (layout.group(id).spec.retention == Retention::kSnapshot) reason = LossReason::kSnapshotEvicted;
      if (quarantined) reason = *quarantined;
      EXPECT_TRUE(below == e || evicted_points) << what;
      if (below < e) expected.push_back({reason, id, (e - below) * 16});
      e = below;
    }
    const HitReport forecast = setup.engine.allocator().probe(setup.tokens, setup.engine.space());
    const AdmitResult promise = setup.engine.admit(setup.tokens);  // checks every row of R(p)
    ASSERT_TRUE(promise.sequence) << what;
    for (const HitReport* report : {&forecast, &promise.report}) {
      EXPECT_EQ(report->num_recoverable_tokens, model.hit() * 16) << what;
      EXPECT_EQ(report->num_history_tokens, model.history * 16) << what;
      ASSERT_EQ(report->losses().size(), expected.size()) << what << ": " << report->to_string(layout);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(report->losses()[i].reason, expected[i].reason) << what << ": " << report->to_string(layout);
        EXPECT_EQ(report->losses()[i].group, expected[i].group) << what;
        EXPECT_EQ(report->losses()[i].tokens, expected[i].tokens) << what;
      }
    }
  }
  static void heals(Setup& setup, const std::string& what) {
    setup.engine.turn(setup.tokens);
    EXPECT_EQ(setup.engine.turn(setup.tokens).num_recoverable_tokens, kBlocks * 16) << what;
    setup.engine.allocator().check_invariants();
  }
};

TEST_P(Deletion, EveryPointObjectInTurn) {
  const CacheLayout layout = GetParam().layout();
  const Model whole = complete(layout);
  ASSERT_EQ(whole.hit(), kBlocks);
  for (const auto& [id, e] : whole.points) {
    for (const bool evict : {true, false}) {
      Setup setup(layout);
      check(setup, whole, {}, false, "nothing deleted");
      const std::string what =
          std::string(evict ? "evicted " : "broken ") + layout.group(id).spec.name + " at " + std::to_string(e);
      KvAllocator& allocator = setup.engine.allocator();
      if (evict) {
        EXPECT_TRUE(allocator.evict_object(setup.tokens, setup.engine.space(), e * 16, id)) << what;
        EXPECT_FALSE(allocator.evict_object(setup.tokens, setup.engine.space(), e * 16, id)) << what;
      } else {
        EXPECT_EQ(allocator.quarantine(setup.tokens, setup.engine.space(), e * 16, id, LossReason::kChecksum), 1u) << what;
      }
      Model left = whole;
      left.points.erase({id, e});
      check(setup, left, {}, true, what, evict ? std::nullopt : std::optional(LossReason::kChecksum));
      heals(setup, what);
    }
  }
}

TEST_P(Deletion, EveryHistoryObjectInTurn) {
  const CacheLayout layout = GetParam().layout();
  const Model whole = complete(layout);
  for (const GroupId id : layout.history_groups()) {
    for (std::int64_t e = 1; e <= kBlocks; ++e) {
      const std::string what = layout.group(id).spec.name + " at " + std::to_string(e);
      {  // An object leaves only when no child needs it.
        Setup setup(layout);
        EXPECT_EQ(setup.engine.allocator().evict_object(setup.tokens, setup.engine.space(), e * 16, id), e == kBlocks) << what;
        Model left = whole;
        if (e == kBlocks) left.history = kBlocks - 1;
        std::vector<Loss> lost;
        if (e == kBlocks) lost.push_back({LossReason::kEvicted, -1, 16});
        check(setup, left, lost, false, what);
        heals(setup, what);
      }
      for (const LossReason reason : {LossReason::kChecksum, LossReason::kIncomplete, LossReason::kIndexStale}) {
        Setup setup(layout);
        EXPECT_EQ(setup.engine.allocator().quarantine(setup.tokens, setup.engine.space(), e * 16, id, reason),
                  static_cast<std::uint64_t>(kBlocks - e + 1));
        Model left = whole;
        left.history = e - 1;
        check(setup, left, {{reason, id, (kBlocks - e + 1) * 16}}, false, "broken " + what);
        heals(setup, what);
      }
    }
  }
}

// Several at once, at random.
TEST_P(Deletion, AnySubset) {
  const CacheLayout layout = GetParam().layout();
  const Model whole = complete(layout);
  std::mt19937_64 random(6);
  for (int round = 0; round < 30; ++round) {
    Setup setup(layout);
    Model left = whole;
    const std::uint64_t rare = 1 + random() % 8;
    for (const auto& [id, e] : whole.points) {
      if (random() % rare != 0) continue;
      EXPECT_TRUE(setup.engine.allocator().evict_object(setup.tokens, setup.engine.space(), e * 16, id));
      left.points.erase({id, e});
    }
    check(setup, left, {}, true, "round " + std::to_string(round));
    heals(setup, "round " + std::to_string(round));
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Deletion,
                         ::testing::Values(Row{"full", [] { return full_layout(); }},
                                           Row{"window", [] { return window_layout(); }}, Row{"v4", [] { return v4_layout(); }},
                                           Row{"snapshot", [] { return snapshot_layout(); }},
                                           Row{"everything", [] { return everything_layout(); }}),
                         [](const ::testing::TestParamInfo<Row>& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace hetkv::testing
