// The endpoint scan: the largest p at which every point group's part of R(p) is present, and which group cost what.
//
// Pure: reads flags through a callable, owns nothing, allocates nothing. History is settled before (prefix-closed: one depth says it
// all); here windows, tails and snapshots are intersected at the *same* p. No group can ever enlarge the candidate.
#pragma once

#include <cstdint>
#include <optional>

#include "allocator/hit_report.h"
#include "allocator/layout.h"

namespace hetkv {

class EndpointScan {
 public:
  struct NeverBroken {
    std::optional<LossReason> operator()(std::uint32_t, std::uint32_t) const { return std::nullopt; }
  };

  explicit EndpointScan(const CacheLayout& layout) : layout_(layout) {}

  // Largest depth <= from whose R(depth * block_size) is covered in the first `groups` point groups; 0 always is.
  // flags_at(depth) gives the point flags of the node at that depth (1-based). Each window node is read O(1) times.
  template <class FlagsAt>
  std::uint32_t largest(std::uint32_t from, std::uint32_t groups, FlagsAt&& flags_at) const {
    std::uint32_t e = from;
    while (e > 0) {
      const std::uint32_t next = first_gap(e, groups, flags_at);
      if (next == e) return e;
      e = next;
    }
    return 0;
  }

  // Runs all point checks and the last-token rule from history depth `d`; adds the losses and sets num_recoverable_tokens.
  // ever_at(depth): the point sets that were published at that node once. broken_at(depth, set): why that object of it was
  // quarantined, if it was.
  template <class FlagsAt, class EverAt, class BrokenAt = NeverBroken>
  std::uint32_t run(std::uint32_t d, HitReport& report, FlagsAt&& flags_at, EverAt&& ever_at, BrokenAt&& broken_at = {}) const {
    const std::int64_t b = layout_.block_size();
    std::uint32_t e = d;
    const auto points = layout_.point_groups();
    for (std::uint32_t k = 0; k < points.size(); ++k) {
#ifdef HETKV_PLANT_MIN_OF_MAXIMA
      std::uint32_t below = e;
      while (below > 0 && (flags_at(below) >> k & 1) == 0) --below;
#else
      const std::uint32_t below = largest(e, k + 1, flags_at);
#endif
      if (below < e) report.lose(reason(points[k], k, e, below, flags_at, ever_at, broken_at), points[k], (e - below) * b);
      e = below;
    }
    const auto last = static_cast<std::uint32_t>(report.num_prompt_tokens > 0 ? (report.num_prompt_tokens - 1) / b : 0);
    if (e > last) {
      const std::uint32_t below = largest(last, static_cast<std::uint32_t>(points.size()), flags_at);
      report.lose(LossReason::kLastToken, -1, (e - below) * b);
      e = below;
    }
    report.num_recoverable_tokens = e * b;
    return e;
  }

 private:
  // e if the first `groups` groups are complete at e, else the next smaller depth that could be.
  template <class FlagsAt>
  std::uint32_t first_gap(std::uint32_t e, std::uint32_t groups, FlagsAt&& flags_at) const {
    const auto points = layout_.point_groups();
    for (std::uint32_t k = 0; k < groups; ++k) {
      const Group& group = layout_.group(points[k]);
      if (group.spec.retention == Retention::kWindow) {
        const std::uint32_t span = layout_.window_nodes(group.id, e);
        for (std::uint32_t j = e; j > e - span; --j) {
          if ((flags_at(j) >> k & 1) == 0) return j - 1;  // every endpoint in [j, e] needs node j
        }
      } else if (layout_.point_needed(group.id, e) && (flags_at(e) >> k & 1) == 0) {
        return e - 1;
      }
    }
    return e;
  }

  template <class FlagsAt, class EverAt, class BrokenAt>
  LossReason reason(GroupId id, std::uint32_t k, std::uint32_t e, std::uint32_t below, FlagsAt&& flags_at, EverAt&& ever_at,
                    BrokenAt&& broken_at) const {
    const Group& group = layout_.group(id);
    std::uint32_t missing = e;
    if (group.spec.retention == Retention::kWindow) {
      while (missing > 1 && (flags_at(missing) >> k & 1) != 0) --missing;
    }
    if (const std::optional<LossReason> broken = broken_at(missing, k)) return *broken;
    const bool was_there = (ever_at(missing) >> k & 1) != 0;
    switch (group.spec.retention) {
      case Retention::kWindow:
        return was_there ? LossReason::kWindowEvicted : LossReason::kGroupMissing;
      case Retention::kTail:
        if (was_there) return LossReason::kTailEvicted;
        return below > 0 ? LossReason::kTailMisaligned : LossReason::kGroupMissing;
      case Retention::kSnapshot:
        return was_there ? LossReason::kSnapshotEvicted : LossReason::kGroupMissing;
      case Retention::kHistory:
        break;
    }
    return LossReason::kGroupMissing;
  }

  const CacheLayout& layout_;
};

}  // namespace hetkv
