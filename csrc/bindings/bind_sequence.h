// Python's view of sequences and steps: Sequence, StepStamp, PublishResult, HashedPrefix, StepArrays.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "allocator/kv_allocator.h"

namespace hetkv {

// The caller's arrays of a step, checked once. Owns references to them, so that the addresses stay good.
struct StepArrays {
  StepBuffers buffers;  // padded to the full size of the arrays
  std::vector<pybind11::array> keep;
};

// A report as (prompt, hash hit, history, recoverable, ((reason, group name or None, tokens), ...), canonical); a forecast does not know the last.
pybind11::tuple report_tuple(const HitReport& report, const CacheLayout& layout, bool forecast);

void bind_sequence(pybind11::module_& m);

}  // namespace hetkv
