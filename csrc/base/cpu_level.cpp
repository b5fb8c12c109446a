#include "base/cpu_level.h"

#include <cstdlib>
#include <string>

#include "base/error.h"

namespace hetkv {
namespace {

CpuLevel chosen_level() {
  const CpuLevel best = best_cpu_level();
  const char* const forced = std::getenv("HETKV_CPU_LEVEL");
  if (forced == nullptr || *forced == '\0') return best;
  for (const CpuLevel level : {CpuLevel::kPortable, CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (cpu_level_name(level) != forced) continue;
    if (level <= best) return level;
    throw ArgumentError("HETKV_CPU_LEVEL", forced, "at most " + std::string(cpu_level_name(best)) + ", the best of this machine");
  }
  throw ArgumentError("HETKV_CPU_LEVEL", forced, "portable, avx2 or avx512");
}

}  // namespace

std::string_view cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kPortable:
      return "portable";
    case CpuLevel::kAvx2:
      return "avx2";
    case CpuLevel::kAvx512:
      return "avx512";
  }
  return "?";
}

CpuLevel best_cpu_level() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();  // asks the processor, and the operating system through XGETBV
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (!avx2) return CpuLevel::kPortable;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? CpuLevel::kAvx512 : CpuLevel::kAvx2;
#else
  return CpuLevel::kPortable;
#endif
}

CpuLevel cpu_level() {
  static const CpuLevel level = chosen_level();
  return level;
}

}  // namespace hetkv
