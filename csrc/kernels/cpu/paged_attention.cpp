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

std::int32_t attention_head_span(const PagedAttentionParams& params) noexcept {
  constexpr std::int64_t kLongRead = 4096;
  const std::int64_t span = kLongRead / entry_data_bytes(params.keys.format, params.dim);
  return static_cast<std::int32_t>(span < 1 ? 1 : span < params.kv_heads ? span : params.kv_heads);
}

std::int64_t attention_scratch_floats(const PagedAttentionParams& params) noexcept {
  constexpr std::int64_t kChunk = 64, kFewRows = 8;
  const std::int64_t rows = tile_rows(params), dim = round_up(params.dim), span = attention_head_span(params);
  // One head: query, scores, two running results (of all splits, and of one), and a chunk of keys and values as floats.
  const std::int64_t one = rows * dim + kChunk * rows + 2 * rows * (dim + 2) + 2 * kChunk * dim + 4 * kWidestVector;
  const std::int64_t few = span * (kFewRows * dim + 2 * kWidestVector * (dim + 2));  // queries, two running results
  return one > few ? one : few;
}

void attend_tile_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t first_head,
                     std::int32_t num_heads, float* scratch) noexcept {
  pick_level(portable::attend_tile, avx2::attend_tile, avx512::attend_tile)(params, tile, first_head, num_heads, scratch);
}

void attend_split_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t first_head,
                      std::int32_t num_heads, std::int32_t split, float* partials, float* scratch) noexcept {
  pick_level(portable::attend_split, avx2::attend_split, avx512::attend_split)(params, tile, first_head, num_heads, split,
                                                                               partials, scratch);
}

void combine_splits_cpu(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head,
                        std::int32_t num_splits, const float* const* partials, float* scratch) noexcept {
  pick_level(portable::combine_splits, avx2::combine_splits, avx512::combine_splits)(params, tile, kv_head, num_splits, partials,
                                                                                     scratch);
}

}  // namespace hetkv
