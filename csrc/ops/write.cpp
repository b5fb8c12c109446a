#include "ops/write.h"

#include <algorithm>

#include <torch/csrc/stable/ops.h>

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr std::int64_t kMaxHeads = std::int64_t{1} << 16;  // an expanded tensor may have any number: products must not overflow
constexpr std::int64_t kValuesPerThread = 32 * 1024;       // about 30 us of work; less is not worth another thread

void check_rotation(WriteParams& params, const TensorArgument& arena, const OptionalTensor& cos, const OptionalTensor& sin) {
  if (!cos && !sin) return;
  if (!cos || !sin) refuse_argument(arena.op, cos ? "sin" : "cos", "None", "a tensor, where the other one is");
  const TensorArgument cos_argument{arena.op, "cos", *cos}, sin_argument{arena.op, "sin", *sin};
  check_dense(cos_argument, arena, ScalarType::Float, {params.num_rows, -1}, "the rows");
  check_dense(sin_argument, arena, ScalarType::Float, {params.num_rows, cos->size(1)}, "as cos");
  if (2 * cos->size(1) > params.target.width) {
    refuse_argument(arena.op, "cos.size(1)", std::to_string(cos->size(1)),
                    "at most half of the " + std::to_string(params.target.width) + " values of a row");
  }
  params.cos = data_of<float>(*cos);
  params.sin = data_of<float>(*sin);
  params.rope = static_cast<std::int32_t>(2 * cos->size(1));
}

std::optional<WriteParams> checked_params(const TensorArgument& arena, const TensorArgument& rows, const TensorArgument& slots,
                                          const SectionArguments& section) {
  check_arena(arena);
  check_ndim_at_least(rows, 2);
  if (rows.tensor.dim() > 3)
    refuse_argument(rows.op, std::string(rows.name) + ".ndim", std::to_string(rows.tensor.dim()), "2 or 3");
  check_same_device(rows, arena);
  const EntryFormat row_format = float_format(rows);
  check_contiguous_from(rows, rows.tensor.dim() - 1);
  check_dense(slots, arena, ScalarType::Long, {rows.tensor.size(0)}, "the rows");
  const std::int64_t width = rows.tensor.size(rows.tensor.dim() - 1);
  const std::int64_t heads = rows.tensor.dim() == 3 ? rows.tensor.size(1) : 1;
  if (width > kMaxWriteWidth || width < 1 || heads < 1 || heads > kMaxHeads) {
    refuse_argument(rows.op, std::string(rows.name) + ".shape", std::to_string(heads) + " x " + std::to_string(width),
                    "1 to " + std::to_string(kMaxHeads) + " heads of 1 to " + std::to_string(kMaxWriteWidth) + " values");
  }
  WriteParams params;
  params.target = paged_rows(arena, section, heads, width);
  params.rows = data_of<std::byte>(rows.tensor);
  params.slots = data_of<std::int64_t>(slots.tensor);
  params.num_rows = rows.tensor.size(0);
  const auto element = static_cast<std::int64_t>(rows.tensor.element_size());
  params.row_stride = rows.tensor.stride(0) * element;
  params.head_stride = rows.tensor.dim() == 3 ? rows.tensor.stride(1) * element : 0;
  params.heads = static_cast<std::int32_t>(heads);
  params.row_format = row_format;
  return params;
}

void check_slots(const char* op, const WriteParams& params) {
  const std::int64_t bad = find_bad_write_slot(params);
  if (bad < 0) return;
  refuse_argument(op, "slots[" + std::to_string(bad) + "]", std::to_string(params.slots[bad]),
                  "-1, or block_offset * rows_per_block + row of a block inside the arena");
}

void write_in_parallel(const WriteParams& params) {
  const auto write = [&params](std::int64_t begin, std::int64_t end) { hetkv::write_rows_cpu(params, begin, end); };
  const std::int64_t grain = std::max<std::int64_t>(1, kValuesPerThread / (params.heads * params.target.width));
  if (params.num_rows <= grain) return write(0, params.num_rows);
  torch::stable::parallel_for(0, params.num_rows, grain, write);
}

}  // namespace

