#include "kernels/row_copy.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace hetkv {
namespace {

enum class Direction : std::uint8_t { kScatter, kGather };

constexpr int kTileRows = 64;

// Rows from `row` on, at most `limit`, that lie one after the other on both sides: a run is copied at once, which is what makes
// a prefill (whole blocks in order) run at the speed of one memcpy per block section.
std::int64_t run_length(const RowCopyParams& params, std::int64_t row, std::int64_t limit) noexcept {
  if (params.rows_row_stride != params.row_bytes) return 1;
  const std::int64_t slot = params.slots[row];
  const std::int64_t mask = (std::int64_t{1} << params.block_shift) - 1;
  const std::int64_t most = std::min(limit, mask + 1 - (slot & mask));  // a run ends with its block
  std::int64_t length = 1;
  while (length < most && params.slots[row + length] == slot + length) ++length;
  return length;
}

struct Run {
  std::int64_t row = 0, count = 0;  // packed side
  std::int64_t start = 0;           // bytes from the arena's start, first layer
};

// Copies `num_runs` runs in layers [layer, layer_end).
template <Direction kDirection>
void copy_runs(const RowCopyParams& params, const Run* runs, int num_runs, std::int64_t layer, std::int64_t layer_end) noexcept {
  for (; layer < layer_end; ++layer) {
    std::byte* const arena = params.arena + layer * params.layer_stride;
    std::byte* const rows = params.rows + layer * params.rows_layer_stride;
    for (int i = 0; i < num_runs; ++i) {
      std::byte* const block_side = arena + runs[i].start;
      std::byte* const packed_side = rows + runs[i].row * params.rows_row_stride;
      const auto bytes = static_cast<std::size_t>(runs[i].count * params.row_bytes);
      if constexpr (kDirection == Direction::kScatter) {
        std::memcpy(block_side, packed_side, bytes);
      } else {
        std::memcpy(packed_side, block_side, bytes);
      }
    }
  }
}

// Tiles of rows, then layers, then the runs of the tile. A tile of a whole block is one piece of the arena for all layers; layer
// by layer over everything would come back to every block's pages for each layer, row by row would jump between layers that
// often collide in the cache.
template <Direction kDirection>
void copy_rows(const RowCopyParams& params, std::int64_t begin, std::int64_t end) noexcept {
  std::array<Run, kTileRows> runs;
  while (begin < end) {
    const std::int64_t first = begin / params.num_layers;
    const std::int64_t layer = begin - first * params.num_layers;
    const bool whole = layer == 0 && end - begin >= params.num_layers;
    // A range may begin and end inside a row's layers: then the tile is that row, and these layers of it.
    const std::int64_t layer_end = whole ? params.num_layers : std::min(params.num_layers, layer + (end - begin));
    const std::int64_t rows_end = whole ? first + (end - begin) / params.num_layers : first + 1;
    std::int64_t row = first;
    int num_runs = 0;
    while (row < rows_end && row - first < kTileRows) {
      const std::int64_t count = run_length(params, row, rows_end - row);
      runs[static_cast<std::size_t>(num_runs++)] = {row, count, row_start(params, params.slots[row])};
      row += count;
    }
    copy_runs<kDirection>(params, runs.data(), num_runs, layer, layer_end);
    begin = whole ? row * params.num_layers : begin + (layer_end - layer);
  }
}

}  // namespace

std::int64_t find_bad_slot(const RowCopyParams& params) noexcept {
  for (std::int64_t i = 0; i < params.num_rows; ++i) {
    if (row_start(params, params.slots[i]) < 0) return i;
  }
  return -1;
}

void scatter_rows_cpu(const RowCopyParams& params, std::int64_t begin, std::int64_t end) noexcept {
  copy_rows<Direction::kScatter>(params, begin, end);
}

void gather_rows_cpu(const RowCopyParams& params, std::int64_t begin, std::int64_t end) noexcept {
  copy_rows<Direction::kGather>(params, begin, end);
}

}  // namespace hetkv
