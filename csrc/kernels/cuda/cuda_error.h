// A CUDA call that failed. Becomes RuntimeError in Python.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace hetkv {

class CudaError : public std::runtime_error {
 public:
  CudaError(std::string kernel, int code, const std::string& why)
      : std::runtime_error(kernel + ": CUDA error " + std::to_string(code) + " (" + why + ")"), kernel(std::move(kernel)),
        code(code) {}
  std::string kernel;  // what was launched
  int code;            // cudaError_t
};

}  // namespace hetkv
