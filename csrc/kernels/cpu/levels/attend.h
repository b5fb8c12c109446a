// The core of attention on one level: a tile of query rows against chunks of keys, softmax as it goes.
//
// Query rows are lanes: the tile is stored transposed, [dim][rows], so scores, maxima and sums are vertical, and a key row is read as it
// lies. What a row gets depends on the order of its own visible keys and on where chunks begin, never on the rows beside it: keys that
// a row does not see are left out. Chunk boundaries come from the caller.
#pragma once

#include <cstdint>

#include "kernels/cpu/levels/simd.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr int kChunkKeys = 64;
constexpr int kMaxTileRows = 64;
constexpr int kMaxHeadDim = 576;
constexpr float kLog2e = 1.44269504088896341f;

// Rows padded to whole vectors.
constexpr int padded_rows(int rows) { return (rows + kLanes - 1) / kLanes * kLanes; }

// Running softmax of a tile. Memory: see TileScratch.
struct Tile {
  int rows = 0;     // padded_rows of the real ones
  int dim = 0;      // of keys: a multiple of kLanes, zero-padded
  int out_dim = 0;  // of values, the same; at most dim where keys are values
  float* query;     // [dim][rows], times scale and log2(e)
  float* scores;    // [kChunkKeys][rows]
  float* largest;   // [rows], of the scores so far; -inf at first
  float* sums;      // [rows]
  float* out;       // [rows][out_dim], not yet divided by the sums
};

// Keys [0, count) of a chunk; row r of the tile sees keys [first[r], last[r]). null: every row sees all.
struct Chunk {
  int count = 0;
  const float* key[kChunkKeys];    // dim values each, zero-padded
  const float* value[kChunkKeys];  // out_dim values each; what they hold behind the real ones goes into out and no further
  const std::int32_t* first = nullptr;
  const std::int32_t* last = nullptr;
};

inline void reset(Tile& tile) {
  for (int r = 0; r < tile.rows; ++r) {
    tile.largest[r] = -__builtin_inff();
    tile.sums[r] = 0.0f;
  }
  __builtin_memset(tile.out, 0, sizeof(float) * static_cast<std::size_t>(tile.rows) * static_cast<std::size_t>(tile.out_dim));
}

// scores[k][r] = key k . query r, for kKeys keys and kVectors vectors of rows.
template <int kKeys, int kVectors>
inline void score_block(const float* query, int rows, int dim, const float* const* keys, float* scores) {
  Float sums[std::size_t{kKeys}][std::size_t{kVectors}] = {};
  for (int d = 0; d < dim; ++d) {
    Float q[std::size_t{kVectors}];
    for (int v = 0; v < kVectors; ++v) q[v] = load_float(query + std::ptrdiff_t{d} * rows + v * kLanes);
    for (int k = 0; k < kKeys; ++k) {
      const Float value = splat(keys[k][d]);
      for (int v = 0; v < kVectors; ++v) sums[k][v] += q[v] * value;
    }
  }
  for (int k = 0; k < kKeys; ++k) {
    for (int v = 0; v < kVectors; ++v) store(scores + k * rows + v * kLanes, sums[k][v]);
  }
}

template <int kKeys>
inline void score_keys(const float* query, int rows, int dim, const float* const* keys, float* scores) {
  int row = 0;
  for (; row + 4 * kLanes <= rows; row += 4 * kLanes) score_block<kKeys, 4>(query + row, rows, dim, keys, scores + row);
  for (; row + 2 * kLanes <= rows; row += 2 * kLanes) score_block<kKeys, 2>(query + row, rows, dim, keys, scores + row);
  for (; row < rows; row += kLanes) score_block<kKeys, 1>(query + row, rows, dim, keys, scores + row);
}

