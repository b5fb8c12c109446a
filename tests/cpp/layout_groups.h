// Groups that several tests build layouts from.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "allocator/layout.h"

namespace hetkv::test {

using Groups = std::vector<GroupSpec>;

inline std::vector<std::uint32_t> layers(std::uint32_t count, std::uint32_t first = 0, std::uint32_t step = 1) {
  std::vector<std::uint32_t> result;
  for (std::uint32_t i = 0; i < count; ++i) result.push_back(first + i * step);
  return result;
}

inline GroupSpec history(std::string name, std::uint32_t ratio, ObjectKind kind = ObjectKind::kCompressedKv) {
  GroupSpec g;
  g.name = std::move(name);
  g.kind = kind;
  g.compress_ratio = ratio;
  g.owner_layers = {0, 1};
  g.fields = {{"kv", DType::kFloat32, {8}, false}};
  return g;
}

inline GroupSpec window(std::string name, std::uint32_t tokens) {
  GroupSpec g = history(std::move(name), 1, ObjectKind::kSwaWindow);
  g.retention = Retention::kWindow;
  g.window = tokens;
  return g;
}

inline GroupSpec tail(std::string name, std::uint32_t ratio, std::uint32_t overlap_rows, std::uint32_t width = 8) {
  GroupSpec g = history(std::move(name), ratio, ObjectKind::kUncompressedTail);
  g.retention = Retention::kTail;
  g.overlap_rows = overlap_rows;
  g.fields = {{"kv", DType::kFloat32, {width}, false}, {"gate", DType::kFloat32, {width}, false}};
  if (overlap_rows > 0) {
    g.fields.push_back({"overlap_kv", DType::kFloat32, {width / 2}, true});
    g.fields.push_back({"overlap_gate", DType::kFloat32, {width / 2}, true});
  }
  return g;
}

inline GroupSpec snapshot(std::string name) {
  GroupSpec g = history(std::move(name), 1, ObjectKind::kRecurrentState);
  g.retention = Retention::kSnapshot;
  g.fields = {{"conv", DType::kBFloat16, {6, 4}, false}, {"recurrent", DType::kFloat32, {2, 4, 4}, false}};
  return g;
}

// DeepSeek-V4's groups in Hugging Face form.
inline Groups v4_groups() {
  GroupSpec index = history("csa_index", 4, ObjectKind::kIndexerState);
  index.indexes = "csa_kv";
  return {history("csa_kv", 4),         index,
          history("hca_kv", 128),       window("swa", 128),
          tail("csa_tail", 4, 4, 1024), tail("csa_index_tail", 4, 4, 256),
          tail("hca_tail", 128, 0, 512)};
}

// Groups: 0 history, 1 window, 2 tail with overlap, 3 snapshot, 4 index of group 0.
inline Groups sound_groups() {
  GroupSpec index = history("index", 4, ObjectKind::kIndexerState);
  index.indexes = "kv";
  return {history("kv", 4), window("swa", 128), tail("tail", 4, 4), snapshot("gdn"), index};
}

inline CacheLayout build(Groups groups, std::uint32_t block_size = 64) {
  return CacheLayout::build("test", block_size, std::move(groups));
}

}  // namespace hetkv::test
