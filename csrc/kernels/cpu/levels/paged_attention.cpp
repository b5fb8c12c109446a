#include "kernels/paged_attention.h"

#include "kernels/cpu/levels/attend.h"
#include "kernels/cpu/levels/attend_few.h"
#include "kernels/cpu/levels/entry_store.h"
#include "kernels/cpu/levels/query_rows.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr std::int64_t kPrefetchKeys = 16;

// One head of one token: out[padded_dim], not yet divided, is used up.
inline void write_vector(const PagedAttentionParams& params, std::int64_t token, int head, float largest, float sum, float* out,
                         int padded_dim) {
  const std::int64_t vector = token * params.heads + head;
  const Finish end = finish(largest, sum, params.sinks == nullptr ? -__builtin_inff() : params.sinks[head]);
  for (int d = 0; d < padded_dim; d += kLanes) store(out + d, load_float(out + d) * end.factor);
  store_plain(out, params.query_format, params.dim, params.out + vector * entry_data_bytes(params.query_format, params.dim));
  params.lse[vector] = end.lse;
}

// One KV head of one tile: the softmax so far, and the scratch to make chunks of keys in.
struct Work {
  const PagedAttentionParams& params;
  const AttentionTile& tile;
  int kv_head, group, real_rows;
  Tile total;         // of all splits
  Tile split;         // of one split; shares query and scores with total
  float* key_rows;    // [kChunkKeys][dim]
  float* value_rows;  // the same
  std::int32_t first[kMaxTileRows + 16], last[kMaxTileRows + 16];

  Work(const PagedAttentionParams& p, const AttentionTile& t, int head, float* scratch)
      : params(p), tile(t), kv_head(head), group(p.heads / p.kv_heads), real_rows(group * t.count) {
    const int rows = padded_rows(group * attention_tile_tokens(group)), dim = padded_rows(p.dim);
    float* next = scratch;
    const auto take = [&next](std::int64_t count) {
      float* const taken = next;
      next += count;
      return taken;
    };
    total.rows = split.rows = padded_rows(real_rows);
    total.dim = split.dim = total.out_dim = split.out_dim = dim;
    total.query = split.query = take(std::int64_t{rows} * dim);
    total.scores = split.scores = take(std::int64_t{kChunkKeys} * rows);
    Tile* const both[] = {&total, &split};
    for (Tile* const one : both) {
      one->largest = take(rows);
      one->sums = take(rows);
      one->out = take(std::int64_t{rows} * dim);
    }
    key_rows = take(std::int64_t{kChunkKeys} * dim);
    value_rows = take(std::int64_t{kChunkKeys} * dim);
  }

  std::int64_t tile_first() const { return first_key(params, tile.position); }
  std::int64_t tile_last() const { return tile.position + tile.count; }  // one past the last key

  void load_queries() {
    __builtin_memset(total.query, 0, sizeof(float) * static_cast<std::size_t>(total.rows) * static_cast<std::size_t>(total.dim));
    const std::int64_t vector_bytes = entry_data_bytes(params.query_format, params.dim);
    for (int t = 0; t < tile.count; ++t) {
      for (int h = 0; h < group; ++h) {
        const std::int64_t vector = (tile.token + t) * params.heads + kv_head * group + h;
        put_query(total, t * group + h, params.query + vector * vector_bytes, params.query_format, params.dim,
                  params.scale * kLog2e);
      }
    }
  }

  // A stored vector of this head as floats, zero-padded: the row itself where that is possible.
  const float* vector_of(const PagedRows& rows, std::int64_t token, float* space) const {
    RowAddress address = row_address(rows, params.table, tile.sequence, token);
    address.data += kv_head * (rows.data_bytes / params.kv_heads);
    if (total.dim == params.dim) {
      if (const float* const stored = float_row(rows, address)) return stored;
    }
    load_entry(rows, address, space);
    for (int d = params.dim; d < total.dim; ++d) space[d] = 0.0f;
    return space;
  }

