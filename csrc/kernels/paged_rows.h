// Rows of one field of one layer inside the blocks of an arena, and the formats that a row can have: what every kernel that reads
// or writes blocks shares.
//
// A block offset counts 256 bytes from the arena's start. Row r of a sequence lies in block table[r >> block_shift], there at
//   block_offset * 256 + data_offset + (r & mask) * data_bytes,
// data_offset being the bytes from a block's start to row 0 of this layer's field. Packed formats keep their scales in a section of
// their own, addressed the same way with scale_offset and scale_bytes. Offsets are widened to 64 bits before they are scaled.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/host_device.h"

namespace hetkv {

inline constexpr int kBlockOffsetShift = 8;  // block offsets count 256 bytes

// How one row of `width` values is stored. Bytes per row: data_bytes() and scale_bytes().
enum class EntryFormat : std::uint8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFp8Packed,   // width - 64 e4m3 in groups of 64, then 64 bf16; scale byte e + 127 per group, padded to 8 bytes with zeros
  kFp8Index,    // width e4m3; one float32 scale, a power of two
  kMxfp4Index,  // width e2m1, low nibble first; one ue8m0 byte (e + 127) per 32 values
};

inline constexpr int kPackedRope = 64;   // trailing bf16 values of kFp8Packed
inline constexpr int kPackedGroup = 64;  // values per scale of kFp8Packed
inline constexpr int kMxfp4Group = 32;   // values per scale of kMxfp4Index

HETKV_HOST_DEVICE constexpr std::int64_t entry_data_bytes(EntryFormat format, std::int64_t width) {
  switch (format) {
    case EntryFormat::kFloat32:
      return 4 * width;
    case EntryFormat::kFloat16:
    case EntryFormat::kBFloat16:
      return 2 * width;
    case EntryFormat::kFp8Packed:
      return width - kPackedRope + 2 * kPackedRope;
    case EntryFormat::kFp8Index:
      return width;
    case EntryFormat::kMxfp4Index:
      return width / 2;
  }
  return 0;
}

HETKV_HOST_DEVICE constexpr std::int64_t entry_scale_bytes(EntryFormat format, std::int64_t width) {
  switch (format) {
    case EntryFormat::kFp8Packed:
      return ((width - kPackedRope) / kPackedGroup + 7) / 8 * 8;
    case EntryFormat::kFp8Index:
      return 4;
    case EntryFormat::kMxfp4Index:
      return width / kMxfp4Group;
    default:
      return 0;
  }
}

// One field of one layer, and how its rows are stored. Borrows the arena.
struct PagedRows {
  std::byte* arena = nullptr;
  std::int64_t arena_bytes = 0;
  std::int64_t data_offset = 0;   // bytes from a block's start to row 0
  std::int64_t scale_offset = 0;  // same, of the scales; unused by plain formats
  std::int64_t data_bytes = 0;    // of one row
  std::int64_t scale_bytes = 0;   // of one row; 0 for plain formats
  std::int32_t width = 0;         // values of one row
  std::int32_t block_shift = 0;   // log2 of rows per block
  EntryFormat format = EntryFormat::kFloat32;
};

// int32 [batch, columns] of block offsets, rows `stride` apart. Borrows. Columns that a sequence does not reach may hold anything.
struct BlockTable {
  const std::int32_t* blocks = nullptr;
  std::int64_t stride = 0;  // elements
  std::int32_t columns = 0;
};

struct RowAddress {
  std::byte* data;
  std::byte* scale;
};

HETKV_HOST_DEVICE inline RowAddress row_in_block(const PagedRows& rows, std::int64_t block_offset, std::int64_t row) {
  std::byte* const block = rows.arena + (block_offset << kBlockOffsetShift);
  return {block + rows.data_offset + row * rows.data_bytes, block + rows.scale_offset + row * rows.scale_bytes};
}

// Row `row` of sequence `sequence`. The caller knows that the row is inside the table and that its block is real.
HETKV_HOST_DEVICE inline RowAddress row_address(const PagedRows& rows, const BlockTable& table, std::int64_t sequence,
                                                std::int64_t row) {
  const std::int64_t block = table.blocks[sequence * table.stride + (row >> rows.block_shift)];
  return row_in_block(rows, block, row & ((std::int64_t{1} << rows.block_shift) - 1));
}

// The row of a slot (block_offset * rows_per_block + row).
HETKV_HOST_DEVICE inline RowAddress slot_address(const PagedRows& rows, std::int64_t slot) {
  const std::int64_t block = slot >> rows.block_shift;
  return row_in_block(rows, block, slot - (block << rows.block_shift));
}

// Whether the block's part that holds these rows is inside the arena. Never overflows for offsets of 32 bits.
HETKV_HOST_DEVICE inline bool block_inside(const PagedRows& rows, std::int64_t block_offset) {
  if (block_offset < 0 || block_offset > (rows.arena_bytes >> kBlockOffsetShift)) return false;
  const std::int64_t count = std::int64_t{1} << rows.block_shift;
  const std::int64_t data_end = rows.data_offset + count * rows.data_bytes;
  const std::int64_t scale_end = rows.scale_bytes == 0 ? 0 : rows.scale_offset + count * rows.scale_bytes;
  return (block_offset << kBlockOffsetShift) + (data_end > scale_end ? data_end : scale_end) <= rows.arena_bytes;
}

}  // namespace hetkv
