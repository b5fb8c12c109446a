#include "kernels/block_scores.h"

#include "kernels/cpu/pick_level.h"

namespace hetkv {

std::int64_t block_scores_scratch_floats(const BlockScoresParams& params) noexcept {
  constexpr std::int64_t kWidestVector = 16, kChunk = 64;
  const std::int64_t tokens = block_scores_tile_tokens(params.heads);
  const std::int64_t rows = (params.heads * tokens + kWidestVector - 1) / kWidestVector * kWidestVector;
  return params.dim * rows + kChunk * rows + rows + kChunk * params.dim;  // query, products, maxima, keys as floats
}

void block_scores_cpu(const BlockScoresParams& params, const BlockScoresTile& tile, std::int64_t begin, std::int64_t end,
                      float* scratch) noexcept {
  pick_level(portable::block_scores, avx2::block_scores, avx512::block_scores)(params, tile, begin, end, scratch);
}

}  // namespace hetkv
