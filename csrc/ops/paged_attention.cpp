#include "ops/paged_attention.h"

#include <algorithm>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "ops/attention_output.h"

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOp = "paged_attention";
constexpr std::int64_t kFewItems = 8;  // pieces of a step: below that, work is cut at splits as well

// The tiles of a step, in order; nothing for padding.
std::vector<AttentionTile> tiles_of(const PagedAttentionParams& params) {
  const std::int32_t most = attention_tile_tokens(params.heads / params.kv_heads);
  std::vector<AttentionTile> tiles;
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    const std::int64_t begin = params.cu_seqlens_q[b], end = params.cu_seqlens_q[b + 1];
    const std::int64_t first_position = params.seqused_k[b] - (end - begin);
    if (params.seqused_k[b] == 0) continue;
    for (std::int64_t token = begin; token < end; token += most) {
      const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(most, end - token));
      tiles.push_back({b, token, first_position + token - begin, count});
    }
  }
  return tiles;
}

// KV heads of a piece of work, where there are `pieces` per KV head: several, unless threads would be idle.
std::int32_t head_span(const PagedAttentionParams& params, std::size_t pieces) {
  const std::int32_t span = attention_head_span(params);
  const auto spans = static_cast<std::size_t>((params.kv_heads + span - 1) / span),
             threads = std::size_t{torch::stable::get_num_threads()};
  return threads == 1 || pieces * spans >= 2 * threads ? span : 1;
}

void attend_whole(const PagedAttentionParams& params, const std::vector<AttentionTile>& tiles) {
  const std::int32_t span = head_span(params, tiles.size());
  const std::int64_t spans = (params.kv_heads + span - 1) / span;
  torch::stable::parallel_for(0, static_cast<std::int64_t>(tiles.size()) * spans, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(attention_scratch_floats(params)));
    for (std::int64_t item = begin; item < end; ++item) {
      const auto head = static_cast<std::int32_t>(item % spans) * span;
      attend_tile_cpu(params, tiles[static_cast<std::size_t>(item / spans)], head, std::min(span, params.kv_heads - head),
                      scratch.data());
    }
  });
}

// One split of one tile.
struct Piece {
  std::size_t tile;
  std::int32_t split;
};

void attend_in_splits(const PagedAttentionParams& params, const std::vector<AttentionTile>& tiles) {
  std::vector<Piece> pieces;
  std::vector<std::size_t> firsts;  // of each tile, then the end
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    const auto first = static_cast<std::int32_t>(first_key(params, tiles[t].position) / kAttentionSplit);
    const auto last = static_cast<std::int32_t>((tiles[t].position + tiles[t].count - 1) / kAttentionSplit);
    firsts.push_back(pieces.size());
    for (std::int32_t split = first; split <= last; ++split) pieces.push_back({t, split});
  }
  firsts.push_back(pieces.size());
  const std::int32_t span = head_span(params, pieces.size());
  const std::int64_t spans = (params.kv_heads + span - 1) / span;
  const auto stride = static_cast<std::size_t>(attention_partial_floats(params)),
             heads = static_cast<std::size_t>(params.kv_heads);
  std::vector<float> partials(pieces.size() * heads * stride);
  const auto partial = [&](std::size_t piece, std::size_t head) { return partials.data() + (piece * heads + head) * stride; };
  torch::stable::parallel_for(0, static_cast<std::int64_t>(pieces.size()) * spans, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(attention_scratch_floats(params)));
    for (std::int64_t item = begin; item < end; ++item) {
      const auto i = static_cast<std::size_t>(item / spans);
      const auto head = static_cast<std::int32_t>(item % spans) * span;
      attend_split_cpu(params, tiles[pieces[i].tile], head, std::min(span, params.kv_heads - head), pieces[i].split,
                       partial(i, static_cast<std::size_t>(head)), scratch.data());
    }
  });
  std::vector<float> scratch(static_cast<std::size_t>(attention_scratch_floats(params)));
  std::vector<const float*> of_head;
  for (std::size_t t = 0; t < tiles.size(); ++t) {
    for (std::size_t head = 0; head < heads; ++head) {
      of_head.clear();
      for (std::size_t piece = firsts[t]; piece < firsts[t + 1]; ++piece) of_head.push_back(partial(piece, head));
      combine_splits_cpu(params, tiles[t], static_cast<std::int32_t>(head), static_cast<std::int32_t>(of_head.size()),
                         of_head.data(), scratch.data());
    }
  }
}

}  // namespace

