#include "ops/verify.h"

#include <algorithm>

#include <torch/csrc/stable/ops.h>

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr std::int64_t kBlockBytesPerThread = 256 * 1024;  // about 30 us of reading

void check_block_bytes(const char* op, std::int64_t block_bytes) {
  if (block_bytes < 1) refuse_argument(op, "block_bytes", std::to_string(block_bytes), "at least 1");
}

// What is wrong with ranges that the host may read.
void check_ranges(const VerifyParams& params) {
  constexpr const char* kOp = "verify_blocks";
  const auto refuse_place = [&](const char* name, std::int64_t r, const std::int64_t* range) {
    refuse_argument(kOp, std::string(name) + "[" + std::to_string(r) + "]",
                    std::to_string(range[0]) + " to " + std::to_string(range[1]),
                    "bytes of a block of " + std::to_string(params.block_bytes));
  };
  for (std::int64_t r = 0; r < params.num_zero_ranges; ++r) {
    const std::int64_t* const range = params.zero_ranges + 2 * r;
    if (!zero_range_fits(range, params.block_bytes)) refuse_place("zero_ranges", r, range);
  }
  for (std::int64_t r = 0; r < params.num_finite_ranges; ++r) {
    const std::int64_t* const range = params.finite_ranges + 3 * r;
    if (finite_range_fits(range, params.block_bytes)) continue;
    if (!zero_range_fits(range, params.block_bytes)) refuse_place("finite_ranges", r, range);
    if (range[2] < 0 || range[2] > static_cast<std::int64_t>(FiniteType::kE4m3)) {
      refuse_argument(kOp, "finite_ranges[" + std::to_string(r) + ", 2]", std::to_string(range[2]), "0 to 3, a type");
    }
    refuse_argument(kOp, "finite_ranges[" + std::to_string(r) + "]", std::to_string(range[1] - range[0]) + " bytes",
                    "whole values of " + std::to_string(finite_type_bytes(static_cast<FiniteType>(range[2]))) + " bytes");
  }
}

template <typename Function>
void over_blocks(std::int64_t count, std::int64_t block_bytes, const Function& function) {
  const std::int64_t grain = std::max<std::int64_t>(1, kBlockBytesPerThread / block_bytes);
  if (count <= grain) return function(std::int64_t{0}, count);
  torch::stable::parallel_for(0, count, grain, function);
}

}  // namespace

VerifyParams verify_blocks_params(const Tensor& arena, const Tensor& blocks, std::int64_t block_bytes,
                                  const OptionalTensor& checksums, const OptionalTensor& zero_ranges,
                                  const OptionalTensor& finite_ranges, std::int64_t base_alignment,
                                  std::int64_t stride_alignment) {
  constexpr const char* kOp = "verify_blocks";
  const TensorArgument arena_argument{kOp, "arena", arena};
  check_ndim(arena_argument, 1);
  check_dtype(arena_argument, ScalarType::Byte);
  check_contiguous(arena_argument);
  check_dense({kOp, "blocks", blocks}, arena_argument, ScalarType::Int, {-1}, "");
  check_block_bytes(kOp, block_bytes);
  check_power_of_two(kOp, "base_alignment", base_alignment);
  check_power_of_two(kOp, "stride_alignment", stride_alignment);
  VerifyParams params;
  params.num_blocks = blocks.size(0);
  params.block_bytes = block_bytes;
  if (checksums) {
    check_dense({kOp, "checksums", *checksums}, arena_argument, ScalarType::Long, {params.num_blocks}, "the blocks");
    params.checksums = data_of<std::int64_t>(*checksums);
  }
  if (zero_ranges) {
    check_dense({kOp, "zero_ranges", *zero_ranges}, arena_argument, ScalarType::Long, {-1, 2}, "begin and end");
    params.zero_ranges = data_of<std::int64_t>(*zero_ranges);
    params.num_zero_ranges = zero_ranges->size(0);
  }
  if (finite_ranges) {
    check_dense({kOp, "finite_ranges", *finite_ranges}, arena_argument, ScalarType::Long, {-1, 3}, "begin, end and type");
    params.finite_ranges = data_of<std::int64_t>(*finite_ranges);
    params.num_finite_ranges = finite_ranges->size(0);
  }
  params.arena = data_of<std::byte>(arena);
  params.arena_bytes = arena.numel();
  params.blocks = data_of<std::int32_t>(blocks);
  params.base_alignment = base_alignment;
  params.stride_alignment = stride_alignment;
  return params;
}

ChecksumParams checksum_blocks_params(const Tensor& arena, const Tensor& blocks, std::int64_t block_bytes) {
  constexpr const char* kOp = "checksum_blocks";
  const TensorArgument arena_argument{kOp, "arena", arena};
  check_ndim(arena_argument, 1);
  check_dtype(arena_argument, ScalarType::Byte);
  check_contiguous(arena_argument);
  check_dense({kOp, "blocks", blocks}, arena_argument, ScalarType::Int, {-1}, "");
  check_block_bytes(kOp, block_bytes);
  ChecksumParams params;
  params.arena = data_of<std::byte>(arena);
  params.arena_bytes = arena.numel();
  params.blocks = data_of<std::int32_t>(blocks);
  params.num_blocks = blocks.size(0);
  params.block_bytes = block_bytes;
  return params;
}

Tensor verify_blocks_cpu(Tensor arena, Tensor blocks, std::int64_t block_bytes, OptionalTensor checksums,
                         OptionalTensor zero_ranges, OptionalTensor finite_ranges, std::int64_t base_alignment,
                         std::int64_t stride_alignment) {
  VerifyParams params =
      verify_blocks_params(arena, blocks, block_bytes, checksums, zero_ranges, finite_ranges, base_alignment, stride_alignment);
  check_ranges(params);
  Tensor status = torch::stable::new_empty(blocks, {params.num_blocks}, ScalarType::Int);
  params.status = static_cast<std::int32_t*>(status.mutable_data_ptr());
  over_blocks(params.num_blocks, block_bytes,
              [&params](std::int64_t begin, std::int64_t end) { hetkv::verify_blocks_cpu(params, begin, end); });
  return status;
}

Tensor checksum_blocks_cpu(Tensor arena, Tensor blocks, std::int64_t block_bytes) {
  ChecksumParams params = checksum_blocks_params(arena, blocks, block_bytes);
  for (std::int64_t i = 0; i < params.num_blocks; ++i) {
    const std::int64_t offset = std::int64_t{params.blocks[i]} << kBlockOffsetShift;
    if (offset >= 0 && offset <= params.arena_bytes - block_bytes) continue;
    refuse_argument("checksum_blocks", "blocks[" + std::to_string(i) + "]", std::to_string(params.blocks[i]),
                    "the offset of a block inside the arena, in units of 256 bytes");
  }
  Tensor out = torch::stable::new_empty(blocks, {params.num_blocks}, ScalarType::Long);
  params.checksums = static_cast<std::int64_t*>(out.mutable_data_ptr());
  over_blocks(params.num_blocks, block_bytes,
              [&params](std::int64_t begin, std::int64_t end) { hetkv::checksum_blocks_cpu(params, begin, end); });
  return out;
}

}  // namespace hetkv::ops
