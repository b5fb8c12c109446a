#include <atomic>
#include <memory>
#include <thread>

#include "bench_layouts.h"
#include "cases.h"
#include "engine.h"

namespace hetkv::bench {
namespace {

// Operations a second of `threads` threads that start together and each repeat `work` for `seconds`.
template <class Work>
double rate(std::uint32_t threads, double seconds, Work&& work) {
  std::atomic<std::uint32_t> ready{0};
  std::atomic<bool> go{false}, stop{false};
  std::atomic<std::uint64_t> done{0};
  std::vector<std::thread> all;
  for (std::uint32_t t = 0; t < threads; ++t) {
    all.emplace_back([&] {
      std::uint64_t mine = 0;
      work();
      ready.fetch_add(1);
      while (!go.load(std::memory_order_acquire)) {
      }
      for (; !stop.load(std::memory_order_relaxed); ++mine) work();
      done.fetch_add(mine);
    });
  }
  while (ready.load() < threads) std::this_thread::yield();
  const auto begin = std::chrono::steady_clock::now();
  go.store(true, std::memory_order_release);
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double took = seconds_since(begin);
  stop.store(true);
  for (std::thread& thread : all) thread.join();
  return static_cast<double>(done.load()) / took;
}

template <class Work>
void by_threads(const Plan& plan, const std::string& name, std::uint32_t block, Work&& work, Report& report) {
  // Thread counts alternate within each repeat, and the scaling is the median of ratios of neighbours.
  std::vector<std::vector<double>> rates(plan.thread_counts.size());
  for (std::size_t i = 0; i < plan.repeats; ++i) {
    for (std::size_t k = 0; k < plan.thread_counts.size(); ++k) rates[k].push_back(rate(plan.thread_counts[k], plan.thread_seconds, work));
  }
  for (std::size_t k = 0; k < plan.thread_counts.size(); ++k) {
    std::vector<double> ns, ratios;
    for (std::size_t i = 0; i < plan.repeats; ++i) {
      ns.push_back(1e9 * plan.thread_counts[k] / rates[k][i]);
      ratios.push_back(rates[k][i] / rates[0][i]);
    }
    std::sort(ratios.begin(), ratios.end());
    Result result{.name = name, .layout = "full", .block_size = block, .tokens = plan.lookup_tokens, .threads = plan.thread_counts[k]};
    result.time = timing_of(std::move(ns));  // of one operation on one thread
    result.operations_per_second = 1e9 * plan.thread_counts[k] / result.time.median_ns;
    result.extra = {{"scaling", ratios[ratios.size() / 2]}, {"best_scaling", ratios.back()}};
    report.add(std::move(result));
  }
}

}  // namespace

void measure_threads(const Plan& plan, Report& report) {
  for (const std::uint32_t block : plan.block_sizes) {
    const CacheLayout layout = make_layout("full", block);
    const auto blocks = static_cast<std::uint64_t>(plan.lookup_tokens / block);
    Engine engine(layout, history_bytes(layout, 2 * blocks + 8192));
    const auto prompt = make_prompt(static_cast<std::size_t>(plan.lookup_tokens) + 8, 7);
    engine.serve(prompt);
    by_threads(plan, "threads_probe", block, [&] { keep(engine.allocator().probe(prompt, engine.space()).num_recoverable_tokens); }, report);
    by_threads(plan, "threads_warm_admit", block, [&] { keep(engine.admit(prompt)->num_computed_tokens()); }, report);
  }
}

}  // namespace hetkv::bench