  void attend_keys(Tile& into, std::int64_t begin, std::int64_t end) {
    const bool shared = params.keys.data_offset == params.values.data_offset;
    for (std::int64_t from = begin; from < end;) {
      const std::int64_t boundary = (from / kChunkKeys + 1) * kChunkKeys;
      const std::int64_t to = boundary < end ? boundary : end;
      Chunk chunk;
      chunk.count = static_cast<int>(to - from);
      for (int k = 0; k < chunk.count; ++k) {
        const std::int64_t ahead = from + k + kPrefetchKeys;
        if (ahead < end) prefetch(ahead, shared);
        chunk.key[k] = vector_of(params.keys, from + k, key_rows + k * total.dim);
        chunk.value[k] = shared ? chunk.key[k] : vector_of(params.values, from + k, value_rows + k * total.dim);
      }
      // Whether a row of the tile does not see the whole chunk.
      const bool some_blind = to > tile.position + 1 || from < first_key(params, tile.position + tile.count - 1);
      if (some_blind) {
        set_visible(from, chunk.count);
        chunk.first = first;
        chunk.last = last;
      }
      attend(into, chunk, real_rows, params.softcap);
      from = to;
    }
  }

  void prefetch(std::int64_t token, bool shared) const {
    const std::int64_t bytes = params.keys.data_bytes / params.kv_heads;
    const std::byte* const key = row_address(params.keys, params.table, tile.sequence, token).data + kv_head * bytes;
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(key + i);
    if (shared) return;
    const std::byte* const value = row_address(params.values, params.table, tile.sequence, token).data + kv_head * bytes;
    for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(value + i);
  }

  void set_visible(std::int64_t from, int count) {
    for (int row = 0; row < total.rows; ++row) {
      const std::int64_t position = tile.position + row / group;
      std::int64_t begin = first_key(params, position) - from, end = position + 1 - from;
#ifdef HETKV_PLANT_SEES_NEXT_KEY
      ++end;
#endif
      if (row >= real_rows) begin = end = 0;
      first[row] = static_cast<std::int32_t>(begin < 0 ? 0 : begin > count ? count : begin);
      last[row] = static_cast<std::int32_t>(end < 0 ? 0 : end > count ? count : end);
    }
  }

  void write_results() {
    for (int row = 0; row < real_rows; ++row) {
      write_vector(params, tile.token + row / group, kv_head * group + row % group, total.largest[row], total.sums[row],
                   total.out + row * total.dim, total.dim);
    }
  }
};

// KV heads [first, first + count) of a tile of one token and few rows. Rows of blocks are read whole: heads are the inner loop.
struct Heads {
  std::int32_t first, count;
};

bool few_rows(const PagedAttentionParams& params, const AttentionTile& tile) {
  return tile.count == 1 && params.heads / params.kv_heads <= kFewRows && params.dim % kFewDimUnit == 0;
}

// A softmax that runs, as attend_split leaves it: largest[padded], sums[padded], out[padded][dim].
struct FewState {
  float *largest, *sums, *out;
  FewState(float* from, int group) : largest(from), sums(from + padded_rows(group)), out(from + 2 * padded_rows(group)) {}
};

class FewWork {
 public:
  // scratch: count * few_rows_padded(group) * dim floats.
  FewWork(const PagedAttentionParams& params, const AttentionTile& tile, Heads heads, float* scratch)
      : params_(params), tile_(tile), heads_(heads), group_(params.heads / params.kv_heads),
        head_bytes_(params.keys.data_bytes / params.kv_heads), query_floats_(few_rows_padded(group_) * params.dim),
        query_(scratch) {
    const std::int64_t vector_bytes = entry_data_bytes(params.query_format, params.dim);
    for (int h = 0; h < heads.count; ++h) {
      float* const queries = query_ + h * query_floats_;
      __builtin_memset(queries, 0, sizeof(float) * static_cast<std::size_t>(query_floats_));
      for (int row = 0; row < group_; ++row) {
        const std::int64_t vector = tile.token * params.heads + (heads.first + h) * group_ + row;
        load_plain(params.query + vector * vector_bytes, params.query_format, params.dim, queries + row * params.dim);
      }
      for (int i = 0; i < query_floats_; i += kLanes) store(queries + i, load_float(queries + i) * (params.scale * kLog2e));
    }
  }

