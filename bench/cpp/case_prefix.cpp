#include <memory>

#include "base/check.h"
#include "bench_layouts.h"
#include "cases.h"
#include "engine.h"

namespace hetkv::bench {
namespace {

// Several operations a sample for short ones, so that the clock does not count.
std::size_t rounds_for(std::int64_t tokens) { return static_cast<std::size_t>(std::max<std::int64_t>(1, 262144 / tokens)); }

void one_prefix(const Plan& plan, const std::string& name, std::uint32_t block, std::int64_t tokens, Report& report) {
  const CacheLayout layout = make_layout(name, block);
  const auto blocks = static_cast<std::uint64_t>(tokens / block);
  Engine engine(layout, history_bytes(layout, 2 * blocks + 8192));
  KvAllocator& allocator = engine.allocator();
  // Eight tokens more than the prefix, so that all of it can be used.
  const auto prompt = make_prompt(static_cast<std::size_t>(tokens) + 8, 7);
  engine.serve(prompt);
  engine.serve(prompt);
  const std::size_t rounds = rounds_for(tokens);
  const auto per_block = [&](const Timing& time) { return time.median_ns / static_cast<double>(blocks); };
  const Result row{.layout = name, .block_size = block, .tokens = tokens};

  Result probe = row;
  probe.name = "probe";
  HitReport hit;
  probe.time = measure(plan.repeats, rounds, [&] {
    for (std::size_t i = 0; i < rounds; ++i) hit = allocator.probe(prompt, engine.space());
  });
  HETKV_CHECK(hit.num_recoverable_tokens == tokens, "a warm prefix is not recoverable");
  probe.extra = {{"ns_per_block", per_block(probe.time)}, {"hit_tokens", static_cast<double>(hit.num_recoverable_tokens)}};
  report.add(std::move(probe));

  // Hash, search, pin, compare every token, pin the points, reserve the rest, fill the tables; then give it all back.
  Result warm = row;
  warm.name = "warm_admit";
  warm.time = measure(plan.repeats, rounds, [&] {
    for (std::size_t i = 0; i < rounds; ++i) keep(engine.admit(prompt)->num_computed_tokens());
  });
  warm.extra = {{"ns_per_block", per_block(warm.time)}};
  report.add(std::move(warm));

  // The same for the next turn of a conversation whose prefix was hashed by the turn before.
  std::shared_ptr<const HashedPrefix> previous = engine.admit(prompt)->hashed_prefix();
  Result next = row;
  next.name = "warm_admit_conversation";
  next.time = measure(plan.repeats, rounds, [&] {
    for (std::size_t i = 0; i < rounds; ++i) keep(engine.admit(prompt, previous)->num_computed_tokens());
  });
  next.extra = {{"ns_per_block", per_block(next.time)}};
  report.add(std::move(next));
}

void hash_blocks(const Plan& plan, std::uint32_t block, std::int64_t tokens, Report& report) {
  const ChainHasher hasher(1);
  const auto prompt = make_prompt(static_cast<std::size_t>(tokens), 3);
  std::vector<Key128> keys(static_cast<std::size_t>(tokens) / block);
  const std::size_t rounds = rounds_for(tokens);
  Result hash{.name = "hash", .block_size = block, .tokens = tokens};
  hash.time = measure(plan.repeats, rounds, [&] {
    for (std::size_t i = 0; i < rounds; ++i) {
      hasher.chain(Key128{1, 2}, prompt.data(), block, keys);
      keep(keys.data());
    }
  });
  hash.extra = {{"ns_per_block", hash.time.median_ns / static_cast<double>(keys.size())},
                {"bytes_per_second", static_cast<double>(tokens) * 4e9 / hash.time.median_ns}};
  report.add(std::move(hash));
}

}  // namespace

void measure_prefixes(const Plan& plan, Report& report) {
  for (const std::uint32_t block : plan.block_sizes) hash_blocks(plan, block, plan.request_tokens, report);
  for (const char* name : {"full", "full+window", "v4"}) {
    for (const std::uint32_t block : plan.block_sizes) {
      for (const std::int64_t tokens : plan.prefixes) one_prefix(plan, name, block, tokens, report);
    }
  }
}

}  // namespace hetkv::bench
