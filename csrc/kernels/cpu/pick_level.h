// Chooses among the three builds of a kernel in cpu/levels.
#pragma once

#include "base/cpu_level.h"

namespace hetkv {

// The function of this process's level. ArgumentError as cpu_level(). Thread-safe.
template <typename Function>
Function* pick_level(Function* portable, Function* avx2, Function* avx512) {
  switch (cpu_level()) {
    case CpuLevel::kAvx512:
      return avx512;
    case CpuLevel::kAvx2:
      return avx2;
    case CpuLevel::kPortable:
      break;
  }
  return portable;
}

}  // namespace hetkv
