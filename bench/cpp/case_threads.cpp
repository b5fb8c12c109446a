#include <time.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "bench_layouts.h"
#include "cases.h"
#include "engine.h"

namespace hetkv::bench {
namespace {

struct Rate {
  double per_second = 0;  // operations of all threads, by the wall clock
  double cpu_ns = 0;      // processor time of one operation: what is left of scaling when other programs take the cores
};

double thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

// `threads` threads start together and each repeat `work` for `seconds`.
template <class Work>
Rate rate(std::uint32_t threads, double seconds, Work&& work) {
  std::atomic<std::uint32_t> ready{0};
  std::atomic<bool> go{false}, stop{false};
  std::atomic<std::uint64_t> done{0};
  std::atomic<double> cpu_ns{0};
  std::vector<std::thread> all;
  for (std::uint32_t t = 0; t < threads; ++t) {
    all.emplace_back([&] {
      std::uint64_t mine = 0;
      work();
      ready.fetch_add(1);
      go.wait(false, std::memory_order_acquire);  // asleep: a spinning thread could keep the starter off the cores
      const double begin = thread_cpu_ns();
      for (; !stop.load(std::memory_order_relaxed); ++mine) work();
      cpu_ns.fetch_add(thread_cpu_ns() - begin);
      done.fetch_add(mine);
    });
  }
  while (ready.load() < threads) std::this_thread::yield();
  const auto begin = std::chrono::steady_clock::now();
  go.store(true, std::memory_order_release);
  go.notify_all();
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  const double took = seconds_since(begin);
  stop.store(true);
  for (std::thread& thread : all) thread.join();
  const auto operations = static_cast<double>(std::max<std::uint64_t>(1, done.load()));
  return {operations / took, cpu_ns.load() / operations};
}

template <class Work>
void by_threads(const Plan& plan, const std::string& name, std::uint32_t block, Work&& work, Report& report) {
  // Thread counts alternate within each repeat, and the scaling is the median of ratios of neighbours.
  std::vector<std::vector<Rate>> rates(plan.thread_counts.size());
  for (std::size_t i = 0; i < plan.repeats; ++i) {
    for (std::size_t k = 0; k < plan.thread_counts.size(); ++k)
      rates[k].push_back(rate(plan.thread_counts[k], plan.thread_seconds, work));
  }
  for (std::size_t k = 0; k < plan.thread_counts.size(); ++k) {
    std::vector<double> ns, ratios, cpu, cpu_ratios;
    for (std::size_t i = 0; i < plan.repeats; ++i) {
      ns.push_back(1e9 * plan.thread_counts[k] / rates[k][i].per_second);
      ratios.push_back(rates[k][i].per_second / rates[0][i].per_second);
      cpu.push_back(rates[k][i].cpu_ns);
      cpu_ratios.push_back(plan.thread_counts[k] * rates[0][i].cpu_ns / rates[k][i].cpu_ns);
    }
    Result result{
        .name = name, .layout = "full", .block_size = block, .tokens = plan.lookup_tokens, .threads = plan.thread_counts[k]};
    result.time = timing_of(std::move(ns));  // of one operation on one thread
    result.operations_per_second = 1e9 * plan.thread_counts[k] / result.time.median_ns;
    const double best = *std::max_element(ratios.begin(), ratios.end());
    result.extra = {{"scaling", median(std::move(ratios))},
                    {"best_scaling", best},
                    {"cpu_ns", median(std::move(cpu))},
                    {"scaling_by_cpu_time", median(std::move(cpu_ratios))}};
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
    by_threads(
        plan, "threads_probe", block, [&] { keep(engine.allocator().probe(prompt, engine.space()).num_recoverable_tokens); },
        report);
    by_threads(plan, "threads_warm_admit", block, [&] { keep(engine.admit(prompt)->num_computed_tokens()); }, report);
  }
}

}  // namespace hetkv::bench
