#include "ops/block_scores.h"

#include <algorithm>
#include <vector>

#include <torch/csrc/stable/ops.h>

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOp = "block_scores";

// The tiles of a step, in order; nothing for padding. Checks what they read.
std::vector<BlockScoresTile> tiles_of(const BlockScoresParams& params, const Tensor& table) {
  std::vector<BlockScoresTile> tiles;
  if (params.num_sequences == 0) return tiles;
  check_sequences(kOp, params.cu_seqlens_q, params.seqused_k, params.num_sequences, params.num_tokens);
  const std::int32_t most = block_scores_tile_tokens(params.heads);
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    const std::int64_t begin = params.cu_seqlens_q[b], end = params.cu_seqlens_q[b + 1], used = params.seqused_k[b];
    if (used == 0 || begin == end) continue;
    check_blocks({kOp, "block_table", table}, params.table, params.keys, b, 0, used);
    for (std::int64_t token = begin; token < end; token += most) {
      const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(most, end - token));
      tiles.push_back({b, token, used - (end - token), count});
    }
  }
  return tiles;
}

}  // namespace

BlockScoresParams block_scores_params(const BlockScoresTensors& t, const SectionArguments& section, std::int64_t routed_tokens,
                                      std::int64_t local_blocks) {
  const TensorArgument arena{kOp, "arena", t.arena}, query{kOp, "query", t.query}, table{kOp, "block_table", t.block_table};
  check_arena(arena);
  check_ndim(query, 3);
  check_same_device(query, arena);
  BlockScoresParams params;
  params.query_format = float_format(query);
  check_contiguous(query);
  const std::int64_t heads = t.query.size(1), dim = t.query.size(2);
  if (dim < 1 || dim > kMaxBlockScoreDim || heads < 1 || heads > kMaxBlockScoreHeads) {
    refuse_argument(
        kOp, "query.shape[1:]", std::to_string(heads) + " x " + std::to_string(dim),
        "1 to " + std::to_string(kMaxBlockScoreHeads) + " heads of 1 to " + std::to_string(kMaxBlockScoreDim) + " values");
  }
  params.table = block_table(table, arena);
  check_dense({kOp, "seqused_k", t.seqused_k}, arena, ScalarType::Int, {-1}, "");
  params.num_sequences = t.seqused_k.size(0);
  check_size(table, 0, params.num_sequences, "the sequences of seqused_k");
  check_dense({kOp, "cu_seqlens_q", t.cu_seqlens_q}, arena, ScalarType::Int, {params.num_sequences + 1}, "seqused_k.size(0) + 1");
  params.keys = paged_rows(arena, section, 1, dim);
  if (routed_tokens < 1 || routed_tokens > INT32_MAX) {
    refuse_argument(kOp, "routed_tokens", std::to_string(routed_tokens), "1 to " + std::to_string(INT32_MAX));
  }
  check_not_negative(kOp, "local_blocks", local_blocks);
  params.query = data_of<std::byte>(t.query);
  params.cu_seqlens_q = data_of<std::int32_t>(t.cu_seqlens_q);
  params.seqused_k = data_of<std::int32_t>(t.seqused_k);
  params.num_tokens = t.query.size(0);
  params.num_blocks = (t.block_table.size(1) * section.rows_per_block + routed_tokens - 1) / routed_tokens;
  params.routed_tokens = routed_tokens;
  params.local_blocks = std::min<std::int64_t>(local_blocks, INT32_MAX);
  params.heads = static_cast<std::int32_t>(heads);
  params.dim = static_cast<std::int32_t>(dim);
  return params;
}

Tensor block_scores_cpu(Tensor query, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                        std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format,
                        std::int64_t scale_offset, std::int64_t routed_tokens, std::int64_t local_blocks) {
  BlockScoresParams params =
      block_scores_params({query, arena, block_table, cu_seqlens_q, seqused_k},
                          {rows_per_block, section_offset, scale_offset, entry_format}, routed_tokens, local_blocks);
  Tensor out = torch::stable::new_empty(query, {params.num_tokens, params.heads, params.num_blocks}, ScalarType::Float);
  params.scores = static_cast<float*>(out.mutable_data_ptr());
  std::fill_n(params.scores, out.numel(), -__builtin_inff());
  const std::vector<BlockScoresTile> tiles = tiles_of(params, block_table);
  const std::int64_t blocks_per_piece = std::max<std::int64_t>(1, kBlockScoreKeysPerPiece / routed_tokens);
  const std::int64_t pieces = (params.num_blocks + blocks_per_piece - 1) / blocks_per_piece;
  if (tiles.empty() || pieces == 0) return out;
  torch::stable::parallel_for(0, static_cast<std::int64_t>(tiles.size()) * pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(block_scores_scratch_floats(params)));
    for (std::int64_t item = begin; item < end; ++item) {
      const BlockScoresTile& tile = tiles[static_cast<std::size_t>(item / pieces)];
      const std::int64_t seen = (tile.position + tile.count - 1) / routed_tokens + 1;  // blocks; the others have -inf already
      const std::int64_t from = item % pieces * blocks_per_piece, to = std::min(seen, from + blocks_per_piece);
      if (from < to) hetkv::block_scores_cpu(params, tile, from, to, scratch.data());
    }
  });
  return out;
}

}  // namespace hetkv::ops
