// Why tokens of a prompt cannot be resumed from: the reasons, their names, one loss.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace hetkv {

enum class LossReason : std::uint8_t {
  kGranularity,     // the last, incomplete block of the prompt
  kNotFound,        // no such prefix was ever published here
  kEvicted,         // it was, and was evicted
  kLayout,          // the bytes are laid out for another layout or alignment
  kAbi,             // written or read by another kernel ABI
  kModelVersion,    // written by other weights
  kNotRestored,     // on a lower tier only
  kIncomplete,      // a block of the history set is gone
  kChecksum,        // its bytes did not verify
  kIndexStale,      // the index and what it indexes are not of the same publication
  kGroupMissing,    // the point object was never published at this position
  kWindowEvicted,   // window rows were published and evicted
  kTailEvicted,     // tail state was published and evicted
  kTailMisaligned,  // tail state exists, but only at other positions
  kSnapshotEvicted,
  kLastToken,  // at least one token must be computed to have logits
};
inline constexpr std::size_t kNumLossReasons = 16;

constexpr std::string_view loss_reason_name(LossReason reason) {
  constexpr std::array<std::string_view, kNumLossReasons> names{
      "granularity",  "not_found",       "evicted",          "layout",      "abi",           "model_version",
      "not_restored", "incomplete",      "checksum",         "index_stale", "group_missing", "window_evicted",
      "tail_evicted", "tail_misaligned", "snapshot_evicted", "last_token"};
  return names[static_cast<std::size_t>(reason)];
}

struct Loss {
  LossReason reason = LossReason::kNotFound;
  std::int32_t group = -1;  // group id, or -1 where no single group is to blame
  std::int64_t tokens = 0;  // > 0
};

}  // namespace hetkv
