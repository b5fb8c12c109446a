#include <memory>

#include "base/check.h"
#include "bench_layouts.h"
#include "cases.h"
#include "engine.h"

namespace hetkv::bench {
namespace {

constexpr std::uint32_t kBlocks = 512;  // of one reservation: 32,768 tokens in blocks of 64

void reserve_and_free(const Plan& plan, const std::string& name, bool lock_free, Report& report) {
  const CacheLayout layout = make_layout(name, 64);
  ArenaConfig config;
  config.bytes = history_bytes(layout, 64 * kBlocks);
  config.lock_free = lock_free;
  Arena arena(layout, config);
  BlockCounts need{};
  for (const Group& group : layout.groups()) need[group.id] = group.spec.retention == Retention::kHistory ? kBlocks : 4;
  std::uint64_t blocks = 0;
  for (std::size_t pool = 0; pool < layout.pools().size(); ++pool) blocks += need[pool];
  std::vector<Block> taken;
  taken.reserve(blocks);
  const std::string twin = lock_free ? "" : "_locked";
  constexpr std::size_t kRounds = 200;

  Result credits{.name = "reserve_return" + twin, .layout = name, .block_size = 64};
  credits.time = measure(plan.repeats, kRounds, [&] {
    for (std::size_t i = 0; i < kRounds; ++i) {
      Charge charge;
      HETKV_CHECK(arena.reserve(need, {}, charge).status == ReserveOutcome::Status::kReserved,
                  "a reservation of a benchmark was refused");
    }
  });
  credits.extra = {{"pools", static_cast<double>(layout.groups().size())}};
  report.add(std::move(credits));

  Result whole{.name = "reserve_take_free" + twin, .layout = name, .block_size = 64};
  constexpr std::size_t kWholeRounds = 20;
  whole.time = measure(plan.repeats, kWholeRounds, [&] {
    for (std::size_t i = 0; i < kWholeRounds; ++i) {
      Charge charge;
      HETKV_CHECK(arena.reserve(need, {}, charge).status == ReserveOutcome::Status::kReserved,
                  "a reservation of a benchmark was refused");
      taken.clear();
      for (std::size_t pool = 0; pool < layout.pools().size(); ++pool) {
        for (std::uint32_t b = 0; b < need[pool]; ++b) taken.push_back(charge.take(static_cast<PoolId>(pool)));
      }
      for (const Block block : taken) arena.drop(block);
    }
  });
  whole.extra = {{"blocks", static_cast<double>(blocks)}, {"ns_per_block", whole.time.median_ns / static_cast<double>(blocks)}};
  report.add(std::move(whole));
}

void pin_and_unpin(const Plan& plan, Report& report) {
  const CacheLayout layout = make_layout("full", 64);
  Engine engine(layout, history_bytes(layout, 1024));
  const auto prompt = make_prompt(64 * 16 + 1, 1);
  engine.serve(prompt);
  ObjectStore& store = engine.allocator().store();
  const auto sequence = engine.admit(prompt);
  const auto prefix = sequence->hashed_prefix();
  const Key128 key = prefix->keys[15];
  const VersionId version = engine.allocator().versions().current();
  const std::uint32_t space = engine.space()->instance.load(std::memory_order_acquire)->id;
  const Found found = store.lookup(key, version, space);
  HETKV_CHECK(found.node != 0, "a published node was not found");
  constexpr std::size_t kRounds = 10000;
  Result pins{.name = "pin_unpin", .layout = "full", .block_size = 64};
  pins.time = measure(plan.repeats, kRounds, [&] {
    for (std::size_t i = 0; i < kRounds; ++i) {
      HETKV_CHECK(store.pin_node(found, key, version, space, 16), "a pin of a benchmark failed");
      store.unpin_node(found.node);
    }
  });
  report.add(std::move(pins));

  Result lookups{.name = "lookup_one_block", .layout = "full", .block_size = 64};
  lookups.time = measure(plan.repeats, kRounds, [&] {
    for (std::size_t i = 0; i < kRounds; ++i) keep(store.lookup(key, version, space).node);
  });
  report.add(std::move(lookups));
}

}  // namespace

void measure_memory(const Plan& plan, Report& report) {
  for (const char* name : {"full", "v4"}) {
    reserve_and_free(plan, name, true, report);
    reserve_and_free(plan, name, false, report);
  }
  pin_and_unpin(plan, report);
}

}  // namespace hetkv::bench
