// Reservation: credits over all pools in one atomic act, and the numbers that it checks. Two implementations behind one interface:
// VectorReservation (lock-free, below) and LockedReservation (locked_reservation.h), its plainly correct twin.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "allocator/reservation_rules.h"
#include "allocator/slab.h"
#include "base/lazy_array.h"

namespace hetkv {

// Owns the counters. Does not own slabs (it moves them through the table) or blocks. Rules and table must outlive it.
class Reservation {
 public:
  Reservation(const ReservationRules& rules, SlabTable& slabs) : rules_(rules), slabs_(slabs) {}
  virtual ~Reservation() = default;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  // Adds need[p] to every pool p, or changes nothing. On kReserved every credit has a block in a slab that its pool owns, and
  // headroom[p] more blocks could still be reserved. Thread-safe; no allocation; whether it may wait says the implementation.
  virtual ReserveOutcome reserve(const BlockCounts& need, const BlockCounts& headroom) = 0;

  // One consistent view: blocks and credits, slabs. Same promises as reserve.
  virtual ReservationNumbers numbers() = 0;
  virtual std::uint64_t metadata_bytes() const noexcept = 0;

  // Credits or blocks that go back; for blocks after SlabTable::put_back. Thread-safe, never blocks.
  void release(PoolId pool, std::uint64_t blocks) noexcept { released_[pool].count.fetch_add(blocks, std::memory_order_release); }

 protected:
  std::uint64_t released(std::size_t pool) const noexcept { return released_[pool].count.load(std::memory_order_acquire); }

  const ReservationRules& rules_;
  SlabTable& slabs_;

 private:
  struct alignas(64) Counter {
    std::atomic<std::uint64_t> count{0};  // monotonic
  };
  std::array<Counter, kMaxPools> released_;
};

// The lock-free reservation. Reserved blocks and owned slabs of every pool, free slabs, and the slabs that are changing hands form
// one vector in a type-stable slot; a head word {slot 32, tag 32} names the current one. To change anything: copy it, check all,
// write a spare slot, swing the head by CAS.
//
// Slabs that change hands are listed in the vector itself. Whoever finds such a list first carries it out (each entry is idempotent)
// and only then makes the next vector. So a thread that stops between its CAS and the hand-over delays nobody, no slab is ever in
// transit for others, and a refusal is exact.
//
// A reservation that needs slabs takes free ones in its own CAS: after it, it cannot fail. If too few are free, empty slabs of
// other pools are first made free, in a vector of its own: owned(h)-1, if the rest still covers used(h); then the slab decides
// (it may be in use by now); the next vector counts it as free, or gives it back to h.
//
// All methods: lock-free, never wait. Spare slots are claimed per operation: a thread stopped inside one keeps one of kSlots.
class VectorReservation final : public Reservation {
 public:
  VectorReservation(const ReservationRules& rules, SlabTable& slabs);

  ReserveOutcome reserve(const BlockCounts& need, const BlockCounts& headroom) override;
  ReservationNumbers numbers() override;
  std::uint64_t metadata_bytes() const noexcept override;

  static constexpr std::uint32_t kSlots = 256;  // many more than threads: this many may stop inside a reservation

 private:
  enum class Moves : std::uint32_t { kNone, kGrant, kRetire };
  struct View {
    std::uint64_t head;
    std::array<std::uint64_t, kMaxPools> reserved, owned;
    std::uint64_t free_slabs;
  };
  struct alignas(64) Busy {
    std::atomic<std::uint32_t> flag{0};
    std::atomic<std::uint32_t> most_moves{0};  // longest list so far, for metadata_bytes; written by who has the slot
  };

  // A consistent view whose slab moves are all carried out, and counted.
  ReservationNumbers settle(View& view) noexcept;
  // Carries out the moves of the vector that `head` names; false if the head has moved, and then they are done.
  bool carry_out(std::uint64_t head) noexcept;
  std::uint32_t claim_slot() noexcept;
  void free_slot(std::uint32_t slot) noexcept { busy_[slot].flag.store(0, std::memory_order_release); }
  bool swing(View& view, std::uint32_t slot) noexcept;
  void write(std::uint32_t slot, const View& view, Moves moves, std::uint32_t count) noexcept;
  // For a reservation that fits: false if another success came between.
  bool commit(View& view, const BlockCounts& need, const SlabPlan& plan) noexcept;
  // Makes plan.missing empty slabs free: false if there are not that many.
  bool steal(View& view, SlabPlan& plan) noexcept;

  std::atomic<std::uint64_t>& number(std::uint32_t slot, std::size_t i) const noexcept { return numbers_[slot * stride_ + i]; }
  std::atomic<std::uint64_t>& move(std::uint32_t slot, std::uint32_t i) const noexcept {
    return moves_[std::size_t{slot} * rules_.slabs() + i];
  }
  std::size_t free_index() const noexcept { return 2 * rules_.num_pools(); }
  std::size_t moves_index() const noexcept { return 2 * rules_.num_pools() + 1; }

  std::size_t stride_;  // of a slot, in words: reserved and owned per pool, free slabs, {moves, how many}; whole cache lines
  std::unique_ptr<std::atomic<std::uint64_t>[]> numbers_;
  LazyArray<std::atomic<std::uint64_t>> moves_;
  std::unique_ptr<Busy[]> busy_;
  alignas(64) std::atomic<std::uint64_t> head_{0};
};

}  // namespace hetkv
