// Attention over a window of raw rows and compressed entries, in one softmax; keys are values. Parameters and entry points.
//
// Token at position p sees rows [max(0, p - window + 1), p] of the window table, then the entries of its list `selected` (-1: none),
// or, without a list, all entries [0, floor((p + 1) / ratio)). Each head may have a sink; the output's trailing values are rotated by
// the token's inverse rotation. Tokens of no sequence get output 0 and lse -inf.
//
// A token's result has the same bits whatever the step holds beside it: window rows by position, then the list in order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"

namespace hetkv {

inline constexpr int kMaxSparseDim = 512;
inline constexpr int kSparseTileHeads = 64;  // heads that share a loaded row

struct SparseAttentionParams {
  PagedRows window_rows;
  PagedRows entries;
  BlockTable window_table;
  BlockTable entry_table;                  // blocks null: no entries
  const std::int32_t* selected = nullptr;  // [num_tokens, num_selected], or null: all visible entries
  const std::byte* query = nullptr;        // [num_tokens, heads, dim] of query_format, dense
  std::byte* out = nullptr;                // the same
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
  std::int32_t window = 0;
  std::int32_t heads = 0;
  std::int32_t dim = 0;
  std::int32_t rope = 0;
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
