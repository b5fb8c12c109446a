#include "kernels/sparse_attention.h"

#include <algorithm>

#include "kernels/cpu/pick_level.h"

namespace hetkv {

std::int64_t sparse_scratch_floats(const SparseAttentionParams& params) noexcept {
  constexpr std::int64_t kWidestVector = 16, kChunk = 64;
  const auto round_up = [](std::int64_t value) { return (value + kWidestVector - 1) / kWidestVector * kWidestVector; };
  const std::int64_t rows = round_up(std::min(params.heads, kSparseTileHeads)), dim = round_up(params.dim),
                     out_dim = round_up(params.value_dim);
  return rows * (dim + out_dim) + kChunk * rows + 2 * rows + kChunk * dim;  // query and output, scores, softmax, a chunk of rows
}

void sparse_attention_cpu(const SparseAttentionParams& params, const SparseToken& token, std::int32_t head,
                          float* scratch) noexcept {
  pick_level(portable::sparse_attention, avx2::sparse_attention, avx512::sparse_attention)(params, token, head, scratch);
}

}  // namespace hetkv
