// Which instruction set the CPU kernels of this process use. One level for the whole process: results of different levels differ in
// the last bits, so a call may not choose.
#pragma once

#include <cstdint>
#include <string_view>

namespace hetkv {

enum class CpuLevel : std::uint8_t {
  kPortable,  // the compiler's baseline
  kAvx2,      // AVX2, FMA, F16C
  kAvx512,    // AVX-512 F, BW, DQ, VL
};
std::string_view cpu_level_name(CpuLevel level);  // "portable", "avx2", "avx512"

// The best level that processor and operating system allow. Thread-safe, allocates nothing.
CpuLevel best_cpu_level() noexcept;

// The level of this process: best_cpu_level(), or what the environment variable HETKV_CPU_LEVEL names; read once, at the first
// call. ArgumentError if that is no level, or one that this machine lacks. Thread-safe.
CpuLevel cpu_level();

}  // namespace hetkv
