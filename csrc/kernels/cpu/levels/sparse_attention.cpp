#include "kernels/sparse_attention.h"

#include "kernels/cpu/levels/attend.h"
#include "kernels/cpu/levels/entry_store.h"
#include "kernels/cpu/levels/query_rows.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr std::int64_t kPrefetchRows = 12;

// The rows that a token sees, by their place in its list: window rows by position, then entries.
struct List {
  const SparseAttentionParams& params;
  const SparseToken& token;
  std::int64_t first_row;  // of the window
  std::int64_t window_rows;
  std::int64_t entries;  // places of the list, -1 included

  List(const SparseAttentionParams& p, const SparseToken& t) : params(p), token(t) {
    first_row = token.position + 1 > params.window ? token.position + 1 - params.window : 0;
    window_rows = token.position + 1 - first_row;
    if (params.entry_table.blocks == nullptr) {
      entries = 0;
    } else if (params.selected != nullptr) {
      entries = params.num_selected;
    } else {
      entries = (token.position + 1) / params.ratio;
    }
  }
  std::int64_t size() const { return window_rows + entries; }

  // False: the place names no entry.
  bool address(std::int64_t place, const PagedRows*& rows, RowAddress& address) const {
    if (place < window_rows) {
      rows = &params.window_rows;
      address = row_address(params.window_rows, params.window_table, token.sequence, first_row + place);
      return true;
    }
    std::int64_t entry = place - window_rows;
    if (params.selected != nullptr) entry = params.selected[token.token * params.num_selected + entry];
    if (entry < 0) return false;
    rows = &params.entries;
    address = row_address(params.entries, params.entry_table, token.sequence, entry);
    return true;
  }

  void prefetch(std::int64_t place) const {
    const PagedRows* rows = nullptr;
    RowAddress at{};
    if (place >= size() || !address(place, rows, at)) return;
    for (std::int64_t i = 0; i < rows->data_bytes; i += 64) __builtin_prefetch(at.data + i);
    if (rows->scale_bytes > 0) __builtin_prefetch(at.scale);
  }
};

}  // namespace

void sparse_attention(const SparseAttentionParams& params, const SparseToken& token, std::int32_t head, float* scratch) noexcept {
  const int left = params.heads - head;
  const int heads = left < kSparseTileHeads ? left : kSparseTileHeads;
  Tile tile;
  tile.rows = padded_rows(heads);
  tile.dim = padded_rows(params.dim);
  tile.out_dim = padded_rows(params.value_dim);
  tile.query = scratch;
  tile.out = tile.query + std::int64_t{tile.rows} * tile.dim;
  tile.scores = tile.out + std::int64_t{tile.rows} * tile.out_dim;
  tile.largest = tile.scores + std::int64_t{kChunkKeys} * tile.rows;
  tile.sums = tile.largest + tile.rows;
  float* const space = tile.sums + tile.rows;  // [kChunkKeys][dim]

  reset(tile);
  __builtin_memset(tile.query, 0, sizeof(float) * static_cast<std::size_t>(tile.rows) * static_cast<std::size_t>(tile.dim));
  const std::int64_t vector_bytes = entry_data_bytes(params.query_format, params.dim);
  const std::int64_t out_bytes = entry_data_bytes(params.query_format, params.value_dim);
  const std::int64_t first_vector = token.token * params.heads + head;
  for (int h = 0; h < heads; ++h) {
    const std::byte* const from = params.query + (first_vector + h) * vector_bytes;
    put_query(tile, h, from, params.query_format, params.dim, params.scale * kLog2e);
  }

  const List list(params, token);
  const std::int64_t size = list.size();
  Chunk chunk;
  for (std::int64_t place = 0; place < size; ++place) {
    list.prefetch(place + kPrefetchRows);
    const PagedRows* rows = nullptr;
    RowAddress address{};
    if (list.address(place, rows, address)) {
      const float* row = tile.dim == params.dim ? float_row(*rows, address) : nullptr;
      if (row == nullptr) {
        float* const made = space + chunk.count * tile.dim;
        load_entry(*rows, address, made);
        for (int d = params.dim; d < tile.dim; ++d) made[d] = 0.0f;
        row = made;
      }
      chunk.key[chunk.count] = chunk.value[chunk.count] = row;
      ++chunk.count;
    }
    if (chunk.count == kChunkKeys || (place + 1 == size && chunk.count > 0)) {
      attend(tile, chunk, heads, 0.0f);
      chunk.count = 0;
    }
  }

  const int pairs = params.rope / 2;
  for (int h = 0; h < heads; ++h) {
    const float sink = params.sinks == nullptr ? -__builtin_inff() : params.sinks[head + h];
    const Finish end = finish(tile.largest[h], tile.sums[h], sink);
    float* const out = tile.out + h * tile.out_dim;
    for (int d = 0; d < tile.out_dim; d += kLanes) store(out + d, load_float(out + d) * end.factor);
    float* const rotated = out + params.value_dim - params.rope;
    for (int i = 0; i < pairs; ++i) {  // by -position: the sine changes its sign
      const float cos = params.cos[token.token * pairs + i], sin = params.sin[token.token * pairs + i];
      const float a = rotated[2 * i], b = rotated[2 * i + 1];
      rotated[2 * i] = a * cos + b * sin;
      rotated[2 * i + 1] = b * cos - a * sin;
    }
    store_plain(out, params.query_format, params.value_dim, params.out + (first_vector + h) * out_bytes);
    params.lse[first_vector + h] = end.lse;
  }
}

}  // namespace hetkv::HETKV_LEVEL
