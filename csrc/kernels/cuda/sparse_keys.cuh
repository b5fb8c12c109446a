// The keys of a token in sparse attention, by their place: window rows by position, then entries in list order. Shared by the kernels
// of sparse_attention.
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/token_place.cuh"
#include "kernels/sparse_attention.h"

namespace hetkv::gpu {

// A token and how many keys it has of each kind: none if it belongs to no sequence. Absent keys count as places.
struct SparseKeys {
  std::int64_t sequence = 0;
  std::int64_t token = 0;
  std::int64_t first_row = 0;
  int window_rows = 0;
  int entries = 0;
  int visible = 0;  // entries that the token may see
};

HETKV_DEVICE_INLINE SparseKeys sparse_keys_of(const SparseAttentionParams& params, std::int64_t token) {
  SparseKeys keys;
  keys.token = token;
  const auto [sequence, position] = token_place(params, token);
  keys.sequence = sequence;
  if (position < 0) return keys;
  keys.first_row = position + 1 > params.window ? position + 1 - params.window : 0;
  keys.window_rows = static_cast<int>(position + 1 - keys.first_row);
  if (params.entry_table.blocks != nullptr) {
    keys.visible = static_cast<int>((position + 1) / params.ratio);
    keys.entries = params.selected != nullptr ? params.num_selected : keys.visible;
  }
  return keys;
}

// The number of the entry at a place of the list, or -1.
HETKV_DEVICE_INLINE int listed_entry(const SparseAttentionParams& params, const SparseKeys& keys, int place) {
  if (place >= keys.entries) return -1;
  if (params.selected == nullptr) return place;
  const int entry = params.selected[keys.token * params.num_selected + place];
  return entry < keys.visible ? entry : -1;
}

}  // namespace hetkv::gpu
