// Threads over one arena, with real memory behind it: every block in use carries its holder's mark, written without atomics, so that
// a block in two hands shows as a wrong mark, and as a race under ThreadSanitizer. Invariants are checked between rounds.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <functional>
#include <latch>
#include <random>
#include <thread>
#include <vector>

#include "allocator/arena.h"
#include "layout_groups.h"

namespace hetkv {
namespace {

using Status = ReserveOutcome::Status;
constexpr BlockCounts kNone{};
constexpr int kThreads = 4;

void run_threads(const std::function<void(std::uint32_t)>& work) {
  std::latch gate(kThreads);
  std::vector<std::thread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      gate.arrive_and_wait();
      work(t);
    });
  for (std::thread& thread : threads) thread.join();
}

class ArenaStress : public ::testing::TestWithParam<bool> {
 protected:
  static ArenaConfig config() {
    ArenaConfig c;
    c.bytes = 12 * 16384;
    c.slab_bytes = 16384;
    c.lock_free = GetParam();
    c.limits[static_cast<std::size_t>(ObjectKind::kSwaWindow)].floor_slabs = 2;
    c.limits[static_cast<std::size_t>(ObjectKind::kCompressedKv)].cap_bytes = 6 * 16384;
    return c;
  }
  static CacheLayout layout() {
    const auto group = [](std::string name, ObjectKind kind, std::uint32_t width) {
      GroupSpec g = kind == ObjectKind::kSwaWindow ? test::window(std::move(name), 128) : test::history(std::move(name), 1, kind);
      g.fields[0].shape = {width};
      return g;
    };
    return test::build({group("full", ObjectKind::kFullKv, 8), group("swa", ObjectKind::kSwaWindow, 4),
                        group("ckv", ObjectKind::kCompressedKv, 16), group("swa2", ObjectKind::kSwaWindow, 32)});
  }
  // Two words at both ends of the block are enough to see another's mark.
  std::uint64_t* words(Block block) { return memory_.data() + arena_.range(block).offset / 8; }
  void mark(Block block, std::uint64_t m) {
    std::uint64_t* w = words(block);
    w[0] = m;
    w[arena_.range(block).bytes / 8 - 1] = m;
  }
  bool marked(Block block, std::uint64_t m) {
    const std::uint64_t* w = words(block);
    return w[0] == m && w[arena_.range(block).bytes / 8 - 1] == m;
  }

  Arena arena_{layout(), config()};
  std::vector<std::uint64_t> memory_ = std::vector<std::uint64_t>(arena_.bytes() / 8);
};
INSTANTIATE_TEST_SUITE_P(Twins, ArenaStress, ::testing::Bool(),
                         [](const auto& param_info) { return param_info.param ? "LockFree" : "Locked"; });

