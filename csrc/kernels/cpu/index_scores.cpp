#include "kernels/index_scores.h"

#include "kernels/cpu/pick_level.h"

namespace hetkv {

std::int64_t index_scratch_floats(const IndexScoresParams& params) noexcept {
  constexpr std::int64_t kWidestVector = 16, kChunk = 64;
  const std::int64_t heads = (params.heads + kWidestVector - 1) / kWidestVector * kWidestVector;
  return params.dim * heads + heads + kChunk * heads + kChunk * params.dim;  // query, weights, products, keys as floats
}

void index_scores_cpu(const IndexScoresParams& params, const IndexToken& token, std::int64_t begin, std::int64_t end,
                      float* scores, float* scratch) noexcept {
  pick_level(portable::index_scores, avx2::index_scores, avx512::index_scores)(params, token, begin, end, scores, scratch);
}

}  // namespace hetkv
