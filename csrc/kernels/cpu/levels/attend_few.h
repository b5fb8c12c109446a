// Attention of few query rows, the heads of one group of one token, against chunks of stored keys: decoding.
//
// With few rows, rows as lanes would leave most lanes empty. Here keys are lanes where scores are made, and values are read as they are
// stored. A row gets the bits that attend() gives it: products are added over d in order, weights over keys in order, and every
// row sees every key of a chunk.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/levels/attend.h"
#include "kernels/paged_rows.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr int kFewRows = 8;
constexpr int kFewDimUnit = 2 * kLanes;  // dimensions are multiples of it

// Running softmax of up to kFewRows rows.
struct FewRows {
  int count = 0;
  int dim = 0;
  const float* query;  // [count rounded up to 1, 2, 4 or 8][dim], times scale and log2(e)
  float* largest;      // [count]
  float* sums;         // [count]
  float* out;          // [count][dim]
};

// Keys [0, count) of a chunk: this head's stored vectors are key[k] + at. As a vector is read, as much is fetched ahead from next_key[k] or
// next_value[k], into the second cache: in one go, so many fetches would hold up the work.
struct StoredChunk {
  int count = 0;
  std::ptrdiff_t at = 0;
  const std::byte* key[kChunkKeys];
  const std::byte* value[kChunkKeys];
  const std::byte* next_key[kChunkKeys];
  const std::byte* next_value[kChunkKeys];
};

inline void fetch_ahead(const std::byte* from) { __builtin_prefetch(from, 0, 2); }

template <EntryFormat kFormat>
inline Float load_stored(const std::byte* vector, int d) {
  if constexpr (kFormat == EntryFormat::kFloat32) return load<Float>(vector + std::ptrdiff_t{4} * d);
  const Half bits = load<Half>(vector + std::ptrdiff_t{2} * d);
  return kFormat == EntryFormat::kFloat16 ? from_float16(bits) : from_bfloat16(bits);
}

template <int kRows>
inline void add_products(Float (&sums)[std::size_t{kRows}], Float values, const float* query, int dim) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] += splat(query[r * dim]) * values;
}

// scores[r][lane] = query r . key[lane] for kLanes keys.
template <int kRows, EntryFormat kFormat>
inline void score_lanes(const float* query, int dim, const std::byte* const (&keys)[kLanes], const std::byte* const* next,
                        float* scores) {
  Float sums[std::size_t{kRows}] = {};
  if constexpr (kFormat == EntryFormat::kBFloat16) {  // pairs are turned as one word
    for (int d = 0; d < dim; d += 2 * kLanes) {
      UInt pairs[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        pairs[i] = load<UInt>(keys[i] + std::ptrdiff_t{2} * d);
        fetch_ahead(next[i] + std::ptrdiff_t{2} * d);
      }
      transpose(pairs);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        add_products<kRows>(sums, (Float)(pairs[i] << 16), query + d + 2 * i, dim);
        add_products<kRows>(sums, (Float)(pairs[i] & 0xffff0000u), query + d + 2 * i + 1, dim);
      }
    }
  } else {
    for (int d = 0; d < dim; d += kLanes) {
      Float values[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        values[i] = load_stored<kFormat>(keys[i], d);
        fetch_ahead(next[i] + std::ptrdiff_t{kFormat == EntryFormat::kFloat32 ? 4 : 2} * d);
      }
      transpose(values);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) add_products<kRows>(sums, values[i], query + d + i, dim);
    }
  }
  for (int r = 0; r < kRows; ++r) store(scores + r * kChunkKeys, sums[r]);
}

// scores[r][k] for all keys of the chunk; behind the last, up to a whole vector, anything.
template <int kRows, EntryFormat kFormat>
inline void score_stored(const FewRows& rows, const StoredChunk& chunk, float* scores) {
  for (int first = 0; first < chunk.count; first += kLanes) {
    const std::byte* keys[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      keys[i] = chunk.key[first + i < chunk.count ? first + i : chunk.count - 1] + chunk.at;
    }
    score_lanes<kRows, kFormat>(rows.query, rows.dim, keys, chunk.next_key + first, scores + first);
  }
}

// Scores become weights; see weigh_chunk.
inline void weigh_few(FewRows& rows, int count, float* scores, float* alpha) {
  const Float nothing = splat(-__builtin_inff());
  for (int r = 0; r < rows.count; ++r) {
    float* const row = scores + r * kChunkKeys;
    Float most = nothing;
    Int strange{};  // lanes that saw NaN
    for (int k = 0; k < count; k += kLanes) {
      const Float score = load_float(row + k);
      most = max(most, score);
      strange |= score != score;
    }
    float largest = rows.largest[r] > max_lane(most) ? rows.largest[r] : max_lane(most);
    if (rows.largest[r] != rows.largest[r]) largest = rows.largest[r];
    for (int i = 0; i < kLanes; ++i) largest = strange[i] != 0 ? __builtin_nanf("") : largest;
    const float base = largest == -__builtin_inff() ? 0.0f : largest;
    alpha[r] = exp2(splat(rows.largest[r] - base))[0];
    rows.largest[r] = largest;
    rows.sums[r] *= alpha[r];
    for (int k = 0; k < count; k += kLanes) store(row + k, exp2(load_float(row + k) - base));
  }
}

