#include "allocator/reservation.h"

#include "base/check.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

constexpr std::uint64_t make_head(std::uint32_t slot, std::uint64_t tag) { return (tag << 32) | slot; }
constexpr std::uint32_t head_slot(std::uint64_t head) { return static_cast<std::uint32_t>(head); }
constexpr std::uint64_t head_tag(std::uint64_t head) { return head >> 32; }

// Where a thread starts to look for a spare slot: its own place, so that threads seldom meet.
std::uint32_t first_slot() noexcept {
  static std::atomic<std::uint32_t> threads{0};
  thread_local const std::uint32_t mine = threads.fetch_add(1, std::memory_order_relaxed) * 7 + 1;
  return mine;
}

}  // namespace

VectorReservation::VectorReservation(const ReservationRules& rules, SlabTable& slabs)
    : Reservation(rules, slabs), stride_((2 * rules.num_pools() + 2 + 7) / 8 * 8),
      numbers_(new std::atomic<std::uint64_t>[kSlots * stride_]()), moves_(std::size_t{kSlots} * rules.slabs()),
      busy_(new Busy[kSlots]) {
  busy_[0].flag.store(1, std::memory_order_relaxed);  // the current vector
  number(0, free_index()).store(rules.slabs(), std::memory_order_relaxed);
}

// Loads are acquire and stores release (not relaxed with fences, which ThreadSanitizer cannot follow): whoever reads a number from a
// reused slot also sees that the head has moved.
ReservationNumbers VectorReservation::settle(View& view) noexcept {
  const std::size_t pools = rules_.num_pools();
  ReservationNumbers now;
  for (;;) {
    view.head = head_.load(std::memory_order_acquire);
    const std::uint32_t slot = head_slot(view.head);
    for (std::size_t p = 0; p < pools; ++p) view.reserved[p] = number(slot, p).load(std::memory_order_acquire);
    for (std::size_t p = 0; p < pools; ++p) view.owned[p] = number(slot, pools + p).load(std::memory_order_acquire);
    view.free_slabs = number(slot, free_index()).load(std::memory_order_acquire);
    const std::uint64_t moves = number(slot, moves_index()).load(std::memory_order_acquire);
    // Released after reserved: a release of something reserved later shows as a moved head.
    for (std::size_t p = 0; p < pools; ++p) now.used[p] = view.reserved[p] - released(p);
    HETKV_TEST_POINT("reserve: copied");
    if (static_cast<Moves>(moves >> 32) != Moves::kNone) {
      if (!carry_out(view.head)) continue;
      if (static_cast<Moves>(moves >> 32) == Moves::kRetire) {
        for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(moves); ++i) {
          const SlabMove m = SlabMove::unpack(move(slot, i).load(std::memory_order_acquire));
          if (head_.load(std::memory_order_acquire) != view.head) break;  // m may belong to another vector
          if (slabs_.retired(m))
            ++view.free_slabs;
          else
            ++view.owned[m.pool];
        }
      }
    }
    if (head_.load(std::memory_order_acquire) != view.head) continue;
    for (std::size_t p = 0; p < pools; ++p) now.owned[p] = view.owned[p];
    now.free_slabs = view.free_slabs;
    return now;
  }
}

bool VectorReservation::carry_out(std::uint64_t head) noexcept {
  const std::uint32_t slot = head_slot(head);
  const std::uint64_t moves = number(slot, moves_index()).load(std::memory_order_acquire);
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(moves); ++i) {
    const SlabMove m = SlabMove::unpack(move(slot, i).load(std::memory_order_acquire));
    // Only a committed entry may be carried out; it then holds for ever, as the slab's gen makes it harmless once it is done.
    if (head_.load(std::memory_order_acquire) != head) return false;
    HETKV_TEST_POINT("reserve: before a slab moves");
    if (static_cast<Moves>(moves >> 32) == Moves::kGrant)
      slabs_.grant(m);
    else
      slabs_.retire(m);
  }
  return head_.load(std::memory_order_acquire) == head;
}

std::uint32_t VectorReservation::claim_slot() noexcept {
  for (std::uint32_t i = first_slot();; ++i) {
    Busy& busy = busy_[i % kSlots];
    std::uint32_t idle = 0;
    if (busy.flag.load(std::memory_order_relaxed) == 0 &&
        busy.flag.compare_exchange_strong(idle, 1, std::memory_order_acquire, std::memory_order_relaxed))
      return i % kSlots;
  }
}

