// Everything at once, over small arenas and real memory: turns, probes, evictions, quarantines, changes of version, clears, pinned
// prefixes and quotas, from four threads, for every layout. The shadow engine checks each row that a sequence resumes from.
//
// HETKV_STRESS_SECONDS: seconds per layout (default 0.5); HETKV_STRESS_SEED.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "shadow_engine.h"

namespace hetkv::testing {
namespace {

using Clock = std::chrono::steady_clock;

double seconds() {
  const char* text = std::getenv("HETKV_STRESS_SECONDS");
  return text != nullptr ? std::strtod(text, nullptr) / 4 : 0.5;
}

std::uint64_t seed() {
  const char* text = std::getenv("HETKV_STRESS_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
}

struct Row {
  const char* name;
  CacheLayout (*layout)();
};

void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

class KvStress : public ::testing::TestWithParam<Row> {};

// Several sequences of one thread are alive at a time, so that objects are pinned, shared and half-published when others strike.
class Worker {
 public:
  Worker(ShadowEngine& engine, std::uint64_t number) : engine_(engine), random_(seed() * 1000 + number) {
    std::mt19937_64 common(seed());
    for (auto& prefix : shared_) prefix = random_tokens(common, 32 + common() % 80);
    spaces_ = {engine.space(), engine.allocator().space({{"salt", "a"}}), engine.allocator().space({{"salt", "limited"}})};
  }

  void run(Clock::time_point until) {
    // At least this much work, however slow the machine is: the checks below need hits and evictions to look at.
    constexpr std::uint64_t kLeastSteps = 1500;
    while ((Clock::now() < until || steps_ < kLeastSteps) && !::testing::Test::HasFatalFailure()) step();
    running_.clear();
    pinned_.clear();
  }
  std::uint64_t hits() const { return hits_; }
  std::uint64_t steps() const { return steps_; }

 private:
  struct Running {
    std::unique_ptr<Sequence> sequence;
    std::vector<std::int32_t> tokens;
  };

  std::vector<std::int32_t> prompt() {
    std::vector<std::int32_t> tokens = shared_[random_() % shared_.size()];
    tokens.resize(std::min(tokens.size(), 16 + random_() % 100));
    const std::size_t more = random_() % 120;
    // Few distinct endings: threads meet on them.
    std::mt19937_64 ending(random_() % 6);
    for (std::size_t i = 0; i < more; ++i) tokens.push_back(static_cast<std::int32_t>(ending() % 50000));
    return tokens;
  }
  std::int64_t position(const std::vector<std::int32_t>& tokens) {
    return static_cast<std::int64_t>(1 + random_() % (tokens.size() / 16)) * 16;
  }
  GroupId any_group() { return static_cast<GroupId>(random_() % engine_.allocator().layout().groups().size()); }

  void step() {
    ++steps_;
    KvAllocator& allocator = engine_.allocator();
    Namespace* space = spaces_[random_() % spaces_.size()];
    const auto tokens = prompt();
    switch (random_() % 32) {
      default: {
        if (running_.size() < 3) admit(tokens, space);
        break;
      }
      case 8:
      case 9:
      case 10:
      case 11:
      case 12:
      case 13:
      case 14:
      case 15:
        if (!running_.empty()) advance(running_[random_() % running_.size()]);
        break;
      case 16:
      case 17:
      case 18:
      case 19:
        if (!running_.empty()) {
          const std::size_t at = random_() % running_.size();
          running_[at].sequence->free(random_() % 4 != 0);
          std::swap(running_[at], running_.back());
          running_.pop_back();
        }
        break;
      case 20:
      case 21:
      case 22: {
        const HitReport report = allocator.probe(tokens, space);
        std::int64_t lost = 0;
        for (const Loss& loss : report.losses()) lost += loss.tokens;
        EXPECT_EQ(report.num_prompt_tokens - lost, report.num_recoverable_tokens);
        EXPECT_LE(report.num_recoverable_tokens, report.num_history_tokens);
        EXPECT_LE(report.num_history_tokens, report.num_hash_hit_tokens);
        break;
      }
      case 23: {
        const Group& group = allocator.layout().group(any_group());
        allocator.evict(group.spec.kind, random_() % 6);
        break;
      }
      case 24:
        allocator.evict_object(tokens, space, position(tokens), any_group());
        break;
      case 25:
        if (random_() % 4 == 0) allocator.quarantine(tokens, space, position(tokens), any_group(), LossReason::kChecksum);
        break;
      case 26:
        if (random_() % 4 == 0) allocator.set_model_version(random_() % 2 == 0 ? "0" : "1");
        break;
      case 27:
        if (random_() % 16 == 0) allocator.clear(space);
        break;
      case 28:
        if (pinned_.size() < 2) {
          try {
            pinned_.push_back(allocator.pin_prefix(tokens, space));
          } catch (const AdmissionError& error) {
            EXPECT_EQ(error.kind, "pin_prefix");
          }
        } else {
          pinned_.erase(pinned_.begin());
        }
        break;
      case 29:
        allocator.set_quota(spaces_[2], random_() % 3 == 0 ? ~std::uint64_t{0} : 20000 + random_() % 40000);
        break;
    }
  }

  void admit(const std::vector<std::int32_t>& tokens, Namespace* space) {
    AdmitOptions options;
    options.max_new_tokens = random_() % 4 == 0 ? 32 : 0;
    options.live_state = random_() % 4 == 0;
    AdmitResult result = engine_.admit(tokens, options, space);
    if (!result.sequence) return;
    hits_ += result.report.num_recoverable_tokens > 0;
    running_.push_back({std::move(result.sequence), tokens});
  }
  void advance(Running& running) {
    Sequence& s = *running.sequence;
    const auto known = static_cast<std::int64_t>(running.tokens.size());
    if (s.scheduled() < known) {
      engine_.run(s, running.tokens, std::min<std::int64_t>(known, s.scheduled() + 1 + static_cast<std::int64_t>(random_() % 80)),
                  random_() % 4 != 0);
      return;
    }
    for (std::uint64_t i = random_() % 20; i > 0; --i) {
      running.tokens.push_back(static_cast<std::int32_t>(running.tokens.size() * 7 % 50000));
      s.append_one(running.tokens.back());
    }
    if (random_() % 8 == 0) s.restart_from_settled();
  }

  ShadowEngine& engine_;
  std::mt19937_64 random_;
  std::array<std::vector<std::int32_t>, 4> shared_;
  std::array<Namespace*, 3> spaces_{};
  std::vector<Running> running_;
  std::vector<std::unique_ptr<PinnedPrefix>> pinned_;
  std::uint64_t hits_ = 0, steps_ = 0;
};

TEST_P(KvStress, EverythingAtOnce) {
  for (const bool lock_free : {true, false}) {
    AllocatorConfig config;
    config.arena.slab_bytes = 4096;
    config.arena.lock_free = lock_free;
    config.retention = RetentionPolicy::parse(lock_free ? "adaptive" : "all");
    ShadowEngine engine(GetParam().layout(), 256 << 10, config);
    constexpr std::size_t kThreads = 4;
    std::vector<std::unique_ptr<Worker>> workers;
    for (std::size_t t = 0; t < kThreads; ++t) workers.push_back(std::make_unique<Worker>(engine, t));
    const auto until = Clock::now() + std::chrono::milliseconds(static_cast<std::int64_t>(seconds() * (lock_free ? 800 : 200)));
    std::vector<std::thread> threads;
    for (auto& worker : workers) threads.emplace_back([&worker, until] { worker->run(until); });
    for (auto& thread : threads) thread.join();

    KvAllocator& allocator = engine.allocator();
    allocator.check_invariants();
    std::uint64_t hits = 0, steps = 0;
    for (const auto& worker : workers) {
      hits += worker->hits();
      steps += worker->steps();
    }
    EXPECT_GT(hits, 10u) << steps;
    EXPECT_GT(allocator.store().counters().history_evicted.load(), 0u);

    // Nothing is held any more but by the index; evict that, and all memory is free and all accounts are square.
    while (allocator.store().evict_coldest_history(true)) {
    }
    EXPECT_EQ(allocator.store().live_nodes(), 0u);
    for (std::size_t pool = 0; pool < allocator.layout().pools().size(); ++pool) {
      EXPECT_EQ(allocator.arena().usage(static_cast<PoolId>(pool)).blocks_reserved, 1u) << "the scratch block of pool " << pool;
    }
    for (Namespace* space : {engine.space(), allocator.space({{"salt", "a"}}), allocator.space({{"salt", "limited"}})}) {
      EXPECT_EQ(space->used_bytes.load(), 0);
    }
    allocator.check_invariants();
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, KvStress,
                         ::testing::Values(Row{"full", [] { return full_layout(); }},
                                           Row{"window", [] { return window_layout(); }}, Row{"v4", [] { return v4_layout(); }},
                                           Row{"snapshot", [] { return snapshot_layout(); }}),
                         [](const ::testing::TestParamInfo<Row>& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace hetkv::testing