  // Keys [begin, end) into the states, which are `stride` floats apart.
  void attend_keys(float* states, std::int64_t stride, std::int64_t begin, std::int64_t end) {
    for (int h = 0; h < heads_.count; ++h) {
      const FewState state(states + h * stride, group_);
      for (int row = 0; row < group_; ++row) {
        state.largest[row] = -__builtin_inff();
        state.sums[row] = 0.0f;
      }
      __builtin_memset(state.out, 0, sizeof(float) * static_cast<std::size_t>(group_) * static_cast<std::size_t>(params_.dim));
    }
    for (std::int64_t from = begin; from < end;) {
      const std::int64_t boundary = (from / kChunkKeys + 1) * kChunkKeys, to = boundary < end ? boundary : end;
      attend_chunk(states, stride, from, to, end);
      from = to;
    }
  }

 private:
  void attend_chunk(float* states, std::int64_t stride, std::int64_t from, std::int64_t to, std::int64_t end) {
    StoredChunk chunk;
    chunk.count = static_cast<int>(to - from);
    for (int k = 0; k < chunk.count; ++k) {
      chunk.key[k] = row_of(params_.keys, from + k);
      chunk.value[k] = row_of(params_.values, from + k);
    }
    for (int h = 0; h < heads_.count; ++h) {
      look_ahead(chunk, h, to, end);
      chunk.at = h * head_bytes_;
      const FewState state(states + h * stride, group_);
      FewRows rows{group_, params_.dim, query_ + h * query_floats_, state.largest, state.sums, state.out};
      attend_few(rows, chunk, params_.keys.format, params_.softcap);
    }
  }

  const std::byte* row_of(const PagedRows& rows, std::int64_t token) const {
    return row_address(rows, params_.table, tile_.sequence, token).data + heads_.first * head_bytes_;
  }

  // The part of the next chunk that the work on head h should fetch: together, the heads go through whole rows.
  void look_ahead(StoredChunk& chunk, int h, std::int64_t next, std::int64_t end) const {
    const std::byte *key = nullptr, *value = nullptr;
    int head = 0;  // of the row
    std::int64_t token = next + h * kChunkKeys / heads_.count;
    const int first = h * kChunkKeys % heads_.count;
    for (int k = 0; k < kChunkKeys; ++k) {
      if (k == 0 || head == heads_.count) {
        const std::int64_t row = token < end ? token : end - 1;  // behind the last: a row that is there already
        key = row_of(params_.keys, row);
        value = row_of(params_.values, row);
        head = k == 0 ? first : 0;
        ++token;
      }
      chunk.next_key[k] = key + head * head_bytes_;
      chunk.next_value[k] = value + head * head_bytes_;
      ++head;
    }
  }

  const PagedAttentionParams& params_;
  const AttentionTile& tile_;
  Heads heads_;
  int group_;
  std::int64_t head_bytes_;
  int query_floats_;
  float* query_;
};

