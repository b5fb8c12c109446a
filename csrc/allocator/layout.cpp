#include "allocator/layout.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <iomanip>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>

namespace hetkv {

namespace {

constexpr std::size_t kNumDTypes = 9;
constexpr std::array<std::string_view, kNumDTypes> kDTypeNames{"float64", "float32", "float16", "bfloat16", "float8_e4m3fn",
                                                               "uint8",   "int8",    "int32",   "int64"};
constexpr std::array<std::uint32_t, kNumDTypes> kDTypeBytes{8, 4, 2, 2, 1, 1, 1, 4, 8};

// Block offsets are int32 counts of kOffsetUnit, so nothing larger can be addressed.
constexpr std::uint64_t kMaxBlockBytes = std::uint64_t{1} << 39;
constexpr std::uint32_t kMaxAlignment = 1u << 20;
constexpr std::uint32_t kMaxBlockSize = 1u << 20;      // tokens
constexpr std::uint32_t kMaxCompressRatio = 1u << 30;  // tokens; twice as much still fits 32 bits

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Largest number of unfinished tokens at a node's end: max over d of (d * block_size) mod m.
constexpr std::uint32_t node_tail_rows(std::uint32_t block_size, std::uint32_t m) { return m > block_size ? m - block_size : 0; }

// 0 stays 0: such a section holds nothing.
constexpr std::uint32_t pow2_rows(std::uint32_t rows) { return rows == 0 ? 0 : std::bit_ceil(rows); }

bool strictly_ascending(const std::vector<std::uint32_t>& values) {
  return std::adjacent_find(values.begin(), values.end(), std::greater_equal<>()) == values.end();
}

bool retention_legal(ObjectKind kind, Retention retention) {
  switch (retention) {
    case Retention::kHistory:
      return is_legal(kind, Operation::kPublishHistory);
    case Retention::kWindow:
      return is_legal(kind, Operation::kPublishPoint) && is_legal(kind, Operation::kSlide);
    case Retention::kTail:
    case Retention::kSnapshot:
      return is_legal(kind, Operation::kPublishPoint) && is_legal(kind, Operation::kSnapshot);
  }
  return false;
}

[[noreturn]] void refuse(const GroupSpec& group, std::string field, std::string why) {
  throw LayoutError(group.name, std::move(field), std::move(why));
}

void validate_layers(const GroupSpec& g) {
  if (g.owner_layers.empty()) refuse(g, "owner_layers", "no layer owns the group");
  if (!strictly_ascending(g.owner_layers)) refuse(g, "owner_layers", "must be ascending, each layer once");
  if (!strictly_ascending(g.reader_layers)) refuse(g, "reader_layers", "must be ascending, each layer once");
  if (g.layer_windows.empty()) return;
  if (g.layer_windows.size() != g.owner_layers.size()) refuse(g, "layer_windows", "needs one window for each owner layer");
  for (std::size_t i = 0; i < g.layer_windows.size(); ++i) {
    if (g.layer_windows[i] == g.window) continue;
    refuse(g, "layer_windows",
           "layer " + std::to_string(g.owner_layers[i]) + " has window " + std::to_string(g.layer_windows[i]) +
               ", the group has " + std::to_string(g.window) + "; layers with different windows need groups of their own");
  }
}

void validate_ratio(const GroupSpec& g, std::uint32_t block_size) {
  const std::uint32_t m = g.compress_ratio;
  if (m == 0 || m > kMaxCompressRatio) refuse(g, "compress_ratio", std::to_string(m) + " is not a number of tokens");
  switch (g.retention) {
    case Retention::kHistory:
      break;
    case Retention::kTail:
      if (m == 1) refuse(g, "compress_ratio", "a tail feeds a compressor, so its ratio is at least 2");
      break;
    case Retention::kWindow:
    case Retention::kSnapshot:
      if (m != 1) refuse(g, "compress_ratio", "must be 1 for window and snapshot groups");
      return;
  }
  if (block_size % m != 0 && m % block_size != 0)
    refuse(g, "compress_ratio",
           std::to_string(m) + " neither divides block_size " + std::to_string(block_size) + " nor is a multiple of it");
}

void validate_retention(const GroupSpec& g) {
  if (!retention_legal(g.kind, g.retention))
    refuse(
        g, "retention",
        "kind '" + std::string(kind_name(g.kind)) + "' cannot have retention '" + std::string(retention_name(g.retention)) + "'");
  const bool window = g.retention == Retention::kWindow;
  if (window && g.window == 0) refuse(g, "window", "a window group needs a window of at least 1 token");
  if (!window && g.window != 0) refuse(g, "window", "only window groups have a window");
  if (g.retention != Retention::kTail && g.overlap_rows != 0) refuse(g, "overlap_rows", "only tail groups have overlap rows");
  if (g.overlap_rows > g.compress_ratio)
    refuse(g, "overlap_rows",
           std::to_string(g.overlap_rows) + " rows are more than one window of " + std::to_string(g.compress_ratio) + " tokens");
}

void validate_fields(const GroupSpec& g) {
  if (g.fields.empty()) refuse(g, "fields", "a group needs at least one field");
  std::set<std::string_view> names;
  std::size_t overlap_fields = 0;
  for (const FieldSpec& field : g.fields) {
    if (field.name.empty()) refuse(g, "fields", "a field needs a name");
    if (!names.insert(field.name).second) refuse(g, field.name, "two fields have this name");
    if (static_cast<std::size_t>(field.dtype) >= kNumDTypes) refuse(g, field.name, "unknown dtype");
    std::uint64_t row_bytes = dtype_bytes(field.dtype);
    for (const std::uint32_t dim : field.shape) {
      if (dim == 0) refuse(g, field.name, "a dimension of the row is 0");
      row_bytes *= dim;
      if (row_bytes > std::numeric_limits<std::uint32_t>::max()) refuse(g, field.name, "a row of 4 GiB or more");
    }
    overlap_fields += field.overlap;
    if (field.overlap && g.overlap_rows == 0) refuse(g, field.name, "is an overlap field, but the group has no overlap rows");
    if (dtype_bytes(field.dtype) > g.alignment)
      refuse(g, "alignment",
             std::to_string(g.alignment) + " bytes cannot align '" + field.name + "' of " + std::string(dtype_name(field.dtype)));
  }
  if (g.overlap_rows != 0 && overlap_fields == 0) refuse(g, "overlap_rows", "no field holds the overlap rows");
  if (overlap_fields == g.fields.size()) refuse(g, "fields", "a tail group needs a field for its tail rows");
}

void validate_group(const GroupSpec& g, std::uint32_t block_size) {
  if (g.name.empty()) refuse(g, "name", "a group needs a name");
  if (!std::has_single_bit(g.alignment) || g.alignment > kMaxAlignment)
    refuse(g, "alignment", std::to_string(g.alignment) + " is not a power of two up to 1 MiB");
  if (static_cast<std::size_t>(g.kind) >= kNumKinds) refuse(g, "kind", "unknown kind");
  validate_retention(g);
  validate_ratio(g, block_size);
  validate_layers(g);
  validate_fields(g);
}

// Lays the sections one after the other and returns the stride of a layer's part.
template <typename Rows, typename Place>
std::uint64_t lay_out(const GroupSpec& g, std::vector<Field>& fields, Rows rows_of, Place place) {
  std::uint64_t offset = 0;
  for (Field& field : fields) {
    offset = round_up(offset, g.alignment);
    place(field, offset);
    offset += std::uint64_t{field.row_bytes} * rows_of(field);
    if (offset > kMaxBlockBytes) refuse(g, field.spec.name, "a block above 512 GiB cannot be addressed");
  }
  return round_up(offset, g.alignment);
}

std::uint64_t bytes_of_block(const GroupSpec& g, std::uint64_t layer_stride) {
  const std::uint64_t layers = g.owner_layers.size();
  if (layer_stride > kMaxBlockBytes / layers) refuse(g, "fields", "a block above 512 GiB cannot be addressed");
  const std::uint64_t unit = std::lcm(kOffsetUnit, std::uint64_t{g.alignment});
  return std::max(unit, round_up(layers * layer_stride, unit));
}

Group derive_group(GroupSpec spec, GroupId id, std::uint32_t block_size) {
  Group group;
  group.id = id;
  if (spec.reader_layers.empty()) spec.reader_layers = spec.owner_layers;
  group.spec = std::move(spec);
  const GroupSpec& g = group.spec;
  const bool tail = g.retention == Retention::kTail;

  std::uint32_t rows = 1;
  if (g.retention == Retention::kHistory) rows = std::max(1u, block_size / g.compress_ratio);
  if (g.retention == Retention::kWindow) rows = block_size;
  if (tail) rows = pow2_rows(node_tail_rows(block_size, g.compress_ratio));
  group.entries_per_block = std::max(1u, rows);
  if (tail) group.ring_entries = std::bit_ceil(g.overlap_rows > 0 ? 2 * g.compress_ratio : g.compress_ratio);

  for (const FieldSpec& field_spec : g.fields) {
    Field field;
    field.spec = field_spec;
    field.row_bytes =
        std::accumulate(field_spec.shape.begin(), field_spec.shape.end(), dtype_bytes(field_spec.dtype), std::multiplies<>());
    field.rows_per_block = field_spec.overlap ? pow2_rows(g.overlap_rows) : rows;
    field.ring_rows = field_spec.overlap ? 0 : group.ring_entries;
    group.fields.push_back(std::move(field));
  }

  group.layer_stride = lay_out(
      g, group.fields, [](const Field& f) { return f.rows_per_block; },
      [](Field& f, std::uint64_t offset) { f.section_offset = offset; });
  group.block_bytes = bytes_of_block(g, group.layer_stride);
  if (tail) {
    // Overlap rows of a running sequence are columns of ring rows, so the ring holds tail fields only.
    group.ring_layer_stride = lay_out(
        g, group.fields, [](const Field& f) { return f.ring_rows; },
        [](Field& f, std::uint64_t offset) { f.ring_section_offset = f.ring_rows == 0 ? 0 : offset; });
    group.ring_block_bytes = bytes_of_block(g, group.ring_layer_stride);
  }
  return group;
}

void add_group_facts(FingerprintBuilder& facts, const Group& group) {
  const GroupSpec& g = group.spec;
  facts.add("group", g.name).add("kind", kind_name(g.kind)).add("retention", retention_name(g.retention));
  facts.add("compress_ratio", g.compress_ratio).add("window", g.window).add("overlap_rows", g.overlap_rows);
  facts.add("alignment", g.alignment).add("indexes", g.indexes).add("entries_per_block", group.entries_per_block);
  facts.add("layer_stride", group.layer_stride).add("block_bytes", group.block_bytes).add("ring_entries", group.ring_entries);
  facts.add("ring_layer_stride", group.ring_layer_stride).add("ring_block_bytes", group.ring_block_bytes);
  facts.add("owner_layers", g.owner_layers.size());
  for (const std::uint32_t layer : g.owner_layers) facts.add("owner_layer", layer);
  facts.add("fields", group.fields.size());
  for (const Field& field : group.fields) {
    facts.add("field", field.spec.name).add("dtype", dtype_name(field.spec.dtype)).add("overlap", field.spec.overlap ? 1u : 0u);
    facts.add("dimensions", field.spec.shape.size());
    for (const std::uint32_t dim : field.spec.shape) facts.add("dimension", dim);
    facts.add("row_bytes", field.row_bytes).add("rows_per_block", field.rows_per_block);
    facts.add("section_offset", field.section_offset).add("ring_rows", field.ring_rows);
    facts.add("ring_section_offset", field.ring_section_offset);
  }
}

}  // namespace

std::uint32_t dtype_bytes(DType dtype) { return kDTypeBytes[static_cast<std::size_t>(dtype)]; }

std::string_view dtype_name(DType dtype) { return kDTypeNames[static_cast<std::size_t>(dtype)]; }

DType dtype_from_name(std::string_view name) {
  const auto found = std::find(kDTypeNames.begin(), kDTypeNames.end(), name);
  if (found == kDTypeNames.end()) throw ArgumentError("dtype", "'" + std::string(name) + "'", "a dtype as torch spells it");
  return static_cast<DType>(found - kDTypeNames.begin());
}

std::string_view retention_name(Retention retention) {
  constexpr std::array<std::string_view, 4> names{"history", "window", "tail", "snapshot"};
  return names[static_cast<std::size_t>(retention)];
}

CacheLayout CacheLayout::build(std::string model, std::uint32_t block_size, std::vector<GroupSpec> groups) {
  if (!std::has_single_bit(block_size) || block_size > kMaxBlockSize)
    throw LayoutError("", "block_size", std::to_string(block_size) + " is not a power of two up to 2^20");
  if (groups.empty()) throw LayoutError("", "groups", "a layout needs at least one group");
  if (groups.size() > kMaxGroups)
    throw LayoutError("", "groups", std::to_string(groups.size()) + " groups, at most " + std::to_string(kMaxGroups));

  std::set<std::string_view> names;
  for (const GroupSpec& g : groups) {
    validate_group(g, block_size);
    if (!names.insert(g.name).second) refuse(g, "name", "two groups have this name");
  }
  for (const GroupSpec& g : groups) {
    if (g.indexes.empty()) continue;
    if (g.kind != ObjectKind::kIndexerState) refuse(g, "indexes", "only indexer_state groups index another group");
    if (g.indexes == g.name || !names.contains(g.indexes)) refuse(g, "indexes", "no other group is named '" + g.indexes + "'");
  }
  if (std::all_of(groups.begin(), groups.end(), [](const GroupSpec& g) { return g.optional; }))
    throw LayoutError("", "groups", "every group is optional, so nothing would say where to resume");

  CacheLayout layout;
  layout.model_ = std::move(model);
  layout.block_size_ = block_size;
  for (GroupSpec& g : groups)
    layout.groups_.push_back(derive_group(std::move(g), static_cast<GroupId>(layout.groups_.size()), block_size));

  for (Group& group : layout.groups_) {
    if (group.spec.retention != Retention::kHistory || group.spec.optional) continue;
    group.history_slot = static_cast<std::int32_t>(layout.history_.size());
    layout.history_.push_back(group.id);
  }
  for (const Retention retention : {Retention::kWindow, Retention::kTail, Retention::kSnapshot}) {
    for (Group& group : layout.groups_) {
      if (group.spec.retention != retention) continue;
      group.point_slot = static_cast<std::int32_t>(layout.points_.size());
      layout.points_.push_back(group.id);
    }
  }
  if (layout.points_.size() > kMaxPointSets)
    throw LayoutError(
        "", "groups",
        std::to_string(layout.points_.size()) + " window, tail and snapshot groups, at most " + std::to_string(kMaxPointSets));

  for (const Group& group : layout.groups_)
    layout.pools_.push_back(PoolSpec{group.spec.name, group.spec.kind, group.id, false, group.block_bytes});
  for (const Group& group : layout.groups_) {
    if (group.spec.retention != Retention::kTail) continue;
    layout.pools_.push_back(PoolSpec{group.spec.name + ".ring", group.spec.kind, group.id, true, group.ring_block_bytes});
  }

  FingerprintBuilder facts("hetkv.layout.1");
  facts.add("endianness", std::endian::native == std::endian::little ? "little" : "big");
  facts.add("block_size", block_size).add("groups", layout.groups_.size());
  for (const Group& group : layout.groups_) add_group_facts(facts, group);
  layout.fingerprint_ = facts.finish();
  return layout;
}

const Group* CacheLayout::find_group(std::string_view name) const {
  const auto found = std::find_if(groups_.begin(), groups_.end(), [name](const Group& g) { return g.spec.name == name; });
  return found == groups_.end() ? nullptr : &*found;
}

std::optional<PoolId> CacheLayout::ring_pool(GroupId group) const {
  for (std::size_t pool = groups_.size(); pool < pools_.size(); ++pool)
    if (pools_[pool].group == group) return static_cast<PoolId>(pool);
  return std::nullopt;
}

RowRange CacheLayout::need(GroupId group, std::int64_t p) const {
  if (p <= 0) return {};
  const GroupSpec& g = groups_[group].spec;
  const std::int64_t m = g.compress_ratio;
  switch (g.retention) {
    case Retention::kHistory:
      return {.begin = 0, .end = p / m};
    case Retention::kWindow:
      return {.begin = std::max<std::int64_t>(0, p - std::int64_t{g.window} + 1), .end = p};
    case Retention::kTail:
      return {.begin = p - p % m, .end = p, .overlap_rows = p >= m ? g.overlap_rows : 0};
    case Retention::kSnapshot:
      return {.begin = p, .end = p, .snapshot = true};
  }
  return {};
}

bool CacheLayout::history_block_at(GroupId group, std::uint32_t depth) const {
  const GroupSpec& g = groups_[group].spec;
  if (g.retention != Retention::kHistory || depth == 0) return false;
  return g.compress_ratio <= block_size_ || (std::uint64_t{depth} * block_size_) % g.compress_ratio == 0;
}

std::uint32_t CacheLayout::window_nodes(GroupId group, std::uint32_t depth) const {
  const GroupSpec& g = groups_[group].spec;
  if (g.retention != Retention::kWindow) return 0;
  const std::uint64_t rows = g.window - 1;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(depth, (rows + block_size_ - 1) / block_size_));
}

