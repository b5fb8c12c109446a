// A small engine over real memory: it writes, for every row, a fingerprint of what that row must hold, and checks every row that
// R(p) names when a sequence resumes. The oracle of the allocator's tests: any wrong, stale or foreign block shows at once. The
// fingerprint covers tokens, position, group, namespace and the weights version of the step.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "allocator/kv_allocator.h"

namespace hetkv::testing {

inline GroupSpec make_group(std::string name, ObjectKind kind, Retention retention, std::uint32_t ratio = 1) {
  GroupSpec spec;
  spec.name = std::move(name);
  spec.kind = kind;
  spec.retention = retention;
  spec.compress_ratio = ratio;
  spec.owner_layers = {0, 1};
  spec.fields = {FieldSpec{"v", DType::kFloat32, {4}, false}};
  return spec;
}

inline GroupSpec window_group(std::uint32_t window, const std::string& name = "swa") {
  GroupSpec spec = make_group(name, ObjectKind::kSwaWindow, Retention::kWindow);
  spec.window = window;
  return spec;
}

inline GroupSpec tail_group(const std::string& name, std::uint32_t ratio, std::uint32_t overlap) {
  GroupSpec spec = make_group(name, ObjectKind::kUncompressedTail, Retention::kTail, ratio);
  spec.overlap_rows = overlap;
  if (overlap > 0) spec.fields.push_back(FieldSpec{"o", DType::kFloat32, {4}, true});
  return spec;
}

inline CacheLayout full_layout(std::uint32_t block_size = 16) {
  return CacheLayout::build("full", block_size, {make_group("full", ObjectKind::kFullKv, Retention::kHistory)});
}

inline CacheLayout window_layout(std::uint32_t block_size = 16, std::uint32_t window = 40) {
  return CacheLayout::build("full+window", block_size,
                            {make_group("full", ObjectKind::kFullKv, Retention::kHistory), window_group(window)});
}

// DeepSeek-V4 in small: ratios 4 and 32, block 16, so that the larger ratio closes at every second node.
inline CacheLayout v4_layout(std::uint32_t block_size = 16) {
  GroupSpec index = make_group("csa_index", ObjectKind::kIndexerState, Retention::kHistory, 4);
  index.indexes = "csa_kv";
  return CacheLayout::build("v4", block_size,
                            {make_group("csa_kv", ObjectKind::kCompressedKv, Retention::kHistory, 4), index,
                             make_group("hca_kv", ObjectKind::kCompressedKv, Retention::kHistory, 32), window_group(32),
                             tail_group("csa_tail", 4, 4), tail_group("hca_tail", 32, 0)});
}

inline CacheLayout snapshot_layout(std::uint32_t block_size = 16) {
  return CacheLayout::build("recurrent", block_size,
                            {make_group("full", ObjectKind::kFullKv, Retention::kHistory),
                             make_group("gdn", ObjectKind::kRecurrentState, Retention::kSnapshot)});
}

inline std::vector<std::int32_t> random_tokens(std::mt19937_64& random, std::size_t n) {
  std::vector<std::int32_t> tokens(n);
  for (auto& token : tokens) token = static_cast<std::int32_t>(random() % 50000);
  return tokens;
}

// Zeroed, on a page boundary as an arena's memory is.
class Memory {
 public:
  explicit Memory(std::uint64_t bytes) : words_(bytes / 8 + kPage / 8, 0) {}
  std::uint64_t* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(words_.data());
    return reinterpret_cast<std::uint64_t*>((address + kPage - 1) / kPage * kPage);
  }

 private:
  static constexpr std::uintptr_t kPage = 4096;
  std::vector<std::uint64_t> words_;
};

class ShadowEngine {
 public:
  explicit ShadowEngine(CacheLayout layout, std::uint64_t arena_bytes, AllocatorConfig config = {})
      : memory_(arena_bytes), host_memory_(config.lower.host ? config.lower.host->arena.bytes : 0),
        allocator_(std::move(layout), with_memory(config, arena_bytes)), space_(allocator_.space({})) {}

