// Attention over a window of raw rows and compressed entries, in one softmax; a key's leading values are its value. Parameters and entry
// points.
//
// Token at position p sees rows [max(0, p - window + 1), p] of the window table, then the entries of its list `selected` (-1: none),
// or, without a list, all entries [0, floor((p + 1) / ratio)). Each head may have a sink; the output's trailing values are rotated by
// the token's inverse rotation. Tokens of no sequence get output 0 and lse -inf.
//
// DeepSeek-V4: window rows and entries of 512 values, all of them the value. DeepSeek-V3.2, absorbed: no window (0), the entries are
// the tokens themselves (ratio 1), 512 latent values that are the value and 64 rotated ones that only keys have.
//
// A token's result has the same bits whatever the step holds beside it: window rows by position, then the list in order. On CUDA the
// bits follow also from the number of splits, and so from the shapes of the step; between shapes results agree up to rounding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"

namespace hetkv {

inline constexpr int kMaxSparseDim = 576;
inline constexpr int kSparseTileHeads = 64;    // heads that share a loaded row
inline constexpr int kSparseTileValues = 512;  // of an output vector on tensor cores

struct SparseAttentionParams {
  PagedRows window_rows;  // without a window: as entries
  PagedRows entries;
  BlockTable window_table;
  BlockTable entry_table;                  // blocks null: no entries
  const std::int32_t* selected = nullptr;  // [num_tokens, num_selected], or null: all visible entries
  const std::byte* query = nullptr;        // [num_tokens, heads, dim] of query_format, dense
  std::byte* out = nullptr;                // [num_tokens, heads, value_dim], the same
  float* lse = nullptr;                    // [num_tokens, heads], natural, without the sink
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* seqused_k = nullptr;
  const float* sinks = nullptr;  // [heads], or null
  const float* cos = nullptr;    // [num_tokens, rope / 2], or null
  const float* sin = nullptr;
  std::int64_t num_tokens = 0;
  std::int64_t num_sequences = 0;
  std::int64_t ratio = 1;
  std::int32_t num_selected = 0;
  std::int32_t window = 0;  // 0: none
  std::int32_t heads = 0;
  std::int32_t dim = 0;
  std::int32_t value_dim = 0;  // the leading values of a row that are its value: 1 to dim
  std::int32_t rope = 0;       // at most value_dim
  float scale = 0.0f;
  EntryFormat query_format = EntryFormat::kFloat32;
};

// A token of the step and its position.
struct SparseToken {
  std::int64_t sequence = 0, token = 0, position = 0;
};

// Floats of scratch that one thread needs.
std::int64_t sparse_scratch_floats(const SparseAttentionParams& params) noexcept;

// Heads [head, head + kSparseTileHeads) of one token. Thread-safe over disjoint (token, heads); allocates nothing.
void sparse_attention_cpu(const SparseAttentionParams& params, const SparseToken& token, std::int32_t head,
                          float* scratch) noexcept;

// CUDA: how many parts the keys of a token are cut into, from shapes alone: enough to fill a card when tokens are few.
inline constexpr std::int64_t kSparseSplitKeys = 320;    // a part is not made smaller
inline constexpr std::int64_t kSparseWantedParts = 256;  // of a launch
inline std::int64_t sparse_splits(const SparseAttentionParams& params) noexcept {
  const auto up = [](std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit; };
  const std::int64_t rows = std::int64_t{params.window_table.columns} << params.window_rows.block_shift;
  std::int64_t entries = std::int64_t{params.entry_table.columns} << params.entries.block_shift;
  if (params.selected != nullptr) entries = params.num_selected;
  if (params.entry_table.blocks == nullptr) entries = 0;
  const std::int64_t keys = up(rows < params.window ? rows : params.window, 64) * 64 + up(entries, 64) * 64;
  const std::int64_t work = params.num_tokens * up(params.heads, kSparseTileHeads);
  const std::int64_t wanted = work < kSparseWantedParts && work > 0 ? kSparseWantedParts / work : 1;
  const std::int64_t most = up(keys, kSparseSplitKeys);
  return most < 1 ? 1 : most < wanted ? most : wanted;
}
// Floats of device workspace; 0 with one split.
inline std::int64_t sparse_workspace_floats(const SparseAttentionParams& params) noexcept {
  const std::int64_t splits = sparse_splits(params);
  return splits == 1 ? 0 : params.num_tokens * splits * params.heads * (kSparseTileValues + 2);
}

// All tokens and heads, on a stream of the arena's device. Every pointer is device memory. Rows and entries outside the arena or the
// tables, and selected entries that a token does not see, count as absent. 512 values with rows of 512 or 576, of one 16-bit type with
// the query, and bfloat16 with packed rows of 512, run on tensor cores, with weights rounded to 16 bits; everything else in float, without
// a promise of speed. Throws CudaError if a launch is refused. Thread-safe over distinct workspaces, allocates nothing, does not block; may be
// captured.
void sparse_attention_cuda(const SparseAttentionParams& params, float* workspace, void* stream);

// The builds of cpu/levels.
using SparseAttentionFn = void(const SparseAttentionParams&, const SparseToken&, std::int32_t, float*) noexcept;
namespace portable {
SparseAttentionFn sparse_attention;
}
namespace avx2 {
SparseAttentionFn sparse_attention;
}
namespace avx512 {
SparseAttentionFn sparse_attention;
}

}  // namespace hetkv
