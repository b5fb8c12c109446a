// CPU implementations of the ops in library.cpp.
#include <torch/csrc/stable/library.h>

#include "ops/row_copy.h"

STABLE_TORCH_LIBRARY_IMPL(hetkv, CPU, m) {
  m.impl("scatter_rows", TORCH_BOX(&hetkv::ops::scatter_rows_cpu));
  m.impl("gather_rows", TORCH_BOX(&hetkv::ops::gather_rows_cpu));
}
