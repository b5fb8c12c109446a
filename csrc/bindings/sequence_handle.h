// SequenceHandle: a Sequence as Python holds it.
//
// Owns the sequence and a share of its allocator, so that neither the order of garbage collection nor a lost Cache object can end
// the allocator first. Calls release the GIL, so two Python threads could meet inside one sequence, which is not thread-safe: every
// call enters through Use, and the second of two threads gets an error instead of a race.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <utility>

#include "allocator/kv_allocator.h"
#include "allocator/restore.h"
#include "base/error.h"
#include "bindings/refuse.h"

namespace hetkv {

class SequenceHandle {
 public:
  SequenceHandle(std::shared_ptr<KvAllocator> allocator, std::unique_ptr<Sequence> sequence)
      : allocator_(std::move(allocator)), sequence_(std::move(sequence)) {}

  // The right to call the sequence, for one scope. Thread-safe; does not allocate; never waits.
  class Use {
   public:
    // RuntimeError if another thread is inside; ArgumentError if the sequence was freed.
    explicit Use(SequenceHandle& handle) : Use(handle, true) {}
    // Also of a freed sequence: for free() itself.
    static Use even_if_freed(SequenceHandle& handle) { return Use(handle, false); }
    Use(Use&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (handle_ != nullptr) handle_->busy_.store(false, std::memory_order_release);
    }
    Sequence* operator->() const { return handle_->sequence_.get(); }
    Sequence* get() const { return handle_->sequence_.get(); }

   private:
    Use(SequenceHandle& handle, bool must_live) {
      if (handle.busy_.exchange(true, std::memory_order_acquire))
        throw std::runtime_error("sequence used from two threads at once");
      handle_ = &handle;
      if (!must_live) return;
      try {
        handle.finish_restore();
        if (!handle.sequence_->live()) throw ArgumentError("sequence", "freed", "a sequence that was not freed");
      } catch (...) {
        handle.busy_.store(false, std::memory_order_release);
        throw;
      }
    }
    SequenceHandle* handle_ = nullptr;
  };

  const std::shared_ptr<KvAllocator>& allocator() const { return allocator_; }
  // What admission decided; constant once it is no longer pending, so readable at any time, also after free().
  const HitReport& report() {
    settle();
    return sequence_->report();
  }
  std::int64_t num_computed_tokens() {
    settle();
    return sequence_->num_computed_tokens();
  }
  // The restore that it still waits for, or null. Thread-safe.
  std::shared_ptr<Restore> restore() {
    const Use use = Use::even_if_freed(*this);
    return use->restore();
  }

 private:
  void settle() {
    const Use use = Use::even_if_freed(*this);
    if (use->live()) finish_restore();
  }
  // Inside a Use. PendingError while the restore runs; AdmissionError if there is no room for what could not be restored.
  void finish_restore() {
    if (!sequence_->pending()) return;
    if (!sequence_->restore()->done()) throw PendingError();
    throw_if_refused(allocator_->finish_restore(*sequence_), allocator_->layout(), "admit");
  }

  std::shared_ptr<KvAllocator> allocator_;  // first: ends last
  std::unique_ptr<Sequence> sequence_;
  std::atomic<bool> busy_{false};
};

}  // namespace hetkv
