#include "ops/sparse_attention.h"

#include <algorithm>
#include <vector>

#include <torch/csrc/stable/ops.h>

#include "ops/attention_output.h"

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOp = "sparse_attention";

void check_rotation(SparseAttentionParams& params, const TensorArgument& arena, const SparseTensors& t) {
  if (!t.cos && !t.sin) return;
  if (!t.cos || !t.sin) refuse_argument(kOp, t.cos ? "sin" : "cos", "None", "a tensor, where the other one is");
  check_dense({kOp, "cos", *t.cos}, arena, ScalarType::Float, {params.num_tokens, -1}, "the tokens of query");
  check_dense({kOp, "sin", *t.sin}, arena, ScalarType::Float, {params.num_tokens, t.cos->size(1)}, "as cos");
  if (2 * t.cos->size(1) > params.value_dim) {
    refuse_argument(kOp, "cos.size(1)", std::to_string(t.cos->size(1)),
                    "at most half of the " + std::to_string(params.value_dim) + " values of the output");
  }
  params.cos = data_of<float>(*t.cos);
  params.sin = data_of<float>(*t.sin);
  params.rope = static_cast<std::int32_t>(2 * t.cos->size(1));
}

void check_selected(const SparseAttentionParams& params, const SparseToken& token) {
  const std::int64_t visible = (token.position + 1) / params.ratio;
  const std::int32_t* const list = params.selected + token.token * params.num_selected;
  for (std::int32_t i = 0; i < params.num_selected; ++i) {
    if (list[i] >= -1 && list[i] < visible) continue;
    refuse_argument(kOp, "selected[" + std::to_string(token.token) + ", " + std::to_string(i) + "]", std::to_string(list[i]),
                    "-1, or one of the " + std::to_string(visible) + " entries that the token sees");
  }
}

// The tokens of the step that belong to a sequence. Checks what they read.
std::vector<SparseToken> tokens_of(const SparseAttentionParams& params, const SparseTensors& t) {
  std::vector<SparseToken> tokens;
  if (params.num_sequences == 0) return tokens;
  check_sequences(kOp, params.cu_seqlens_q, params.seqused_k, params.num_sequences, params.num_tokens);
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    const std::int64_t begin = params.cu_seqlens_q[b], end = params.cu_seqlens_q[b + 1], used = params.seqused_k[b];
    if (used == 0 || begin == end) continue;
    const std::int64_t first_position = used - (end - begin);
    const std::int64_t first_row = params.window == 0 ? used : std::max<std::int64_t>(0, first_position + 1 - params.window);
    check_blocks({kOp, "window_table", t.window_table}, params.window_table, params.window_rows, b, first_row, used);
    if (params.entry_table.blocks != nullptr)
      check_blocks({kOp, "entry_table", *t.entry_table}, params.entry_table, params.entries, b, 0, used / params.ratio);
    for (std::int64_t token = begin; token < end; ++token) {
      tokens.push_back({b, token, first_position + token - begin});
      if (params.selected != nullptr) check_selected(params, tokens.back());
    }
  }
  return tokens;
}

}  // namespace

