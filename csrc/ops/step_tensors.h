// What the ops of a step share: tensors and numbers that describe rows in blocks, checked and turned into the kernels' structs.
// Every function throws ArgumentError that names op and argument. Thread-safe; allocate only to build an error.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/paged_rows.h"
#include "ops/check_tensor.h"

namespace hetkv::ops {

using OptionalTensor = std::optional<torch::stable::Tensor>;

inline constexpr std::uintptr_t kArenaAlignment = 16;  // bytes: the widest access of a kernel

inline void check_arena(const TensorArgument& arena) {
  check_ndim(arena, 1);
  check_dtype(arena, torch::headeronly::ScalarType::Byte);
  check_contiguous(arena);
  check_aligned(arena, kArenaAlignment);
}

// Where rows of one layer's field lie, as the ops take it. `names`: of the arguments, for errors.
struct SectionArguments {
  std::int64_t rows_per_block, offset, scale_offset;
  std::string format;
  const char* rows_per_block_name = "rows_per_block";
  const char* offset_name = "section_offset";
  const char* scale_offset_name = "scale_offset";
  const char* format_name = "entry_format";
};

inline EntryFormat entry_format(const char* op, const char* name, const std::string& text) {
  if (text == "float32") return EntryFormat::kFloat32;
  if (text == "float16") return EntryFormat::kFloat16;
  if (text == "bfloat16") return EntryFormat::kBFloat16;
  if (text == "fp8_packed") return EntryFormat::kFp8Packed;
  if (text == "fp8_index") return EntryFormat::kFp8Index;
  if (text == "mxfp4_index") return EntryFormat::kMxfp4Index;
  refuse_argument(op, name, text, "float32, float16, bfloat16, fp8_packed, fp8_index or mxfp4_index");
}

// The stored format that a tensor's dtype corresponds to: float32, float16 or bfloat16.
inline EntryFormat float_format(const TensorArgument& argument) {
  using torch::headeronly::ScalarType;
  switch (argument.tensor.scalar_type()) {
    case ScalarType::Float:
      return EntryFormat::kFloat32;
    case ScalarType::Half:
      return EntryFormat::kFloat16;
    case ScalarType::BFloat16:
      return EntryFormat::kBFloat16;
    default:
      refuse_argument(argument.op, std::string(argument.name) + ".dtype",
                      torch::headeronly::toString(argument.tensor.scalar_type()), "Float, Half or BFloat16");
  }
}

// `heads` vectors of `width` values a row. Packed formats take one head, and widths that their groups divide.
inline PagedRows paged_rows(const TensorArgument& arena, const SectionArguments& section, std::int64_t heads,
                            std::int64_t width) {
  const char* const op = arena.op;
  check_power_of_two(op, section.rows_per_block_name, section.rows_per_block);
  check_not_negative(op, section.offset_name, section.offset);
  PagedRows rows;
  rows.format = entry_format(op, section.format_name, section.format);
  const bool packed = rows.format >= EntryFormat::kFp8Packed;
  const bool width_fits = rows.format == EntryFormat::kFp8Packed    ? width > kPackedRope && width % kPackedGroup == 0
                          : rows.format == EntryFormat::kFp8Index   ? width % 16 == 0 && width <= 512
                          : rows.format == EntryFormat::kMxfp4Index ? width % kMxfp4Group == 0
                                                                    : true;
  if (!width_fits || (packed && heads != 1)) {
    refuse_argument(op, section.format_name, section.format,
                    "a format for " + std::to_string(heads) + " vectors of " + std::to_string(width) +
                        " values (packed ones take one, in whole groups)");
  }
  rows.arena = static_cast<std::byte*>(const_cast<void*>(arena.tensor.const_data_ptr()));
  rows.arena_bytes = arena.tensor.numel();
  rows.data_offset = section.offset;
  rows.data_bytes = heads * entry_data_bytes(rows.format, width);
  rows.scale_bytes = entry_scale_bytes(rows.format, width);
  rows.width = static_cast<std::int32_t>(width);
  rows.block_shift = std::countr_zero(static_cast<std::uint64_t>(section.rows_per_block));
  const auto must_fit = [&](const char* name, std::int64_t offset, std::int64_t row_bytes) {
    std::int64_t end = 0;
    if (__builtin_mul_overflow(section.rows_per_block, row_bytes, &end) || __builtin_add_overflow(end, offset, &end) ||
        end > rows.arena_bytes) {
      refuse_argument(op, name, std::to_string(offset),
                      "a section of " + std::to_string(section.rows_per_block) + " rows of " + std::to_string(row_bytes) +
                          " bytes inside the arena of " + std::to_string(rows.arena_bytes));
    }
  };
  must_fit(section.offset_name, section.offset, rows.data_bytes);
  const std::int64_t unit = packed ? 1 : rows.format == EntryFormat::kFloat32 ? 4 : 2;
  if (section.offset % unit != 0) {
    refuse_argument(op, section.offset_name, std::to_string(section.offset), "a multiple of " + std::to_string(unit));
  }
  if (rows.scale_bytes > 0) {
    check_not_negative(op, section.scale_offset_name, section.scale_offset);
    rows.scale_offset = section.scale_offset;
    must_fit(section.scale_offset_name, section.scale_offset, rows.scale_bytes);
  }
  return rows;
}

// int32 [batch, columns], the last dimension dense.
inline BlockTable block_table(const TensorArgument& table, const TensorArgument& arena) {
  check_ndim(table, 2);
  check_same_device(table, arena);
  check_dtype(table, torch::headeronly::ScalarType::Int);
  check_contiguous_from(table, 1);
  return {static_cast<const std::int32_t*>(table.tensor.const_data_ptr()), table.tensor.stride(0),
          static_cast<std::int32_t>(table.tensor.size(1))};
}

// A dense tensor beside the arena, of this dtype and these sizes (-1: any).
inline void check_dense(const TensorArgument& argument, const TensorArgument& arena, torch::headeronly::ScalarType dtype,
                        std::initializer_list<std::int64_t> sizes, const char* why) {
  check_ndim(argument, static_cast<std::int64_t>(sizes.size()));
  check_same_device(argument, arena);
  check_dtype(argument, dtype);
  check_contiguous(argument);
  std::int64_t dim = 0;
  for (const std::int64_t size : sizes) {
    if (size >= 0) check_size(argument, dim, size, why);
    ++dim;
  }
}

template <typename T>
const T* data_of(const torch::stable::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

// What is wrong with the sequences of a step, for ops on the CPU, which may look: cu_seqlens_q rises from 0 or more to at most
// num_tokens, and a sequence that is no padding holds at least the tokens of the step.
inline void check_sequences(const char* op, const std::int32_t* cu_seqlens_q, const std::int32_t* seqused_k, std::int64_t batch,
                            std::int64_t num_tokens) {
  if (cu_seqlens_q[0] < 0) refuse_argument(op, "cu_seqlens_q[0]", std::to_string(cu_seqlens_q[0]), "0 or more");
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t begin = cu_seqlens_q[b], end = cu_seqlens_q[b + 1];
    if (end < begin || end > num_tokens) {
      refuse_argument(op, "cu_seqlens_q[" + std::to_string(b + 1) + "]", std::to_string(end),
                      std::to_string(begin) + " to the " + std::to_string(num_tokens) + " tokens of the step");
    }
    if (seqused_k[b] < 0 || (seqused_k[b] > 0 && seqused_k[b] < end - begin)) {
      refuse_argument(op, "seqused_k[" + std::to_string(b) + "]", std::to_string(seqused_k[b]),
                      "0, or at least its " + std::to_string(end - begin) + " tokens of the step");
    }
  }
}

// What is wrong with the blocks of rows [begin, end) of a sequence: a column too few, or a block outside the arena.
inline void check_blocks(const TensorArgument& table, const BlockTable& blocks, const PagedRows& rows, std::int64_t sequence,
                         std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  const std::int64_t last = (end - 1) >> rows.block_shift;
  if (last >= blocks.columns) {
    refuse_argument(table.op, std::string(table.name) + ".size(1)", std::to_string(blocks.columns),
                    "at least " + std::to_string(last + 1) + ", for the " + std::to_string(end) + " rows of sequence " +
                        std::to_string(sequence));
  }
  for (std::int64_t column = begin >> rows.block_shift; column <= last; ++column) {
    const std::int32_t block = blocks.blocks[sequence * blocks.stride + column];
    if (block_inside(rows, block)) continue;
    refuse_argument(table.op, std::string(table.name) + "[" + std::to_string(sequence) + ", " + std::to_string(column) + "]",
                    std::to_string(block), "the offset of a block inside the arena, in units of 256 bytes");
  }
}

}  // namespace hetkv::ops
