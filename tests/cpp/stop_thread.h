// Stops one thread at a named point of an operation (base/test_point.h) until the test lets it go on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "base/test_point.h"

#ifndef HETKV_TEST_HOOKS
#error "these tests need the allocator built with HETKV_TEST_HOOKS"
#endif

namespace hetkv {

class StoppedThread {
 public:
  // Runs `work` on a thread of its own and waits until it stops at `point` or ends.
  StoppedThread(const char* point, std::function<void()> work) {
    point_ = point;
    reached_ = false;
    resume_ = false;
    ended_ = false;
    test_point_callback.store(&StoppedThread::at_point, std::memory_order_release);
    thread_ = std::thread([work = std::move(work)] {
      victim_ = true;
      work();
      victim_ = false;
      ended_ = true;
    });
    while (!reached_ && !ended_) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ~StoppedThread() { finish(); }
  StoppedThread(const StoppedThread&) = delete;
  StoppedThread& operator=(const StoppedThread&) = delete;

  bool stopped() const { return reached_ && !ended_; }
  void finish() {
    if (!thread_.joinable()) return;
    resume_ = true;
    thread_.join();
    test_point_callback.store(nullptr, std::memory_order_release);
  }

 private:
  static void at_point(const char* name) {
    if (!victim_ || reached_ || std::strcmp(name, point_) != 0) return;
    reached_ = true;
    while (!resume_) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  static inline thread_local bool victim_ = false;
  static inline const char* point_ = "";
  static inline std::atomic<bool> reached_{false}, resume_{false}, ended_{false};
  std::thread thread_;
};

}  // namespace hetkv
