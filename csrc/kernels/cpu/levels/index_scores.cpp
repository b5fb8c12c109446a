#include "kernels/index_scores.h"

#include "kernels/cpu/levels/attend.h"
#include "kernels/cpu/levels/entry_load.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr std::int64_t kPrefetchKeys = 16;

}  // namespace

void index_scores(const IndexScoresParams& params, const IndexToken& token, std::int64_t begin, std::int64_t end, float* scores,
                  float* scratch) noexcept {
  const int heads = padded_rows(params.heads), dim = params.dim;
  float* const query = scratch;  // [dim][heads]
  float* const weights = query + dim * heads;
  float* const products = weights + heads;  // [kChunkKeys][heads]
  float* const key_rows = products + kChunkKeys * heads;

  __builtin_memset(query, 0, sizeof(float) * static_cast<std::size_t>(dim) * static_cast<std::size_t>(heads));
  __builtin_memset(weights, 0, sizeof(float) * static_cast<std::size_t>(heads));
  alignas(64) float values[kMaxIndexDim];
  const std::int64_t vector_bytes = entry_data_bytes(params.query_format, dim);
  for (int h = 0; h < params.heads; ++h) {
    const std::int64_t vector = token.token * params.heads + h;
    load_plain(params.query + vector * vector_bytes, params.query_format, dim, values);
    for (int d = 0; d < dim; ++d) query[d * heads + h] = values[d];
    weights[h] = params.weights[vector];
  }

  for (std::int64_t from = begin; from < end; from += kChunkKeys) {
    const int count = static_cast<int>(end - from < kChunkKeys ? end - from : kChunkKeys);
    const float* keys[kChunkKeys];
    for (int k = 0; k < count; ++k) {
      const RowAddress address = row_address(params.keys, params.table, token.sequence, from + k);
      keys[k] = float_row(params.keys, address);
      if (keys[k] == nullptr) {
        load_entry(params.keys, address, key_rows + k * dim);
        keys[k] = key_rows + k * dim;
      }
      if (from + k + kPrefetchKeys < end) {
        const RowAddress ahead = row_address(params.keys, params.table, token.sequence, from + k + kPrefetchKeys);
        for (std::int64_t i = 0; i < params.keys.data_bytes; i += 64) __builtin_prefetch(ahead.data + i);
      }
    }
    score_chunk(query, heads, dim, keys, count, products);
    for (int first = 0; first < count; first += kLanes) {
      Float totals[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        totals[i] = Float{};
        if (first + i >= count) continue;
        for (int h = 0; h < heads; h += kLanes) {
          const Float product = load_float(products + (first + i) * heads + h);
          totals[i] += load_float(weights + h) * (product < 0.0f ? splat(0.0f) : product);  // NaN stays
        }
      }
      const Float sums = sums_of(totals);
      float* const to = scores + (from - begin + first);
      if (first + kLanes <= count) {
        store(to, sums);
      } else {
        for (int i = 0; first + i < count; ++i) to[i] = sums[i];
      }
    }
  }
}

}  // namespace hetkv::HETKV_LEVEL
