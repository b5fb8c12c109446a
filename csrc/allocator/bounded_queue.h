// BoundedQueue: many producers, many consumers, a fixed number of places; a full or empty queue refuses instead of waiting.
//
// A place carries a turn number: a producer may write it when the number equals its ticket, a consumer when it is one more. After
// D. Vyukov's bounded MPMC queue. Lock-free in the sense that a stopped thread holds up only its own place and what comes after it.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/check.h"

namespace hetkv {

template <class T>
class BoundedQueue {
 public:
  // places: a power of two.
  explicit BoundedQueue(std::size_t places) : mask_(places - 1), places_(std::make_unique<Place[]>(places)) {
    HETKV_CHECK(std::has_single_bit(places), "a queue of a power of two of places");
    for (std::size_t i = 0; i < places; ++i) places_[i].turn.store(i, std::memory_order_relaxed);
  }

  // Thread-safe, no allocation, never waits.
  bool try_push(const T& value) {
    std::size_t ticket = head_.load(std::memory_order_relaxed);
    for (;;) {
      Place& place = places_[ticket & mask_];
      const std::size_t turn = place.turn.load(std::memory_order_acquire);
      if (turn == ticket) {
        if (!head_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed)) continue;
        place.value = value;
        place.turn.store(ticket + 1, std::memory_order_release);
        return true;
      }
      if (turn < ticket) return false;  // full
      ticket = head_.load(std::memory_order_relaxed);
    }
  }
  bool try_pop(T& value) {
    std::size_t ticket = tail_.load(std::memory_order_relaxed);
    for (;;) {
      Place& place = places_[ticket & mask_];
      const std::size_t turn = place.turn.load(std::memory_order_acquire);
      if (turn == ticket + 1) {
        if (!tail_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_relaxed)) continue;
        value = place.value;
        place.turn.store(ticket + mask_ + 1, std::memory_order_release);
        return true;
      }
      if (turn < ticket + 1) return false;  // empty
      ticket = tail_.load(std::memory_order_relaxed);
    }
  }

 private:
  struct Place {
    std::atomic<std::size_t> turn{0};
    T value{};
  };
  const std::size_t mask_;
  std::unique_ptr<Place[]> places_;
  alignas(64) std::atomic<std::size_t> head_{0};
  alignas(64) std::atomic<std::size_t> tail_{0};
};

}  // namespace hetkv
