// Token ids as they come from Python: a contiguous int32 numpy array, read in place. Other forms are converted in Python.
#pragma once

#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"

namespace hetkv {

// Take it by const reference and with .noconvert(): no copy is ever made, and the reference dies with the GIL held.
using TokenArray = pybind11::array_t<std::int32_t, pybind11::array::c_style>;

// A view of the ids, valid while the array lives. ArgumentError unless it has one dimension, at least `least` ids and none below
// 0. Needs the GIL.
inline std::span<const std::int32_t> token_span(const TokenArray& tokens, const char* argument, std::size_t least = 1) {
  if (tokens.ndim() != 1) throw ArgumentError(argument, std::to_string(tokens.ndim()) + " dimensions", "one dimension");
  const std::span<const std::int32_t> ids(tokens.data(), static_cast<std::size_t>(tokens.size()));
  if (ids.size() < least) throw ArgumentError(argument, "no tokens", "at least one token id");
  std::int32_t all = 0;
  for (const std::int32_t id : ids) all |= id;
  if (all < 0) {
    for (std::size_t i = 0; i < ids.size(); ++i)
      if (ids[i] < 0)
        throw ArgumentError(argument + ("[" + std::to_string(i) + "]"), std::to_string(ids[i]), "a token id, 0 to 2147483647");
  }
  return ids;
}

}  // namespace hetkv
