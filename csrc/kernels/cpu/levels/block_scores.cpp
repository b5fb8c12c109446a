#include "kernels/block_scores.h"

#include "kernels/cpu/levels/attend.h"
#include "kernels/cpu/levels/attend_few.h"
#include "kernels/cpu/levels/entry_load.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr std::int64_t kPrefetchKeys = 16;

// The rows of a tile against keys. Query rows are lanes, or, where these are few, keys are: products are added over d in order either
// way, so that a score has the same bits in both, and does not depend on the rows beside it.
class BlockScorer {
 public:
  BlockScorer(const BlockScoresParams& params, const BlockScoresTile& tile, float* scratch)
      : params_(params), tile_(tile), rows_(padded_rows(params.heads * tile.count)), query_(scratch),
        products_(query_ + std::int64_t{params.dim} * rows_), largest_(products_ + std::int64_t{kChunkKeys} * rows_),
        key_rows_(largest_ + rows_) {
    const int dim = params.dim, real_rows = params.heads * tile.count;
    few_ = real_rows <= kFewRows && dim % kFewDimUnit == 0 && params.keys.format <= EntryFormat::kBFloat16;
    __builtin_memset(query_, 0, sizeof(float) * static_cast<std::size_t>(dim) * static_cast<std::size_t>(rows_));
    alignas(64) float values[kMaxBlockScoreDim];
    const std::int64_t vector_bytes = entry_data_bytes(params.query_format, dim);
    for (int row = 0; row < real_rows; ++row) {
      const std::int64_t vector = tile.token * params.heads + row;
      load_plain(params.query + vector * vector_bytes, params.query_format, dim, values);
      for (int d = 0; d < dim; ++d) query_[few_ ? row * dim + d : d * rows_ + row] = values[d];
    }
    for (int row = 0; row < rows_; ++row) {  // rows of padding see what the last token sees
      const int token = row / params.heads;
      positions_[row] = tile.position + (token < tile.count ? token : tile.count - 1);
    }
  }

  void score(std::int64_t block) {
    const std::int64_t begin = block * params_.routed_tokens, last_position = tile_.position + tile_.count - 1;
    if (begin > last_position) {
      for (int token = 0; token < tile_.count; ++token) write(token, block, nullptr);
      return;
    }
    bool some_need = false;
    for (int token = 0; token < tile_.count; ++token) some_need = some_need || needs_score(token, block);
    if (some_need) {
      const std::int64_t behind = begin + params_.routed_tokens;
      score_keys(begin, behind < last_position + 1 ? behind : last_position + 1);
    }
    for (int token = 0; token < tile_.count; ++token) write(token, block, largest_);
  }

 private:
  bool needs_score(int token, std::int64_t block) const {
    const std::int64_t position = tile_.position + token;
    return block * params_.routed_tokens <= position && block < first_local_block(params_, position);
  }

  // largest_[row] over the keys [begin, end) that the row sees.
  void score_keys(std::int64_t begin, std::int64_t end) {
    for (int row = 0; row < rows_; ++row) largest_[row] = -__builtin_inff();
    for (std::int64_t from = begin; from < end; from += kChunkKeys) {
      const int count = static_cast<int>(end - from < kChunkKeys ? end - from : kChunkKeys);
      if (few_) {
        score_few_rows(from, count, end);
      } else {
        score_rows(from, count, end);
      }
    }
  }

  // How many of the chunk's keys a row sees.
  int seen_keys(int row, std::int64_t from, int count) const {
    const std::int64_t left = positions_[row] + 1 - from;
    return static_cast<int>(left < 0 ? 0 : left > count ? count : left);
  }

  void score_rows(std::int64_t from, int count, std::int64_t end) {
    const Float nothing = splat(-__builtin_inff());
    const float* keys[kChunkKeys];
    for (int k = 0; k < count; ++k) {
      if (from + k + kPrefetchKeys < end) prefetch(from + k + kPrefetchKeys);
      keys[k] = key_row(from + k, key_rows_ + k * params_.dim);
    }
    score_chunk(query_, rows_, params_.dim, keys, count, products_);
    const bool some_blind = from + count > tile_.position + 1;
    for (int row = 0; row < rows_; row += kLanes) {
      Float seen{};
      for (int i = 0; i < kLanes; ++i) seen[i] = static_cast<float>(seen_keys(row + i, from, count));
      Float largest = load_float(largest_ + row);
      for (int k = 0; k < count; ++k) {
        Float product = load_float(products_ + k * rows_ + row);
        if (some_blind) product = splat(static_cast<float>(k)) < seen ? product : nothing;
        largest = product > largest ? product : (product == product ? largest : product);  // NaN stays
      }
      store(largest_ + row, largest);
    }
  }

