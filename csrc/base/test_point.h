// HETKV_TEST_POINT(name): a named place inside an operation where a test may stop the running thread. Without HETKV_TEST_HOOKS it
// compiles to nothing. The callback runs on the thread that reached the point; it must not call back into hetkv.
#pragma once

#ifdef HETKV_TEST_HOOKS
#include <atomic>

namespace hetkv {
inline std::atomic<void (*)(const char*)> test_point_callback{nullptr};
}  // namespace hetkv

#define HETKV_TEST_POINT(name) \
  do { \
    if (auto* hetkv_callback = ::hetkv::test_point_callback.load(std::memory_order_acquire)) hetkv_callback(name); \
  } while (false)
#else
#define HETKV_TEST_POINT(name) static_cast<void>(0)
#endif
