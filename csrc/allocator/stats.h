// Counters of the allocator. Hash hits and recoverable tokens are counted apart: their difference is what other systems lose.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "allocator/loss.h"

namespace hetkv {

// A counter spread over cache lines, so that threads that only read the index do not meet on one. Lock-free; sum() is a snapshot.
class SpreadCounters {
 public:
  static constexpr std::size_t kCounters = 32;
  void add(std::size_t counter, std::uint64_t n) { lines_[mine()].counts[counter].fetch_add(n, std::memory_order_relaxed); }
  std::uint64_t sum(std::size_t counter) const {
    std::uint64_t total = 0;
    for (const Line& line : lines_) total += line.counts[counter].load(std::memory_order_relaxed);
    return total;
  }

 private:
  static constexpr std::size_t kLines = 16;
  struct alignas(64) Line {
    std::array<std::atomic<std::uint64_t>, kCounters> counts{};
  };
  static std::size_t mine() {
    static std::atomic<std::size_t> next{0};
    thread_local const std::size_t line = next.fetch_add(1, std::memory_order_relaxed) % kLines;
    return line;
  }
  std::array<Line, kLines> lines_;
};

class Counters {
 public:
  enum Name : std::size_t {
    kProbes,
    kAdmissions,
    kPromptTokens,
    kHashHitTokens,
    kRecoverableTokens,
    kRefusedImpossible,
    kRefusedNoRoom,
    kRefusedQuota,
    kStaleSteps,
    kForeignSteps,
    kVerifyMismatches,
    kLossFirst,
    kCount = kLossFirst + kNumLossReasons,
  };
  static_assert(kCount <= SpreadCounters::kCounters);
  void add(Name name, std::uint64_t n = 1) { spread_.add(name, n); }
  void add_loss(LossReason reason, std::uint64_t tokens) { spread_.add(kLossFirst + static_cast<std::size_t>(reason), tokens); }
  std::uint64_t get(Name name) const { return spread_.sum(name); }
  std::uint64_t loss(LossReason reason) const { return spread_.sum(kLossFirst + static_cast<std::size_t>(reason)); }

 private:
  SpreadCounters spread_;
};

}  // namespace hetkv
