#include "kernels/row_copy.h"

#include <algorithm>
#include <cstring>

namespace hetkv {
namespace {

enum class Direction : std::uint8_t { kScatter, kGather };

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

template <Direction kDirection>
void copy_rows(const RowCopyParams& params, std::int64_t begin, std::int64_t end) noexcept {
  while (begin < end) {
    const std::int64_t layer = begin / params.num_rows;
    const std::int64_t layer_end = std::min(end, (layer + 1) * params.num_rows);
    std::byte* const arena = params.arena + layer * params.layer_stride;
    std::byte* const rows = params.rows + layer * params.rows_layer_stride;
    std::int64_t row = begin - layer * params.num_rows;
    const std::int64_t row_end = row + (layer_end - begin);
    while (row < row_end) {
      const std::int64_t length = run_length(params, row, row_end - row);
      std::byte* const block_side = arena + row_start(params, params.slots[row]);
      std::byte* const packed_side = rows + row * params.rows_row_stride;
      const auto bytes = static_cast<std::size_t>(length * params.row_bytes);
      if constexpr (kDirection == Direction::kScatter) {
        std::memcpy(block_side, packed_side, bytes);
      } else {
        std::memcpy(packed_side, block_side, bytes);
      }
      row += length;
    }
    begin = layer_end;
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
