// The endpoint scan: the largest p at which every group's part of R(p) is there, against a naive reading of R(p), and the losses.
#include "allocator/recoverability.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "shadow_engine.h"

namespace hetkv::testing {
namespace {

using Flags = std::vector<std::uint8_t>;  // [depth]; entry 0 is not used

std::vector<CacheLayout> layouts() {
  std::vector<CacheLayout> all;
  all.push_back(full_layout());
  all.push_back(window_layout());
  all.push_back(window_layout(16, 1));
  all.push_back(window_layout(16, 17));
  all.push_back(window_layout(16, 18));
  all.push_back(v4_layout());
  all.push_back(snapshot_layout());
  all.push_back(CacheLayout::build("windows only", 16, {window_group(20, "a"), window_group(70, "b")}));
  GroupSpec second = make_group("ssm", ObjectKind::kRecurrentState, Retention::kSnapshot);
  all.push_back(CacheLayout::build("everything", 16,
                                   {make_group("full", ObjectKind::kFullKv, Retention::kHistory), window_group(40, "a"),
                                    window_group(100, "b"), tail_group("short", 4, 4), tail_group("long", 64, 0),
                                    make_group("gdn", ObjectKind::kRecurrentState, Retention::kSnapshot), second}));
  return all;
}

// R(p), read row by row.
bool covered(const CacheLayout& layout, std::size_t groups, std::uint32_t e, const Flags& flags) {
  const std::int64_t b = layout.block_size();
  for (std::size_t k = 0; k < groups; ++k) {
    const Group& group = layout.group(layout.point_groups()[k]);
    const RowRange need = layout.need(group.id, e * b);
    if (group.spec.retention == Retention::kWindow) {
      for (std::int64_t row = need.begin; row < need.end; ++row) {
        if ((flags[static_cast<std::size_t>(row / b + 1)] >> k & 1) == 0) return false;
      }
    } else if (!need.empty() && (flags[e] >> k & 1) == 0) {
      return false;
    }
  }
  return true;
}

std::uint32_t naive(const CacheLayout& layout, std::size_t groups, std::uint32_t from, const Flags& flags) {
  for (std::uint32_t e = from; e > 0; --e) {
    if (covered(layout, groups, e, flags)) return e;
  }
  return 0;
}

LossReason naive_reason(const CacheLayout& layout, std::size_t k, std::uint32_t e, std::uint32_t below, const Flags& flags,
                        const Flags& ever) {
  const Group& group = layout.group(layout.point_groups()[k]);
  std::uint32_t missing = e;
  if (group.spec.retention == Retention::kWindow) {
    while ((flags[missing] >> k & 1) != 0) --missing;
    return (ever[missing] >> k & 1) != 0 ? LossReason::kWindowEvicted : LossReason::kGroupMissing;
  }
  const bool was = (ever[e] >> k & 1) != 0;
  if (group.spec.retention == Retention::kSnapshot) return was ? LossReason::kSnapshotEvicted : LossReason::kGroupMissing;
  if (was) return LossReason::kTailEvicted;
  return below > 0 ? LossReason::kTailMisaligned : LossReason::kGroupMissing;
}

TEST(EndpointScan, AgreesWithANaiveReadingOfTheRequirement) {
  std::mt19937_64 random(1);
  for (const CacheLayout& layout : layouts()) {
    const EndpointScan scan(layout);
    const std::size_t points = layout.point_groups().size();
    std::uint64_t positive = 0;
    for (int round = 0; round < 1500; ++round) {
      const auto d = static_cast<std::uint32_t>(random() % 14);
      const std::uint64_t dense = 1 + random() % 20;
      Flags flags(d + 1), ever(d + 1);
      for (std::uint32_t depth = 1; depth <= d; ++depth) {
        for (std::size_t k = 0; k < points; ++k) {
          const auto bit = static_cast<std::uint8_t>(1U << k);
          if (random() % dense != 0 || dense == 1) flags[depth] |= bit;
          if ((flags[depth] & bit) != 0 || random() % 2 == 0) ever[depth] |= bit;
        }
      }
      const auto flags_at = [&](std::uint32_t at) {
        EXPECT_TRUE(at >= 1 && at <= d) << at;
        return flags[at];
      };
      for (std::uint32_t from = 0; from <= d; ++from) {
        for (std::uint32_t groups = 0; groups <= points; ++groups) {
          ASSERT_EQ(scan.largest(from, groups, flags_at), naive(layout, groups, from, flags))
              << layout.model() << " from " << from << ", groups " << groups;
        }
      }

      HitReport report;
      report.num_prompt_tokens = static_cast<std::int64_t>(d * 16 + random() % 17);
      report.num_history_tokens = d * 16;
      if (d > 0 && random() % 8 == 0) report.num_prompt_tokens = d * 16;  // an aligned prompt: the last token is at stake
      const std::uint32_t end = scan.run(d, report, flags_at, [&](std::uint32_t at) { return ever[at]; });
      std::vector<Loss> expected;
      std::uint32_t e = d;
      for (std::size_t k = 0; k < points; ++k) {
        const std::uint32_t below = naive(layout, k + 1, e, flags);
        if (below < e)
          expected.push_back({naive_reason(layout, k, e, below, flags, ever), layout.point_groups()[k], (e - below) * 16});
        e = below;
      }
      if (e * 16 >= report.num_prompt_tokens && e > 0) {
        const std::uint32_t below = naive(layout, points, static_cast<std::uint32_t>((report.num_prompt_tokens - 1) / 16), flags);
        expected.push_back({LossReason::kLastToken, -1, (e - below) * 16});
        e = below;
      }
      ASSERT_EQ(end, e) << layout.model();
      ASSERT_EQ(report.num_recoverable_tokens, e * 16);
      ASSERT_EQ(report.losses().size(), expected.size()) << layout.model();
      std::int64_t sum = 0;
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(report.losses()[i].reason, expected[i].reason) << layout.model();
        EXPECT_EQ(report.losses()[i].group, expected[i].group);
        EXPECT_EQ(report.losses()[i].tokens, expected[i].tokens);
        sum += report.losses()[i].tokens;
      }
      EXPECT_EQ(d * 16 - sum, report.num_recoverable_tokens) << "the losses telescope";
      positive += e > 0;
    }
    EXPECT_GT(positive, 100u) << layout.model();
  }
}

// Legal ends {1,3} and {1,2} meet at 1, {3} and {2} nowhere, {3} and {3} at 3: an intersection, never a minimum of maxima.
TEST(EndpointScan, C1_IntersectionOfLegalEnds) {
  GroupSpec second = make_group("ssm", ObjectKind::kRecurrentState, Retention::kSnapshot);
  const CacheLayout layout = CacheLayout::build("two states", 16,
                                                {make_group("full", ObjectKind::kFullKv, Retention::kHistory),
                                                 make_group("gdn", ObjectKind::kRecurrentState, Retention::kSnapshot), second});
  auto end = [&](std::vector<std::uint32_t> a, std::vector<std::uint32_t> b) {
    Flags flags(4);
    for (const std::uint32_t e : a) flags[e] |= 1;
    for (const std::uint32_t e : b) flags[e] |= 2;
    HitReport report;
    report.num_prompt_tokens = 49;
    return EndpointScan(layout).run(
        3, report, [&](std::uint32_t at) { return flags[at]; }, [&](std::uint32_t) -> std::uint8_t { return 3; });
  };
  EXPECT_EQ(end({1, 3}, {1, 2}), 1u);
  EXPECT_EQ(end({3}, {2}), 0u);
  EXPECT_EQ(end({3}, {3}), 3u);
  EXPECT_EQ(end({1, 2, 3}, {}), 0u);
}

// No group can enlarge what an earlier check allowed, whatever the flags say.
TEST(EndpointScan, NoGroupEnlargesTheCandidate) {
  std::mt19937_64 random(2);
  for (const CacheLayout& layout : layouts()) {
    for (int round = 0; round < 300; ++round) {
      Flags flags(12);
      for (auto& f : flags) f = static_cast<std::uint8_t>(random() | random());
      std::uint32_t before = 11;
      for (std::uint32_t groups = 0; groups <= layout.point_groups().size(); ++groups) {
        const std::uint32_t e = EndpointScan(layout).largest(11, groups, [&](std::uint32_t at) { return flags[at]; });
        EXPECT_LE(e, before);
        before = e;
      }
    }
  }
}

// Where no window is left, the scan reads a bounded number of slots per depth.
TEST(EndpointScan, CostIsLinearWhereNoWindowIsLeft) {
  const CacheLayout layout = window_layout(16, 16 * 64);
  const std::uint32_t d = 20000;
  for (const std::uint32_t hole : {0u, 2u, 63u, 64u, 200u}) {
    std::uint64_t reads = 0;
    auto flags_at = [&](std::uint32_t at) -> std::uint8_t {
      ++reads;
      return hole == 0 || at % hole == 0 ? 0 : 1;
    };
    EndpointScan(layout).largest(d, 1, flags_at);
    EXPECT_LE(reads, 2 * d) << hole;
  }
}

}  // namespace
}  // namespace hetkv::testing
