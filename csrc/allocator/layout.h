// CacheLayout: the groups of a model's cache, their bytes, and R(p), the rows needed to resume at p.
//
// Owns: group descriptions and everything derived from them. Immutable after build(). Does not own memory, versions or
// namespaces. Sizes are bytes; positions are tokens; rows are entries of one group.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/fingerprint.h"
#include "allocator/object_kind.h"

namespace hetkv {

using GroupId = std::uint8_t;
using PoolId = std::uint8_t;
inline constexpr std::uint64_t kOffsetUnit = 256;  // bytes; block offsets and block bytes are multiples of it
inline constexpr std::size_t kMaxGroups = 16;
inline constexpr std::size_t kMaxPointSets = 8;  // point flags of an index slot

enum class DType : std::uint8_t { kFloat64, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kUInt8, kInt8, kInt32, kInt64 };
std::uint32_t dtype_bytes(DType dtype);
std::string_view dtype_name(DType dtype);      // "float32", ... as torch spells them
DType dtype_from_name(std::string_view name);  // ArgumentError if unknown

enum class Retention : std::uint8_t {
  kHistory,   // every row of the prefix
  kWindow,    // rows of tokens [max(0, p-W+1), p)
  kTail,      // raw rows [m*floor(p/m), p) and, with overlap, `overlap_rows` half rows of the last closed window if p >= m
  kSnapshot,  // one state, valid at p only
};
std::string_view retention_name(Retention retention);  // "history", "window", "tail", "snapshot"

// One array of a block: `rows` rows of `shape` values. Fields are stored one after the other (field-major) inside a layer.
struct FieldSpec {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::uint32_t> shape;  // of one row
  bool overlap = false;              // tail groups: this field holds the overlap rows, not the tail rows
};

struct GroupSpec {
  std::string name;
  ObjectKind kind = ObjectKind::kFullKv;
  Retention retention = Retention::kHistory;
  std::uint32_t compress_ratio = 1;          // m: tokens per entry (tail: of the compressor that the tail feeds)
  std::uint32_t window = 0;                  // W, counts the query; window groups only
  std::uint32_t overlap_rows = 0;            // tail groups: half rows of the last closed window needed at p >= m
  std::vector<std::uint32_t> owner_layers;   // layers that write it, ascending
  std::vector<std::uint32_t> reader_layers;  // layers that read it; empty = the owners
  std::vector<std::uint32_t> layer_windows;  // optional, one per owner layer: all must equal `window` (mixed windows are refused)
  std::vector<FieldSpec> fields;
  std::uint32_t alignment = 16;  // bytes, power of two, of a layer's part inside a block and of each field section
  std::string indexes;           // name of the group that it indexes, or ""
  bool optional = false;         // draft / MTP
};

struct Field {
  FieldSpec spec;
  std::uint32_t row_bytes = 0;
  std::uint32_t rows_per_block = 0;       // power of two; 0 in a tail whose nodes never end inside a window
  std::uint64_t section_offset = 0;       // bytes from the start of a layer's part
  std::uint32_t ring_rows = 0;            // tail groups: rows of the running ring (power of two); 0 elsewhere
  std::uint64_t ring_section_offset = 0;  // same, in a ring block
};

struct Group {
  GroupSpec spec;
  GroupId id = 0;
  std::uint32_t entries_per_block = 0;  // power of two; tail: capacity in tail rows (>= 1), snapshot: 1
  std::uint64_t layer_stride = 0;       // bytes of one layer's part
  std::uint64_t block_bytes = 0;        // all layers; multiple of kOffsetUnit and of alignment
  std::uint32_t ring_entries = 0;       // tail groups: 2m with overlap, m without, rounded up to a power of two
  std::uint64_t ring_layer_stride = 0;
  std::uint64_t ring_block_bytes = 0;
  std::vector<Field> fields;
  std::int32_t history_slot = -1;  // index among the required history groups, or -1
  std::int32_t point_slot = -1;    // index among the point groups (order: windows, tails, snapshots), or -1
};

// What R(p) asks of one group: rows [begin, end) in the group's own rows (history: entries; window, tail: tokens), and overlap rows.
struct RowRange {
  std::int64_t begin = 0, end = 0;
  std::uint32_t overlap_rows = 0;
  bool snapshot = false;  // the state at p itself
  bool empty() const { return begin == end && overlap_rows == 0 && !snapshot; }
};

// A pool is one free set of equal blocks: one per group (pool id = group id), then one per tail group for running rings.
struct PoolSpec {
  std::string name;
  ObjectKind kind = ObjectKind::kFullKv;
  GroupId group = 0;
  bool ring = false;
  std::uint64_t block_bytes = 0;
};

class CacheLayout {
 public:
  // Validates and derives. Throws LayoutError, naming group and field, for: no groups, more than kMaxGroups or kMaxPointSets,
  // duplicate names, block_size not a power of two, a ratio that neither divides block_size nor is a multiple of it, a kind x
  // retention pair that the route table forbids, mixed windows, window 0, unknown `indexes`, empty fields or layers, bad alignment.
  static CacheLayout build(std::string model, std::uint32_t block_size, std::vector<GroupSpec> groups);

  const std::string& model() const { return model_; }
  std::uint32_t block_size() const { return block_size_; }
  std::span<const Group> groups() const { return groups_; }
  const Group& group(GroupId id) const { return groups_[id]; }
  const Group* find_group(std::string_view name) const;  // nullptr if absent
  std::span<const PoolSpec> pools() const { return pools_; }
  std::optional<PoolId> ring_pool(GroupId group) const;                 // of a tail group
  std::span<const GroupId> history_groups() const { return history_; }  // required ones only: an optional group never cuts a hit
  std::span<const GroupId> point_groups() const { return points_; }  // windows, then tails, then snapshots: order of the checks

  // R(p): exact rows that `group` needs to resume at token p (the next token computed is p). p = 0 needs nothing.
  RowRange need(GroupId group, std::int64_t p) const;

  // Whether the node that ends at token depth * block_size stores a block of this history group (ratio > block_size: only where
  // an entry closes).
  bool history_block_at(GroupId group, std::uint32_t depth) const;
  // Number of trailing nodes whose window block R(depth * block_size) asks for: min(depth, ceil((W-1)/block_size)).
  std::uint32_t window_nodes(GroupId group, std::uint32_t depth) const;
  // Whether R(depth * block_size) asks for this tail or snapshot group's object at that node.
  bool point_needed(GroupId group, std::uint32_t depth) const;

  // 128-bit fingerprint of every byte-relevant fact: model-independent; names, order, kinds, shapes, dtypes, offsets, strides,
  // padding, alignment, ratios, windows, overlap, endianness.
  Fingerprint fingerprint() const { return fingerprint_; }
  // The same layout with one group's alignment changed (strides and fingerprint follow). LayoutError if impossible.
  CacheLayout with_alignment(std::string_view group, std::uint32_t alignment) const;
  std::string describe() const;  // a table, one line per group

 private:
  std::string model_;
  std::uint32_t block_size_ = 0;
  std::vector<Group> groups_;
  std::vector<PoolSpec> pools_;
  std::vector<GroupId> history_, points_;
  Fingerprint fingerprint_;
};

}  // namespace hetkv