// All keys of a chunk: [count][rows]. A key's scores are the same bits wherever it stands.
inline void score_chunk(const float* query, int rows, int dim, const float* const* keys, int count, float* scores) {
  int k = 0;
  for (; k + 4 <= count; k += 4) score_keys<4>(query, rows, dim, keys + k, scores + k * rows);
  for (; k < count; ++k) score_keys<1>(query, rows, dim, keys + k, scores + k * rows);
}

// tanh(x) = 1 - 2 / (e^2x + 1), clamped where it is 1.
inline Float tanh(Float x) {
  const Float clamped = max(min(x, splat(15.0f)), splat(-15.0f));
  const Float power = exp2(clamped * (2.0f * kLog2e));
  return 1.0f - 2.0f / (power + 1.0f);
}

// scores -> softcap * tanh(scores / softcap), where scores carry a factor log2(e).
inline void cap_scores(float* scores, int count, float softcap) {
  const float in = 1.0f / (softcap * kLog2e), out = softcap * kLog2e;
  for (int i = 0; i < count; i += kLanes) store(scores + i, tanh(load_float(scores + i) * in) * out);
}

inline Float row_vector(const std::int32_t* from, int row) { return __builtin_convertvector(load<Int>(from + row), Float); }

// Scores become weights 2^(score - largest); sums and largest move on. alpha[rows]: what earlier output is worth now.
inline void weigh_chunk(Tile& tile, const Chunk& chunk, float* alpha) {
  const Float nothing = splat(-__builtin_inff());
  for (int row = 0; row < tile.rows; row += kLanes) {
    const Float before = load_float(tile.largest + row);
    Float largest = before;
    const Float first = chunk.first == nullptr ? splat(0.0f) : row_vector(chunk.first, row);
    const Float last = chunk.first == nullptr ? splat(static_cast<float>(chunk.count)) : row_vector(chunk.last, row);
    for (int k = 0; k < chunk.count; ++k) {
      float* const at = tile.scores + k * tile.rows + row;
      const Float index = splat(static_cast<float>(k));
      Float score = load_float(at);
      if (chunk.first != nullptr) {
        score = index < first ? nothing : score;
        score = index < last ? score : nothing;
        store(at, score);
      }
      largest = score > largest ? score : (score == score ? largest : score);  // NaN stays
    }
    const Float base = largest == nothing ? splat(0.0f) : largest;  // -inf - -inf would be NaN
    const Float shrink = exp2(before - base);
    Float sum = load_float(tile.sums + row) * shrink;
    for (int k = 0; k < chunk.count; ++k) {
      float* const at = tile.scores + k * tile.rows + row;
      const Float weight = exp2(load_float(at) - base);
      sum += weight;
      store(at, weight);
    }
    store(tile.largest + row, largest);
    store(tile.sums + row, sum);
    store(alpha + row, shrink);
  }
}

// sums[r] += weight[k][row + r] * value[k][d..] for keys [begin, end), kRows rows and kVectors vectors at once.
template <int kRows, int kVectors>
inline void add_keys(Float (*sums)[std::size_t{kVectors}], const Tile& tile, const Chunk& chunk, int row, int d, int begin,
                     int end) {
  for (int k = begin; k < end; ++k) {
    Float values[std::size_t{kVectors}];
    for (int v = 0; v < kVectors; ++v) values[v] = load_float(chunk.value[k] + d + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Float weight = splat(tile.scores[k * tile.rows + row + r]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] += weight * values[v];
    }
  }
}

