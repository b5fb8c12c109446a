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

// Byte ranges [begin, end) of a block, the first two columns of a tensor that the host may read.
void check_ranges(const TensorArgument& ranges, std::int64_t columns, std::int64_t block_bytes) {
  const auto* const values = data_of<std::int64_t>(ranges.tensor);
  for (std::int64_t r = 0; r < ranges.tensor.size(0); ++r) {
    const std::int64_t begin = values[r * columns], end = values[r * columns + 1];
    if (begin >= 0 && begin <= end && end <= block_bytes) continue;
    refuse_argument(ranges.op, std::string(ranges.name) + "[" + std::to_string(r) + "]",
                    std::to_string(begin) + " to " + std::to_string(end), "bytes of a block of " + std::to_string(block_bytes));
  }
}

template <typename Function>
void over_blocks(std::int64_t count, std::int64_t block_bytes, const Function& function) {
  const std::int64_t grain = std::max<std::int64_t>(1, kBlockBytesPerThread / block_bytes);
  if (count <= grain) return function(std::int64_t{0}, count);
  torch::stable::parallel_for(0, count, grain, function);
}

}  // namespace

Tensor verify_blocks_cpu(Tensor arena, Tensor blocks, std::int64_t block_bytes, OptionalTensor checksums,
                         OptionalTensor zero_ranges, OptionalTensor finite_ranges, std::int64_t base_alignment,
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
    const TensorArgument ranges{kOp, "zero_ranges", *zero_ranges};
    check_dense(ranges, arena_argument, ScalarType::Long, {-1, 2}, "begin and end");
    check_ranges(ranges, 2, block_bytes);
    params.zero_ranges = data_of<std::int64_t>(*zero_ranges);
    params.num_zero_ranges = zero_ranges->size(0);
  }
  if (finite_ranges) {
    const TensorArgument ranges{kOp, "finite_ranges", *finite_ranges};
    check_dense(ranges, arena_argument, ScalarType::Long, {-1, 3}, "begin, end and type");
    check_ranges(ranges, 3, block_bytes);
    params.finite_ranges = data_of<std::int64_t>(*finite_ranges);
    params.num_finite_ranges = finite_ranges->size(0);
    for (std::int64_t r = 0; r < params.num_finite_ranges; ++r) {
      const std::int64_t type = params.finite_ranges[3 * r + 2];
      if (type < 0 || type > static_cast<std::int64_t>(FiniteType::kE4m3)) {
        refuse_argument(kOp, "finite_ranges[" + std::to_string(r) + ", 2]", std::to_string(type), "0 to 3, a type");
      }
      constexpr std::int64_t kTypeBytes[] = {4, 2, 2, 1};
      const std::int64_t length = params.finite_ranges[3 * r + 1] - params.finite_ranges[3 * r];
      if (length % kTypeBytes[type] != 0) {
        refuse_argument(kOp, "finite_ranges[" + std::to_string(r) + "]", std::to_string(length) + " bytes",
                        "whole values of " + std::to_string(kTypeBytes[type]) + " bytes");
      }
    }
  }
  params.arena = data_of<std::byte>(arena);
  params.arena_bytes = arena.numel();
  params.blocks = data_of<std::int32_t>(blocks);
  params.base_alignment = base_alignment;
  params.stride_alignment = stride_alignment;
  Tensor status = torch::stable::new_empty(blocks, {params.num_blocks}, ScalarType::Int);
  params.status = static_cast<std::int32_t*>(status.mutable_data_ptr());
  over_blocks(params.num_blocks, block_bytes,
              [&params](std::int64_t begin, std::int64_t end) { hetkv::verify_blocks_cpu(params, begin, end); });
  return status;
}

Tensor checksum_blocks_cpu(Tensor arena, Tensor blocks, std::int64_t block_bytes) {
  constexpr const char* kOp = "checksum_blocks";
  const TensorArgument arena_argument{kOp, "arena", arena};
  check_ndim(arena_argument, 1);
  check_dtype(arena_argument, ScalarType::Byte);
  check_contiguous(arena_argument);
  check_dense({kOp, "blocks", blocks}, arena_argument, ScalarType::Int, {-1}, "");
  check_block_bytes(kOp, block_bytes);
  const auto* const bytes = data_of<std::byte>(arena);
  const auto* const offsets = data_of<std::int32_t>(blocks);
  const std::int64_t count = blocks.size(0), last = arena.numel() - block_bytes;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t offset = std::int64_t{offsets[i]} << kBlockOffsetShift;
    if (offset >= 0 && offset <= last) continue;
    refuse_argument(kOp, "blocks[" + std::to_string(i) + "]", std::to_string(offsets[i]),
                    "the offset of a block inside the arena, in units of 256 bytes");
  }
  Tensor out = torch::stable::new_empty(blocks, {count}, ScalarType::Long);
  auto* const sums = static_cast<std::int64_t*>(out.mutable_data_ptr());
  over_blocks(count, block_bytes, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::byte* const block = bytes + (std::int64_t{offsets[i]} << kBlockOffsetShift);
      sums[i] = static_cast<std::int64_t>(checksum_cpu(block, static_cast<std::size_t>(block_bytes)));
    }
  });
  return out;
}

}  // namespace hetkv::ops
