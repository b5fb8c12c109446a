#include "ops/compress.h"

#include <algorithm>

#include <torch/csrc/stable/ops.h>

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr std::int64_t kOpBytesPerThread = 256 * 1024;  // of raw rows: about 30 us of work

// ring_inside, which the kernels ask, relies on it: with a ring that fits the arena nothing there overflows.
std::int64_t checked_ring_offset(const char* name, std::int64_t offset, std::int64_t ring_rows, const CompressParams& params) {
  check_not_negative("compress", name, offset);
  if (offset % 16 != 0) refuse_argument("compress", name, std::to_string(offset), "a multiple of 16");
  const std::int64_t row_bytes = raw_row_bytes(params);
  std::int64_t end = 0;
  if (__builtin_mul_overflow(ring_rows, row_bytes, &end) || __builtin_add_overflow(end, offset, &end) ||
      end > params.entries.arena_bytes) {
    refuse_argument("compress", name, std::to_string(offset),
                    "a ring of " + std::to_string(ring_rows) + " rows of " + std::to_string(row_bytes) +
                        " bytes inside the arena of " + std::to_string(params.entries.arena_bytes));
  }
  return offset;
}

[[noreturn]] void refuse(const CompressProblem& problem, const CompressParams& params) {
  const std::string at = "[" + std::to_string(problem.index) + "]";
  switch (problem.kind) {
    case CompressProblem::Kind::kCuSeqlens:
      refuse_argument("compress", "cu_seqlens_q" + at, std::to_string(params.cu_seqlens_q[problem.index]),
                      "a running sum from 0 on, of at most " + std::to_string(params.num_tokens) + " tokens");
    case CompressProblem::Kind::kSeqused:
      refuse_argument("compress", "seqused_k" + at, std::to_string(params.seqused_k[problem.index]),
                      "0, or at least the tokens of the step");
    case CompressProblem::Kind::kRingTable:
      refuse_argument("compress", "ring_table" + at,
                      std::to_string(params.ring_table.blocks[problem.index * params.ring_table.stride]),
                      "the offset of a ring's block inside the arena, in units of 256 bytes");
    default:
      refuse_argument("compress", "slots" + at, std::to_string(params.slots[problem.index]),
                      "-1, or block_offset * rows_per_block + row of a block inside the arena");
  }
}

}  // namespace