// sums[r] += the weights of row r, key by key.
template <int kRows>
inline void sum_weights(const float* weights, int count, float* sums) {
  float row[std::size_t{kRows}];
  for (int r = 0; r < kRows; ++r) row[r] = sums[r];
  for (int k = 0; k < count; ++k) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) row[r] += weights[r * kChunkKeys + k];
  }
  for (int r = 0; r < kRows; ++r) sums[r] = row[r];
}

// out[row + r][d..] = out * alpha + weights * values, for kRows rows and kVectors vectors.
template <int kRows, int kVectors, EntryFormat kFormat>
inline void add_stored(FewRows& rows, const StoredChunk& chunk, const float* weights, const float* alpha, int row, int d) {
  Float sums[std::size_t{kRows}][std::size_t{kVectors}];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = load_float(rows.out + (row + r) * rows.dim + d + v * kLanes) * alpha[row + r];
  }
  for (int k = 0; k < chunk.count; ++k) {
    const std::byte* const value = chunk.value[k] + chunk.at;
    if (row == 0) {
      constexpr std::ptrdiff_t kBytes = kFormat == EntryFormat::kFloat32 ? 4 : 2;
      for (std::ptrdiff_t at = kBytes * d; at < kBytes * (d + kVectors * kLanes); at += 64) fetch_ahead(chunk.next_value[k] + at);
    }
    Float values[std::size_t{kVectors}];
    for (int v = 0; v < kVectors; ++v) values[v] = load_stored<kFormat>(value, d + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Float weight = splat(weights[(row + r) * kChunkKeys + k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] += weight * values[v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(rows.out + (row + r) * rows.dim + d + v * kLanes, sums[r][v]);
  }
}

template <int kRows, EntryFormat kFormat>
inline void add_all_stored(FewRows& rows, const StoredChunk& chunk, const float* weights, const float* alpha, int row) {
  constexpr int kMost = kLanes == 16 ? 4 : 2;  // as registers allow
  int d = 0;
  for (; d + kMost * kLanes <= rows.dim; d += kMost * kLanes) {
    add_stored<kRows, kMost, kFormat>(rows, chunk, weights, alpha, row, d);
  }
  for (; d < rows.dim; d += kLanes) add_stored<kRows, 1, kFormat>(rows, chunk, weights, alpha, row, d);
}

// Rows of a query block for `count` rows.
constexpr int few_rows_padded(int count) { return count > 4 ? 8 : count > 2 ? 4 : count; }

template <EntryFormat kFormat>
inline void attend_stored(FewRows& rows, const StoredChunk& chunk, float softcap) {
  float scores[kFewRows * kChunkKeys], alpha[kFewRows];
  switch (few_rows_padded(rows.count)) {
    case 1:
      score_stored<1, kFormat>(rows, chunk, scores);
      break;
    case 2:
      score_stored<2, kFormat>(rows, chunk, scores);
      break;
    case 4:
      score_stored<4, kFormat>(rows, chunk, scores);
      break;
    default:
      score_stored<8, kFormat>(rows, chunk, scores);
  }
  for (int r = 0; r < rows.count; ++r) {
    float* const row = scores + r * kChunkKeys;
    if (softcap > 0.0f) cap_scores(row, (chunk.count + kLanes - 1) / kLanes * kLanes, softcap);
    for (int k = chunk.count; k % kLanes != 0; ++k) row[k] = -__builtin_inff();
  }
  weigh_few(rows, chunk.count, scores, alpha);
  const auto finish_rows = [&]<int kRows>(int row) {
    sum_weights<kRows>(scores + row * kChunkKeys, chunk.count, rows.sums + row);
    add_all_stored<kRows, kFormat>(rows, chunk, scores, alpha, row);
  };
  int row = 0;
  for (; row + 4 <= rows.count; row += 4) finish_rows.template operator()<4>(row);
  for (; row + 2 <= rows.count; row += 2) finish_rows.template operator()<2>(row);
  for (; row < rows.count; ++row) finish_rows.template operator()<1>(row);
}

// One chunk of keys for all rows.
inline void attend_few(FewRows& rows, const StoredChunk& chunk, EntryFormat format, float softcap) {
  switch (format) {
    case EntryFormat::kFloat16:
      attend_stored<EntryFormat::kFloat16>(rows, chunk, softcap);
      break;
    case EntryFormat::kBFloat16:
      attend_stored<EntryFormat::kBFloat16>(rows, chunk, softcap);
      break;
    default:
      attend_stored<EntryFormat::kFloat32>(rows, chunk, softcap);
  }
}

}  // namespace
}  // namespace hetkv::HETKV_LEVEL
