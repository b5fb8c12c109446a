// Adapter of compress: tensors to CompressParams, and the op function that register_*.cpp registers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/compress.h"
#include "ops/step_tensors.h"

namespace hetkv::ops {

struct CompressTensors {
  const torch::stable::Tensor &arena, &kv, &gate, &position_bias, &norm_weight, &cos, &sin, &cu_seqlens_q, &seqused_k,
      &ring_table, &slots;
};
struct CompressGeometry {
  std::int64_t ratio;
  bool overlap;
  std::int64_t ring_rows, ring_kv_offset, ring_gate_offset;
};

// Checks everything that needs no look at device memory. Empty if the step has no tokens. Throws ArgumentError. Thread-safe.
std::optional<CompressParams> compress_params(const CompressTensors& tensors, const CompressGeometry& geometry,
                                              const SectionArguments& section, double norm_eps);

// CPU: what is wrong in the tables is an ArgumentError before any byte is written; parallel over tokens.
void compress_cpu(torch::stable::Tensor arena, torch::stable::Tensor kv, torch::stable::Tensor gate,
                  torch::stable::Tensor position_bias, torch::stable::Tensor norm_weight, torch::stable::Tensor cos,
                  torch::stable::Tensor sin, torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k,
                  torch::stable::Tensor ring_table, torch::stable::Tensor slots, std::int64_t ratio, bool overlap,
                  std::int64_t ring_rows, std::int64_t ring_kv_offset, std::int64_t ring_gate_offset, std::int64_t rows_per_block,
                  std::int64_t section_offset, std::string entry_format, std::int64_t scale_offset, double norm_eps);
// CUDA: on the current stream of the arena's device; what is outside the arena is skipped.
void compress_cuda(torch::stable::Tensor arena, torch::stable::Tensor kv, torch::stable::Tensor gate,
                   torch::stable::Tensor position_bias, torch::stable::Tensor norm_weight, torch::stable::Tensor cos,
                   torch::stable::Tensor sin, torch::stable::Tensor cu_seqlens_q, torch::stable::Tensor seqused_k,
                   torch::stable::Tensor ring_table, torch::stable::Tensor slots, std::int64_t ratio, bool overlap,
                   std::int64_t ring_rows, std::int64_t ring_kv_offset, std::int64_t ring_gate_offset,
                   std::int64_t rows_per_block, std::int64_t section_offset, std::string entry_format, std::int64_t scale_offset,
                   double norm_eps);

}  // namespace hetkv::ops
