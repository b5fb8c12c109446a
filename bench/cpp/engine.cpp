#include "engine.h"

#include <algorithm>

#include "base/check.h"

namespace hetkv::bench {
namespace {

AllocatorConfig config_of(std::uint64_t arena_bytes, const std::string& retention) {
  AllocatorConfig config;
  config.arena.bytes = arena_bytes;
  config.retention = RetentionPolicy::parse(retention);
  return config;
}

}  // namespace

std::vector<std::int32_t> make_prompt(std::size_t tokens, std::uint64_t seed) {
  std::vector<std::int32_t> out(tokens);
  const std::uint64_t base = (seed * 2654435761ULL) & 0x3FFFFFFF;
  for (std::size_t i = 0; i < tokens; ++i) out[i] = static_cast<std::int32_t>((base + i * 40503) % 128000);
  return out;
}

Engine::Engine(const CacheLayout& layout, std::uint64_t arena_bytes, const std::string& retention)
    : allocator_(layout, config_of(arena_bytes, retention)), space_(allocator_.space({})) {
  for (const GroupId id : layout.point_groups()) stages_points_ |= layout.group(id).spec.retention != Retention::kWindow;
}

std::unique_ptr<Sequence> Engine::admit(std::span<const std::int32_t> tokens, std::shared_ptr<const HashedPrefix> previous) {
  AdmitOptions options;
  options.chunk_tokens = kStepTokens;
  options.previous = std::move(previous);
  AdmitResult result = allocator_.admit(tokens, space_, options);
  HETKV_CHECK(result.sequence != nullptr, "the pool of a benchmark is too small");
  return std::move(result.sequence);
}

void Engine::prefill(Sequence& sequence, std::int64_t upto) {
  const std::int64_t block = allocator_.layout().block_size();
  while (sequence.scheduled() < upto) {
    const std::int64_t begin = sequence.scheduled();
    std::int64_t end = std::min(upto, begin + kStepTokens);
    if (stages_points_) {
      for (std::int64_t p = begin / block * block + block; p < end; p += block) {
        if (sequence.wants_point(p)) end = p;
      }
    }
    StepStamp stamp;
    HETKV_CHECK(!sequence.schedule(end, &stamp), "a step of a benchmark found no room");
    if (stages_points_ && sequence.wants_point(end)) {
      for (const StagedBlock& staged : sequence.stage_point(end)) sequence.commit_point(end, staged.group, end);
    }
    if (!sequence.ranges_to_clear().empty()) sequence.confirm_cleared();
    sequence.settle(stamp);
    sequence.publish(end);
  }
}

HitReport Engine::serve(std::span<const std::int32_t> tokens) {
  const std::unique_ptr<Sequence> sequence = admit(tokens);
  prefill(*sequence, sequence->num_tokens());
  sequence->free(true);
  return sequence->report();
}

}  // namespace hetkv::bench
