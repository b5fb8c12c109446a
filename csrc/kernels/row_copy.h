// Copying rows between a packed tensor and the blocks of an arena: parameters and entry points.
//
// RowCopyParams is the kernel ABI: CPU and CUDA take the same struct, already checked. A kernel owns nothing, keeps nothing,
// and trusts every field but the slots. The memory behind the pointers must outlive the copy (CUDA: until the stream reaches it).
//
// slot = block_offset * rows_per_block + row, block_offset in units of 256 bytes from the arena's start. In the arena a row is at
//   block_offset * 256 + section_offset + layer * layer_stride + row * row_bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"

namespace hetkv {

struct RowCopyParams {
  std::byte* arena = nullptr;           // scatter writes it, gather reads it
  std::byte* rows = nullptr;            // packed side, [num_layers, num_rows, row_bytes]: scatter reads it, gather writes it
  const std::int64_t* slots = nullptr;  // [num_rows], contiguous
  std::int64_t num_layers = 0;          // >= 1
  std::int64_t num_rows = 0;            // >= 1
  std::int64_t row_bytes = 0;           // >= 1
  std::int64_t rows_layer_stride = 0;   // bytes, packed side
  std::int64_t rows_row_stride = 0;     // bytes, packed side
  std::int64_t first_offset = 0;        // bytes from a block's start to row 0 of the first copied layer
  std::int64_t layer_stride = 0;        // bytes from a layer's part of a block to the next
  std::int64_t start_limit = 0;         // bytes: the largest block_offset * 256 + row * row_bytes with every layer in the arena
  std::int32_t block_shift = 0;         // log2 of rows_per_block
};

// Bytes from the arena's start to the slot's row in the first copied layer; -1 if a copied layer of it would leave the arena.
// Thread-safe, allocates nothing. Never overflows: the shifted block offset is compared before it is scaled.
HETKV_HOST_DEVICE inline std::int64_t row_start(const RowCopyParams& params, std::int64_t slot) {
  if (slot < 0) return -1;
  const std::int64_t block = slot >> params.block_shift;
  if (block > (params.start_limit >> kBlockOffsetShift)) return -1;
  const std::int64_t row = slot - (block << params.block_shift);
  const std::int64_t start = (block << kBlockOffsetShift) + row * params.row_bytes;
  return start <= params.start_limit ? start + params.first_offset : -1;
}

// Index of the first slot that row_start refuses, or -1. Thread-safe, allocates nothing; linear in the slots.
std::int64_t find_bad_slot(const RowCopyParams& params) noexcept;

// Copies items [begin, end) of the num_rows * num_layers items, the layers of a row together. Every slot must be good. Two equal
// slots in a scatter leave the bytes of either row, or a mix of both. Thread-safe over disjoint items with distinct slots;
// allocates nothing.
void scatter_rows_cpu(const RowCopyParams& params, std::int64_t begin, std::int64_t end) noexcept;
void gather_rows_cpu(const RowCopyParams& params, std::int64_t begin, std::int64_t end) noexcept;

// Enqueues the whole copy on `stream` (a cudaStream_t of the current device). Slots that row_start refuses are skipped, since the
// host must not wait to see them. Throws CudaError if the launch failed. Thread-safe, allocates nothing, does not block.
void scatter_rows_cuda(const RowCopyParams& params, void* stream);
void gather_rows_cuda(const RowCopyParams& params, void* stream);

}  // namespace hetkv
