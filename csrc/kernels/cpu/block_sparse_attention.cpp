#include "kernels/block_sparse_attention.h"

#include "kernels/cpu/pick_level.h"

namespace hetkv {

std::int64_t block_sparse_scratch_floats(const BlockSparseParams& params) noexcept {
  constexpr std::int64_t kWidestVector = 16, kChunk = 64;
  const auto round_up = [](std::int64_t value) { return (value + kWidestVector - 1) / kWidestVector * kWidestVector; };
  const std::int64_t rows = round_up(params.heads / params.kv_heads), dim = round_up(params.dim);
  return 2 * rows * dim + kChunk * rows + 2 * rows + 2 * kChunk * dim;  // query and output, scores, softmax, keys and values
}

void block_sparse_attention_cpu(const BlockSparseParams& params, const BlockSparseToken& token, std::int32_t kv_head,
                                float* scratch) noexcept {
  pick_level(portable::block_sparse_attention, avx2::block_sparse_attention, avx512::block_sparse_attention)(params, token,
                                                                                                             kv_head, scratch);
}

}  // namespace hetkv
