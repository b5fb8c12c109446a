#include "ops/row_copy.h"

#include <algorithm>
#include <string>

#include <torch/csrc/stable/ops.h>

#include "ops/check_tensor.h"

namespace hetkv::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr std::uintptr_t kArenaAlignment = 16;        // bytes: the widest access of a kernel
constexpr std::int64_t kBytesPerThread = 256 * 1024;  // about 30 us of copying; less is not worth another thread

struct BlockGeometry {
  std::int64_t rows_per_block, section_offset, layer_stride, layer_begin;
};

struct ByteRange {
  std::uintptr_t begin, end;
};

ByteRange byte_range(const Tensor& tensor) {
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {begin, begin + static_cast<std::uintptr_t>(last + 1) * tensor.element_size()};
}

// Rows of a tensor that is written must not share bytes: two strides nest if the larger steps over all that the smaller spans.
void check_rows_disjoint(const TensorArgument& argument, std::int64_t row_elements) {
  const Tensor& tensor = argument.tensor;
  std::int64_t inner_size = tensor.size(0), inner = tensor.stride(0), outer_size = tensor.size(1), outer = tensor.stride(1);
  if (outer_size == 1 || (inner_size != 1 && inner > outer)) {
    std::swap(inner_size, outer_size);
    std::swap(inner, outer);
  }
  const bool inner_fits = inner_size == 1 || inner >= row_elements;
  const bool outer_fits = outer_size == 1 || outer >= (inner_size - 1) * inner + row_elements;
  if (inner_fits && outer_fits) return;
  refuse_argument(argument.op, std::string(argument.name) + ".strides",
                  "(" + std::to_string(tensor.stride(0)) + ", " + std::to_string(tensor.stride(1)) + ")",
                  "rows of " + std::to_string(row_elements) + " elements that do not overlap");
}

void check_apart(const TensorArgument& argument, const TensorArgument& other) {
  const ByteRange a = byte_range(argument.tensor), b = byte_range(other.tensor);
  if (a.end <= b.begin || b.end <= a.begin) return;
  refuse_argument(argument.op, argument.name, "memory shared with " + std::string(other.name), "memory of its own");
}

// `rows` is the packed side: scatter's rows or gather's out. The data pointers of the result are left to the caller.
std::optional<RowCopyParams> checked_params(const TensorArgument& arena, const TensorArgument& rows, const TensorArgument& slots,
                                            const BlockGeometry& geometry, bool rows_written) {
  const char* const op = arena.op;
  check_ndim(arena, 1);
  check_ndim_at_least(rows, 2);
  check_ndim(slots, 1);
  check_same_device(rows, arena);
  check_same_device(slots, arena);
  check_dtype(arena, ScalarType::Byte);
  check_dtype(slots, ScalarType::Long);
  check_contiguous(arena);
  check_aligned(arena, kArenaAlignment);
  check_contiguous_from(rows, 2);
  check_contiguous(slots);
  check_size(slots, 0, rows.tensor.size(1), rows_written ? "the size of out in dimension 1" : "the size of rows in dimension 1");

  check_power_of_two(op, "rows_per_block", geometry.rows_per_block);
  check_not_negative(op, "section_offset", geometry.section_offset);
  check_not_negative(op, "layer_stride", geometry.layer_stride);
  check_not_negative(op, "layer_begin", geometry.layer_begin);
  if (rows.tensor.numel() == 0) return std::nullopt;

  std::int64_t row_elements = 1;
  for (std::int64_t dim = 2; dim < rows.tensor.dim(); ++dim) row_elements *= rows.tensor.size(dim);
  if (rows_written) check_rows_disjoint(rows, row_elements);
  check_apart(rows, arena);

  RowCopyParams params;
  const auto element_bytes = static_cast<std::int64_t>(rows.tensor.element_size());
  params.num_layers = rows.tensor.size(0);
  params.num_rows = rows.tensor.size(1);
  params.row_bytes = row_elements * element_bytes;
  params.rows_layer_stride = rows.tensor.stride(0) * element_bytes;
  params.rows_row_stride = rows.tensor.stride(1) * element_bytes;
  params.layer_stride = geometry.layer_stride;
  params.block_shift = std::countr_zero(static_cast<std::uint64_t>(geometry.rows_per_block));

  // Both products may leave 64 bits for absurd arguments: such a section or layer range is out of bounds anyway.
  std::int64_t section_end = 0, layers_end = 0;
  if (__builtin_mul_overflow(geometry.rows_per_block, params.row_bytes, &section_end) ||
      __builtin_add_overflow(section_end, geometry.section_offset, &section_end) || section_end > geometry.layer_stride) {
    refuse_argument(op, "layer_stride", std::to_string(geometry.layer_stride),
                    "at least section_offset + rows_per_block * row bytes = " + std::to_string(geometry.section_offset) + " + " +
                        std::to_string(geometry.rows_per_block) + " * " + std::to_string(params.row_bytes));
  }
  const std::int64_t arena_bytes = arena.tensor.numel();
  if (__builtin_add_overflow(geometry.layer_begin, params.num_layers, &layers_end) ||
      __builtin_mul_overflow(layers_end, geometry.layer_stride, &layers_end) || layers_end > arena_bytes) {
    refuse_argument(op, "layer_begin", std::to_string(geometry.layer_begin),
                    std::to_string(params.num_layers) + " layers of " + std::to_string(geometry.layer_stride) +
                        " bytes that end inside the arena of " + std::to_string(arena_bytes));
  }
  params.first_offset = geometry.section_offset + geometry.layer_begin * geometry.layer_stride;
  params.start_limit = arena_bytes - params.first_offset - (params.num_layers - 1) * params.layer_stride - params.row_bytes;
  return params;
}

