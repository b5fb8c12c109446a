#include "kernels/block_sparse_attention.h"

#include "kernels/cpu/levels/attend.h"
#include "kernels/cpu/levels/attend_few.h"
#include "kernels/cpu/levels/entry_store.h"
#include "kernels/cpu/levels/query_rows.h"

namespace hetkv::HETKV_LEVEL {
namespace {

// The keys that one KV head of a token sees, as stored vectors, in rising order of position.
class KeyList {
 public:
  KeyList(const BlockSparseParams& params, const BlockSparseToken& token, int kv_head)
      : params_(params), token_(token), list_(params.selected + (token.token * params.kv_heads + kv_head) * params.num_selected),
        head_bytes_(params.keys.data_bytes / params.kv_heads), kv_head_(kv_head) {}

  // The next keys, up to a whole chunk; how many. At the end of all: 0.
  int next_chunk(const std::byte** keys, const std::byte** values) {
    int count = 0;
    while (count < kChunkKeys) {
      if (at_ == end_ && !next_block()) break;  // it stays at the end: blocks only rise
      const int left = kChunkKeys - count;
      const int taken = end_ - at_ < left ? static_cast<int>(end_ - at_) : left;
      for (int k = 0; k < taken; ++k, ++at_, ++count) {
        keys[count] = vector_of(params_.keys);
        values[count] = vector_of(params_.values);
      }
    }
    return count;
  }

 private:
  bool next_block() {
    const std::int64_t own = token_.position / params_.routed_tokens;
    std::int64_t next = INT64_MAX;
    for (std::int32_t i = 0; i < params_.num_selected; ++i) {
      const std::int64_t block = list_[i];
      if (block > block_ && block < next) next = block;
    }
    block_ = next;
    if (next > own) return false;
    at_ = next * params_.routed_tokens;
    end_ = at_ + params_.routed_tokens;
    if (end_ > token_.position + 1) end_ = token_.position + 1;
    return true;
  }

  const std::byte* vector_of(const PagedRows& rows) const {
    return row_address(rows, params_.table, token_.sequence, at_).data + kv_head_ * head_bytes_;
  }

