#include "bindings/refuse.h"

#include <string>

#include "base/error.h"

namespace hetkv {

void throw_if_refused(const Refusal& refusal, const CacheLayout& layout, const char* operation) {
  if (!refusal) return;
  const std::string numbers = " needs " + std::to_string(refusal.need) + " bytes, the cap is " + std::to_string(refusal.cap);
  if (refusal.cause == Refusal::Cause::kQuota) {
    // Refused with all of it in use: `need` counts what is held now, so it may still fit later.
    throw AdmissionError("namespace", refusal.need, refusal.cap, refusal.retryable,
                         std::string(operation) + " refused: over the namespace's quota:" + numbers);
  }
  const std::string kind(kind_name(layout.pools()[refusal.pool].kind));
  throw AdmissionError(
      kind, refusal.need, refusal.cap, refusal.retryable,
      std::string(operation) + " refused: " + kind + numbers +
          (refusal.retryable ? ": nothing more can be evicted now, try again when a sequence ends" : ": it can never fit"));
}

}  // namespace hetkv
