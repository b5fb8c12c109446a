// EvictionQueue: candidates for eviction, lowest score first, lazily validated.
//
// Owns entries, not objects. An entry may be stale: whoever pops it checks generation and score and, if the object was used since,
// pushes it again. Objects carry a "queued" bit so that each has at most one entry. Sharded; a shard is entered by try-lock, and a
// busy shard is skipped: no operation waits. What is lost that way is found again by the evictor's sweep.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "allocator/node_store.h"

namespace hetkv {

struct EvictionEntry {
  std::uint64_t score = 0;
  NodeId node = 0;
  std::uint32_t gen = 0;
};

class EvictionQueue {
 public:
  // False if every shard was busy. Thread-safe, never waits; may allocate.
  bool push(const EvictionEntry& entry);
  // The entry with the lowest score among the shards that are free now. Thread-safe, never waits.
  std::optional<EvictionEntry> pop();
  // Lowest score seen, or ~0: a hint.
  std::uint64_t lowest() const;
  std::size_t bytes() const;

 private:
  static constexpr std::size_t kShards = 8;
  struct alignas(64) Shard {
    std::atomic<bool> busy{false};
    std::atomic<std::uint64_t> lowest{~std::uint64_t{0}};
    std::vector<EvictionEntry> heap;
  };
  std::array<Shard, kShards> shards_;
};

}  // namespace hetkv