void check_slots(const char* op, const RowCopyParams& params) {
  const std::int64_t bad = find_bad_slot(params);
  if (bad < 0) return;
  refuse_argument(op, "slots[" + std::to_string(bad) + "]", std::to_string(params.slots[bad]),
                  "block_offset * rows_per_block + row of a block inside the arena");
}

template <typename Copy>
void copy_in_parallel(const RowCopyParams& params, const Copy& copy) {
  const std::int64_t items = params.num_layers * params.num_rows;
  const std::int64_t grain = std::max<std::int64_t>(1, kBytesPerThread / params.row_bytes);
  if (items <= grain) return copy(0, items);
  torch::stable::parallel_for(0, items, grain, copy);
}

}  // namespace

std::optional<RowCopyParams> scatter_rows_params(const Tensor& arena, const Tensor& rows, const Tensor& slots,
                                                 std::int64_t rows_per_block, std::int64_t section_offset,
                                                 std::int64_t layer_stride, std::int64_t layer_begin) {
  constexpr const char* kOp = "scatter_rows";
  auto params = checked_params({kOp, "arena", arena}, {kOp, "rows", rows}, {kOp, "slots", slots},
                               {rows_per_block, section_offset, layer_stride, layer_begin}, false);
  if (!params) return params;
  params->arena = static_cast<std::byte*>(arena.mutable_data_ptr());
  params->rows = const_cast<std::byte*>(static_cast<const std::byte*>(rows.const_data_ptr()));  // only read by a scatter
  params->slots = static_cast<const std::int64_t*>(slots.const_data_ptr());
  return params;
}

std::optional<RowCopyParams> gather_rows_params(const Tensor& out, const Tensor& arena, const Tensor& slots,
                                                std::int64_t rows_per_block, std::int64_t section_offset,
                                                std::int64_t layer_stride, std::int64_t layer_begin) {
  constexpr const char* kOp = "gather_rows";
  auto params = checked_params({kOp, "arena", arena}, {kOp, "out", out}, {kOp, "slots", slots},
                               {rows_per_block, section_offset, layer_stride, layer_begin}, true);
  if (!params) return params;
  params->arena = const_cast<std::byte*>(static_cast<const std::byte*>(arena.const_data_ptr()));  // only read by a gather
  params->rows = static_cast<std::byte*>(out.mutable_data_ptr());
  params->slots = static_cast<const std::int64_t*>(slots.const_data_ptr());
  return params;
}

void scatter_rows_cpu(Tensor arena, Tensor rows, Tensor slots, std::int64_t rows_per_block, std::int64_t section_offset,
                      std::int64_t layer_stride, std::int64_t layer_begin) {
  const auto params = scatter_rows_params(arena, rows, slots, rows_per_block, section_offset, layer_stride, layer_begin);
  if (!params) return;
  check_slots("scatter_rows", *params);
  copy_in_parallel(*params, [&params](std::int64_t begin, std::int64_t end) { hetkv::scatter_rows_cpu(*params, begin, end); });
}

void gather_rows_cpu(Tensor out, Tensor arena, Tensor slots, std::int64_t rows_per_block, std::int64_t section_offset,
                     std::int64_t layer_stride, std::int64_t layer_begin) {
  const auto params = gather_rows_params(out, arena, slots, rows_per_block, section_offset, layer_stride, layer_begin);
  if (!params) return;
  check_slots("gather_rows", *params);
  copy_in_parallel(*params, [&params](std::int64_t begin, std::int64_t end) { hetkv::gather_rows_cpu(*params, begin, end); });
}

}  // namespace hetkv::ops
