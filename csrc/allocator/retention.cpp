#include "allocator/retention.h"

#include <algorithm>

#include "base/error.h"

namespace hetkv {

RetentionPolicy RetentionPolicy::parse(const std::string& text) {
  if (text == "all") return {Mode::kAll, 0};
  if (text == "turn_ends") return {Mode::kTurnEnds, 0};
  if (text == "none") return {Mode::kNone, 0};
  if (text == "adaptive") return {Mode::kAdaptive, 0};
  if (text.starts_with("every(") && text.ends_with(")") && text.size() > 7 && text.size() < 18) {
    const std::string digits = text.substr(6, text.size() - 7);
    if (std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) {
      const unsigned long n = std::stoul(digits);
      if (n > 0 && n <= 0xFFFFFFFFUL) return {Mode::kEvery, static_cast<std::uint32_t>(n)};
    }
  }
  throw ArgumentError("retention", "'" + text + "'", "'all', 'every(N)' with N >= 1 tokens, 'turn_ends', 'none' or 'adaptive'");
}

std::string RetentionPolicy::to_string() const {
  switch (mode) {
    case Mode::kAll:
      return "all";
    case Mode::kEvery:
      return "every(" + std::to_string(every_tokens) + ")";
    case Mode::kTurnEnds:
      return "turn_ends";
    case Mode::kNone:
      return "none";
    case Mode::kAdaptive:
      return "adaptive";
  }
  return "?";
}

RetentionPlan::RetentionPlan(const RetentionPolicy& policy, const CacheLayout& layout, std::int64_t prompt_tokens,
                             std::uint32_t resume_depth, std::uint32_t branch_depth)
    : policy_(policy), block_size_(layout.block_size()) {
  turn_ends_ = policy.mode == RetentionPolicy::Mode::kTurnEnds || policy.mode == RetentionPolicy::Mode::kAdaptive;
  // The same prompt again must still compute its last token, so its useful end lies below that.
  prompt_depth_ = static_cast<std::uint32_t>(std::max<std::int64_t>(0, prompt_tokens - 1) / block_size_);
  prompt_low_ = turn_end_low(prompt_depth_);
  if (policy.mode == RetentionPolicy::Mode::kAdaptive) {
    if (branch_depth > resume_depth) branch_depth_ = branch_depth;
    // A checkpoint is cheap when it costs no more than about four blocks of history.
    std::uint64_t history = 0, point = 0;
    for (const Group& group : layout.groups()) {
      if (group.history_slot >= 0) history += group.block_bytes * block_size_ / std::max(block_size_, group.spec.compress_ratio);
      if (group.point_slot >= 0) {
        const std::uint32_t far = 1U << 20;
        point += group.block_bytes * (group.spec.retention == Retention::kWindow ? layout.window_nodes(group.id, far) : 1);
      }
    }
    cheap_checkpoints_ = point <= 4 * history;
  }
}

std::uint32_t RetentionPlan::turn_end_low(std::uint32_t last_depth) const {
  if (last_depth == 0) return 0;
  const std::int64_t low = (std::int64_t{last_depth} * block_size_ - 1) / kTurnGrid * kTurnGrid;
  return static_cast<std::uint32_t>(low / block_size_);
}

RetentionPlan::Want RetentionPlan::want(std::uint32_t depth) const {
  if (depth == 0) return Want::kNo;
  const std::int64_t position = std::int64_t{depth} * block_size_;
  switch (policy_.mode) {
    case RetentionPolicy::Mode::kAll:
      return Want::kPublish;
    case RetentionPolicy::Mode::kEvery:  // the first boundary at or after each multiple, which need not be one of block_size
      return position / policy_.every_tokens != (position - block_size_) / policy_.every_tokens ? Want::kPublish : Want::kNo;
    case RetentionPolicy::Mode::kNone:
      return Want::kNo;
    case RetentionPolicy::Mode::kTurnEnds:
    case RetentionPolicy::Mode::kAdaptive:
      break;
  }
  if (depth == prompt_depth_ || depth == prompt_low_) return Want::kPublish;
  if (cheap_checkpoints_ && position % kCheckpointGrid == 0) return Want::kPublish;
  if (depth == branch_depth_) return Want::kProbation;
  return depth > prompt_depth_ ? Want::kRolling : Want::kNo;
}

}  // namespace hetkv
