// HitReport: up to which token a prompt can resume, and why the rest was lost. The losses telescope: they sum exactly to
// num_prompt_tokens - num_recoverable_tokens.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "allocator/layout.h"
#include "allocator/loss.h"

namespace hetkv {

class HitReport {
 public:
  static constexpr std::size_t kMaxLosses = 8 + 2 * kMaxGroups;

  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_hash_hit_tokens = 0;     // longest prefix known in any version on any tier
  std::int64_t num_history_tokens = 0;      // longest prefix whose history is there in the running version
  std::int64_t num_recoverable_tokens = 0;  // resume here
  std::int64_t num_restored_tokens = 0;     // of these, recoverable only because of lower tiers
  std::uint64_t restore_bytes = 0;          // to load for that, or loaded
  // Whether everything resumed from is canonical: computed in chunks that end at every multiple of block_size. Then the continuation
  // equals a cold prefill of the same schedule bit for bit; else only the conversation that made the state, and others up to rounding.
  bool canonical = true;

  // Appends a loss in the order of the checks; tokens = 0 adds nothing.
  void lose(LossReason reason, std::int32_t group, std::int64_t tokens) {
    if (tokens > 0) losses_[num_losses_++] = Loss{reason, group, tokens};
  }
  std::span<const Loss> losses() const { return {losses_.data(), num_losses_}; }
  // A sentence. Allocates.
  std::string to_string(const CacheLayout& layout) const;

 private:
  std::array<Loss, kMaxLosses> losses_{};
  std::size_t num_losses_ = 0;
};

}  // namespace hetkv
