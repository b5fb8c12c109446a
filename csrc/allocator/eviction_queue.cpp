#include "allocator/eviction_queue.h"

#include <algorithm>

#include "base/test_point.h"

namespace hetkv {
namespace {

std::size_t thread_shard() {
  static std::atomic<std::size_t> next{0};
  thread_local const std::size_t mine = next.fetch_add(1, std::memory_order_relaxed);
  return mine;
}

bool later(const EvictionEntry& a, const EvictionEntry& b) { return a.score > b.score; }

}  // namespace

bool EvictionQueue::push(const EvictionEntry& entry) {
  const std::size_t first = thread_shard();
  for (std::size_t i = 0; i < kShards; ++i) {
    Shard& shard = shards_[(first + i) % kShards];
    if (shard.busy.exchange(true, std::memory_order_acquire)) continue;
    HETKV_TEST_POINT("queue: in a shard, pushing");
    try {
      shard.heap.push_back(entry);
    } catch (...) {  // out of memory: the entry is lost to the queue, a sweep finds it again
      shard.busy.store(false, std::memory_order_release);
      return false;
    }
    std::push_heap(shard.heap.begin(), shard.heap.end(), later);
    shard.lowest.store(shard.heap.front().score, std::memory_order_relaxed);
    shard.busy.store(false, std::memory_order_release);
    return true;
  }
  return false;
}

std::optional<EvictionEntry> EvictionQueue::pop() {
  std::array<bool, kShards> tried{};
  for (std::size_t attempt = 0; attempt < kShards; ++attempt) {
    std::size_t best = kShards;
    std::uint64_t lowest = ~std::uint64_t{0};
    for (std::size_t i = 0; i < kShards; ++i) {
      const std::uint64_t score = shards_[i].lowest.load(std::memory_order_relaxed);
      if (!tried[i] && score < lowest) {
        lowest = score;
        best = i;
      }
    }
    if (best == kShards) return std::nullopt;
    tried[best] = true;
    Shard& shard = shards_[best];
    if (shard.busy.exchange(true, std::memory_order_acquire)) continue;
    HETKV_TEST_POINT("queue: in a shard, popping");
    std::optional<EvictionEntry> out;
    if (!shard.heap.empty()) {
      std::pop_heap(shard.heap.begin(), shard.heap.end(), later);
      out = shard.heap.back();
      shard.heap.pop_back();
    }
    shard.lowest.store(shard.heap.empty() ? ~std::uint64_t{0} : shard.heap.front().score, std::memory_order_relaxed);
    shard.busy.store(false, std::memory_order_release);
    if (out) return out;
  }
  return std::nullopt;
}

std::uint64_t EvictionQueue::lowest() const {
  std::uint64_t lowest = ~std::uint64_t{0};
  for (const Shard& shard : shards_) lowest = std::min(lowest, shard.lowest.load(std::memory_order_relaxed));
  return lowest;
}

std::size_t EvictionQueue::bytes() const {
  std::size_t bytes = sizeof *this;
  for (const Shard& shard : shards_) bytes += shard.heap.capacity() * sizeof(EvictionEntry);
  return bytes;
}

}  // namespace hetkv
