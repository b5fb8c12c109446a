// Checks of tensor arguments, one line each at the call site, in the fixed order ndim, device, dtype, layout, shape.
// Each throws ArgumentError (ValueError in Python) that names op and argument. Thread-safe; allocate only to build an error.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "base/error.h"

namespace hetkv::ops {

// Borrows the tensor and the names: a TensorArgument must not outlive the call that it describes.
struct TensorArgument {
  const char* op;
  const char* name;
  const torch::stable::Tensor& tensor;
};

[[noreturn]] inline void refuse_argument(const char* op, const std::string& what, const std::string& value,
                                         const std::string& expected) {
  throw ArgumentError(std::string(op) + ": " + what, value, expected);
}

inline std::string device_text(const torch::stable::Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  if (tensor.is_cuda()) return "cuda:" + std::to_string(tensor.get_device_index());
  return "a device that is neither cpu nor cuda";
}

inline void check_ndim(const TensorArgument& argument, std::int64_t ndim) {
  if (argument.tensor.dim() == ndim) return;
  refuse_argument(argument.op, std::string(argument.name) + ".ndim", std::to_string(argument.tensor.dim()), std::to_string(ndim));
}

inline void check_ndim_at_least(const TensorArgument& argument, std::int64_t ndim) {
  if (argument.tensor.dim() >= ndim) return;
  refuse_argument(argument.op, std::string(argument.name) + ".ndim", std::to_string(argument.tensor.dim()),
                  "at least " + std::to_string(ndim));
}

inline void check_same_device(const TensorArgument& argument, const TensorArgument& other) {
  if (argument.tensor.device() == other.tensor.device()) return;
  refuse_argument(argument.op, std::string(argument.name) + ".device", device_text(argument.tensor),
                  device_text(other.tensor) + ", where " + other.name + " is");
}

inline void check_dtype(const TensorArgument& argument, torch::headeronly::ScalarType dtype) {
  if (argument.tensor.scalar_type() == dtype) return;
  refuse_argument(argument.op, std::string(argument.name) + ".dtype", torch::headeronly::toString(argument.tensor.scalar_type()),
                  torch::headeronly::toString(dtype));
}

inline void check_contiguous(const TensorArgument& argument) {
  if (argument.tensor.is_contiguous()) return;
  refuse_argument(argument.op, std::string(argument.name) + ".layout", "strided", "contiguous");
}

// Dimensions `first`, first + 1, ... lie densely, the last one innermost. Strides of dimensions of size 1 do not matter.
inline void check_contiguous_from(const TensorArgument& argument, std::int64_t first) {
  std::int64_t dense = 1;
  for (std::int64_t dim = argument.tensor.dim() - 1; dim >= first; --dim) {
    const std::int64_t size = argument.tensor.size(dim);
    if (size == 0) return;
    if (size != 1 && argument.tensor.stride(dim) != dense) {
      refuse_argument(argument.op, std::string(argument.name) + ".stride(" + std::to_string(dim) + ")",
                      std::to_string(argument.tensor.stride(dim)),
                      std::to_string(dense) + ": dimensions from " + std::to_string(first) + " on must be contiguous");
    }
    dense *= size;
  }
}

inline void check_aligned(const TensorArgument& argument, std::uintptr_t bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(argument.tensor.const_data_ptr());
  if (address % bytes == 0) return;
  refuse_argument(argument.op, std::string(argument.name) + ".data_ptr() modulo " + std::to_string(bytes),
                  std::to_string(address % bytes), "0");
}

inline void check_size(const TensorArgument& argument, std::int64_t dim, std::int64_t size, const char* why) {
  if (argument.tensor.size(dim) == size) return;
  refuse_argument(argument.op, std::string(argument.name) + ".size(" + std::to_string(dim) + ")",
                  std::to_string(argument.tensor.size(dim)), std::to_string(size) + ", " + why);
}

inline void check_not_negative(const char* op, const char* name, std::int64_t value) {
  if (value >= 0) return;
  refuse_argument(op, name, std::to_string(value), "at least 0");
}

inline void check_power_of_two(const char* op, const char* name, std::int64_t value) {
  if (value > 0 && std::has_single_bit(static_cast<std::uint64_t>(value))) return;
  refuse_argument(op, name, std::to_string(value), "a power of two");
}

}  // namespace hetkv::ops
