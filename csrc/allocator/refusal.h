// A refused reservation, with its numbers.
#pragma once

#include <cstdint>

#include "allocator/layout.h"

namespace hetkv {

// A refusal with its numbers; what AdmissionError is made from.
struct Refusal {
  enum class Cause : std::uint8_t { kNone, kImpossible, kNoRoom, kQuota };
  Cause cause = Cause::kNone;
  PoolId pool = 0;
  std::uint64_t need = 0, cap = 0;  // bytes; kQuota: with what the namespace holds
  bool retryable = false;           // kNoRoom, and kQuota where it could fit once sequences end
  explicit operator bool() const { return cause != Cause::kNone; }
};

}  // namespace hetkv
