// Python's view of KvAllocator: Allocator, Namespace, PinnedPrefix.
#pragma once

#include <pybind11/pybind11.h>

#include "allocator/kv_allocator.h"

namespace hetkv {

void bind_allocator(pybind11::module_& m);

// All counters as a dict of ints and dicts; a snapshot, not one moment. Needs the GIL; O(pools).
pybind11::dict allocator_stats(KvAllocator& allocator);

}  // namespace hetkv
