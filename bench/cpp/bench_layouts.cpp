#include "bench_layouts.h"

#include <utility>
#include <vector>

#include "base/error.h"

namespace hetkv::bench {
namespace {

constexpr std::uint32_t kWindow = 128;  // tokens

GroupSpec group(std::string name, ObjectKind kind, Retention retention, std::uint32_t ratio, std::vector<FieldSpec> fields) {
  GroupSpec spec;
  spec.name = std::move(name);
  spec.kind = kind;
  spec.retention = retention;
  spec.compress_ratio = ratio;
  if (retention == Retention::kWindow) spec.window = kWindow;
  spec.owner_layers = {0};
  spec.fields = std::move(fields);
  return spec;
}

std::vector<FieldSpec> key_value() {
  return {{"k", DType::kBFloat16, {1, 128}, false}, {"v", DType::kBFloat16, {1, 128}, false}};
}

std::vector<GroupSpec> v4_groups() {
  const auto entries = [](std::uint32_t width) { return std::vector<FieldSpec>{{"kv", DType::kBFloat16, {width}, false}}; };
  const auto overlapping = [&](std::string name, std::uint32_t width) {
    GroupSpec spec = group(std::move(name), ObjectKind::kUncompressedTail, Retention::kTail, 4,
                           {{"kv", DType::kBFloat16, {2 * width}, false},
                            {"gate", DType::kBFloat16, {2 * width}, false},
                            {"overlap_kv", DType::kBFloat16, {width}, true},
                            {"overlap_gate", DType::kFloat32, {width}, true}});
    spec.overlap_rows = 4;
    return spec;
  };
  GroupSpec index = group("csa_index", ObjectKind::kIndexerState, Retention::kHistory, 4, entries(128));
  index.indexes = "csa_kv";
  return {group("csa_kv", ObjectKind::kCompressedKv, Retention::kHistory, 4, entries(512)),
          index,
          group("hca_kv", ObjectKind::kCompressedKv, Retention::kHistory, 128, entries(512)),
          group("swa", ObjectKind::kSwaWindow, Retention::kWindow, 1, entries(512)),
          overlapping("csa_tail", 512),
          overlapping("csa_index_tail", 128),
          group("hca_tail", ObjectKind::kUncompressedTail, Retention::kTail, 128,
                {{"kv", DType::kBFloat16, {512}, false}, {"gate", DType::kBFloat16, {512}, false}})};
}

}  // namespace

CacheLayout make_layout(const std::string& name, std::uint32_t block_size) {
  if (name == "v4") return CacheLayout::build(name, block_size, v4_groups());
  std::vector<GroupSpec> groups{group("full", ObjectKind::kFullKv, Retention::kHistory, 1, key_value())};
  if (name == "full+window") groups.push_back(group("swa", ObjectKind::kSwaWindow, Retention::kWindow, 1, key_value()));
  if (name != "full" && name != "full+window") throw ArgumentError("layout", name, "full, full+window or v4");
  return CacheLayout::build(name, block_size, std::move(groups));
}

std::uint64_t history_bytes(const CacheLayout& layout, std::uint64_t blocks) {
  std::uint64_t bytes = 0;
  for (const GroupId id : layout.history_groups()) {
    const Group& g = layout.group(id);
    const std::uint64_t per_block = std::max<std::uint64_t>(1, g.spec.compress_ratio / layout.block_size());
    bytes += (blocks + per_block - 1) / per_block * g.block_bytes;
  }
  return bytes;
}

}  // namespace hetkv::bench
