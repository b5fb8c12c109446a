// Ops without tensors.
#include <torch/csrc/stable/library.h>

#include "base/cpu_level.h"

namespace {

std::int64_t cpu_level() { return static_cast<std::int64_t>(hetkv::cpu_level()); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(hetkv, CompositeExplicitAutograd, m) { m.impl("cpu_level", TORCH_BOX(&cpu_level)); }
