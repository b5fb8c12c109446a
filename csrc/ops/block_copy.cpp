#include "ops/block_copy.h"

#include <algorithm>
#include <vector>

#include <torch/csrc/stable/ops.h>

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr std::int64_t kCopyBytesPerThread = 256 * 1024;  // about 30 us of copying

void check_bytes(const TensorArgument& arena) {
  check_ndim(arena, 1);
  check_dtype(arena, ScalarType::Byte);
  check_contiguous(arena);
}

void check_offsets(const TensorArgument& blocks, std::int64_t arena_bytes, const BlockCopyParams& params) {
  const auto* const offsets = data_of<std::int32_t>(blocks.tensor);
  for (std::int64_t i = 0; i < params.num_pairs; ++i) {
    const std::int64_t offset = std::int64_t{offsets[i]} << kBlockOffsetShift;
    if (offset >= 0 && offset <= arena_bytes - params.begin - params.num_bytes) continue;
    refuse_argument(blocks.op, std::string(blocks.name) + "[" + std::to_string(i) + "]", std::to_string(offsets[i]),
                    "the offset of a block whose part lies inside the arena, in units of 256 bytes");
  }
}

struct Part {
  std::int64_t begin;  // bytes
  std::int64_t pair;
  bool written;
};

// No pair may write what another pair reads or writes: the order of the pairs would matter.
void check_pairs_apart(const char* op, const BlockCopyParams& params, bool one_arena) {
  std::vector<Part> parts;
  for (std::int64_t i = 0; i < params.num_pairs; ++i) {
    parts.push_back({std::int64_t{params.target[i]} << kBlockOffsetShift, i, true});
    if (one_arena) parts.push_back({std::int64_t{params.source[i]} << kBlockOffsetShift, i, false});
  }
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (std::size_t j = i + 1; j < parts.size() && parts[j].begin < parts[i].begin + params.num_bytes; ++j) {
      if (parts[i].pair == parts[j].pair || (!parts[i].written && !parts[j].written)) continue;
      const Part& writer = parts[i].written ? parts[i] : parts[j];
      refuse_argument(op, "target[" + std::to_string(writer.pair) + "]", std::to_string(params.target[writer.pair]),
                      "a part that no other pair reads or writes");
    }
  }
}

BlockCopyParams params_of(const TensorArgument& target_arena, const TensorArgument& source_arena, const TensorArgument& source,
                          const TensorArgument& target, std::int64_t num_bytes, std::int64_t begin, bool one_arena) {
  const char* const op = target_arena.op;
  check_bytes(target_arena);
  check_bytes(source_arena);
  check_same_device(source_arena, target_arena);
  check_dense(source, target_arena, ScalarType::Int, {-1}, "");
  check_dense(target, target_arena, ScalarType::Int, {source.tensor.size(0)}, "the pairs of source");
  if (num_bytes < 1) refuse_argument(op, "num_bytes", std::to_string(num_bytes), "at least 1");
  check_not_negative(op, "begin", begin);
  BlockCopyParams params;
  params.source_arena = data_of<std::byte>(source_arena.tensor);
  params.target_arena = static_cast<std::byte*>(target_arena.tensor.mutable_data_ptr());
  params.source = data_of<std::int32_t>(source.tensor);
  params.target = data_of<std::int32_t>(target.tensor);
  params.source_arena_bytes = source_arena.tensor.numel();
  params.target_arena_bytes = target_arena.tensor.numel();
  params.num_pairs = source.tensor.size(0);
  params.begin = begin;
  params.num_bytes = num_bytes;
  if (begin > params.target_arena_bytes || num_bytes > params.target_arena_bytes - begin) {
    refuse_argument(op, "num_bytes", std::to_string(num_bytes),
                    "a part that fits the arena of " + std::to_string(params.target_arena_bytes) + " bytes from begin on");
  }
  if (!one_arena) {
    const auto a = reinterpret_cast<std::uintptr_t>(params.source_arena),
               b = reinterpret_cast<std::uintptr_t>(params.target_arena);
    if (a < b + static_cast<std::uintptr_t>(params.target_arena_bytes) &&
        b < a + static_cast<std::uintptr_t>(params.source_arena_bytes)) {
      refuse_argument(op, source_arena.name, "memory shared with the target", "memory of its own; copy_blocks copies inside one");
    }
  }
  return params;
}

void copy(const char* op, const BlockCopyParams& params, const Tensor& source, const Tensor& target, bool one_arena) {
  check_offsets({op, "source", source}, params.source_arena_bytes, params);
  check_offsets({op, "target", target}, params.target_arena_bytes, params);
  check_pairs_apart(op, params, one_arena);
  const std::int64_t grain = std::max<std::int64_t>(1, kCopyBytesPerThread / params.num_bytes);
  const auto run = [&params](std::int64_t first, std::int64_t last) { hetkv::copy_blocks_cpu(params, first, last); };
  if (params.num_pairs <= grain) return run(0, params.num_pairs);
  torch::stable::parallel_for(0, params.num_pairs, grain, run);
}

}  // namespace

BlockCopyParams copy_blocks_params(const Tensor& arena, const Tensor& source, const Tensor& target, std::int64_t num_bytes,
                                   std::int64_t begin) {
  constexpr const char* kOp = "copy_blocks";
  return params_of({kOp, "arena", arena}, {kOp, "arena", arena}, {kOp, "source", source}, {kOp, "target", target}, num_bytes,
                   begin, true);
}

BlockCopyParams transfer_blocks_params(const Tensor& target_arena, const Tensor& source_arena, const Tensor& source,
                                       const Tensor& target, std::int64_t num_bytes, std::int64_t begin) {
  constexpr const char* kOp = "transfer_blocks";
  return params_of({kOp, "target_arena", target_arena}, {kOp, "source_arena", source_arena}, {kOp, "source", source},
                   {kOp, "target", target}, num_bytes, begin, false);
}

void copy_blocks_cpu(Tensor arena, Tensor source, Tensor target, std::int64_t num_bytes, std::int64_t begin) {
  copy("copy_blocks", copy_blocks_params(arena, source, target, num_bytes, begin), source, target, true);
}

void transfer_blocks_cpu(Tensor target_arena, Tensor source_arena, Tensor source, Tensor target, std::int64_t num_bytes,
                         std::int64_t begin) {
  copy("transfer_blocks", transfer_blocks_params(target_arena, source_arena, source, target, num_bytes, begin), source, target,
       false);
}

}  // namespace hetkv::ops
