// Nobody waits for anybody: one thread is stopped for good inside each operation, and the others go on, on other prefixes and on the
// same one, under memory pressure. And the atomics of the request paths are lock-free, without which all of that would be luck.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "shadow_engine.h"
#include "stop_thread.h"

namespace hetkv::testing {
namespace {

// Every atomic type that a request path touches.
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);  // object words, index slots, slab words, heads, counters, keys
static_assert(std::atomic<std::int64_t>::is_always_lock_free);   // bytes used by a namespace
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);  // versions, depths, writer bits, owners, holds
static_assert(std::atomic<std::uint16_t>::is_always_lock_free);  // queued bits
static_assert(std::atomic<std::uint8_t>::is_always_lock_free);   // point sets
static_assert(std::atomic<bool>::is_always_lock_free);           // shards of the eviction queues
static_assert(std::atomic<void*>::is_always_lock_free);          // namespace instances
static_assert(std::atomic<const NamespaceInstance*>::is_always_lock_free);
static_assert(std::atomic<NodeId>::is_always_lock_free);

struct Stop {
  const char* point;
  enum class Victim { kTurn, kPressure, kEvict, kQuarantine, kRead } victim;
};

std::ostream& operator<<(std::ostream& out, const Stop& stop) { return out << stop.point; }

class Progress : public ::testing::TestWithParam<Stop> {
 protected:
  static std::vector<std::int32_t> text(std::uint64_t seed, std::size_t n) {
    std::mt19937_64 random(seed);
    return random_tokens(random, n);
  }
};

// What the stopped thread holds: at most one request's blocks and pins. The rest of the arena serves the others.
TEST_P(Progress, OthersCompleteTheirTurns) {
  AllocatorConfig config;
  config.arena.slab_bytes = 4096;
  ShadowEngine engine(v4_layout(), 320 << 10, config);
  KvAllocator& allocator = engine.allocator();
  const auto common = text(1, 130);
  engine.turn(common);
  if (GetParam().victim != Stop::Victim::kTurn) {
    for (std::uint64_t i = 0; i < 60; ++i) engine.turn(text(10 + i, 150));  // the arena is full of what can be evicted
    engine.turn(common);
  }
  auto longer = common;
  longer.resize(200, 3);

  StoppedThread stopped(GetParam().point, [&] {
    switch (GetParam().victim) {
      case Stop::Victim::kTurn:
      case Stop::Victim::kRead:
        engine.turn(longer);
        break;
      case Stop::Victim::kPressure:
        for (std::uint64_t i = 0; i < 10; ++i) engine.turn(text(500 + i, 300));
        break;
      case Stop::Victim::kEvict:
        allocator.evict(ObjectKind::kSwaWindow, 1000);
        allocator.evict(ObjectKind::kCompressedKv, 1000);
        break;
      case Stop::Victim::kQuarantine:
        allocator.quarantine(common, engine.space(), 64, 0, LossReason::kChecksum);
        break;
    }
  });
  ASSERT_TRUE(stopped.stopped()) << "the point was not reached";

  constexpr int kThreads = 2, kTurns = 150;
  std::atomic<int> same{0}, other{0}, refused{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < kTurns; ++i) {
        bool no = false;
        engine.turn(longer, i % 3, nullptr, &no);  // where the stopped one is
        (no ? refused : same).fetch_add(1);
        no = false;
        engine.turn(text(1000 + t * kTurns + i, 150), 0, nullptr, &no);
        (no ? refused : other).fetch_add(1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(stopped.stopped());
  EXPECT_EQ(same, kThreads * kTurns);
  EXPECT_EQ(other, kThreads * kTurns);
  EXPECT_EQ(refused, 0);
  stopped.finish();
  allocator.check_invariants();
}

INSTANTIATE_TEST_SUITE_P(
    Points, Progress,
    ::testing::Values(
        Stop{"publish: writer bit held", Stop::Victim::kTurn}, Stop{"publish: no equal node", Stop::Victim::kTurn},
        Stop{"publish: before the seal", Stop::Victim::kTurn}, Stop{"publish: sealed, not inserted", Stop::Victim::kTurn},
        Stop{"publish: point is filling", Stop::Victim::kTurn}, Stop{"evict: before the claim", Stop::Victim::kPressure},
        Stop{"evict: claimed", Stop::Victim::kPressure}, Stop{"evict: claimed", Stop::Victim::kEvict},
        Stop{"evict: point claimed", Stop::Victim::kEvict}, Stop{"queue: in a shard, pushing", Stop::Victim::kTurn},
        Stop{"queue: in a shard, popping", Stop::Victim::kPressure}, Stop{"quarantine: marked", Stop::Victim::kQuarantine},
        Stop{"admit: found, not pinned", Stop::Victim::kRead}, Stop{"admit: pinned, not gathered", Stop::Victim::kRead},
        Stop{"admit: pinned, not reserved", Stop::Victim::kRead}, Stop{"reserve: copied", Stop::Victim::kTurn},
        Stop{"reserve: before the head moves", Stop::Victim::kTurn}, Stop{"take: counted, bit not taken", Stop::Victim::kTurn},
        Stop{"drop: last hold gone", Stop::Victim::kTurn}, Stop{"put_back: between bit and count", Stop::Victim::kTurn},
        Stop{"drop: before the release counts", Stop::Victim::kTurn},
        Stop{"free: blocks returned, pins held", Stop::Victim::kTurn}),
    [](const ::testing::TestParamInfo<Stop>& row) {
      std::string name = std::to_string(row.index) + "_" + row.param.point;
      for (char& c : name) {
        if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
      }
      return name;
    });

}  // namespace
}  // namespace hetkv::testing
