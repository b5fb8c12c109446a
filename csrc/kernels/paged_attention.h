// Attention of the tokens of a step over keys and values in blocks: full or sliding window, grouped heads, sinks. Parameters and entry
// points.
//
// PagedAttentionParams is the kernel ABI, already checked; CPU and CUDA take the same struct. A kernel owns nothing and keeps nothing.
// The memory behind the pointers must outlive the call.
//
// Query token i of sequence b has position p = seqused_k[b] - q_len + (i - cu_seqlens_q[b]) and sees the keys of tokens
// [max(0, p - window + 1), p], window 0 meaning all. Token t's row is row t of the sequence in its block table. Tokens behind the last
// sequence, and those of sequences with seqused_k 0, get output 0 and lse -inf.
//
// A token's result has the same bits whatever the step holds beside it and however its prompt was cut: keys are taken in order, in
// chunks and splits that begin at fixed positions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"

namespace hetkv {

inline constexpr int kMaxAttentionDim = 512;      // values of a head
inline constexpr int kAttentionSplit = 1024;      // keys of a split; splits begin at multiples of it
inline constexpr int kMaxAttentionTileRows = 64;  // query rows (token x head of the group) that share a key

struct PagedAttentionParams {
  PagedRows keys;    // width: of one head; data_bytes: of a whole row, all heads
  PagedRows values;  // the same; equal to keys where K = V
  BlockTable table;
  const std::byte* query = nullptr;            // [num_tokens, heads, dim] of query_format, dense
  std::byte* out = nullptr;                    // the same
  float* lse = nullptr;                        // [num_tokens, heads], natural, without the sink
  const std::int32_t* cu_seqlens_q = nullptr;  // [num_sequences + 1]
  const std::int32_t* seqused_k = nullptr;     // [num_sequences]
  const float* sinks = nullptr;                // [heads], or null
  std::int64_t num_tokens = 0;
  std::int64_t num_sequences = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t dim = 0;
  std::int32_t window = 0;
  float scale = 0.0f;
  float softcap = 0.0f;  // 0: none
  EntryFormat query_format = EntryFormat::kFloat32;
};

// Consecutive query tokens of one sequence whose rows, with the heads of one group, fill a tile.
struct AttentionTile {
  std::int64_t sequence = 0;
  std::int64_t token = 0;     // first, of the step
  std::int64_t position = 0;  // of that token
  std::int32_t count = 0;
};

// Tokens of a tile, for this many heads of a group. Thread-safe, allocates nothing.
constexpr std::int32_t attention_tile_tokens(std::int32_t group) {
  return group >= kMaxAttentionTileRows ? 1 : kMaxAttentionTileRows / group;
}

// KV heads that one piece of work should have: with one query token a piece, as many as make long reads of a block's rows.
std::int32_t attention_head_span(const PagedAttentionParams& params) noexcept;

// Floats of scratch that one thread needs for pieces of up to attention_head_span heads, and that one head's partial result of a split
// needs.
std::int64_t attention_scratch_floats(const PagedAttentionParams& params) noexcept;
std::int64_t attention_partial_floats(const PagedAttentionParams& params) noexcept;

// KV heads [first_head, first_head + num_heads) of one tile, all their keys; writes out and lse. scratch: attention_scratch_floats.
// Thread-safe over disjoint (tile, head); allocates nothing. How heads are put together does not show in the result.
void attend_tile_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t first_head,
                     std::int32_t num_heads, float* scratch) noexcept;

// The same work cut: split `split` (keys from kAttentionSplit * split on) into `partials`, attention_partial_floats for each head; then
// all partials of a head merged in order. The result is that of attend_tile_cpu, bit for bit.
void attend_split_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t first_head,
                      std::int32_t num_heads, std::int32_t split, float* partials, float* scratch) noexcept;
void combine_splits_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head,
                        std::int32_t num_splits, const float* const* partials, float* scratch) noexcept;

// First key that the token at `position` sees.
HETKV_HOST_DEVICE inline std::int64_t first_key(const PagedAttentionParams& params, std::int64_t position) {
  return params.window > 0 && position + 1 > params.window ? position + 1 - params.window : 0;
}

// CUDA, all tokens: on `stream` (a cudaStream_t) of the device that holds all pointers; may be captured. Allocates nothing, grids
// come from shapes only; lengths, tables and positions are read on the device. A block outside the arena, or a column that the table
// does not have, counts as absent: its rows are seen by nobody. Every row of out and lse is written.
//
// Tensor cores serve queries, keys and values of one 16-bit type whose dim is a multiple of 16 up to 256, offsets of 16 bytes. If the
// step has few tokens per sequence, by its shape, the decode kernel takes all of them; otherwise each sequence with few tokens of the
// step, and the prefill kernel the others. Anything else goes through a plain kernel.
//
// A token's bits are the same for one kernel, whatever the step holds beside it and however its prompt was cut; between kernels they
// agree up to rounding, since weights are rounded to the 16-bit type against another running maximum. On tensor cores a value that is not finite
// makes NaN of what sees it; what does not see it keeps its bits.
// workspace: attention_workspace_floats, 16-byte aligned; what it holds before and after means nothing.
std::int64_t attention_workspace_floats(const PagedAttentionParams& params) noexcept;
void paged_attention_cuda(const PagedAttentionParams& params, float* workspace, void* stream);

// The builds of cpu/levels.
using AttendTileFn = void(const PagedAttentionParams&, const AttentionTile&, std::int32_t, std::int32_t, float*) noexcept;
using AttendSplitFn = void(const PagedAttentionParams&, const AttentionTile&, std::int32_t, std::int32_t, std::int32_t, float*,
                           float*) noexcept;
using CombineSplitsFn = void(const PagedAttentionParams&, const AttentionTile&, std::int32_t, std::int32_t, const float* const*,
                             float*) noexcept;
namespace portable {
AttendTileFn attend_tile;
AttendSplitFn attend_split;
CombineSplitsFn combine_splits;
}  // namespace portable
namespace avx2 {
AttendTileFn attend_tile;
AttendSplitFn attend_split;
CombineSplitsFn combine_splits;
}  // namespace avx2
namespace avx512 {
AttendTileFn attend_tile;
AttendSplitFn attend_split;
CombineSplitsFn combine_splits;
}  // namespace avx512

}  // namespace hetkv
