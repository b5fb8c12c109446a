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
  double cores = 0;       // processor time of all threads over wall time: less than the threads when others take the cores
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
  return {static_cast<double>(done.load()) / took, cpu_ns.load() / (took * 1e9)};
}

// Whether every thread had a core to itself, as far as there are cores. Otherwise threads take turns and cannot meet, and their
// rate says nothing about scaling, neither good nor bad.
bool undisturbed(const Rate& rate, std::uint32_t threads) {
  return rate.cores >= 0.95 * std::min(threads, std::max(1U, std::thread::hardware_concurrency()));
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
    const std::uint32_t threads = plan.thread_counts[k];
    std::vector<double> ns, ratios, cores, clean;
    for (std::size_t i = 0; i < plan.repeats; ++i) {
      const Rate &one = rates[0][i], &all = rates[k][i];
      if (one.per_second == 0 || all.per_second == 0) continue;  // never ran in its time
      ns.push_back(1e9 * threads / all.per_second);
      ratios.push_back(all.per_second / one.per_second);
      cores.push_back(all.cores);
      if (undisturbed(one, plan.thread_counts[0]) && undisturbed(all, threads)) clean.push_back(ratios.back());
    }
    if (ns.empty()) continue;
    Result result{.name = name, .layout = "full", .block_size = block, .tokens = plan.lookup_tokens, .threads = threads};
    result.time = timing_of(std::move(ns));  // of one operation on one thread
    result.operations_per_second = 1e9 * threads / result.time.median_ns;
    result.extra = {{"scaling", median(std::move(ratios))},
                    {"cores", median(std::move(cores))},
                    {"undisturbed_repeats", static_cast<double>(clean.size())}};
    if (!clean.empty()) result.extra.emplace_back("undisturbed_scaling", median(std::move(clean)));
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
