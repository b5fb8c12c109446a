#include "allocator/hit_report.h"

namespace hetkv {

std::string HitReport::to_string(const CacheLayout& layout) const {
  std::string text = "resume at " + std::to_string(num_recoverable_tokens) + " of " + std::to_string(num_prompt_tokens) +
                     " tokens (hash hit " + std::to_string(num_hash_hit_tokens) + ")";
  const char* separator = "; lost: ";
  for (const Loss& loss : losses()) {
    text += separator + std::to_string(loss.tokens) + " " + std::string(loss_reason_name(loss.reason));
    if (loss.group >= 0) text += " in " + layout.group(static_cast<GroupId>(loss.group)).spec.name;
    separator = ", ";
  }
  return text;
}

}  // namespace hetkv
