// Attention of the tokens of a step over the keys of chosen blocks: every KV head of a token has its own choice. Parameters and entry
// points.
//
// A routed block is a run of routed_tokens consecutive tokens. Token at position p sees, in the heads of one group, the keys t <= p of
// the blocks in its list `selected`; -1 names none, and a block named twice counts once. Blocks are taken in rising order, whatever the
// list's. Tokens of no sequence, and those that see no key, get output 0 and lse -inf.
//
// A token's result has the same bits whatever the step holds beside it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"

namespace hetkv {

inline constexpr int kMaxBlockSparseDim = 512;   // values of a head
inline constexpr int kMaxBlockSparseGroup = 64;  // heads of a group

struct BlockSparseParams {
  PagedRows keys;    // width: of one head; data_bytes: of a whole row, all heads
  PagedRows values;  // the same; equal to keys where K = V
  BlockTable table;
  const std::int32_t* selected = nullptr;  // [num_tokens, kv_heads, num_selected]
  const std::byte* query = nullptr;        // [num_tokens, heads, dim] of query_format, dense
  std::byte* out = nullptr;                // the same
  float* lse = nullptr;                    // [num_tokens, heads], natural, without the sink
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* seqused_k = nullptr;
  const float* sinks = nullptr;  // [heads], or null
  std::int64_t num_tokens = 0;
  std::int64_t num_sequences = 0;
  std::int64_t routed_tokens = 1;
  std::int32_t num_selected = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t dim = 0;
  float scale = 0.0f;
  EntryFormat query_format = EntryFormat::kFloat32;
};

// A token of the step and its position.
struct BlockSparseToken {
  std::int64_t sequence = 0, token = 0, position = 0;
};

// Floats of scratch that one thread needs.
std::int64_t block_sparse_scratch_floats(const BlockSparseParams& params) noexcept;

// The heads of one group of one token. Thread-safe over disjoint (token, kv_head); allocates nothing.
void block_sparse_attention_cpu(const BlockSparseParams& params, const BlockSparseToken& token, std::int32_t kv_head,
                                float* scratch) noexcept;

// All tokens and heads, on a stream of the arena's device. Every pointer is device memory. Rows outside the arena or the table count as
// absent. In float, without a promise of speed. Throws CudaError if a launch is refused. Thread-safe, allocates nothing, does not
// block; may be captured.
void block_sparse_attention_cuda(const BlockSparseParams& params, void* stream);

// The builds of cpu/levels.
using BlockSparseFn = void(const BlockSparseParams&, const BlockSparseToken&, std::int32_t, float*) noexcept;
namespace portable {
BlockSparseFn block_sparse_attention;
}
namespace avx2 {
BlockSparseFn block_sparse_attention;
}
namespace avx512 {
BlockSparseFn block_sparse_attention;
}

}  // namespace hetkv
