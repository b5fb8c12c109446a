#include "ops/index_scores.h"

#include <algorithm>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "kernels/top_k.h"
#include "ops/top_k.h"

namespace hetkv::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

IndexScoresParams index_scores_params(const IndexTensors& t, std::int64_t ratio, const SectionArguments& section) {
  const TensorArgument arena{t.op, "arena", t.arena}, query{t.op, "query", t.query}, table{t.op, "block_table", t.block_table};
  check_arena(arena);
  check_ndim(query, 3);
  check_same_device(query, arena);
  IndexScoresParams params;
  params.query_format = float_format(query);
  check_contiguous(query);
  const std::int64_t heads = t.query.size(1), dim = t.query.size(2);
  if (dim < 1 || dim > kMaxIndexDim || heads < 1 || heads > kMaxIndexHeads) {
    refuse_argument(t.op, "query.shape[1:]", std::to_string(heads) + " x " + std::to_string(dim),
                    "1 to " + std::to_string(kMaxIndexHeads) + " heads of 1 to " + std::to_string(kMaxIndexDim) + " values");
  }
  check_dense({t.op, "weights", t.weights}, arena, ScalarType::Float, {t.query.size(0), heads}, "as query");
  params.table = block_table(table, arena);
  check_dense({t.op, "seqused_k", t.seqused_k}, arena, ScalarType::Int, {-1}, "");
  params.num_sequences = t.seqused_k.size(0);
  check_size(table, 0, params.num_sequences, "the sequences of seqused_k");
  check_dense({t.op, "cu_seqlens_q", t.cu_seqlens_q}, arena, ScalarType::Int, {params.num_sequences + 1},
              "seqused_k.size(0) + 1");
  if (ratio < 1) refuse_argument(t.op, "ratio", std::to_string(ratio), "at least 1");
  params.keys = paged_rows(arena, section, 1, dim);
  params.query = data_of<std::byte>(t.query);
  params.weights = data_of<float>(t.weights);
  params.cu_seqlens_q = data_of<std::int32_t>(t.cu_seqlens_q);
  params.seqused_k = data_of<std::int32_t>(t.seqused_k);
  params.num_tokens = t.query.size(0);
  params.ratio = ratio;
  params.heads = static_cast<std::int32_t>(heads);
  params.dim = static_cast<std::int32_t>(dim);
  return params;
}

namespace {

// The tokens of the step that belong to a sequence. Checks what they read.
std::vector<IndexToken> tokens_of(const char* op, const IndexScoresParams& params, const Tensor& table) {
  std::vector<IndexToken> tokens;
  if (params.num_sequences == 0) return tokens;
  check_sequences(op, params.cu_seqlens_q, params.seqused_k, params.num_sequences, params.num_tokens);
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    const std::int64_t begin = params.cu_seqlens_q[b], end = params.cu_seqlens_q[b + 1], used = params.seqused_k[b];
    if (used == 0 || begin == end) continue;
    check_blocks({op, "block_table", table}, params.table, params.keys, b, 0, used / params.ratio);
    for (std::int64_t token = begin; token < end; ++token)
      tokens.push_back({b, token, (used - (end - token) + 1) / params.ratio});
  }
  return tokens;
}

std::vector<float> scratch_for(const IndexScoresParams& params) {
  return std::vector<float>(static_cast<std::size_t>(index_scratch_floats(params)));
}

}  // namespace

Tensor index_scores_cpu(Tensor query, Tensor weights, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                        std::int64_t ratio, std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format,
                        std::int64_t scale_offset) {
  constexpr const char* kOp = "index_scores";
  const IndexScoresParams params = index_scores_params({kOp, query, weights, arena, block_table, cu_seqlens_q, seqused_k}, ratio,
                                                       {rows_per_block, section_offset, scale_offset, entry_format});
  const std::int64_t width = block_table.size(1) * rows_per_block;
  Tensor out = torch::stable::new_empty(query, {params.num_tokens, width}, ScalarType::Float);
  auto* const scores = static_cast<float*>(out.mutable_data_ptr());
  std::fill_n(scores, out.numel(), -__builtin_inff());
  const std::vector<IndexToken> tokens = tokens_of(kOp, params, block_table);
  const std::int64_t pieces = (width + kIndexKeysPerPiece - 1) / kIndexKeysPerPiece;
  if (tokens.empty() || pieces == 0) return out;
  torch::stable::parallel_for(0, static_cast<std::int64_t>(tokens.size()) * pieces, 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch = scratch_for(params);
    for (std::int64_t item = begin; item < end; ++item) {
      const IndexToken& token = tokens[static_cast<std::size_t>(item / pieces)];
      const std::int64_t from = item % pieces * kIndexKeysPerPiece, to = std::min(token.visible, from + kIndexKeysPerPiece);
      if (from < to) hetkv::index_scores_cpu(params, token, from, to, scores + token.token * width + from, scratch.data());
    }
  });
  return out;
}

Tensor select_entries_cpu(Tensor query, Tensor weights, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k,
                          std::int64_t ratio, std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format,
                          std::int64_t k, std::int64_t scale_offset) {
  constexpr const char* kOp = "select_entries";
  const IndexScoresParams params = index_scores_params({kOp, query, weights, arena, block_table, cu_seqlens_q, seqused_k}, ratio,
                                                       {rows_per_block, section_offset, scale_offset, entry_format});
  const std::int32_t count = checked_k(kOp, k);
  Tensor out = torch::stable::new_empty(query, {params.num_tokens, k}, ScalarType::Int);
  auto* const indices = static_cast<std::int32_t*>(out.mutable_data_ptr());
  std::fill_n(indices, out.numel(), -1);
  const std::vector<IndexToken> tokens = tokens_of(kOp, params, block_table);
  if (tokens.empty()) return out;
  std::int64_t most = 0;
  for (const IndexToken& token : tokens) most = std::max(most, token.visible);
  if (most == 0) return out;

  if (tokens.size() == 1) {  // decoding: the keys are shared out, not the tokens
    std::vector<float> scores(static_cast<std::size_t>(most));
    const std::int64_t pieces = (most + kIndexKeysPerPiece - 1) / kIndexKeysPerPiece;
    torch::stable::parallel_for(0, pieces, 1, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> scratch = scratch_for(params);
      const std::int64_t from = begin * kIndexKeysPerPiece, to = std::min(most, end * kIndexKeysPerPiece);
      hetkv::index_scores_cpu(params, tokens[0], from, to, scores.data() + from, scratch.data());
    });
    std::vector<std::uint64_t> words(static_cast<std::size_t>(top_k_scratch_words(most, count)));
    top_k_row_cpu(scores.data(), most, count, indices + tokens[0].token * k, words.data());
    return out;
  }
  torch::stable::parallel_for(0, static_cast<std::int64_t>(tokens.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scores(static_cast<std::size_t>(most)), scratch = scratch_for(params);
    std::vector<std::uint64_t> words(static_cast<std::size_t>(top_k_scratch_words(most, count)));
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
      if (tokens[i].visible == 0) continue;
      hetkv::index_scores_cpu(params, tokens[i], 0, tokens[i].visible, scores.data(), scratch.data());
      top_k_row_cpu(scores.data(), tokens[i].visible, count, indices + tokens[i].token * k, words.data());
    }
  });
  return out;
}

}  // namespace hetkv::ops