  KvAllocator& allocator() { return allocator_; }
  Namespace* space() { return space_; }

  AdmitResult admit(std::span<const std::int32_t> tokens, const AdmitOptions& options = {}, Namespace* space = nullptr) {
    AdmitResult result = allocator_.admit(tokens, space != nullptr ? space : space_, options);
    finish(result);
    if (result.sequence) check_resume(*result.sequence, tokens);
    return result;
  }
  // Waits for the restore of a pending admission and ends it.
  void finish(AdmitResult& result) {
    if (!result.sequence || !result.sequence->pending()) return;
    result.sequence->restore()->wait();
    result.refusal = allocator_.finish_restore(*result.sequence);
    if (result.refusal) {
      result.sequence.reset();
    } else {
      result.report = result.sequence->report();
    }
  }

  // Computes the rows up to `upto` in block-aligned chunks, stages and commits checkpoints, publishes. False: no room for a step.
  bool run(Sequence& s, std::vector<std::int32_t> const& tokens, std::int64_t upto, bool publish = true) {
    const std::int64_t b = allocator_.layout().block_size();
    clear(s);
    while (s.scheduled() < upto) {
      const std::int64_t begin = s.scheduled(), end = std::min(upto, (begin / b + 1) * b);
      StepStamp stamp;
      if (s.schedule(end, &stamp)) return false;
      clear(s);
      const std::uint64_t salt = salt_of(s, stamp.version);
      write_rows(s, tokens, begin, end, salt);
      if (end % b == 0 && s.wants_point(end)) {
        for (const StagedBlock& staged : s.stage_point(end)) {
          clear(s);
          write_point(tokens, staged, end, salt);
          s.commit_point(end, staged.group, end);
        }
      }
      EXPECT_TRUE(s.settle(stamp));
      if (publish && end % b == 0) s.publish(end);
    }
    return true;
  }

  // A whole turn: admit, compute the prompt and `generated` more tokens, end the turn. Returns the report of the admission.
  HitReport turn(std::vector<std::int32_t> tokens, std::size_t generated = 0, Namespace* space = nullptr,
                 bool* refused = nullptr) {
    AdmitResult result = admit(tokens, {}, space);
    if (!result.sequence) {
      if (refused != nullptr) *refused = true;
      return result.report;
    }
    Sequence& s = *result.sequence;
    bool room = run(s, tokens, static_cast<std::int64_t>(tokens.size()));
    for (std::size_t i = 0; i < generated && room; ++i) {
      tokens.push_back(static_cast<std::int32_t>(tokens.size() * 7 % 50000));
      s.append_one(tokens.back());
      room = run(s, tokens, static_cast<std::int64_t>(tokens.size()));
    }
    s.free(true);
    return result.report;
  }

  void check_resume(const Sequence& s, std::span<const std::int32_t> tokens) {
    const CacheLayout& layout = allocator_.layout();
    const std::int64_t p = s.num_computed_tokens();
    const std::uint64_t salt = salt_of(s, s.version());
    std::int64_t lost = 0;
    for (const Loss& loss : s.report().losses()) lost += loss.tokens;
    EXPECT_EQ(s.report().num_prompt_tokens - lost, s.report().num_recoverable_tokens) << s.report().to_string(layout);
    EXPECT_LT(p, static_cast<std::int64_t>(tokens.size()));
    for (const Group& group : layout.groups()) {
      const RowRange need = layout.need(group.id, p);
      if (need.empty()) continue;
      if (group.spec.retention == Retention::kHistory || group.spec.retention == Retention::kWindow) {
        std::vector<std::int64_t> slots(static_cast<std::size_t>(need.end - need.begin));
        s.slot_mapping(group.id, need.begin, need.end, slots.data());
        for (std::int64_t row = need.begin; row < need.end; ++row) {
          const std::int64_t last = (row + 1) * group.spec.compress_ratio;  // tokens that the row depends on
          ASSERT_EQ(load(group, 0, slots[static_cast<std::size_t>(row - need.begin)]), print(group, tokens, last, salt))
              << group.spec.name << " row " << row << " of resume point " << p;
        }
      } else {
        ASSERT_GE(s.point_block(group.id), 0) << group.spec.name << " at " << p;
        ASSERT_EQ(load_point(group, s.point_block(group.id)), print(group, tokens, p, salt)) << group.spec.name << " at " << p;
      }
    }
  }

