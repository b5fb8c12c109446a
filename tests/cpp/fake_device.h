// A device that completes its copies when a test says so, in any order, or fails them.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "allocator/copy_engine.h"

namespace hetkv::testing {

class FakeDevice final : public CopyEngine {
 public:
  Fence copy(std::span<const ByteCopy> copies, const Fence& after) override {
    const std::lock_guard guard(mutex_);
    Work work{std::vector<ByteCopy>(copies.begin(), copies.end()), after, std::make_shared<ManualFence>()};
    work_.push_back(work);
    submitted_.notify_all();
    if (running_) complete_locked(work_.size() - 1, FenceStatus::kPassed);
    return Fence(work.fence);
  }
  // Until so many copies were submitted in all.
  void wait_for(std::size_t copies) {
    std::unique_lock guard(mutex_);
    submitted_.wait(guard, [&] { return work_.size() >= copies; });
  }
  std::size_t submitted() {
    const std::lock_guard guard(mutex_);
    return work_.size();
  }
  // Does the i-th copy now; kFailed: does not, and its fence fails.
  void complete(std::size_t i, FenceStatus status = FenceStatus::kPassed) {
    const std::lock_guard guard(mutex_);
    complete_locked(i, status);
  }
  // From now on nothing completes by itself.
  void hold() {
    const std::lock_guard guard(mutex_);
    running_ = false;
  }
  // Completes everything, now and from now on.
  void run() {
    const std::lock_guard guard(mutex_);
    running_ = true;
    for (std::size_t i = 0; i < work_.size(); ++i) complete_locked(i, FenceStatus::kPassed);
  }

 private:
  struct Work {
    std::vector<ByteCopy> copies;
    Fence after;
    std::shared_ptr<ManualFence> fence;
  };
  void complete_locked(std::size_t i, FenceStatus status) {
    Work& work = work_[i];
    if (work.fence->poll() != FenceStatus::kPending) return;
    if (status == FenceStatus::kPassed) {
      for (const ByteCopy& c : work.copies) std::memcpy(c.to, c.from, c.bytes);
    }
    work.fence->settle(status);
  }

  std::mutex mutex_;
  std::condition_variable submitted_;
  std::vector<Work> work_;
  bool running_ = false;
};

}  // namespace hetkv::testing
