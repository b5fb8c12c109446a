// CopyEngine: moves bytes between the memories of two tiers, ordered by fences.
//
// Who submits a copy keeps source and target (pins, holds) until its fence has passed or failed; the engine keeps nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "allocator/fence.h"

namespace hetkv {

// Addresses as the device that copies sees them.
struct ByteCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::uint64_t bytes = 0;
};

class CopyEngine {
 public:
  virtual ~CopyEngine() = default;
  // Starts the copies once `after` has passed; the returned fence passes when all bytes are in place, and fails if `after` fails.
  // The spans are read before it returns. Thread-safe.
  virtual Fence copy(std::span<const ByteCopy> copies, const Fence& after) = 0;
};

// Both memories are the process's own: the caller's thread copies, and waits for `after`.
class HostCopyEngine final : public CopyEngine {
 public:
  Fence copy(std::span<const ByteCopy> copies, const Fence& after) override {
    if (after.wait() == FenceStatus::kFailed) return after;
    for (const ByteCopy& c : copies) std::memcpy(c.to, c.from, c.bytes);
    return {};
  }
};

}  // namespace hetkv
