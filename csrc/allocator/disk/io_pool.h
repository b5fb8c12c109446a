// IoPool: threads that run blocking work. Loads and stores each have one, so that a stalled store never keeps a load waiting.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace hetkv {

class IoPool {
 public:
  // threads: 1 or more; ArgumentError otherwise.
  explicit IoPool(std::size_t threads);
  ~IoPool();  // runs what was posted, also what that posts, then joins
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  // Thread-safe; allocates; never waits for other work. Who posts bounds how much: a spiller by its batch, a restore by its loaders.
  void post(std::function<void()> work);
  std::size_t threads() const { return threads_.size(); }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> work_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace hetkv
