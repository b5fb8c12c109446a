#include "ops/block_sparse_attention.h"

#include <algorithm>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "ops/attention_output.h"

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOp = "block_sparse_attention";

// The lists of one token: their numbers, and the blocks of the arena that they lead to.
void check_selected(const BlockSparseParams& params, const Tensor& table, const BlockSparseToken& token) {
  const std::int64_t first = token.token * params.kv_heads * params.num_selected;
  for (std::int64_t i = 0; i < std::int64_t{params.kv_heads} * params.num_selected; ++i) {
    const std::int64_t block = params.selected[first + i];
    if (block < -1) {
      refuse_argument(kOp,
                      "selected_blocks[" + std::to_string(token.token) + ", " + std::to_string(i / params.num_selected) + ", " +
                          std::to_string(i % params.num_selected) + "]",
                      std::to_string(block), "-1, or a block's number");
    }
    if (block < 0) continue;
    const std::int64_t begin = block * params.routed_tokens, end = std::min(begin + params.routed_tokens, token.position + 1);
    check_blocks({kOp, "block_table", table}, params.table, params.keys, token.sequence, begin, end);
    check_blocks({kOp, "block_table", table}, params.table, params.values, token.sequence, begin, end);
  }
}

// The tokens of the step that belong to a sequence. Checks what they read.
std::vector<BlockSparseToken> tokens_of(const BlockSparseParams& params, const Tensor& table) {
  std::vector<BlockSparseToken> tokens;
  if (params.num_sequences == 0) return tokens;
  check_sequences(kOp, params.cu_seqlens_q, params.seqused_k, params.num_sequences, params.num_tokens);
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    const std::int64_t begin = params.cu_seqlens_q[b], end = params.cu_seqlens_q[b + 1], used = params.seqused_k[b];
    if (used == 0) continue;
    for (std::int64_t token = begin; token < end; ++token) {
      tokens.push_back({b, token, used - (end - token)});
      check_selected(params, table, tokens.back());
    }
  }
  return tokens;
}

}  // namespace

BlockSparseParams block_sparse_params(const BlockSparseArguments& a) {
  const TensorArgument arena{kOp, "arena", a.arena}, query{kOp, "query", a.query}, table{kOp, "block_table", a.block_table};
  check_arena(arena);
  check_ndim(query, 3);
  check_same_device(query, arena);
  BlockSparseParams params;
  params.query_format = float_format(query);
  check_contiguous(query);
  const std::int64_t heads = a.query.size(1), dim = a.query.size(2);
  if (dim < 1 || dim > kMaxBlockSparseDim) {
    refuse_argument(kOp, "query.size(2)", std::to_string(dim), "1 to " + std::to_string(kMaxBlockSparseDim));
  }
  if (a.num_kv_heads < 1 || heads < 1 || heads % a.num_kv_heads != 0 || heads / a.num_kv_heads > kMaxBlockSparseGroup) {
    refuse_argument(kOp, "num_kv_heads", std::to_string(a.num_kv_heads),
                    "a divisor of the " + std::to_string(heads) + " heads of query, at most " +
                        std::to_string(kMaxBlockSparseGroup) + " heads a group");
  }
  params.table = block_table(table, arena);
  check_dense({kOp, "seqused_k", a.seqused_k}, arena, ScalarType::Int, {-1}, "");
  params.num_sequences = a.seqused_k.size(0);
  check_size(table, 0, params.num_sequences, "the sequences of seqused_k");
  check_dense({kOp, "cu_seqlens_q", a.cu_seqlens_q}, arena, ScalarType::Int, {params.num_sequences + 1}, "seqused_k.size(0) + 1");
  check_dense({kOp, "selected_blocks", a.selected_blocks}, arena, ScalarType::Int, {a.query.size(0), a.num_kv_heads, -1},
              "the tokens of query and num_kv_heads");
  if (a.selected_blocks.size(2) > INT32_MAX) {
    refuse_argument(kOp, "selected_blocks.size(2)", std::to_string(a.selected_blocks.size(2)),
                    "at most " + std::to_string(INT32_MAX));
  }
  SectionArguments key_section{a.rows_per_block, a.key_offset, 0, a.entry_format},
      value_section{a.rows_per_block, a.value_offset, 0, a.entry_format};
  key_section.offset_name = "key_offset";
  value_section.offset_name = "value_offset";
  params.keys = paged_rows(arena, key_section, a.num_kv_heads, dim);
  params.values = paged_rows(arena, value_section, a.num_kv_heads, dim);
  if (params.keys.format >= EntryFormat::kFp8Packed) {
    refuse_argument(kOp, "entry_format", a.entry_format, "float32, float16 or bfloat16");
  }
  if (a.routed_tokens < 1 || a.routed_tokens > INT32_MAX) {
    refuse_argument(kOp, "routed_tokens", std::to_string(a.routed_tokens), "1 to " + std::to_string(INT32_MAX));
  }
  if (a.sinks) {
    check_dense({kOp, "sinks", *a.sinks}, arena, ScalarType::Float, {heads}, "the heads of query");
    params.sinks = data_of<float>(*a.sinks);
  }
  params.selected = data_of<std::int32_t>(a.selected_blocks);
  params.num_selected = static_cast<std::int32_t>(a.selected_blocks.size(2));
  params.query = data_of<std::byte>(a.query);
  params.cu_seqlens_q = data_of<std::int32_t>(a.cu_seqlens_q);
  params.seqused_k = data_of<std::int32_t>(a.seqused_k);
  params.num_tokens = a.query.size(0);
  params.routed_tokens = a.routed_tokens;
  params.heads = static_cast<std::int32_t>(heads);
  params.kv_heads = static_cast<std::int32_t>(a.num_kv_heads);
  params.dim = static_cast<std::int32_t>(dim);
  params.scale = static_cast<float>(a.scale);
  return params;
}

std::tuple<Tensor, Tensor> block_sparse_attention_cpu(Tensor query, Tensor arena, Tensor block_table, Tensor selected_blocks,
                                                      Tensor cu_seqlens_q, Tensor seqused_k, std::int64_t num_kv_heads,
                                                      std::int64_t rows_per_block, std::int64_t key_offset,
                                                      std::int64_t value_offset, std::string entry_format, double scale,
                                                      std::int64_t routed_tokens, OptionalTensor sinks) {
  BlockSparseParams params =
      block_sparse_params({query, arena, block_table, selected_blocks, cu_seqlens_q, seqused_k, sinks, num_kv_heads,
                           rows_per_block, key_offset, value_offset, entry_format, scale, routed_tokens});
  const AttentionOutput output = make_attention_output(params, query, params.dim);
  clear_attention_output(params, output);
  const std::vector<BlockSparseToken> tokens = tokens_of(params, block_table);
  if (tokens.empty()) return {output.out, output.lse};
  const std::int64_t kv_heads = params.kv_heads;
  torch::stable::parallel_for(0, static_cast<std::int64_t>(tokens.size()) * kv_heads, 1,
                              [&](std::int64_t begin, std::int64_t end) {
                                std::vector<float> scratch(static_cast<std::size_t>(block_sparse_scratch_floats(params)));
                                for (std::int64_t item = begin; item < end; ++item) {
                                  hetkv::block_sparse_attention_cpu(params, tokens[static_cast<std::size_t>(item / kv_heads)],
                                                                    static_cast<std::int32_t>(item % kv_heads), scratch.data());
                                }
                              });
  return {output.out, output.lse};
}

}  // namespace hetkv::ops
