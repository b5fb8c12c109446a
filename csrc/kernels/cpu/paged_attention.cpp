#include "kernels/paged_attention.h"

#include "kernels/cpu/pick_level.h"

namespace hetkv {
namespace {

constexpr std::int64_t kWidestVector = 16;  // floats: scratch is sized for every level

std::int64_t round_up(std::int64_t value) { return (value + kWidestVector - 1) / kWidestVector * kWidestVector; }

std::int64_t tile_rows(const PagedAttentionParams& params) {
  const std::int32_t group = params.heads / params.kv_heads;
  return round_up(std::int64_t{group} * attention_tile_tokens(group));
}

}  // namespace

std::int64_t attention_partial_floats(const PagedAttentionParams& params) noexcept {
  return tile_rows(params) * (round_up(params.dim) + 2);
}

std::int64_t attention_scratch_floats(const PagedAttentionParams& params) noexcept {
  constexpr std::int64_t kChunk = 64;
  const std::int64_t rows = tile_rows(params), dim = round_up(params.dim);
  // query, scores, two running results (of all splits, and of one), and a chunk of keys and values as floats
  return rows * dim + kChunk * rows + 2 * rows * (dim + 2) + 2 * kChunk * dim + 4 * kWidestVector;
}

void attend_tile_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head,
                     float* scratch) noexcept {
  pick_level(portable::attend_tile, avx2::attend_tile, avx512::attend_tile)(params, tile, kv_head, scratch);
}

void attend_split_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head, std::int32_t split,
                      float* partial, float* scratch) noexcept {
  pick_level(portable::attend_split, avx2::attend_split, avx512::attend_split)(params, tile, kv_head, split, partial, scratch);
}

void combine_splits_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head,
                        std::int32_t first_split, std::int32_t num_splits, const float* partials, float* scratch) noexcept {
  pick_level(portable::combine_splits, avx2::combine_splits, avx512::combine_splits)(params, tile, kv_head, first_split,
                                                                                     num_splits, partials, scratch);
}

}  // namespace hetkv
