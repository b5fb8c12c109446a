// What the replayed failures share: prompts, layouts, and short questions to a ShadowEngine.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "shadow_engine.h"

namespace hetkv::testing {

inline constexpr std::uint64_t kMiB = 1 << 20;

inline std::vector<std::int32_t> text(std::uint64_t seed, std::size_t n) {
  std::mt19937_64 random(seed);
  return random_tokens(random, n);
}

inline AllocatorConfig keep(const char* retention, std::uint64_t slab_bytes = 0) {
  AllocatorConfig config;
  config.retention = RetentionPolicy::parse(retention);
  config.arena.slab_bytes = slab_bytes;
  return config;
}

inline const Loss* loss_of(const HitReport& report, LossReason reason) {
  for (const Loss& loss : report.losses()) {
    if (loss.reason == reason) return &loss;
  }
  return nullptr;
}

inline GroupId group(ShadowEngine& engine, const char* name) { return engine.allocator().layout().find_group(name)->id; }
inline HitReport probe(ShadowEngine& engine, const std::vector<std::int32_t>& tokens) {
  return engine.allocator().probe(tokens, engine.space());
}

// Blocks of a pool in use, the scratch block apart.
inline std::uint64_t live(ShadowEngine& engine, PoolId pool) {
  return engine.allocator().arena().usage(pool).blocks_reserved - 1;
}

inline CacheLayout two_states() {
  return CacheLayout::build("two states", 16,
                            {make_group("full", ObjectKind::kFullKv, Retention::kHistory),
                             make_group("gdn", ObjectKind::kRecurrentState, Retention::kSnapshot),
                             make_group("ssm", ObjectKind::kRecurrentState, Retention::kSnapshot)});
}

inline CacheLayout two_windows() {
  return CacheLayout::build(
      "two windows", 16,
      {make_group("full", ObjectKind::kFullKv, Retention::kHistory), window_group(17, "narrow"), window_group(100, "wide")});
}

}  // namespace hetkv::testing