void VectorReservation::write(std::uint32_t slot, const View& view, Moves moves, std::uint32_t count) noexcept {
  const std::size_t pools = rules_.num_pools();
  for (std::size_t p = 0; p < pools; ++p) number(slot, p).store(view.reserved[p], std::memory_order_release);
  for (std::size_t p = 0; p < pools; ++p) number(slot, pools + p).store(view.owned[p], std::memory_order_release);
  number(slot, free_index()).store(view.free_slabs, std::memory_order_release);
  std::atomic<std::uint32_t>& most = busy_[slot].most_moves;
  if (most.load(std::memory_order_relaxed) < count) most.store(count, std::memory_order_relaxed);
  number(slot, moves_index()).store((std::uint64_t{static_cast<std::uint32_t>(moves)} << 32) | count, std::memory_order_release);
}

bool VectorReservation::swing(View& view, std::uint32_t slot) noexcept {
  HETKV_TEST_POINT("reserve: before the head moves");
  const std::uint32_t old = head_slot(view.head);
  const std::uint64_t next = make_head(slot, head_tag(view.head) + 1);
#ifdef HETKV_PLANT_TORN_VECTOR
  std::uint64_t seen = head_.load(std::memory_order_acquire);
  const bool won = head_slot(seen) == old && head_.compare_exchange_strong(seen, next, std::memory_order_acq_rel);
#else
  const bool won = head_.compare_exchange_strong(view.head, next, std::memory_order_acq_rel, std::memory_order_relaxed);
#endif
  free_slot(won ? old : slot);
  if (won) view.head = next;
  return won;
}

bool VectorReservation::commit(View& view, const BlockCounts& need, const SlabPlan& plan) noexcept {
  const std::uint32_t slot = claim_slot();
  std::uint32_t count = 0;
  if (plan.grants > 0) {
    PoolId pool = 0;
    std::uint32_t left = plan.grant[0];
    count = slabs_.find_free(plan.grants, [&](std::uint32_t i, SlabMove m) {
      while (left == 0) left = plan.grant[++pool];
      --left;
      m.pool = pool;
      move(slot, i).store(m.pack(), std::memory_order_release);
    });
    if (count < plan.grants) {  // the head has moved
      free_slot(slot);
      return false;
    }
    view.free_slabs -= plan.grants;
  }
  for (std::size_t p = 0; p < rules_.num_pools(); ++p) {
    view.reserved[p] += need[p];
    view.owned[p] += plan.grant[p];
  }
  write(slot, view, count > 0 ? Moves::kGrant : Moves::kNone, count);
  if (!swing(view, slot)) return false;
  HETKV_TEST_POINT("reserve: reserved, slabs not moved");
  if (count > 0) carry_out(view.head);
  return true;
}

bool VectorReservation::steal(View& view, SlabPlan& plan) noexcept {
  const std::uint32_t slot = claim_slot();
  const std::uint32_t count = slabs_.find_empty(plan, [&](std::uint32_t i, SlabMove m) {
    move(slot, i).store(m.pack(), std::memory_order_release);
    --view.owned[m.pool];
  });
  if (count < plan.missing) {
    plan.found = count;
    free_slot(slot);
    return false;
  }
  write(slot, view, Moves::kRetire, count);
  if (swing(view, slot)) HETKV_TEST_POINT("reserve: stealing");
  return true;
}

ReserveOutcome VectorReservation::reserve(const BlockCounts& need, const BlockCounts& headroom) {
  for (;;) {
    View view;
    const ReservationNumbers now = settle(view);
    SlabPlan plan = rules_.check(now, need, headroom);
    if (plan.verdict == SlabPlan::Verdict::kFits) {
      if (commit(view, need, plan)) return {};
      continue;
    }
    if (const ReserveOutcome never = rules_.possible(need); never.status == ReserveOutcome::Status::kImpossible) return never;
    const std::uint64_t head = view.head;
    if (plan.verdict == SlabPlan::Verdict::kStealFirst && steal(view, plan)) continue;
    if (head_.load(std::memory_order_acquire) == head) return rules_.refuse(plan, need);
  }
}

ReservationNumbers VectorReservation::numbers() {
  View view;
  return settle(view);
}

std::uint64_t VectorReservation::metadata_bytes() const noexcept {
  std::uint64_t bytes = sizeof(*this) + kSlots * (stride_ * sizeof(std::uint64_t) + sizeof(Busy));
  for (std::uint32_t slot = 0; slot < kSlots; ++slot)
    bytes += busy_[slot].most_moves.load(std::memory_order_relaxed) * sizeof(std::uint64_t);
  return bytes;
}

}  // namespace hetkv
