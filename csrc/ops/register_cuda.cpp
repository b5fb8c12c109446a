// CUDA implementations of the ops in library.cpp. Built only with CUDA sources; loads under a torch without CUDA as well.
#include <torch/csrc/stable/library.h>

#include "ops/row_copy.h"

STABLE_TORCH_LIBRARY_IMPL(hetkv, CUDA, m) {
  m.impl("scatter_rows", TORCH_BOX(&hetkv::ops::scatter_rows_cuda));
  m.impl("gather_rows", TORCH_BOX(&hetkv::ops::gather_rows_cuda));
}