 private:
  AllocatorConfig with_memory(AllocatorConfig config, std::uint64_t bytes) {
    config.arena.bytes = bytes;
    config.arena.base_address = reinterpret_cast<std::uintptr_t>(memory_.data());
    if (config.lower.host) config.lower.host->arena.base_address = reinterpret_cast<std::uintptr_t>(host_memory_.data());
    if (config.hash_seed == 0) config.hash_seed = 12345;
    return config;
  }
  void clear(Sequence& s) {
    for (const ClearRange& range : s.ranges_to_clear()) {
      std::memset(reinterpret_cast<std::byte*>(memory_.data()) + range.offset, 0, range.bytes);
    }
    s.confirm_cleared();
  }
  // The same in every process, so that a restart can be checked.
  std::uint64_t salt_of(const Sequence& s, VersionId version) {
    FingerprintBuilder builder("shadow");
    builder.add("space", s.space().framed).add("model", allocator_.versions().at(version).model.hex());
    return builder.finish().low;
  }
  static std::uint64_t print(const Group& group, std::span<const std::int32_t> tokens, std::int64_t upto, std::uint64_t salt) {
    std::uint64_t h = 0xCBF29CE484222325ULL + std::uint64_t{group.id} * 1000003 + salt;
    for (std::int64_t i = std::max<std::int64_t>(0, upto - 64); i < upto; ++i) {
      h = (h ^ static_cast<std::uint32_t>(tokens[static_cast<std::size_t>(i)])) * std::uint64_t{0x100000001B3};
    }
    return h ^ static_cast<std::uint64_t>(upto);
  }
  std::uint64_t* at(std::int64_t block_offset, std::uint64_t bytes) {
    return memory_.data() + (static_cast<std::uint64_t>(block_offset) * kOffsetUnit + bytes) / 8;
  }
  std::uint64_t* row_address(const Group& group, std::size_t field, std::int64_t slot) {
    const Field& f = group.fields[field];
    return at(slot / f.rows_per_block, f.section_offset + static_cast<std::uint64_t>(slot % f.rows_per_block) * f.row_bytes);
  }
  std::uint64_t load(const Group& group, std::size_t field, std::int64_t slot) { return *row_address(group, field, slot); }
  std::uint64_t load_point(const Group& group, std::int64_t offset) { return *at(offset, point_section(group)); }
  // Where the state's fingerprint is kept: the first field that has rows in a published block.
  static std::uint64_t point_section(const Group& group) {
    for (const Field& field : group.fields) {
      if (field.rows_per_block > 0) return field.section_offset;
    }
    return 0;
  }
  void write_rows(const Sequence& s, const std::vector<std::int32_t>& tokens, std::int64_t begin, std::int64_t end,
                  std::uint64_t salt) {
    for (const Group& group : allocator_.layout().groups()) {
      if (group.spec.retention != Retention::kHistory && group.spec.retention != Retention::kWindow) continue;
      const std::int64_t m = group.spec.compress_ratio;
      const std::int64_t first = begin / m, last = end / m;
      std::vector<std::int64_t> slots(static_cast<std::size_t>(last - first));
      s.slot_mapping(group.id, first, last, slots.data());
      for (std::int64_t row = first; row < last; ++row) {
        *row_address(group, 0, slots[static_cast<std::size_t>(row - first)]) = print(group, tokens, (row + 1) * m, salt);
      }
    }
  }
  void write_point(const std::vector<std::int32_t>& tokens, const StagedBlock& staged, std::int64_t p, std::uint64_t salt) {
    const Group& group = allocator_.layout().group(staged.group);
    *at(staged.offset, point_section(group)) = print(group, tokens, p, salt);
  }

  Memory memory_, host_memory_;
  KvAllocator allocator_;
  Namespace* space_;
};

}  // namespace hetkv::testing
