// Fence: proof that device work up to some point is done. A CUDA event; on the CPU immediate; in tests a fake device's.
//
// A Fence is a share of a state that the device's side owns. An empty one has passed. A fence passes or fails once, for ever.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace hetkv {

enum class FenceStatus : std::uint8_t { kPending, kPassed, kFailed };

class FenceState {
 public:
  virtual ~FenceState() = default;
  virtual FenceStatus poll() = 0;  // never waits
  virtual FenceStatus wait() = 0;  // until it is not pending
};

class Fence {
 public:
  Fence() = default;  // passed
  explicit Fence(std::shared_ptr<FenceState> state) : state_(std::move(state)) {}
  // Thread-safe; poll never blocks, wait does.
  FenceStatus poll() const { return state_ ? state_->poll() : FenceStatus::kPassed; }
  FenceStatus wait() const { return state_ ? state_->wait() : FenceStatus::kPassed; }

 private:
  std::shared_ptr<FenceState> state_;
};

// A fence that its owner settles by hand, from any thread.
class ManualFence final : public FenceState {
 public:
  void settle(FenceStatus status) {
    {
      const std::lock_guard guard(mutex_);
      if (status_ != FenceStatus::kPending) return;
      status_ = status;
    }
    settled_.notify_all();
  }
  FenceStatus poll() override {
    const std::lock_guard guard(mutex_);
    return status_;
  }
  FenceStatus wait() override {
    std::unique_lock guard(mutex_);
    settled_.wait(guard, [&] { return status_ != FenceStatus::kPending; });
    return status_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable settled_;
  FenceStatus status_ = FenceStatus::kPending;
};

}  // namespace hetkv
