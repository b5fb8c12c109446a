// Writing the new rows of a step into blocks: optional RMS norm, optional rotation, conversion or quantisation. Parameters and entry
// points.
//
// WriteParams is the kernel ABI, already checked; CPU and CUDA take the same struct. A kernel owns nothing and keeps nothing. The
// memory behind the pointers must outlive the call.
//
// Input row i has `heads` vectors of `target.width` values. Each is normed over its width, rotated with row i of cos and sin, rounded
// to the stored format, and stored at slot slots[i]: the heads of a slot one after the other. Packed formats have one head.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"

namespace hetkv {

struct WriteParams {
  PagedRows target;                     // data_bytes: of a whole row, all heads; width: of one head
  const std::byte* rows = nullptr;      // [num_rows, heads, width] of row_format, strides below
  const std::int64_t* slots = nullptr;  // [num_rows]; -1: skipped
  const float* norm_weight = nullptr;   // [width], or null: no norm
  const float* cos = nullptr;           // [num_rows, rope / 2], or null: no rotation
  const float* sin = nullptr;
  std::int64_t num_rows = 0;
  std::int64_t row_stride = 0;   // bytes
  std::int64_t head_stride = 0;  // bytes
  std::int32_t heads = 1;
  std::int32_t rope = 0;  // rotated values, even
  float norm_eps = 0.0f;
  EntryFormat row_format = EntryFormat::kFloat32;  // or kFloat16, kBFloat16
  bool rope_interleaved = true;                    // pairs (2i, 2i + 1); else (i, i + rope / 2)
  bool rope_trailing = true;                       // the last `rope` values; else the first
};

// Whether slot -1 (skipped) or a row inside the arena. Thread-safe, allocates nothing.
HETKV_HOST_DEVICE inline bool slot_fits(const PagedRows& rows, std::int64_t slot) {
  return slot >= 0 && block_inside(rows, slot >> rows.block_shift);
}

// Index of the first slot that is neither -1 nor inside the arena, or -1. Thread-safe, allocates nothing.
std::int64_t find_bad_write_slot(const WriteParams& params) noexcept;

// Writes rows [begin, end). Every slot must be good. Thread-safe over disjoint rows with distinct slots; allocates nothing.
void write_rows_cpu(const WriteParams& params, std::int64_t begin, std::int64_t end) noexcept;

// The same on a stream of the arena's device; slots that are not good are skipped. Every pointer is device memory. Throws CudaError if
// the launch is refused. Thread-safe, allocates nothing, does not block; may be captured.
void write_rows_cuda(const WriteParams& params, void* stream);

inline constexpr int kMaxWriteWidth = 1024;  // values of a head: the kernels' scratch

// The builds of cpu/levels.
using WriteRowsFn = void(const WriteParams&, std::int64_t, std::int64_t) noexcept;
namespace portable {
WriteRowsFn write_rows;
}
namespace avx2 {
WriteRowsFn write_rows;
}
namespace avx512 {
WriteRowsFn write_rows;
}

}  // namespace hetkv