  const BlockSparseParams& params_;
  const BlockSparseToken& token_;
  const std::int32_t* list_;
  std::int64_t head_bytes_;
  int kv_head_;
  std::int64_t block_ = -1, at_ = 0, end_ = 0;  // -1: names no block
};

// One head: out[dim], not yet divided, is used up.
void write_vector(const BlockSparseParams& params, std::int64_t token, int head, float largest, float sum, float* out, int dim) {
  const std::int64_t vector = token * params.heads + head;
  const Finish end = finish(largest, sum, params.sinks == nullptr ? -__builtin_inff() : params.sinks[head]);
  for (int d = 0; d < dim; d += kLanes) store(out + d, load_float(out + d) * end.factor);
  store_plain(out, params.query_format, params.dim, params.out + vector * entry_data_bytes(params.query_format, params.dim));
  params.lse[vector] = end.lse;
}

// Groups of few heads: keys are lanes.
void attend_few_heads(const BlockSparseParams& params, const BlockSparseToken& token, int kv_head, float* scratch) {
  const int group = params.heads / params.kv_heads, dim = params.dim;
  float* const query = scratch;
  float* const out = query + std::int64_t{few_rows_padded(group)} * dim;
  float* const largest = out + std::int64_t{group} * dim;
  FewRows rows{group, dim, query, largest, largest + group, out};
  for (int row = 0; row < group; ++row) {
    rows.largest[row] = -__builtin_inff();
    rows.sums[row] = 0.0f;
  }
  __builtin_memset(query, 0,
                   sizeof(float) * static_cast<std::size_t>(few_rows_padded(group) + group) * static_cast<std::size_t>(dim));
  const std::int64_t vector_bytes = entry_data_bytes(params.query_format, dim);
  for (int row = 0; row < group; ++row) {
    const std::int64_t vector = token.token * params.heads + kv_head * group + row;
    load_plain(params.query + vector * vector_bytes, params.query_format, dim, query + row * dim);
  }
  for (int i = 0; i < group * dim; i += kLanes) store(query + i, load_float(query + i) * (params.scale * kLog2e));

  KeyList list(params, token, kv_head);
  StoredChunk chunks[2];
  chunks[0].count = list.next_chunk(chunks[0].key, chunks[0].value);
  for (int which = 0; chunks[which].count > 0; which ^= 1) {
    StoredChunk &chunk = chunks[which], &next = chunks[which ^ 1];
    next.count = list.next_chunk(next.key, next.value);
    for (int k = 0; k < kChunkKeys; ++k) {  // behind the last: a row that is there already
      const StoredChunk& from = k < next.count ? next : chunk;
      const int key = from.count > k ? k : from.count - 1;
      chunk.next_key[k] = from.key[key];
      chunk.next_value[k] = from.value[key];
    }
    attend_few(rows, chunk, params.keys.format, 0.0f);
  }
  for (int row = 0; row < group; ++row) {
    write_vector(params, token.token, kv_head * group + row, rows.largest[row], rows.sums[row], out + row * dim, dim);
  }
}

// Others: the heads of the group are lanes.
void attend_heads(const BlockSparseParams& params, const BlockSparseToken& token, int kv_head, float* scratch) {
  const int group = params.heads / params.kv_heads;
  Tile tile;
  tile.rows = padded_rows(group);
  tile.dim = tile.out_dim = padded_rows(params.dim);
  tile.query = scratch;
  tile.out = tile.query + std::int64_t{tile.rows} * tile.dim;
  tile.scores = tile.out + std::int64_t{tile.rows} * tile.dim;
  tile.largest = tile.scores + std::int64_t{kChunkKeys} * tile.rows;
  tile.sums = tile.largest + tile.rows;
  float* const key_rows = tile.sums + tile.rows;  // [kChunkKeys][dim]
  float* const value_rows = key_rows + std::int64_t{kChunkKeys} * tile.dim;
  reset(tile);
  __builtin_memset(tile.query, 0, sizeof(float) * static_cast<std::size_t>(tile.rows) * static_cast<std::size_t>(tile.dim));
  const std::int64_t vector_bytes = entry_data_bytes(params.query_format, params.dim);
  for (int row = 0; row < group; ++row) {
    const std::int64_t vector = token.token * params.heads + kv_head * group + row;
    put_query(tile, row, params.query + vector * vector_bytes, params.query_format, params.dim, params.scale * kLog2e);
  }

  const auto as_floats = [&](const std::byte* vector, EntryFormat format, float* space) -> const float* {
    if (format == EntryFormat::kFloat32 && tile.dim == params.dim) return reinterpret_cast<const float*>(vector);
    load_plain(vector, format, params.dim, space);
    for (int d = params.dim; d < tile.dim; ++d) space[d] = 0.0f;
    return space;
  };
  const std::int64_t bytes = params.keys.data_bytes / params.kv_heads;
  const bool shared = params.keys.data_offset == params.values.data_offset;
  KeyList list(params, token, kv_head);
  const std::byte* keys[2][kChunkKeys];
  const std::byte* values[2][kChunkKeys];
  int counts[2] = {list.next_chunk(keys[0], values[0]), 0};
  for (int which = 0; counts[which] > 0; which ^= 1) {
    const int next = which ^ 1;
    counts[next] = list.next_chunk(keys[next], values[next]);
    Chunk chunk;
    chunk.count = counts[which];
    for (int k = 0; k < chunk.count; ++k) {
      if (k < counts[next]) {
        for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(keys[next][k] + i, 0, 2);
        for (std::int64_t i = 0; !shared && i < bytes; i += 64) __builtin_prefetch(values[next][k] + i, 0, 2);
      }
      chunk.key[k] = as_floats(keys[which][k], params.keys.format, key_rows + k * tile.dim);
      chunk.value[k] = shared ? chunk.key[k] : as_floats(values[which][k], params.values.format, value_rows + k * tile.dim);
    }
    attend(tile, chunk, group, 0.0f);
  }
  for (int row = 0; row < group; ++row) {
    write_vector(params, token.token, kv_head * group + row, tile.largest[row], tile.sums[row], tile.out + row * tile.dim,
                 tile.dim);
  }
}

}  // namespace

void block_sparse_attention(const BlockSparseParams& params, const BlockSparseToken& token, std::int32_t kv_head,
                            float* scratch) noexcept {
  if (params.heads / params.kv_heads <= kFewRows && params.dim % kFewDimUnit == 0) {
    attend_few_heads(params, token, kv_head, scratch);
  } else {
    attend_heads(params, token, kv_head, scratch);
  }
}

}  // namespace hetkv::HETKV_LEVEL