TEST_P(ArenaStress, BlocksStayInOneHand) {
  std::atomic<std::uint64_t> wrong{0}, reserved{0}, refused{0}, uncleared{0};
  for (std::uint32_t round = 0; round < 6; ++round) {
    run_threads([&](std::uint32_t t) {
      std::mt19937 random(t + 100 * round);
      const auto pick = [&](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
      struct Held {
        Block block;
        std::uint64_t mark;
      };
      std::vector<Held> held;
      Charge charge;
      std::uint64_t next = (std::uint64_t{t} + 1) << 32;
      for (int step = 0; step < 2500; ++step) {
        BlockCounts need{};
        // Each thread leans to one pool for a while, so that slabs have to move.
        const std::uint32_t favourite = (t + static_cast<std::uint32_t>(step) / 400) % 4;
        need[favourite] = pick(favourite == 3 ? 2 : 6);
        need[pick(4)] += pick(2);
        if (arena_.reserve(need, kNone, charge).status == Status::kReserved)
          ++reserved;
        else
          ++refused;
        for (PoolId p = 0; p < 4; ++p) {
          while (charge.left(p) > 0 && pick(4) != 0) {
            const Block block = charge.take(p);
            if (arena_.must_clear(block)) {
              ++uncleared;
              arena_.confirm_cleared(block);
            }
            if (arena_.must_clear(block) || arena_.holds(block) != 1) ++wrong;
            mark(block, ++next);
            arena_.set_owner(block, static_cast<std::uint32_t>(next));
            held.push_back({block, next});
          }
        }
        if (pick(8) == 0) charge.release();
        std::size_t keep = pick(12);
        while (held.size() > keep) {
          Held& h = held[pick(held.size())];
          if (!marked(h.block, h.mark) || arena_.owner(h.block) != static_cast<std::uint32_t>(h.mark)) ++wrong;
          if (arena_.must_clear(h.block)) ++wrong;
          if (!arena_.drop(h.block)) ++wrong;
          h = held.back();
          held.pop_back();
        }
      }
      for (const Held& h : held) {
        if (!marked(h.block, h.mark)) ++wrong;
        arena_.drop(h.block);
      }
    });
    arena_.check_invariants();
    for (PoolId p = 0; p < 4; ++p) EXPECT_EQ(arena_.usage(p).blocks_reserved, 0u);
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_GT(reserved, 1000u);
  EXPECT_GT(refused, 10u);
  EXPECT_GT(uncleared, 100u) << "slabs moved between pools";
}

// Blocks pass from thread to thread through a mailbox: who takes, who adds holds and who frees are different threads.
TEST_P(ArenaStress, HoldsPassBetweenThreads) {
  std::array<std::atomic<std::uint64_t>, 8> mailbox{};
  std::atomic<std::uint64_t> taken{0}, freed{0}, wrong{0};
  const auto pack = [](Block block) { return (std::uint64_t{1} << 63) | (std::uint64_t{block.pool} << 32) | block.offset; };
  const auto unpack = [](std::uint64_t v) { return Block{static_cast<std::uint32_t>(v), static_cast<PoolId>((v >> 32) & 0xFF)}; };
  const auto drop = [&](Block block) { freed += arena_.drop(block) ? 1u : 0u; };
  run_threads([&](std::uint32_t t) {
    std::mt19937 random(t);
    for (int step = 0; step < 6000; ++step) {
      const auto p = static_cast<PoolId>(random() % 3);
      BlockCounts need{};
      need[p] = 1;
      Charge charge;
      if (arena_.reserve(need, kNone, charge).status != Status::kReserved) continue;
      const Block block = charge.take(p);
      ++taken;
      mark(block, pack(block));
      const std::uint32_t extra = static_cast<std::uint32_t>(random() % 3);
      for (std::uint32_t i = 0; i < extra; ++i) arena_.hold(block);
      for (std::uint32_t i = 0; i <= extra; ++i) {
        const std::uint64_t other = mailbox[random() % mailbox.size()].exchange(pack(block), std::memory_order_acq_rel);
        if (other == 0) continue;
        if (!marked(unpack(other), other)) ++wrong;
        drop(unpack(other));
      }
    }
  });
  for (std::atomic<std::uint64_t>& letter : mailbox)
    if (const std::uint64_t other = letter.load(); other != 0) drop(unpack(other));
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(freed, taken);
  EXPECT_GT(taken, 10000u);
  for (PoolId p = 0; p < 4; ++p) EXPECT_EQ(arena_.usage(p).blocks_reserved, 0u);
  arena_.check_invariants();
}

// J9: four sessions release their hold on the same block; it comes back once.
TEST_P(ArenaStress, J9_FourReleasesOfOneBlockFreeItOnce) {
  for (int round = 0; round < 300; ++round) {
    Charge charge;
    BlockCounts need{};
    need[0] = 1;
    ASSERT_EQ(arena_.reserve(need, kNone, charge).status, Status::kReserved);
    const Block block = charge.take(0);
    for (int i = 1; i < kThreads; ++i) arena_.hold(block);
    std::atomic<int> freed{0};
    run_threads([&](std::uint32_t) { freed += arena_.drop(block) ? 1 : 0; });
    ASSERT_EQ(freed, 1);
    ASSERT_EQ(arena_.usage(0).blocks_reserved, 0u);
  }
  arena_.check_invariants();
}

// The step that headroom keeps is there for the oldest sequence, whatever the others do.
TEST_P(ArenaStress, TheOldestAlwaysFindsItsStep) {
  BlockCounts step{};
  step[0] = 1;
  step[2] = 1;
  std::atomic<bool> stop{false};
  std::atomic<std::uint64_t> refused{0};
  run_threads([&](std::uint32_t t) {
    std::mt19937 random(t);
    if (t == 0) {
      for (int i = 0; i < 3000; ++i) {
        Charge charge;
        if (arena_.reserve(step, kNone, charge).status != Status::kReserved) ++refused;
      }
      stop = true;
      return;
    }
    std::vector<Charge> charges;
    while (!stop) {
      BlockCounts need{};
      need[random() % 4] = 1 + static_cast<std::uint32_t>(random() % 3);
      Charge charge;
      if (arena_.reserve(need, step, charge).status == Status::kReserved)
        charges.push_back(std::move(charge));
      else if (!charges.empty())
        charges.erase(charges.begin() + static_cast<std::ptrdiff_t>(random() % charges.size()));
    }
  });
  EXPECT_EQ(refused, 0u);
  arena_.check_invariants();
}

}  // namespace
}  // namespace hetkv
