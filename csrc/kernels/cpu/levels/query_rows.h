// Query and output rows of attention: read into a tile's transposed form, written back in the query's format.
#pragma once

#include "kernels/cpu/levels/attend.h"
#include "kernels/cpu/levels/entry_load.h"
#include "kernels/cpu/levels/entry_store.h"

namespace hetkv::HETKV_LEVEL {
namespace {

inline void load_vector(const std::byte* from, EntryFormat format, int count, float* out) {
  switch (format) {
    case EntryFormat::kFloat16:
      load_halves<false>(from, count, out);
      break;
    case EntryFormat::kBFloat16:
      load_halves<true>(from, count, out);
      break;
    default:
      __builtin_memcpy(out, from, static_cast<std::size_t>(count) * 4);
  }
}

inline void store_vector(const float* values, EntryFormat format, int count, std::byte* to) {
  switch (format) {
    case EntryFormat::kFloat16:
      store_halves<false>(values, count, to);
      break;
    case EntryFormat::kBFloat16:
      store_halves<true>(values, count, to);
      break;
    default:
      __builtin_memcpy(to, values, static_cast<std::size_t>(count) * 4);
  }
}

// One query vector becomes column `row` of the tile, times `factor`. Dimensions past `dim` must be zero already.
inline void put_query(Tile& tile, int row, const std::byte* from, EntryFormat format, int dim, float factor) {
  alignas(64) float values[kMaxHeadDim];
  load_vector(from, format, dim, values);
  for (int d = 0; d < dim; ++d) tile.query[d * tile.rows + row] = values[d] * factor;
}

}  // namespace
}  // namespace hetkv::HETKV_LEVEL
