// ObjectControl: the only place that changes an object word. Every transition goes through one CAS helper and returns a named
// reason. It owns nothing: it is a view of an atomic word that lives in a type-stable pool.
// All methods: thread-safe, lock-free (a failed CAS is another thread's success), no allocation, never block.
#pragma once

#include <atomic>
#include <cstdint>

#include "allocator/object_word.h"
#include "base/check.h"

namespace hetkv {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "object words need lock-free 64-bit atomics");

enum class Transition : std::uint8_t {
  kDone,
  kWrongState,       // the state x operation table forbids it (README.md of this folder)
  kWrongGeneration,  // the object was recycled since the reference was taken
  kPinned,           // eviction: pins > 0
  kHasKids,          // eviction: children > 0
  kFull,             // a count would overflow its field
};

// What must happen after a count went down.
enum class Released : std::uint8_t { kAlive, kLastOfSealed, kReapBroken };

class ObjectControl {
 public:
  explicit ObjectControl(std::atomic<std::uint64_t>& word) : word_(word) {}

  ObjectWord load() const { return {word_.load(std::memory_order_acquire)}; }
  ObjectWord load_relaxed() const { return {word_.load(std::memory_order_relaxed)}; }

  // ABSENT -> FILLING: gen+1, kids 0, pins 1 (the filler's).
  Transition begin_fill(std::uint32_t* gen) {
    return change(
        [](ObjectWord w) { return w.state() == ObjectState::kAbsent ? Transition::kDone : Transition::kWrongState; },
        [](ObjectWord w) { return ObjectWord::make(ObjectState::kFilling, 0, 1, 0, (w.gen() + 1) & ObjectWord::kMaxGen); },
        [gen](ObjectWord w) { *gen = w.gen(); });
  }
  // FILLING -> SEALED, by the filler: becomes visible. The filler's pin stays.
  Transition seal(std::uint32_t gen) {
    return change([gen](ObjectWord w) { return expect(w, ObjectState::kFilling, gen); },
                  [](ObjectWord w) { return w.with_state(ObjectState::kSealed); });
  }
  // FILLING or BROKEN -> ABSENT by the filler that could not seal (its pin is the only one, it never had children).
  Transition abandon_fill(std::uint32_t gen) {
    return change(
        [gen](ObjectWord w) {
          if (w.gen() != gen) return Transition::kWrongGeneration;
          if (w.state() != ObjectState::kFilling && w.state() != ObjectState::kBroken) return Transition::kWrongState;
          if (w.kids() > 0) return Transition::kHasKids;
          return w.pins() == 1 ? Transition::kDone : Transition::kPinned;
        },
        [](ObjectWord w) { return ObjectWord::make(ObjectState::kAbsent, 0, 0, 0, w.gen()); });
  }
  // SEALED -> SEALED, pins+1.
  Transition pin(std::uint32_t gen) {
    return change(
        [gen](ObjectWord w) {
          const Transition t = expect(w, ObjectState::kSealed, gen);
          return t == Transition::kDone && w.pins() == ObjectWord::kMaxPins ? Transition::kFull : t;
        },
        [](ObjectWord w) { return w.add_pins(1); });
  }
  // One more pin on an object that the caller already has pinned: any state.
  Transition pin_again() {
    return change(
        [](ObjectWord w) {
          HETKV_CHECK(w.pins() > 0 || w.kids() > 0, "pin_again without a pin on the object or below it");
          return w.pins() == ObjectWord::kMaxPins ? Transition::kFull : Transition::kDone;
        },
        [](ObjectWord w) { return w.add_pins(1); });
  }
  // pins-1. kReapBroken: the caller must now evict the broken object; kLastOfSealed: nobody pins it any more.
  Released unpin() {
    ObjectWord after;
    change(
        [](ObjectWord w) {
          HETKV_CHECK(w.pins() > 0, "unpin without a pin");
          return Transition::kDone;
        },
        [](ObjectWord w) { return w.add_pins(-1); }, [&after](ObjectWord w) { after = w; });
    return released(after);
  }
  // kids+1, by one who pins this parent (or fills it in the same batch). Fails if the parent is BROKEN.
  Transition add_kid() {
    return change(
        [](ObjectWord w) {
          if (w.state() != ObjectState::kSealed && w.state() != ObjectState::kFilling) return Transition::kWrongState;
          return w.kids() == ObjectWord::kMaxKids ? Transition::kFull : Transition::kDone;
        },
        [](ObjectWord w) { return w.add_kids(1); });
  }
  // kids-1, only after the child's word is ABSENT.
  Released drop_kid() {
    ObjectWord after;
    change(
        [](ObjectWord w) {
          HETKV_CHECK(w.kids() > 0, "child count below zero");
          return Transition::kDone;
        },
        [](ObjectWord w) { return w.add_kids(-1); }, [&after](ObjectWord w) { after = w; });
    return released(after);
  }
  // SEALED or BROKEN -> EVICTING, pins = 0 and kids = 0: stops being visible.
  Transition begin_evict(std::uint32_t gen) {
    return change(
        [gen](ObjectWord w) {
          if (w.gen() != gen) return Transition::kWrongGeneration;
          if (w.state() != ObjectState::kSealed && w.state() != ObjectState::kBroken) return Transition::kWrongState;
          if (w.pins() > 0) return Transition::kPinned;
          return w.kids() > 0 ? Transition::kHasKids : Transition::kDone;
        },
        [](ObjectWord w) { return w.with_state(ObjectState::kEvicting); });
  }
  // EVICTING -> ABSENT, by the evictor, after slot and blocks are gone. The lasting flags stay.
  void finish_evict() {
    change(
        [](ObjectWord w) {
          HETKV_CHECK(w.state() == ObjectState::kEvicting, "finish_evict without begin_evict");
          return Transition::kDone;
        },
        [](ObjectWord w) {
          return ObjectWord::make(ObjectState::kAbsent, w.flags() & ObjectWord::kLastingFlags, 0, 0, w.gen());
        });
  }
  // SEALED or FILLING -> BROKEN, with these flags more: no new pin, no new child; pins and kids stay.
  Transition break_object(std::uint32_t gen, std::uint32_t flags = 0) {
    return change(
        [gen](ObjectWord w) {
          if (w.gen() != gen) return Transition::kWrongGeneration;
          return w.state() == ObjectState::kSealed || w.state() == ObjectState::kFilling ? Transition::kDone
                                                                                         : Transition::kWrongState;
        },
        [flags](ObjectWord w) { return w.with_state(ObjectState::kBroken).with_flags(w.flags() | flags); });
  }
  Transition set_flags(std::uint32_t set, std::uint32_t clear) {
    return change([](ObjectWord) { return Transition::kDone; },
                  [=](ObjectWord w) { return w.with_flags((w.flags() | set) & ~clear); });
  }