PagedAttentionParams paged_attention_params(const PagedAttentionTensors& tensors, const PagedAttentionSettings& settings) {
  const Tensor& query = tensors.query;
  const TensorArgument query_argument{kOp, "query", query}, arena{kOp, "arena", tensors.arena},
      table{kOp, "block_table", tensors.block_table}, cu_seqlens_q{kOp, "cu_seqlens_q", tensors.cu_seqlens_q},
      seqused_k{kOp, "seqused_k", tensors.seqused_k};
  SectionArguments key_section{settings.rows_per_block, settings.key_offset, 0, settings.entry_format},
      value_section{settings.rows_per_block, settings.value_offset, 0, settings.entry_format};
  key_section.offset_name = "key_offset";
  value_section.offset_name = "value_offset";
  check_arena(arena);
  check_ndim(query_argument, 3);
  check_same_device(query_argument, arena);
  PagedAttentionParams params;
  params.query_format = float_format(query_argument);
  check_contiguous(query_argument);
  const std::int64_t heads = query.size(1), dim = query.size(2), kv_heads = settings.num_kv_heads;
  if (dim < 1 || dim > kMaxAttentionDim) {
    refuse_argument(kOp, "query.size(2)", std::to_string(dim), "1 to " + std::to_string(kMaxAttentionDim));
  }
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || heads / kv_heads > kMaxAttentionTileRows) {
    refuse_argument(kOp, "num_kv_heads", std::to_string(kv_heads),
                    "a divisor of the " + std::to_string(heads) + " heads of query, at most " +
                        std::to_string(kMaxAttentionTileRows) + " heads a group");
  }
  params.table = block_table(table, arena);
  check_dense(seqused_k, arena, ScalarType::Int, {-1}, "");
  const std::int64_t batch = seqused_k.tensor.size(0);
  check_size(table, 0, batch, "the sequences of seqused_k");
  check_dense(cu_seqlens_q, arena, ScalarType::Int, {batch + 1}, "seqused_k.size(0) + 1");
  params.keys = paged_rows(arena, key_section, kv_heads, dim);
  params.values = paged_rows(arena, value_section, kv_heads, dim);
  if (tensors.sinks) {
    check_dense({kOp, "sinks", *tensors.sinks}, arena, ScalarType::Float, {heads}, "the heads of query");
    params.sinks = data_of<float>(*tensors.sinks);
  }
  if (params.keys.format >= EntryFormat::kFp8Packed) {
    refuse_argument(kOp, "entry_format", settings.entry_format, "float32, float16 or bfloat16");
  }
  check_not_negative(kOp, "window", settings.window);
  if (!(settings.softcap >= 0.0)) {
    refuse_argument(kOp, "softcap", std::to_string(settings.softcap), "0 (none) or more");
  }
  params.window = static_cast<std::int32_t>(std::min<std::int64_t>(settings.window, INT32_MAX));
  params.scale = static_cast<float>(settings.scale);
  params.softcap = static_cast<float>(settings.softcap);
  params.query = data_of<std::byte>(query);
  params.cu_seqlens_q = data_of<std::int32_t>(tensors.cu_seqlens_q);
  params.seqused_k = data_of<std::int32_t>(tensors.seqused_k);
  params.num_tokens = query.size(0);
  params.num_sequences = batch;
  params.heads = static_cast<std::int32_t>(heads);
  params.kv_heads = static_cast<std::int32_t>(kv_heads);
  params.dim = static_cast<std::int32_t>(dim);
  return params;
}

std::tuple<Tensor, Tensor> paged_attention_cpu(Tensor query, Tensor arena, Tensor block_table, Tensor cu_seqlens_q,
                                               Tensor seqused_k, std::int64_t num_kv_heads, std::int64_t rows_per_block,
                                               std::int64_t key_offset, std::int64_t value_offset, std::string entry_format,
                                               double scale, std::int64_t window, OptionalTensor sinks, double softcap) {
  PagedAttentionParams params =
      paged_attention_params({query, arena, block_table, cu_seqlens_q, seqused_k, sinks},
                             {num_kv_heads, rows_per_block, key_offset, value_offset, entry_format, scale, window, softcap});
  const AttentionOutput output = make_attention_output(params, query, params.dim);
  const TensorArgument table{kOp, "block_table", block_table};
  clear_attention_output(params, output);
  if (params.num_tokens == 0 || params.num_sequences == 0) return {output.out, output.lse};

  check_sequences(kOp, params.cu_seqlens_q, params.seqused_k, params.num_sequences, params.num_tokens);
  const std::vector<AttentionTile> tiles = tiles_of(params);
  for (const AttentionTile& tile : tiles) {
    const std::int64_t begin = first_key(params, tile.position), end = tile.position + tile.count;
    check_blocks(table, params.table, params.keys, tile.sequence, begin, end);
    check_blocks(table, params.table, params.values, tile.sequence, begin, end);
  }
  const std::int32_t span = attention_head_span(params);
  if (static_cast<std::int64_t>(tiles.size()) * ((params.kv_heads + span - 1) / span) < kFewItems) {
    attend_in_splits(params, tiles);
  } else {
    attend_whole(params, tiles);
  }
  return {output.out, output.lse};
}

}  // namespace hetkv::ops
