// A serving engine without a model: it drives the allocator exactly as one would, and writes no rows. The allocator deals in
// offsets, so an arena of any size costs no memory here.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/kv_allocator.h"

namespace hetkv::bench {

inline constexpr std::int64_t kStepTokens = 8192;  // prefill step, as the peers take it

// Token ids below 128,000; different seeds share no block.
std::vector<std::int32_t> make_prompt(std::size_t tokens, std::uint64_t seed);

class Engine {
 public:
  Engine(const CacheLayout& layout, std::uint64_t arena_bytes, const std::string& retention = "adaptive");

  KvAllocator& allocator() { return allocator_; }
  Namespace* space() { return space_; }

  // Aborts if it is refused: the pools of this program are large enough.
  std::unique_ptr<Sequence> admit(std::span<const std::int32_t> tokens, std::shared_ptr<const HashedPrefix> previous = nullptr);
  // Schedules, settles and publishes up to `upto` in steps that end at every checkpoint which needs staged state.
  void prefill(Sequence& sequence, std::int64_t upto);
  // One whole request: admit, prefill, end of turn. Returns the report of its admission.
  HitReport serve(std::span<const std::int32_t> tokens);

 private:
  KvAllocator allocator_;
  Namespace* space_;
  bool stages_points_ = false;  // the layout has tails or snapshots
};

}  // namespace hetkv::bench
