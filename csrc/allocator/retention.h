// Which positions deserve a checkpoint: the point objects (window, tail, snapshot) without which history cannot be resumed from.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "allocator/layout.h"

namespace hetkv {

struct RetentionPolicy {
  enum class Mode : std::uint8_t { kAll, kEvery, kTurnEnds, kNone, kAdaptive };
  Mode mode = Mode::kAdaptive;
  std::uint32_t every_tokens = 0;  // kEvery

  // "all", "every(N)", "turn_ends", "none", "adaptive". ArgumentError otherwise.
  static RetentionPolicy parse(const std::string& text);
  std::string to_string() const;
};

// The plan of one sequence, made at admission and applied at every block boundary. Depths are in blocks. No allocation.
class RetentionPlan {
 public:
  RetentionPlan() = default;
  // `prompt_tokens`: of this turn. `hash_hit_depth` > `resume_depth`: prefixes branch there, the replay passes over it.
  RetentionPlan(const RetentionPolicy& policy, const CacheLayout& layout, std::int64_t prompt_tokens, std::uint32_t resume_depth,
                std::uint32_t branch_depth);

  enum class Want : std::uint8_t {
    kNo,
    kPublish,    // as soon as it is settled
    kProbation,  // the same, but first to go until it is used
    kRolling,    // only if the turn ends here: keep it staged, publish it at the end of the turn
  };
  Want want(std::uint32_t depth) const;
  bool keeps_turn_ends() const { return turn_ends_; }
  // Depths of the checkpoints of a turn that ends at `last_depth`: two of its prompt, two of its end.
  std::array<std::uint32_t, 4> turn_end_depths(std::uint32_t last_depth) const {
    return {prompt_depth_, prompt_low_, last_depth, turn_end_low(last_depth)};
  }
  // Of two staged depths below the present one, which the end of the turn would still publish.
  std::uint32_t turn_end_low(std::uint32_t last_depth) const;
  static constexpr std::int64_t kTurnGrid = 512;         // tokens: templates and re-tokenised answers change the last tokens
  static constexpr std::int64_t kCheckpointGrid = 2048;  // tokens

 private:
  RetentionPolicy policy_;
  std::uint32_t block_size_ = 1;
  std::uint32_t prompt_depth_ = 0, prompt_low_ = 0, branch_depth_ = 0;
  bool turn_ends_ = false, cheap_checkpoints_ = false;
};

}  // namespace hetkv
