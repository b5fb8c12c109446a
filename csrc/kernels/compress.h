// The compressor: gated pooling of the raw rows of a window of `ratio` tokens into one entry, RMS norm, rotation, and storing the
// entry in its block. Parameters and entry points.
//
// CompressParams is the kernel ABI, already checked; CPU and CUDA take the same struct. A kernel owns nothing and keeps nothing. The
// memory behind the pointers must outlive the call.
//
// Token i of a step belongs to sequence b (cu_seqlens_q) and has the position seqused_k[b] - q_len + (i - cu_seqlens_q[b]). It closes
// window w = position / ratio if position + 1 is a multiple of ratio. The window's raw rows are addressed by position: from the
// step's own rows, else from the sequence's ring at position mod ring_rows. With overlap a raw row has two halves: window w pools
// the first halves of the tokens of window w - 1, then the second halves of its own; window 0 has only its own.
//
// Rows are pooled in the order of their positions, in groups that depend on nothing but the window's length: an entry has the same
// bits for every chunking of the prompt. The two phases keep it so: no ring row is replaced before every window of the step is done.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"
#include "kernels/step_tokens.h"

namespace hetkv {

inline constexpr int kMaxCompressWidth = 1024;  // values of an entry: the kernels' scratch
inline constexpr int kCompressGranule = 8;      // an entry's width is a multiple: raw rows are 16-byte aligned in every format

struct CompressParams {
  PagedRows entries;                     // width = c; the arena is also the ring's
  const std::byte* kv = nullptr;         // [num_tokens, raw_width] of raw_format, 16-byte aligned as is kv_stride
  const std::byte* gate = nullptr;       // the same
  std::int64_t kv_stride = 0;            // bytes
  std::int64_t gate_stride = 0;          // bytes
  const float* position_bias = nullptr;  // [ratio, raw_width], contiguous
  const float* norm_weight = nullptr;    // [c]
  const float* cos = nullptr;            // [num_tokens, rope / 2], row t for the entry that token t closes
  const float* sin = nullptr;
  const std::int32_t* cu_seqlens_q = nullptr;  // [num_sequences + 1]
  const std::int32_t* seqused_k = nullptr;     // [num_sequences]; 0: padding, nothing is read or written
  BlockTable ring_table;                       // one column: the block of the sequence's ring
  const std::int64_t* slots = nullptr;         // [num_tokens], read where a token closes a window; -1: the entry is not stored
  std::int64_t num_tokens = 0;
  std::int64_t num_sequences = 0;
  std::int64_t ring_kv_offset = 0;  // bytes from the ring block's start; multiples of 16
  std::int64_t ring_gate_offset = 0;
  std::int64_t ring_rows = 0;                      // a power of two, >= (overlap ? 2 : 1) * ratio
  std::int64_t ratio = 0;                          // >= 1
  EntryFormat raw_format = EntryFormat::kFloat32;  // or kFloat16, kBFloat16
  std::int32_t rope = 0;                           // rotated values at the end of an entry, even
  bool overlap = false;
  float norm_eps = 0.0f;
};

HETKV_HOST_DEVICE inline std::int64_t raw_width(const CompressParams& params) {
  return std::int64_t{params.overlap ? 2 : 1} * params.entries.width;
}
HETKV_HOST_DEVICE inline std::int64_t raw_row_bytes(const CompressParams& params) {
  return entry_data_bytes(params.raw_format, raw_width(params));
}

// Whether the kv and gate rows of a ring in this block are inside the arena. Never overflows for offsets of 32 bits.
HETKV_HOST_DEVICE inline bool ring_inside(const CompressParams& params, std::int64_t block_offset) {
  const PagedRows& arena = params.entries;
  if (block_offset < 0 || block_offset > (arena.arena_bytes >> kBlockOffsetShift)) return false;
  const std::int64_t last = params.ring_kv_offset > params.ring_gate_offset ? params.ring_kv_offset : params.ring_gate_offset;
  return (block_offset << kBlockOffsetShift) + last + params.ring_rows * raw_row_bytes(params) <= arena.arena_bytes;
}

// What is wrong with the step's tables, for the CPU op, which may look: the first problem, in the order of the members.
struct CompressProblem {
  enum class Kind : std::uint8_t { kNone, kCuSeqlens, kSeqused, kRingTable, kSlot };
  Kind kind = Kind::kNone;
  std::int64_t index = 0;  // of the value in its tensor
};
// Thread-safe, allocates nothing; linear in tokens / ratio + sequences.
CompressProblem find_compress_problem(const CompressParams& params) noexcept;

// Phase 1: the entries that tokens [begin, end) close. Phase 2, after all of phase 1: of tokens [begin, end) those among the last
// ring_rows of their sequence go into the ring. Thread-safe over disjoint tokens with distinct slots; allocate nothing.
void compress_entries_cpu(const CompressParams& params, std::int64_t begin, std::int64_t end) noexcept;
void compress_rings_cpu(const CompressParams& params, std::int64_t begin, std::int64_t end) noexcept;

// Both phases on a stream of the arena's device. Every pointer is device memory; entries whose slot is outside the arena, and sequences
// whose ring is, are skipped. Throws CudaError if a launch is refused. Thread-safe, allocates nothing, does not block; may be captured.
void compress_cuda(const CompressParams& params, void* stream);

// The builds of cpu/levels.
using CompressEntriesFn = void(const CompressParams&, std::int64_t, std::int64_t) noexcept;
namespace portable {
CompressEntriesFn compress_entries;
}
namespace avx2 {
CompressEntriesFn compress_entries;
}
namespace avx512 {
CompressEntriesFn compress_entries;
}

}  // namespace hetkv