 private:
  static Transition expect(ObjectWord w, ObjectState state, std::uint32_t gen) {
    if (w.gen() != gen) return Transition::kWrongGeneration;
    return w.state() == state ? Transition::kDone : Transition::kWrongState;
  }
  static Released released(ObjectWord after) {
    if (after.pins() > 0 || after.kids() > 0) return Released::kAlive;
    if (after.state() == ObjectState::kBroken) return Released::kReapBroken;
    return after.state() == ObjectState::kSealed ? Released::kLastOfSealed : Released::kAlive;
  }
  static constexpr auto kNothing = [](ObjectWord) {};

  // The one CAS helper. Success is acq_rel: what the filler wrote is seen by whoever pins, what readers read is done before
  // the evictor reuses it.
  template <class May, class Next, class Then = decltype(kNothing)>
  Transition change(May may, Next next, Then then = kNothing) {
    ObjectWord seen = load();
    for (;;) {
      if (const Transition t = may(seen); t != Transition::kDone) return t;
      const ObjectWord wanted = next(seen);
      if (word_.compare_exchange_weak(seen.bits, wanted.bits, std::memory_order_acq_rel, std::memory_order_acquire)) {
        then(wanted);
        return Transition::kDone;
      }
    }
  }

  std::atomic<std::uint64_t>& word_;
};

}  // namespace hetkv