// out[r][d..] = out * alpha + sum over the keys that row r sees. Others are left out, not weighed with 0: their values may be infinite
// or NaN. A row's keys are added in order: those that not all rows see yet, those that all see, those that only some still see.
template <int kRows, int kVectors>
inline void add_values(Tile& tile, const Chunk& chunk, const float* alpha, int row, int d) {
  Float sums[std::size_t{kRows}][std::size_t{kVectors}];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v)
      sums[r][v] = load_float(tile.out + (row + r) * tile.out_dim + d + v * kLanes) * alpha[row + r];
  }
  if (chunk.first == nullptr) {
    add_keys<kRows, kVectors>(sums, tile, chunk, row, d, 0, chunk.count);
  } else {
    int begin = 0, end = chunk.count;  // keys that all of the rows see
    for (int r = 0; r < kRows; ++r) {
      if (chunk.first[row + r] > begin) begin = chunk.first[row + r];
      if (chunk.last[row + r] < end) end = chunk.last[row + r];
    }
    if (end < begin) end = begin;
    for (int r = 0; r < kRows; ++r) {
      const int last = chunk.last[row + r];
      add_keys<1, kVectors>(sums + r, tile, chunk, row + r, d, chunk.first[row + r], last < begin ? last : begin);
    }
    add_keys<kRows, kVectors>(sums, tile, chunk, row, d, begin, end);
    for (int r = 0; r < kRows; ++r) {
      const int first = chunk.first[row + r];
      add_keys<1, kVectors>(sums + r, tile, chunk, row + r, d, first > end ? first : end, chunk.last[row + r]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(tile.out + (row + r) * tile.out_dim + d + v * kLanes, sums[r][v]);
  }
}

template <int kRows>
inline void add_all_values(Tile& tile, const Chunk& chunk, const float* alpha, int row) {
  int d = 0;
  for (; d + 4 * kLanes <= tile.out_dim; d += 4 * kLanes) add_values<kRows, 4>(tile, chunk, alpha, row, d);
  for (; d < tile.out_dim; d += kLanes) add_values<kRows, 1>(tile, chunk, alpha, row, d);
}

// One chunk of keys for the first `real_rows` rows of the tile. softcap 0: none.
inline void attend(Tile& tile, const Chunk& chunk, int real_rows, float softcap) {
  float alpha[kMaxTileRows + 16];
  score_chunk(tile.query, tile.rows, tile.dim, chunk.key, chunk.count, tile.scores);
  if (softcap > 0.0f) cap_scores(tile.scores, chunk.count * tile.rows, softcap);
  weigh_chunk(tile, chunk, alpha);
  int row = 0;
  for (; row + 4 <= real_rows; row += 4) add_all_values<4>(tile, chunk, alpha, row);
  for (; row < real_rows; ++row) add_all_values<1>(tile, chunk, alpha, row);
}

// Adds the softmax of other keys, as if they came after: for work that was split.
inline void merge(Tile& tile, int real_rows, const float* largest, const float* sums, const float* out) {
  for (int r = 0; r < real_rows; ++r) {
    const float before = tile.largest[r];
    const float most = largest[r] > before || largest[r] != largest[r] ? largest[r] : before;
    const float base = most == -__builtin_inff() ? 0.0f : most;
    const float mine = exp2(splat(before - base))[0], theirs = exp2(splat(largest[r] - base))[0];
    tile.largest[r] = most;
    tile.sums[r] = tile.sums[r] * mine + sums[r] * theirs;
    for (int d = 0; d < tile.out_dim; d += kLanes) {
      float* const at = tile.out + r * tile.out_dim + d;
      store(at, load_float(at) * mine + load_float(out + r * tile.out_dim + d) * theirs);
    }
  }
}

// What a row's output is multiplied with, and its log-sum-exp (natural, without the sink). sink: -inf for none.
struct Finish {
  float factor, lse;
};
inline Finish finish(float largest, float sum, float sink) {
  if (sum == 0.0f) return {0.0f, -__builtin_inff()};
  const float lse = (largest + __builtin_log2f(sum)) / kLog2e;
  if (sink == -__builtin_inff()) return {1.0f / sum, lse};
  const float with_sink = sum + exp2(splat(sink * kLog2e - largest))[0];
  if (sink * kLog2e - largest > 126.0f) return {0.0f, lse};
  return {1.0f / with_sink, lse};
}

}  // namespace
}  // namespace hetkv::HETKV_LEVEL
