#include <memory>

#include "base/check.h"
#include "bench_layouts.h"
#include "cases.h"
#include "engine.h"

namespace hetkv::bench {
namespace {

double blocks_of(std::int64_t tokens, std::uint32_t block) { return static_cast<double>(tokens / block); }

// The first sight of a prompt in a pool with room for sixteen, from tokens to published blocks and the end of the request.
void cold_admission(const Plan& plan, const std::string& name, std::uint32_t block, Report& report) {
  const CacheLayout layout = make_layout(name, block);
  const auto tokens = static_cast<std::size_t>(plan.request_tokens);
  Engine engine(layout, history_bytes(layout, 32 * tokens / block));
  std::uint64_t seed = 100;
  std::vector<std::int32_t> prompt;
  auto fresh = [&] { prompt = make_prompt(tokens, ++seed); };
  fresh();
  engine.serve(prompt);

  Result cold{.name = "cold_request", .layout = name, .block_size = block, .tokens = plan.request_tokens};
  cold.time = measure(plan.repeats, 1, fresh, [&] { keep(engine.serve(prompt).num_recoverable_tokens); });
  cold.extra = {{"ns_per_block", cold.time.median_ns / blocks_of(plan.request_tokens, block)}};
  report.add(std::move(cold));

  // Its parts.
  std::unique_ptr<Sequence> sequence;
  StepStamp stamp;
  auto admitted = [&] {
    fresh();
    sequence = engine.admit(prompt);
  };
  Result admit{.name = "cold_admit", .layout = name, .block_size = block, .tokens = plan.request_tokens};
  admit.time = measure(
      plan.repeats, 1,
      [&] {
        sequence.reset();
        fresh();
      },
      [&] { sequence = engine.admit(prompt); });
  admit.extra = {{"ns_per_block", admit.time.median_ns / blocks_of(plan.request_tokens, block)}};
  report.add(std::move(admit));

  // One step of the whole prompt where no checkpoint has to be staged on the way.
  if (name == "v4") return;
  auto schedule = [&] { HETKV_CHECK(!sequence->schedule(plan.request_tokens, &stamp), "a step of a benchmark found no room"); };
  Result scheduled{.name = "schedule", .layout = name, .block_size = block, .tokens = plan.request_tokens};
  scheduled.time = measure(
      plan.repeats, 1,
      [&] {
        sequence.reset();
        admitted();
      },
      schedule);
  scheduled.extra = {{"ns_per_block", scheduled.time.median_ns / blocks_of(plan.request_tokens, block)}};
  report.add(std::move(scheduled));

  auto settle = [&] {
    sequence->confirm_cleared();
    sequence->settle(stamp);
  };
  Result settled{.name = "settle", .layout = name, .block_size = block, .tokens = plan.request_tokens};
  settled.time = measure(
      plan.repeats, 1,
      [&] {
        sequence.reset();
        admitted();
        schedule();
      },
      settle);
  settled.extra = {{"ns_per_block", settled.time.median_ns / blocks_of(plan.request_tokens, block)}};
  report.add(std::move(settled));

  Result published{.name = "publish", .layout = name, .block_size = block, .tokens = plan.request_tokens};
  published.time = measure(
      plan.repeats, 1,
      [&] {
        sequence.reset();
        admitted();
        schedule();
        settle();
      },
      [&] { keep(sequence->publish(plan.request_tokens).published_tokens); });
  published.extra = {{"ns_per_block", published.time.median_ns / blocks_of(plan.request_tokens, block)}};
  report.add(std::move(published));
  sequence.reset();
}

// Every prompt is new and the pool holds two, so each step evicts.
void churn(const Plan& plan, const std::string& name, std::uint32_t block, Report& report) {
  const CacheLayout layout = make_layout(name, block);
  const auto tokens = static_cast<std::size_t>(plan.request_tokens);
  Engine probe(layout, history_bytes(layout, 4 * tokens / block));
  const std::uint64_t one = probe.allocator().bytes_for(plan.request_tokens, kStepTokens, false);
  Engine engine(layout, 2 * one + probe.allocator().arena().slab_bytes());
  std::uint64_t seed = 90000;
  std::vector<std::int32_t> prompt;
  auto fresh = [&] { prompt = make_prompt(tokens, ++seed); };
  for (int i = 0; i < 4; ++i) {
    fresh();
    engine.serve(prompt);
  }
  const std::uint64_t before = engine.allocator().store().counters().history_evicted.load();
  Result result{.name = "churn", .layout = name, .block_size = block, .tokens = plan.request_tokens};
  result.time = measure(plan.repeats, 1, fresh, [&] { keep(engine.serve(prompt).num_recoverable_tokens); });
  const std::uint64_t evicted = engine.allocator().store().counters().history_evicted.load() - before;
  HETKV_CHECK(evicted > 0, "a churn without evictions");
  result.extra = {{"ns_per_block", result.time.median_ns / blocks_of(plan.request_tokens, block)},
                  {"evicted_per_request", static_cast<double>(evicted) / static_cast<double>(plan.repeats)}};
  report.add(std::move(result));
}

// One token a step on a warm request, block boundaries included.
void decode(const Plan& plan, const std::string& name, std::uint32_t block, bool publish, Report& report) {
  const CacheLayout layout = make_layout(name, block);
  const auto tokens = static_cast<std::size_t>(plan.request_tokens);
  Engine engine(layout, history_bytes(layout, 4 * tokens / block + 8192));
  const auto prompt = make_prompt(tokens + 8, 7);
  engine.serve(prompt);
  constexpr std::int64_t kTokens = 2048;
  std::unique_ptr<Sequence> sequence;
  Result result{.name = publish ? "decode_token_and_publish" : "decode_token",
                .layout = name,
                .block_size = block,
                .tokens = plan.request_tokens};
  result.time = measure(
      plan.repeats, kTokens,
      [&] {
        sequence.reset();
        sequence = engine.admit(prompt);
        engine.prefill(*sequence, sequence->num_tokens());
      },
      [&] {
        for (std::int64_t i = 0; i < kTokens; ++i) {
          sequence->append_one(static_cast<std::int32_t>(i));
          StepStamp stamp;
          HETKV_CHECK(!sequence->schedule(sequence->num_tokens(), &stamp), "a decode step of a benchmark found no room");
          if (!sequence->ranges_to_clear().empty()) sequence->confirm_cleared();
          sequence->settle(stamp);
          if (publish && stamp.end % block == 0) sequence->publish(stamp.end);
        }
      });
  sequence.reset();
  report.add(std::move(result));
}

void metadata(const Plan& plan, const std::string& name, std::uint32_t block, Report& report) {
  const CacheLayout layout = make_layout(name, block);
  // A full pool: most of the arena holds published prompts.
  const auto tokens = static_cast<std::size_t>(plan.request_tokens);
  const std::uint64_t pool = 32 * tokens / block + 1024;
  Engine engine(layout, history_bytes(layout, pool));
  for (std::uint64_t seed = 0; seed < 40; ++seed) engine.serve(make_prompt(tokens, 500 + seed));
  std::uint64_t live = 0;
  for (std::size_t p = 0; p < layout.pools().size(); ++p)
    live += engine.allocator().arena().usage(static_cast<PoolId>(p)).blocks_live;
  const auto nodes = static_cast<double>(engine.allocator().store().live_nodes());
  const auto bytes = static_cast<double>(engine.allocator().metadata_bytes());
  Result result{.name = "metadata", .layout = name, .block_size = block};
  result.extra = {{"bytes_per_node", bytes / nodes},
                  {"bytes_per_block", bytes / static_cast<double>(live)},
                  {"nodes", nodes},
                  {"blocks", static_cast<double>(live)},
                  {"token_bytes_per_node", 4.0 * block},
                  {"index_and_node_bytes_per_node", static_cast<double>(engine.allocator().store().metadata_bytes()) / nodes}};
  report.add(std::move(result));
}

}  // namespace

void measure_requests(const Plan& plan, Report& report) {
  for (const char* name : {"full", "full+window", "v4"}) {
    for (const std::uint32_t block : plan.block_sizes) {
      cold_admission(plan, name, block, report);
      churn(plan, name, block, report);
      decode(plan, name, block, false, report);
      decode(plan, name, block, true, report);
      metadata(plan, name, block, report);
    }
  }
}

}  // namespace hetkv::bench
