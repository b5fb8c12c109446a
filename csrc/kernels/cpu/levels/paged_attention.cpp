#include "kernels/paged_attention.h"

#include "kernels/cpu/levels/attend.h"
#include "kernels/cpu/levels/entry_store.h"
#include "kernels/cpu/levels/query_rows.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr std::int64_t kPrefetchKeys = 16;

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
    total.dim = split.dim = dim;
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
    const std::int64_t vector_bytes = entry_data_bytes(params.query_format, params.dim);
    for (int row = 0; row < real_rows; ++row) {
      const int head = kv_head * group + row % group;
      const std::int64_t vector = (tile.token + row / group) * params.heads + head;
      const float sink = params.sinks == nullptr ? -__builtin_inff() : params.sinks[head];
      const Finish end = finish(total.largest[row], total.sums[row], sink);
      float* const out = total.out + row * total.dim;
      for (int d = 0; d < total.dim; d += kLanes) store(out + d, load_float(out + d) * end.factor);
      store_plain(out, params.query_format, params.dim, params.out + vector * vector_bytes);
      params.lse[vector] = end.lse;
    }
  }
};

}  // namespace

void attend_split(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head, std::int32_t split,
                  float* partial, float* scratch) noexcept {
  Work work(params, tile, kv_head, scratch);
  work.load_queries();
  reset(work.split);
  const std::int64_t begin = std::int64_t{split} * kAttentionSplit, end = begin + kAttentionSplit;
  work.attend_keys(work.split, begin > work.tile_first() ? begin : work.tile_first(),
                   end < work.tile_last() ? end : work.tile_last());
  const auto rows = static_cast<std::size_t>(work.split.rows);
  __builtin_memcpy(partial, work.split.largest, sizeof(float) * rows);
  __builtin_memcpy(partial + rows, work.split.sums, sizeof(float) * rows);
  __builtin_memcpy(partial + 2 * rows, work.split.out, sizeof(float) * rows * static_cast<std::size_t>(work.split.dim));
}

void combine_splits(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head,
                    std::int32_t /*first_split*/, std::int32_t num_splits, const float* partials, float* scratch) noexcept {
  Work work(params, tile, kv_head, scratch);
  reset(work.total);
  const std::int64_t rows = work.total.rows, stride = attention_partial_floats(params);
  for (std::int32_t i = 0; i < num_splits; ++i) {
    const float* const partial = partials + i * stride;
    merge(work.total, work.real_rows, partial, partial + rows, partial + 2 * rows);
  }
  work.write_results();
}

void attend_tile(const PagedAttentionParams& params, const AttentionTile& tile, std::int32_t kv_head, float* scratch) noexcept {
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

}  // namespace hetkv::HETKV_LEVEL
