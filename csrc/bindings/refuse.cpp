#include "bindings/refuse.h"

#include <string>

#include "base/error.h"

namespace hetkv {

void throw_if_refused(const Refusal& refusal, const CacheLayout& layout, const char* operation) {
  if (!refusal) return;
  const std::string numbers = " needs " + std::to_string(refusal.need) + " bytes, the cap is " + std::to_string(refusal.cap);
  if (refusal.cause == Refusal::Cause::kQuota) {
    throw AdmissionError("namespace", refusal.need, refusal.cap, true,
                         std::string(operation) + " refused: the namespace is over its quota:" + numbers);
  }
  const bool may_retry = refusal.cause == Refusal::Cause::kNoRoom;
  const std::string kind(kind_name(layout.pools()[refusal.pool].kind));
  throw AdmissionError(
      kind, refusal.need, refusal.cap, may_retry,
      std::string(operation) + " refused: " + kind + numbers +
          (may_retry ? ": nothing more can be evicted now, try again when a sequence ends" : ": it can never fit"));
}

}  // namespace hetkv