std::optional<WriteParams> write_rows_params(const Tensor& arena, const Tensor& rows, const Tensor& slots,
                                             const SectionArguments& section, const OptionalTensor& norm_weight, double norm_eps,
                                             const OptionalTensor& cos, const OptionalTensor& sin, bool rope_interleaved,
                                             bool rope_trailing) {
  constexpr const char* kOp = "write_rows";
  const TensorArgument arena_argument{kOp, "arena", arena};
  auto params = checked_params(arena_argument, {kOp, "rows", rows}, {kOp, "slots", slots}, section);
  if (norm_weight) {
    check_dense({kOp, "norm_weight", *norm_weight}, arena_argument, ScalarType::Float, {params->target.width}, "the row's width");
    params->norm_weight = data_of<float>(*norm_weight);
    params->norm_eps = static_cast<float>(norm_eps);
  }
  check_rotation(*params, arena_argument, cos, sin);
  params->rope_interleaved = rope_interleaved;
  params->rope_trailing = rope_trailing;
  if (params->num_rows == 0) return std::nullopt;
  return params;
}

std::optional<std::array<WriteParams, 2>> write_key_value_params(const Tensor& arena, const Tensor& key, const Tensor& value,
                                                                 const Tensor& slots, std::int64_t rows_per_block,
                                                                 std::int64_t key_offset, std::int64_t value_offset,
                                                                 const std::string& entry_format, const OptionalTensor& cos,
                                                                 const OptionalTensor& sin, bool rope_interleaved,
                                                                 bool rope_trailing) {
  constexpr const char* kOp = "write_key_value";
  const TensorArgument arena_argument{kOp, "arena", arena}, slots_argument{kOp, "slots", slots};
  auto keys = checked_params(arena_argument, {kOp, "key", key}, slots_argument,
                             {rows_per_block, key_offset, 0, entry_format, "rows_per_block", "key_offset"});
  auto values = checked_params(arena_argument, {kOp, "value", value}, slots_argument,
                               {rows_per_block, value_offset, 0, entry_format, "rows_per_block", "value_offset"});
  if (keys->target.format >= EntryFormat::kFp8Packed) {
    refuse_argument(kOp, "entry_format", entry_format, "float32, float16 or bfloat16");
  }
  check_rotation(*keys, arena_argument, cos, sin);
  keys->rope_interleaved = rope_interleaved;
  keys->rope_trailing = rope_trailing;
  if (keys->num_rows == 0) return std::nullopt;
  return std::array{*keys, *values};
}

void write_rows_cpu(Tensor arena, Tensor rows, Tensor slots, std::int64_t rows_per_block, std::int64_t section_offset,
                    std::string entry_format, std::int64_t scale_offset, OptionalTensor norm_weight, double norm_eps,
                    OptionalTensor cos, OptionalTensor sin, bool rope_interleaved, bool rope_trailing) {
  const auto params = write_rows_params(arena, rows, slots, {rows_per_block, section_offset, scale_offset, entry_format},
                                        norm_weight, norm_eps, cos, sin, rope_interleaved, rope_trailing);
  if (!params) return;
  check_slots("write_rows", *params);
  write_in_parallel(*params);
}

void write_key_value_cpu(Tensor arena, Tensor key, Tensor value, Tensor slots, std::int64_t rows_per_block,
                         std::int64_t key_offset, std::int64_t value_offset, std::string entry_format, OptionalTensor cos,
                         OptionalTensor sin, bool rope_interleaved, bool rope_trailing) {
  const auto params = write_key_value_params(arena, key, value, slots, rows_per_block, key_offset, value_offset, entry_format,
                                             cos, sin, rope_interleaved, rope_trailing);
  if (!params) return;
  for (const WriteParams& part : *params) check_slots("write_key_value", part);
  for (const WriteParams& part : *params) write_in_parallel(part);
}

}  // namespace hetkv::ops