bool CacheLayout::point_needed(GroupId group, std::uint32_t depth) const {
  const Retention retention = groups_[group].spec.retention;
  if (retention == Retention::kHistory) return false;
  return !need(group, std::int64_t{depth} * block_size_).empty();
}

CacheLayout CacheLayout::with_alignment(std::string_view group, std::uint32_t alignment) const {
  if (find_group(group) == nullptr) throw LayoutError(std::string(group), "", "no such group");
  std::vector<GroupSpec> specs;
  specs.reserve(groups_.size());
  for (const Group& g : groups_) {
    specs.push_back(g.spec);
    if (g.spec.name == group) specs.back().alignment = alignment;
  }
  return build(model_, block_size_, std::move(specs));
}

std::string CacheLayout::describe() const {
  std::ostringstream text;
  text << model_ << ": block_size " << block_size_ << " tokens, fingerprint " << fingerprint_.hex() << "\n";
  const auto row = [&text](const auto& name, const auto& kind, const auto& retention, const auto& layers, const auto& ratio,
                           const auto& window, const auto& align, const auto& entries, const auto& bytes) {
    text << std::left << std::setw(18) << name << ' ' << std::setw(17) << kind << ' ' << std::setw(9) << retention << std::right
         << std::setw(7) << layers << std::setw(7) << ratio << std::setw(8) << window << std::setw(7) << align << std::setw(9)
         << entries << std::setw(13) << bytes << " ";
  };
  row("group", "kind", "retention", "layers", "ratio", "window", "align", "entries", "block bytes");
  text << " fields\n";
  for (const Group& group : groups_) {
    const GroupSpec& g = group.spec;
    row(g.name, kind_name(g.kind), retention_name(g.retention), g.owner_layers.size(), g.compress_ratio, g.window, g.alignment,
        group.entries_per_block, group.block_bytes);
    for (const Field& field : group.fields) {
      text << ' ' << field.spec.name << '[';
      for (std::size_t i = 0; i < field.spec.shape.size(); ++i) text << (i == 0 ? "" : ",") << field.spec.shape[i];
      text << "] " << dtype_name(field.spec.dtype) << " x" << field.rows_per_block;
    }
    if (group.ring_entries != 0) text << "  ring x" << group.ring_entries << ' ' << group.ring_block_bytes << " B";
    if (!g.indexes.empty()) text << "  indexes " << g.indexes;
    if (g.optional) text << "  optional";
    text << '\n';
  }
  return text.str();
}

}  // namespace hetkv
