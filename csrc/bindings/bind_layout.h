// Python's view of layouts: kinds, dtypes, retentions, specs, derived groups, R(p) and fingerprints.
#pragma once

#include <pybind11/pybind11.h>

namespace hetkv {

// Adds the classes to `m`. Everything bound here is immutable once constructed, so it may be used from any thread.
void bind_layout(pybind11::module_& m);

}  // namespace hetkv
