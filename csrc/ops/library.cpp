// The schemas of every hetkv op, in one place. Names and argument order are a promise: they end up in exported graphs.
// What an op writes is marked in its schema, and cache writers return nothing.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(hetkv, m) {
  m.def("cpu_level() -> int");  // as base/cpu_level.h counts them
  m.def(
      "scatter_rows(Tensor(a!) arena, Tensor rows, Tensor slots, int rows_per_block, int section_offset, int layer_stride, "
      "int layer_begin=0) -> ()");
  m.def(
      "gather_rows(Tensor(a!) out, Tensor arena, Tensor slots, int rows_per_block, int section_offset, int layer_stride, "
      "int layer_begin=0) -> ()");
}