void attend_few_tile(const PagedAttentionParams& params, const AttentionTile& tile, Heads heads, float* scratch) {
  const int group = params.heads / params.kv_heads, padded = padded_rows(group);
  const std::int64_t stride = std::int64_t{padded} * (params.dim + 2);
  float* const totals = scratch;
  float* const splits = totals + heads.count * stride;
  FewWork work(params, tile, heads, splits + heads.count * stride);
  for (int h = 0; h < heads.count; ++h) {
    const FewState total(totals + h * stride, group);
    Tile sums{padded, params.dim, params.dim, nullptr, nullptr, total.largest, total.sums, total.out};
    reset(sums);
  }
  const std::int64_t end = tile.position + 1;
  for (std::int64_t from = first_key(params, tile.position); from < end;) {
    const std::int64_t boundary = (from / kAttentionSplit + 1) * kAttentionSplit, to = boundary < end ? boundary : end;
    work.attend_keys(splits, stride, from, to);
    for (int h = 0; h < heads.count; ++h) {
      const FewState total(totals + h * stride, group), split(splits + h * stride, group);
      Tile sums{padded, params.dim, params.dim, nullptr, nullptr, total.largest, total.sums, total.out};
      merge(sums, group, split.largest, split.sums, split.out);
    }
    from = to;
  }
  for (int h = 0; h < heads.count; ++h) {
    const FewState total(totals + h * stride, group);
    for (int row = 0; row < group; ++row) {
      write_vector(params, tile.token, (heads.first + h) * group + row, total.largest[row], total.sums[row],
                   total.out + row * params.dim, params.dim);
    }
  }
}

void attend_one_split(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head, std::int64_t begin,
                      std::int64_t end, float* partial, float* scratch) {
  Work work(params, tile, kv_head, scratch);
  work.load_queries();
  reset(work.split);
  work.attend_keys(work.split, begin, end);
  const auto rows = static_cast<std::size_t>(work.split.rows);
  __builtin_memcpy(partial, work.split.largest, sizeof(float) * rows);
  __builtin_memcpy(partial + rows, work.split.sums, sizeof(float) * rows);
  __builtin_memcpy(partial + 2 * rows, work.split.out, sizeof(float) * rows * static_cast<std::size_t>(work.split.dim));
}

void attend_one_head(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head, float* scratch) {
  Work work(params, tile, kv_head, scratch);
  work.load_queries();
  reset(work.total);
  for (std::int64_t from = work.tile_first(); from < work.tile_last();) {
    const std::int64_t boundary = (from / kAttentionSplit + 1) * kAttentionSplit;
    const std::int64_t to = boundary < work.tile_last() ? boundary : work.tile_last();
    reset(work.split);
    work.attend_keys(work.split, from, to);
    merge(work.total, work.real_rows, work.split.largest, work.split.sums, work.split.out);
    from = to;
  }
  work.write_results();
}

}  // namespace

void attend_split(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t first_head, std::int32_t num_heads,
                  std::int32_t split, float* partials, float* scratch) noexcept {
  const std::int64_t first = first_key(params, tile.position), last = tile.position + tile.count;
  std::int64_t begin = std::int64_t{split} * kAttentionSplit, end = begin + kAttentionSplit;
  begin = begin > first ? begin : first;
  end = end < last ? end : last;
  const std::int64_t stride = attention_partial_floats(params);
  if (few_rows(params, tile)) {
    FewWork(params, tile, {first_head, num_heads}, scratch).attend_keys(partials, stride, begin, end);
    return;
  }
  for (std::int32_t h = 0; h < num_heads; ++h) {
    attend_one_split(params, tile, first_head + h, begin, end, partials + h * stride, scratch);
  }
}

void attend_tile(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t first_head, std::int32_t num_heads,
                 float* scratch) noexcept {
  if (few_rows(params, tile)) {
    attend_few_tile(params, tile, {first_head, num_heads}, scratch);
    return;
  }
  for (std::int32_t h = 0; h < num_heads; ++h) attend_one_head(params, tile, first_head + h, scratch);
}

void combine_splits(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head, std::int32_t num_splits,
                    const float* const* partials, float* scratch) noexcept {
  Work work(params, tile, kv_head, scratch);
  reset(work.total);
  const std::int64_t rows = work.total.rows;
  for (std::int32_t i = 0; i < num_splits; ++i) {
    merge(work.total, work.real_rows, partials[i], partials[i] + rows, partials[i] + 2 * rows);
  }
  work.write_results();
}

}  // namespace hetkv::HETKV_LEVEL
