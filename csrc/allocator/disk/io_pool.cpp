#include "allocator/disk/io_pool.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace hetkv {

IoPool::IoPool(std::size_t threads) {
  if (threads == 0 || threads > 256) throw ArgumentError("threads", std::to_string(threads), "1 to 256");
  for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
}

IoPool::~IoPool() {
  {
    const std::lock_guard guard(mutex_);
    stopping_ = true;
  }
  posted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void IoPool::post(std::function<void()> work) {
  {
    const std::lock_guard guard(mutex_);
    work_.push_back(std::move(work));
  }
  posted_.notify_one();
}

void IoPool::run() {
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock guard(mutex_);
      posted_.wait(guard, [&] { return stopping_ || !work_.empty(); });
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    work();
  }
}

}  // namespace hetkv
