// LockedReservation: the same promises with plain numbers under a fair ticket lock. The oracle of the lock-free one, and a switch
// for bisecting. All methods: thread-safe, no allocation after construction; they wait for the lock, in the order of arrival.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "allocator/reservation.h"

namespace hetkv {

class TicketLock {
 public:
  void lock() noexcept {
    const std::uint32_t mine = next_.fetch_add(1, std::memory_order_relaxed);
    while (serving_.load(std::memory_order_acquire) != mine) std::this_thread::yield();
  }
  void unlock() noexcept { serving_.store(serving_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

 private:
  std::atomic<std::uint32_t> next_{0}, serving_{0};
};

class LockedReservation final : public Reservation {
 public:
  LockedReservation(const ReservationRules& rules, SlabTable& slabs) : Reservation(rules, slabs), free_slabs_(rules.slabs()) {
    moves_.resize(rules.slabs());
  }

  ReserveOutcome reserve(const BlockCounts& need, const BlockCounts& headroom) override {
    const std::lock_guard hold(lock_);
    for (;;) {
      SlabPlan plan = rules_.check(view(), need, headroom);
      if (plan.verdict == SlabPlan::Verdict::kFits) {
        grant(plan);
        for (std::size_t p = 0; p < rules_.num_pools(); ++p) reserved_[p] += need[p];
        return {};
      }
      if (const ReserveOutcome never = rules_.possible(need); never.status == ReserveOutcome::Status::kImpossible) return never;
      if (plan.verdict != SlabPlan::Verdict::kStealFirst || !steal(plan)) return rules_.refuse(plan, need);
    }
  }

  ReservationNumbers numbers() override {
    const std::lock_guard hold(lock_);
    return view();
  }

  std::uint64_t metadata_bytes() const noexcept override { return sizeof(*this) + moves_.size() * sizeof(SlabMove); }

 private:
  ReservationNumbers view() const noexcept {
    ReservationNumbers now;
    for (std::size_t p = 0; p < rules_.num_pools(); ++p) {
      now.used[p] = reserved_[p] - released(p);
      now.owned[p] = owned_[p];
    }
    now.free_slabs = free_slabs_;
    return now;
  }
  void grant(const SlabPlan& plan) noexcept {
    if (plan.grants == 0) return;
    slabs_.find_free(plan.grants, [&](std::uint32_t i, SlabMove m) { moves_[i] = m; });
    std::size_t i = 0;
    for (std::size_t p = 0; p < rules_.num_pools(); ++p) {
      for (std::uint32_t k = 0; k < plan.grant[p]; ++k) {
        moves_[i].pool = static_cast<PoolId>(p);
        slabs_.grant(moves_[i++]);
      }
      owned_[p] += plan.grant[p];
    }
    free_slabs_ -= plan.grants;
  }
  bool steal(SlabPlan& plan) noexcept {
    const std::uint32_t found = slabs_.find_empty(plan, [&](std::uint32_t i, SlabMove m) { moves_[i] = m; });
    if (found < plan.missing) {
      plan.found = found;
      return false;
    }
    for (std::uint32_t i = 0; i < found; ++i) {
      slabs_.retire(moves_[i]);
      if (!slabs_.retired(moves_[i])) continue;
      --owned_[moves_[i].pool];
      ++free_slabs_;
    }
    return true;
  }

  TicketLock lock_;
  std::array<std::uint64_t, kMaxPools> reserved_{}, owned_{};
  std::uint64_t free_slabs_;
  std::vector<SlabMove> moves_;
};

}  // namespace hetkv
