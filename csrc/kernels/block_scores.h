// Scores of routed blocks, runs of routed_tokens consecutive tokens, for the tokens of a step: the largest query . key of a block, for
// every index head. Parameters and entry points.
//
// Token at position p sees the keys [0, p]; key t is row t of its sequence in the block table. A block gets +inf if it is the
// token's own or one of the local_blocks - 1 before it, -inf if the token sees none of its keys, and NaN if a key that it sees gives one. A
// score has the same bits wherever its block stands and whatever else is scored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"

namespace hetkv {

inline constexpr int kMaxBlockScoreDim = 512;
inline constexpr int kMaxBlockScoreHeads = 64;
inline constexpr int kBlockScoreTileRows = 64;                 // query rows (token x head) that share a loaded key
inline constexpr std::int64_t kBlockScoreKeysPerPiece = 1024;  // keys of one piece of work, about

struct BlockScoresParams {
  PagedRows keys;
  BlockTable table;
  const std::byte* query = nullptr;  // [num_tokens, heads, dim] of query_format, dense
  float* scores = nullptr;           // [num_tokens, heads, num_blocks]
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* seqused_k = nullptr;
  std::int64_t num_tokens = 0;
  std::int64_t num_sequences = 0;
  std::int64_t num_blocks = 0;     // routed blocks that the table's columns have room for
  std::int64_t routed_tokens = 1;  // tokens of a routed block
  std::int64_t local_blocks = 1;   // forced
  std::int32_t heads = 0;
  std::int32_t dim = 0;
  EntryFormat query_format = EntryFormat::kFloat32;
};

// Consecutive query tokens of one sequence.
struct BlockScoresTile {
  std::int64_t sequence = 0;
  std::int64_t token = 0;     // first, of the step
  std::int64_t position = 0;  // of that token
  std::int32_t count = 0;     // at most block_scores_tile_tokens
};

// Tokens of a tile. Thread-safe, allocates nothing.
constexpr std::int32_t block_scores_tile_tokens(std::int32_t heads) {
  return heads >= kBlockScoreTileRows ? 1 : kBlockScoreTileRows / heads;
}

// The first block that is forced for a token at this position; its own block is the last.
HETKV_HOST_DEVICE inline std::int64_t first_local_block(const BlockScoresParams& params, std::int64_t position) {
  const std::int64_t first = position / params.routed_tokens + 1 - params.local_blocks;
  return first > 0 ? first : 0;
}

// Floats of scratch that one thread needs.
std::int64_t block_scores_scratch_floats(const BlockScoresParams& params) noexcept;

// Scores of routed blocks [begin, end) of one tile. Thread-safe over disjoint (tile, blocks); allocates nothing.
void block_scores_cpu(const BlockScoresParams& params, const BlockScoresTile& tile, std::int64_t begin, std::int64_t end,
                      float* scratch) noexcept;

// All tokens, on a stream of the arena's device. Every pointer is device memory. Keys outside the arena or the table count as absent. In
// float, without a promise of speed. Throws CudaError if a launch is refused. Thread-safe, allocates nothing, does not block; may be
// captured.
void block_scores_cuda(const BlockScoresParams& params, void* stream);

// The builds of cpu/levels.
using BlockScoresFn = void(const BlockScoresParams&, const BlockScoresTile&, std::int64_t, std::int64_t, float*) noexcept;
namespace portable {
BlockScoresFn block_scores;
}
namespace avx2 {
BlockScoresFn block_scores;
}
namespace avx512 {
BlockScoresFn block_scores;
}

}  // namespace hetkv