SparseAttentionParams sparse_attention_params(const SparseTensors& t, std::int64_t window, std::int64_t value_dim,
                                              std::int64_t ratio, double scale, const SectionArguments& window_section,
                                              const SectionArguments& entry_section) {
  const TensorArgument arena{kOp, "arena", t.arena}, query{kOp, "query", t.query}, windows{kOp, "window_table", t.window_table};
  check_arena(arena);
  check_ndim(query, 3);
  check_same_device(query, arena);
  SparseAttentionParams params;
  params.query_format = float_format(query);
  check_contiguous(query);
  const std::int64_t heads = t.query.size(1), dim = t.query.size(2);
  if (dim < 1 || dim > kMaxSparseDim || heads < 1) {
    refuse_argument(kOp, "query.shape[1:]", std::to_string(heads) + " x " + std::to_string(dim),
                    "at least one head of 1 to " + std::to_string(kMaxSparseDim) + " values");
  }
  params.num_tokens = t.query.size(0);
  params.heads = static_cast<std::int32_t>(heads);
  params.dim = static_cast<std::int32_t>(dim);
  if (value_dim < 0 || value_dim > dim) {
    refuse_argument(kOp, "value_dim", std::to_string(value_dim),
                    "0 for all, or up to the " + std::to_string(dim) + " values of a row");
  }
  params.value_dim = static_cast<std::int32_t>(value_dim == 0 ? dim : value_dim);
  params.window_table = block_table(windows, arena);
  check_dense({kOp, "seqused_k", t.seqused_k}, arena, ScalarType::Int, {-1}, "");
  params.num_sequences = t.seqused_k.size(0);
  check_size(windows, 0, params.num_sequences, "the sequences of seqused_k");
  check_dense({kOp, "cu_seqlens_q", t.cu_seqlens_q}, arena, ScalarType::Int, {params.num_sequences + 1}, "seqused_k.size(0) + 1");
  if (window < 0) refuse_argument(kOp, "window", std::to_string(window), "at least 1: the token itself, or 0: none");
  if (window == 0 && !t.entry_table) refuse_argument(kOp, "entry_table", "None", "a tensor, where window is 0");
  if (ratio < 1) refuse_argument(kOp, "ratio", std::to_string(ratio), "at least 1");
  if (window > 0) params.window_rows = paged_rows(arena, window_section, 1, dim);
  if (t.entry_table) {
    const TensorArgument entries{kOp, "entry_table", *t.entry_table};
    params.entry_table = block_table(entries, arena);
    check_size(entries, 0, params.num_sequences, "the sequences of seqused_k");
    params.entries = paged_rows(arena, entry_section, 1, dim);
    if (window == 0) params.window_rows = params.entries;
  }
  if (t.selected) {
    if (!t.entry_table) refuse_argument(kOp, "entry_table", "None", "a tensor, where selected is");
    check_dense({kOp, "selected", *t.selected}, arena, ScalarType::Int, {params.num_tokens, -1}, "the tokens of query");
    params.selected = data_of<std::int32_t>(*t.selected);
    params.num_selected = static_cast<std::int32_t>(t.selected->size(1));
    if (params.num_selected == 0) params.entry_table = {};  // such a tensor has no address, and a list of none is not "all"
  }
  if (t.sinks) {
    check_dense({kOp, "sinks", *t.sinks}, arena, ScalarType::Float, {heads}, "the heads of query");
    params.sinks = data_of<float>(*t.sinks);
  }
  check_rotation(params, arena, t);
  params.query = data_of<std::byte>(t.query);
  params.cu_seqlens_q = data_of<std::int32_t>(t.cu_seqlens_q);
  params.seqused_k = data_of<std::int32_t>(t.seqused_k);
  params.window = static_cast<std::int32_t>(std::min<std::int64_t>(window, INT32_MAX));
  params.ratio = ratio;
  params.scale = static_cast<float>(scale);
  return params;
}

SectionArguments window_section(std::int64_t rows_per_block, std::int64_t offset, std::int64_t scale_offset, std::string format) {
  return {rows_per_block,          offset,          scale_offset,          std::move(format),
          "window_rows_per_block", "window_offset", "window_scale_offset", "window_format"};
}
SectionArguments entry_section(std::int64_t rows_per_block, std::int64_t offset, std::int64_t scale_offset, std::string format) {
  return {rows_per_block,         offset,         scale_offset,         std::move(format),
          "entry_rows_per_block", "entry_offset", "entry_scale_offset", "entry_format"};
}

std::tuple<Tensor, Tensor> sparse_attention_cpu(Tensor query, Tensor arena, Tensor window_table, OptionalTensor entry_table,
                                                OptionalTensor selected, Tensor cu_seqlens_q, Tensor seqused_k,
                                                std::int64_t window, std::int64_t window_rows_per_block,
                                                std::int64_t window_offset, std::string window_format, double scale,
                                                std::int64_t window_scale_offset, std::int64_t ratio,
                                                std::int64_t entry_rows_per_block, std::int64_t entry_offset,
                                                std::string entry_format, std::int64_t entry_scale_offset, OptionalTensor sinks,
                                                OptionalTensor cos, OptionalTensor sin, std::int64_t value_dim) {
  const SparseTensors tensors{query, arena, window_table, entry_table, selected, cu_seqlens_q, seqused_k, sinks, cos, sin};
  SparseAttentionParams params =
      sparse_attention_params(tensors, window, value_dim, ratio, scale,
                              window_section(window_rows_per_block, window_offset, window_scale_offset, window_format),
                              entry_section(entry_rows_per_block, entry_offset, entry_scale_offset, entry_format));
  const AttentionOutput output = make_attention_output(params, query, params.value_dim);
  clear_attention_output(params, output);
  const std::vector<SparseToken> tokens = tokens_of(params, tensors);
  if (tokens.empty()) return {output.out, output.lse};
  const std::int64_t head_tiles = (params.heads + kSparseTileHeads - 1) / kSparseTileHeads;
  torch::stable::parallel_for(
      0, static_cast<std::int64_t>(tokens.size()) * head_tiles, 1, [&](std::int64_t begin, std::int64_t end) {
        std::vector<float> scratch(static_cast<std::size_t>(sparse_scratch_floats(params)));
        for (std::int64_t item = begin; item < end; ++item) {
          const auto head = static_cast<std::int32_t>(item % head_tiles * kSparseTileHeads);
          hetkv::sparse_attention_cpu(params, tokens[static_cast<std::size_t>(item / head_tiles)], head, scratch.data());
        }
      });
  return {output.out, output.lse};
}

}  // namespace hetkv::ops
