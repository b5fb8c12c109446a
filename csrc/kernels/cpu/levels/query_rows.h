// Query rows of attention, read into a tile's transposed form.
#pragma once

#include "kernels/cpu/levels/attend.h"
#include "kernels/cpu/levels/entry_load.h"

namespace hetkv::HETKV_LEVEL {
namespace {

// One query vector becomes column `row` of the tile, times `factor`. Dimensions past `dim` must be zero already.
inline void put_query(Tile& tile, int row, const std::byte* from, EntryFormat format, int dim, float factor) {
  alignas(64) float values[kMaxHeadDim];
  load_plain(from, format, dim, values);
  for (int d = 0; d < dim; ++d) tile.query[d * tile.rows + row] = values[d] * factor;
}

}  // namespace
}  // namespace hetkv::HETKV_LEVEL
