#include "kernels/compress.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/pick_level.h"

namespace hetkv {

CompressProblem find_compress_problem(const CompressParams& params) noexcept {
  using Kind = CompressProblem::Kind;
  if (params.cu_seqlens_q[0] < 0) return {Kind::kCuSeqlens, 0};
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    const std::int64_t end = params.cu_seqlens_q[b + 1];
    if (end < params.cu_seqlens_q[b] || end > params.num_tokens) return {Kind::kCuSeqlens, b + 1};
  }
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    const std::int64_t used = params.seqused_k[b];
    if (used < 0 || (used > 0 && used < params.cu_seqlens_q[b + 1] - params.cu_seqlens_q[b])) return {Kind::kSeqused, b};
  }
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    if (step_tokens(params, b).count == 0) continue;
    if (!ring_inside(params, params.ring_table.blocks[b * params.ring_table.stride])) return {Kind::kRingTable, b};
  }
  for (std::int64_t b = 0; b < params.num_sequences; ++b) {
    const StepTokens tokens = step_tokens(params, b);
    const std::int64_t shift = tokens.first_position - tokens.first_token;
    const std::int64_t end = tokens.first_token + tokens.count;
    std::int64_t token = (tokens.first_position / params.ratio + 1) * params.ratio - 1 - shift;
    for (; token < end; token += params.ratio) {
      const std::int64_t slot = params.slots[token];
      if (slot != -1 && (slot < 0 || !block_inside(params.entries, slot >> params.entries.block_shift)))
        return {Kind::kSlot, token};
    }
  }
  return {};
}

void compress_entries_cpu(const CompressParams& params, std::int64_t begin, std::int64_t end) noexcept {
  pick_level(portable::compress_entries, avx2::compress_entries, avx512::compress_entries)(params, begin, end);
}

void compress_rings_cpu(const CompressParams& params, std::int64_t begin, std::int64_t end) noexcept {
  const std::int64_t row_bytes = raw_row_bytes(params);
  for (std::int64_t b = sequence_of(params, begin); b < params.num_sequences && params.cu_seqlens_q[b] < end; ++b) {
    const StepTokens tokens = step_tokens(params, b);
    if (tokens.count == 0) continue;
    const std::int64_t last = tokens.first_token + tokens.count;
    const std::int64_t block = params.ring_table.blocks[b * params.ring_table.stride];
    std::byte* const ring = params.entries.arena + (block << kBlockOffsetShift);
    std::int64_t token = std::max({begin, tokens.first_token, last - params.ring_rows});
    for (; token < std::min(end, last); ++token) {
      const std::int64_t position = tokens.first_position + token - tokens.first_token;
      const std::int64_t row = (position & (params.ring_rows - 1)) * row_bytes;
      const auto bytes = static_cast<std::size_t>(row_bytes);
      std::memcpy(ring + params.ring_kv_offset + row, params.kv + token * params.kv_stride, bytes);
      std::memcpy(ring + params.ring_gate_offset + row, params.gate + token * params.gate_stride, bytes);
    }
  }
}

}  // namespace hetkv
