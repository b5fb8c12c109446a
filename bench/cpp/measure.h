// Time of an action: medians of repeats, so that one interruption by another process does not decide.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hetkv::bench {

// Keeps a computed value alive, so that the compiler does not drop the work behind it.
template <class T>
void keep(const T& value) {
  asm volatile("" : : "r,m"(value) : "memory");
}

struct Timing {
  double median_ns = 0, least_ns = 0, most_ns = 0;  // of one operation
  std::size_t repeats = 0;
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

inline Timing timing_of(std::vector<double> samples_ns) {
  std::sort(samples_ns.begin(), samples_ns.end());
  return {samples_ns[samples_ns.size() / 2], samples_ns.front(), samples_ns.back(), samples_ns.size()};
}

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Calls prepare() untimed, then run() timed; run() does `operations` operations.
template <class Prepare, class Run>
Timing measure(std::size_t repeats, std::size_t operations, Prepare&& prepare, Run&& run) {
  std::vector<double> samples;
  samples.reserve(repeats);
  for (std::size_t i = 0; i < repeats; ++i) {
    prepare();
    const auto begin = std::chrono::steady_clock::now();
    run();
    samples.push_back(seconds_since(begin) * 1e9 / static_cast<double>(operations));
  }
  return timing_of(std::move(samples));
}

template <class Run>
Timing measure(std::size_t repeats, std::size_t operations, Run&& run) {
  return measure(repeats, operations, [] {}, run);
}

}  // namespace hetkv::bench
