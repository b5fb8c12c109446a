// Scores of compressed entries for the tokens of a step: sum over heads of weight * ReLU(query . key). Parameters and entry points.
//
// Token at position p sees entries [0, floor((p + 1) / ratio)); entry e is row e of its sequence in the block table. A score has the
// same bits wherever its key stands and whatever else is scored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/paged_rows.h"

namespace hetkv {

inline constexpr int kMaxIndexDim = 512;
inline constexpr int kMaxIndexHeads = 128;
inline constexpr std::int64_t kIndexKeysPerPiece = 512;  // scores of one piece of work

struct IndexScoresParams {
  PagedRows keys;
  BlockTable table;
  const std::byte* query = nullptr;  // [num_tokens, heads, dim] of query_format, dense
  const float* weights = nullptr;    // [num_tokens, heads], all constants folded in
  const std::int32_t* cu_seqlens_q = nullptr;
  const std::int32_t* seqused_k = nullptr;
  std::int64_t num_tokens = 0;
  std::int64_t num_sequences = 0;
  std::int64_t ratio = 1;
  std::int32_t heads = 0;
  std::int32_t dim = 0;
  EntryFormat query_format = EntryFormat::kFloat32;
};

// A token of the step: its sequence, and how many entries it sees.
struct IndexToken {
  std::int64_t sequence = 0, token = 0, visible = 0;
};

// Floats of scratch that one thread needs.
std::int64_t index_scratch_floats(const IndexScoresParams& params) noexcept;

// Scores of entries [begin, end) of one token, to scores[0, end - begin). Thread-safe; allocates nothing.
void index_scores_cpu(const IndexScoresParams& params, const IndexToken& token, std::int64_t begin, std::int64_t end,
                      float* scores, float* scratch) noexcept;

// Which tokens index_scores_cuda scores, and where to.
struct IndexScoresRows {
  std::int64_t first_token = 0, num_tokens = 0;
  float* scores = nullptr;          // [num_tokens, columns * rows per block], rows `stride` floats apart
  std::int64_t stride = 0;          // floats
  std::int32_t* visible = nullptr;  // [num_tokens]: gets the entries that each token sees; scores beyond them are not written
};  // null: scores beyond them are -inf

// Entries in blocks outside the arena score -inf. Lengths, tables and positions are read on the device; one launch, sized by shapes:
// may be captured. Tensor cores serve queries of 16 bits and 64 or 128 values on keys of the same type, kFp8Index or kMxfp4Index;
// other inputs take a slower kernel. Allocates nothing, does not block. Throws CudaError if the launch is refused.
void index_scores_cuda(const IndexScoresParams& params, const IndexScoresRows& rows, void* stream);

// The builds of cpu/levels.
using IndexScoresFn = void(const IndexScoresParams&, const IndexToken&, std::int64_t, std::int64_t, float*, float*) noexcept;
namespace portable {
IndexScoresFn index_scores;
}
namespace avx2 {
IndexScoresFn index_scores;
}
namespace avx512 {
IndexScoresFn index_scores;
}

}  // namespace hetkv