std::optional<CompressParams> compress_params(const CompressTensors& tensors, const CompressGeometry& geometry,
                                              const SectionArguments& section, double norm_eps) {
  constexpr const char* kOp = "compress";
  const TensorArgument arena{kOp, "arena", tensors.arena}, kv{kOp, "kv", tensors.kv}, gate{kOp, "gate", tensors.gate};
  check_arena(arena);
  for (const TensorArgument& raw : {kv, gate}) {
    check_ndim(raw, 2);
    check_same_device(raw, arena);
    check_contiguous_from(raw, 1);
    check_aligned(raw, 16);
  }
  const EntryFormat raw_format = float_format(kv);
  check_dtype(gate, tensors.kv.scalar_type());
  const std::int64_t tokens = tensors.kv.size(0), raw_width = tensors.kv.size(1);
  check_size(gate, 0, tokens, "the tokens of kv");
  check_size(gate, 1, raw_width, "the width of kv");
  if (geometry.ratio < 1) refuse_argument(kOp, "ratio", std::to_string(geometry.ratio), "at least 1");
  const std::int64_t halves = geometry.overlap ? 2 : 1, width = raw_width / halves;
  if (raw_width % halves != 0 || width % kCompressGranule != 0 || width < kCompressGranule || width > kMaxCompressWidth) {
    refuse_argument(kOp, "kv.size(1)", std::to_string(raw_width),
                    std::to_string(halves) + " x the width of an entry, a multiple of " + std::to_string(kCompressGranule) +
                        " up to " + std::to_string(kMaxCompressWidth));
  }
  check_dense({kOp, "position_bias", tensors.position_bias}, arena, ScalarType::Float, {geometry.ratio, raw_width},
              "ratio x the width of kv");
  check_dense({kOp, "norm_weight", tensors.norm_weight}, arena, ScalarType::Float, {width}, "the width of an entry");
  check_dense({kOp, "cos", tensors.cos}, arena, ScalarType::Float, {tokens, -1}, "the tokens of kv");
  check_dense({kOp, "sin", tensors.sin}, arena, ScalarType::Float, {tokens, tensors.cos.size(1)}, "as cos");
  if (2 * tensors.cos.size(1) > width) {
    refuse_argument(kOp, "cos.size(1)", std::to_string(tensors.cos.size(1)),
                    "at most half of the " + std::to_string(width) + " values of an entry");
  }
  check_dense({kOp, "seqused_k", tensors.seqused_k}, arena, ScalarType::Int, {-1}, "");
  const std::int64_t batch = tensors.seqused_k.size(0);
  check_dense({kOp, "cu_seqlens_q", tensors.cu_seqlens_q}, arena, ScalarType::Int, {batch + 1}, "seqused_k.size(0) + 1");
  const TensorArgument ring_table{kOp, "ring_table", tensors.ring_table};
  const BlockTable rings = block_table(ring_table, arena);
  check_size(ring_table, 0, batch, "the sequences of seqused_k");
  check_size(ring_table, 1, 1, "the ring's block");
  check_dense({kOp, "slots", tensors.slots}, arena, ScalarType::Long, {tokens}, "the tokens of kv");
  check_power_of_two(kOp, "ring_rows", geometry.ring_rows);
  if (geometry.ring_rows < halves * geometry.ratio) {
    refuse_argument(kOp, "ring_rows", std::to_string(geometry.ring_rows),
                    "at least " + std::to_string(halves * geometry.ratio) + ", the rows that a window reads");
  }

  CompressParams params;
  params.entries = paged_rows(arena, section, 1, width);
  params.kv = data_of<std::byte>(tensors.kv);
  params.gate = data_of<std::byte>(tensors.gate);
  const auto element = static_cast<std::int64_t>(tensors.kv.element_size());
  params.kv_stride = tensors.kv.stride(0) * element;
  params.gate_stride = tensors.gate.stride(0) * element;
  params.position_bias = data_of<float>(tensors.position_bias);
  params.norm_weight = data_of<float>(tensors.norm_weight);
  params.cos = data_of<float>(tensors.cos);
  params.sin = data_of<float>(tensors.sin);
  params.cu_seqlens_q = data_of<std::int32_t>(tensors.cu_seqlens_q);
  params.seqused_k = data_of<std::int32_t>(tensors.seqused_k);
  params.ring_table = rings;
  params.slots = data_of<std::int64_t>(tensors.slots);
  params.num_tokens = tokens;
  params.num_sequences = batch;
  params.ring_rows = geometry.ring_rows;
  params.ratio = geometry.ratio;
  params.raw_format = raw_format;
  params.rope = static_cast<std::int32_t>(2 * tensors.cos.size(1));
  params.overlap = geometry.overlap;
  params.norm_eps = static_cast<float>(norm_eps);
  params.ring_kv_offset = checked_ring_offset("ring_kv_offset", geometry.ring_kv_offset, geometry.ring_rows, params);
  params.ring_gate_offset = checked_ring_offset("ring_gate_offset", geometry.ring_gate_offset, geometry.ring_rows, params);
  if (tokens == 0 || batch == 0) return std::nullopt;
  return params;
}

void compress_cpu(Tensor arena, Tensor kv, Tensor gate, Tensor position_bias, Tensor norm_weight, Tensor cos, Tensor sin,
                  Tensor cu_seqlens_q, Tensor seqused_k, Tensor ring_table, Tensor slots, std::int64_t ratio, bool overlap,
                  std::int64_t ring_rows, std::int64_t ring_kv_offset, std::int64_t ring_gate_offset, std::int64_t rows_per_block,
                  std::int64_t section_offset, std::string entry_format, std::int64_t scale_offset, double norm_eps) {
  const auto params =
      compress_params({arena, kv, gate, position_bias, norm_weight, cos, sin, cu_seqlens_q, seqused_k, ring_table, slots},
                      {ratio, overlap, ring_rows, ring_kv_offset, ring_gate_offset},
                      {rows_per_block, section_offset, scale_offset, entry_format}, norm_eps);
  if (!params) return;
  const CompressProblem problem = find_compress_problem(*params);
  if (problem.kind != CompressProblem::Kind::kNone) refuse(problem, *params);
  const std::int64_t grain = std::max<std::int64_t>(ratio, kOpBytesPerThread / (2 * raw_row_bytes(*params)));
  const auto run = [&params, grain](auto&& phase) {
    if (params->num_tokens <= grain) return phase(std::int64_t{0}, params->num_tokens);
    torch::stable::parallel_for(0, params->num_tokens, grain, phase);
  };
  run([&params](std::int64_t begin, std::int64_t end) { compress_entries_cpu(*params, begin, end); });
  run([&params](std::int64_t begin, std::int64_t end) { compress_rings_cpu(*params, begin, end); });
}

}  // namespace hetkv::ops