  // products_: [row][kChunkKeys].
  void score_few_rows(std::int64_t from, int count, std::int64_t end) {
    StoredChunk chunk;
    chunk.count = count;
    for (int k = 0; k < kChunkKeys; ++k) {  // behind the last: a row that is there already
      const std::int64_t key = from + k < end ? from + k : end - 1, next = key + kChunkKeys < end ? key + kChunkKeys : end - 1;
      chunk.key[k] = row_address(params_.keys, params_.table, tile_.sequence, key).data;
      chunk.next_key[k] = row_address(params_.keys, params_.table, tile_.sequence, next).data;
    }
    const int real_rows = params_.heads * tile_.count;
    const FewRows rows{real_rows, params_.dim, query_, nullptr, nullptr, nullptr};
    switch (params_.keys.format) {
      case EntryFormat::kFloat16:
        score_few<EntryFormat::kFloat16>(rows, chunk);
        break;
      case EntryFormat::kBFloat16:
        score_few<EntryFormat::kBFloat16>(rows, chunk);
        break;
      default:
        score_few<EntryFormat::kFloat32>(rows, chunk);
    }
    for (int row = 0; row < real_rows; ++row) {
      float* const products = products_ + row * kChunkKeys;
      const int seen = seen_keys(row, from, count);
      for (int k = seen; k % kLanes != 0; ++k) products[k] = -__builtin_inff();
      Float most = splat(largest_[row]);
      Int strange = most != most;
      for (int k = 0; k < seen; k += kLanes) {
        const Float product = load_float(products + k);
        most = max(most, product);
        strange |= product != product;
      }
      float largest = max_lane(most);
      for (int i = 0; i < kLanes; ++i) largest = strange[i] != 0 ? __builtin_nanf("") : largest;
      largest_[row] = largest;
    }
  }

  template <EntryFormat kFormat>
  void score_few(const FewRows& rows, const StoredChunk& chunk) {
    switch (few_rows_padded(rows.count)) {
      case 1:
        score_stored<1, kFormat>(rows, chunk, products_);
        break;
      case 2:
        score_stored<2, kFormat>(rows, chunk, products_);
        break;
      case 4:
        score_stored<4, kFormat>(rows, chunk, products_);
        break;
      default:
        score_stored<8, kFormat>(rows, chunk, products_);
    }
  }

  const float* key_row(std::int64_t token, float* space) const {
    const RowAddress address = row_address(params_.keys, params_.table, tile_.sequence, token);
    if (const float* const stored = float_row(params_.keys, address)) return stored;
    load_entry(params_.keys, address, space);
    return space;
  }

  void prefetch(std::int64_t token) const {
    const RowAddress ahead = row_address(params_.keys, params_.table, tile_.sequence, token);
    for (std::int64_t i = 0; i < params_.keys.data_bytes; i += 64) __builtin_prefetch(ahead.data + i);
  }

  // Which zero is the largest depends on the order of lanes. In bits: the compiler takes both for the same.
  static float plus_zero(float score) {
    std::uint32_t bits = 0;
    __builtin_memcpy(&bits, &score, sizeof bits);
    if (bits << 1 == 0) bits = 0;
    __builtin_memcpy(&score, &bits, sizeof bits);
    return score;
  }

  void write(int token, std::int64_t block, const float* largest) const {
    const std::int64_t position = tile_.position + token, own = position / params_.routed_tokens;
    for (int head = 0; head < params_.heads; ++head) {
      float score = -__builtin_inff();
      if (block <= own) {
        score =
            block >= first_local_block(params_, position) ? __builtin_inff() : plus_zero(largest[token * params_.heads + head]);
      }
      params_.scores[((tile_.token + token) * params_.heads + head) * params_.num_blocks + block] = score;
    }
  }

  const BlockScoresParams& params_;
  const BlockScoresTile& tile_;
  int rows_;
  bool few_ = false;
  float* query_;     // [dim][rows], or, of few rows, [row][dim]
  float* products_;  // [kChunkKeys][rows]
  float* largest_;   // [rows]
  float* key_rows_;  // [kChunkKeys][dim]
  std::int64_t positions_[kBlockScoreTileRows + kLanes];
};

}  // namespace

void block_scores(const BlockScoresParams& params, const BlockScoresTile& tile, std::int64_t begin, std::int64_t end,
                  float* scratch) noexcept {
  BlockScorer scorer(params, tile, scratch);
  for (std::int64_t block = begin; block < end; ++block) scorer.score(block);
}

}  // namespace hetkv::HETKV_LEVEL
