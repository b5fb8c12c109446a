// Host twins of csrc/kernels/cuda/instructions.cuh, after the fragment tables of the PTX manual.
#include "kernels/cuda/instructions.cuh"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "simt/machine.h"

namespace hetkv::gpu {
namespace {

using simt::Access;
using simt::Collective;
using simt::Lane;
using simt::Machine;

std::uintptr_t code_of(void* address) { return reinterpret_cast<std::uintptr_t>(address); }

float float_of_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

std::uint16_t bf16_of_float(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float float_of_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  float size;
  if (exponent == 31) {
    size = mantissa == 0.0f ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    size = std::ldexp(mantissa, -24);
  } else {
    size = std::ldexp(1024.0f + mantissa, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -size : size;
}

std::uint16_t f16_of_float(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const float size = std::fabs(x);
  if (std::isnan(x)) return 0x7fff;
  if (size >= 65520.0f) return static_cast<std::uint16_t>(sign | 0x7c00);
  if (size < 0x1p-14f) return static_cast<std::uint16_t>(sign | static_cast<int>(std::nearbyint(size * 0x1p24f)));
  const std::uint32_t rounded = (bits & 0x7fffffffu) + 0xfffu + ((bits >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
}

float float_of_e4m3(std::uint32_t code) {
  const int exponent = static_cast<int>((code >> 3) & 15u);
  const float mantissa = static_cast<float>(code & 7u);
  float size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0f + mantissa, exponent - 10);
  if ((code & 0x7fu) == 0x7fu) size = std::numeric_limits<float>::quiet_NaN();
  return (code & 0x80u) != 0 ? -size : size;
}

// a[16][k] and b[k][8] from the lanes' registers, then c += a b. `Values` per register, `convert` from one of them.
template <int kDepth, typename Convert>
void multiply(Lane* const* lanes, Convert&& convert) {
  constexpr int kPerRegister = kDepth / 8;  // 2 or 4 neighbours along k
  constexpr int kBits = 32 / kPerRegister;
  constexpr std::uint32_t kMask = kBits == 16 ? 0xffffu : 0xffu;
  float a[16][std::size_t{kDepth}];
  float b[std::size_t{kDepth}][8];
  float c[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Collective& call = *lanes[lane]->collective;
    const auto* const a_registers = static_cast<const std::uint32_t*>(call.in[0]);
    const auto* const c_registers = static_cast<const float*>(call.out);
    const int g = lane >> 2, t = lane & 3;
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < kPerRegister; ++i) {
        const std::uint32_t bits = (a_registers[r] >> (kBits * i)) & kMask;
        a[g + 8 * (r & 1)][(r >> 1) * (kDepth / 2) + kPerRegister * t + i] = convert(bits);
      }
      c[g + 8 * (r >> 1)][2 * t + (r & 1)] = c_registers[r];
    }
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < kPerRegister; ++i) {
        b[r * (kDepth / 2) + kPerRegister * t + i][g] = convert((call.in_words[r] >> (kBits * i)) & kMask);
      }
    }
  }
  const bool pairs = Machine::current->settings.sums == simt::Sums::kPairs;
  for (int m = 0; m < 16; ++m) {
    float sums[8];
    for (int n = 0; n < 8; ++n) sums[n] = c[m][n];
    for (int k = 0; k < kDepth; k += 2) {
      const float first = a[m][k], second = a[m][k + 1];
      if (pairs) {
        for (int n = 0; n < 8; ++n) sums[n] += first * b[k][n] + second * b[k + 1][n];
      } else {
        for (int n = 0; n < 8; ++n) sums[n] += first * b[k][n];
        for (int n = 0; n < 8; ++n) sums[n] += second * b[k + 1][n];
      }
    }
    for (int n = 0; n < 8; ++n) c[m][n] = sums[n];
  }
  for (int lane = 0; lane < 32; ++lane) {
    auto* const c_registers = static_cast<float*>(lanes[lane]->collective->out);
    const int g = lane >> 2, t = lane & 3;
    for (int r = 0; r < 4; ++r) c_registers[r] = c[g + 8 * (r >> 1)][2 * t + (r & 1)];
  }
  ++Machine::current->counts.matrix_products;
}

void complete_bf16(Lane* const* lanes) {
  multiply<16>(lanes, [](std::uint32_t bits) { return float_of_bf16(static_cast<std::uint16_t>(bits)); });
}
void complete_f16(Lane* const* lanes) {
  multiply<16>(lanes, [](std::uint32_t bits) { return float_of_f16(static_cast<std::uint16_t>(bits)); });
}
void complete_e4m3(Lane* const* lanes) {
  multiply<32>(lanes, [](std::uint32_t bits) { return float_of_e4m3(bits); });
}

void mma(const char* name, void (*complete)(Lane* const*), float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
         std::uint32_t b1, void* caller) {
  Machine& machine = *Machine::current;
  machine.require_full_warp(name, code_of(caller));
  Collective call{.name = name, .mask = kAllLanes, .complete = complete};
  call.in[0] = a;
  call.in_words[0] = b0;
  call.in_words[1] = b1;
  call.out = c;
  call.code = code_of(caller);
  machine.collective(call);
}

template <bool kTransposed>
void complete_load(Lane* const* lanes) {
  Machine& machine = *Machine::current;
  std::uint16_t matrices[4][8][8];
  for (unsigned j = 0; j < 4; ++j) {
    std::uint32_t addresses[8];
    for (unsigned i = 0; i < 8; ++i) {
      Lane& lane = *lanes[8 * j + i];
      const std::uint32_t address = lane.collective->argument;
      addresses[i] = address;
      machine.access_shared(lane, address, 16, Access::kRead, lane.collective->code);
      std::memcpy(matrices[j][i], machine.shared() + address, 16);
    }
    machine.count_phase(addresses, 8);
  }
  for (unsigned l = 0; l < 32; ++l) {
    auto* const registers = static_cast<std::uint32_t*>(lanes[l]->collective->out);
    const unsigned g = l / 4, t = 2 * (l % 4);
    for (unsigned j = 0; j < 4; ++j) {
      const std::uint32_t low = kTransposed ? matrices[j][t][g] : matrices[j][g][t];
      const std::uint32_t high = kTransposed ? matrices[j][t + 1][g] : matrices[j][g][t + 1];
      registers[j] = low | (high << 16);
    }
  }
}

void load_matrix(const char* name, void (*complete)(Lane* const*), std::uint32_t (&r)[4], std::uint32_t address, void* caller) {
  Machine& machine = *Machine::current;
  machine.require_full_warp(name, code_of(caller));
  if (address % 16 != 0) {
    machine.fault(simt::Kind::kMisaligned, code_of(caller),
                  machine.here() + ": " + name + " at " + simt::code_mark(code_of(caller)) + ": a row is not 16-byte aligned");
    machine.abandon_block();
  }
  Collective call{.name = name, .mask = kAllLanes, .complete = complete};
  call.argument = address;
  call.out = r;
  call.code = code_of(caller);
  machine.collective(call);
}

}  // namespace

std::uint32_t shared_address(const void* pointer) {
  Machine& machine = *Machine::current;
  const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(pointer) - reinterpret_cast<std::uintptr_t>(machine.shared());
  if (offset > 256 * 1024) {
    machine.fault(simt::Kind::kOutOfBounds, code_of(__builtin_return_address(0)),
                  machine.here() + ": shared_address at " + simt::code_mark(code_of(__builtin_return_address(0))) +
                      " of a pointer that is not in shared memory");
    machine.abandon_block();
  }
  return static_cast<std::uint32_t>(offset);
}

void load_matrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  load_matrix("load_matrix_x4", &complete_load<false>, r, address, __builtin_return_address(0));
}
void load_matrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  load_matrix("load_matrix_x4_trans", &complete_load<true>, r, address, __builtin_return_address(0));
}

void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  mma("mma_bf16", &complete_bf16, c, a, b0, b1, __builtin_return_address(0));
}
void mma_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  mma("mma_f16", &complete_f16, c, a, b0, b1, __builtin_return_address(0));
}
void mma_e4m3(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  mma("mma_e4m3", &complete_e4m3, c, a, b0, b1, __builtin_return_address(0));
}

void copy_async_16(std::uint32_t address, const void* source, int source_bytes) {
  Machine::current->copy_async(address, source, source_bytes, code_of(__builtin_return_address(0)));
}
void copy_async_commit() { Machine::current->copy_async_commit(); }
void copy_async_wait_for(int newest_left) {
  Machine::current->copy_async_wait(newest_left, code_of(__builtin_return_address(0)));
}

uint4 load_once_16(const void* source) {
  Machine::current->access(reinterpret_cast<std::uintptr_t>(source), 16, Access::kRead, code_of(__builtin_return_address(0)),
                           true);
  uint4 value;
  std::memcpy(&value, source, 16);
  return value;
}

float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

std::uint32_t pack_bf16(float low, float high) {
  return bf16_of_float(low) | (static_cast<std::uint32_t>(bf16_of_float(high)) << 16);
}
std::uint32_t pack_f16(float low, float high) {
  return f16_of_float(low) | (static_cast<std::uint32_t>(f16_of_float(high)) << 16);
}
float f16_to_float(std::uint16_t bits) { return float_of_f16(bits); }

std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  const auto product = [](std::uint32_t x, std::uint32_t y) {
    return float_of_bf16(static_cast<std::uint16_t>(x)) * float_of_bf16(static_cast<std::uint16_t>(y));  // exact in float
  };
  return pack_bf16(product(a, b), product(a >> 16, b >> 16));
}

std::uint16_t pack_e4m3_native(float low, float high) {
  // By search, so that it owes nothing to round_to_e4m3: the nearest code, the even one of two.
  const auto nearest = [](float x) -> std::uint32_t {
    if (std::isnan(x)) return 0x7fu;
    const std::uint32_t sign = std::signbit(x) ? 0x80u : 0u;
    const float size = std::fabs(x);
    if (size >= 448.0f) return sign | 0x7eu;
    std::uint32_t code = 0;
    for (std::uint32_t step = 64; step > 0; step /= 2) {
      if (code + step <= 0x7eu && float_of_e4m3(code + step) <= size) code += step;
    }
    const float below = size - float_of_e4m3(code), above = float_of_e4m3(code + 1) - size;
    return sign | (below > above || (below == above && (code & 1u) != 0) ? code + 1 : code);
  };
  return static_cast<std::uint16_t>(nearest(low) | (nearest(high) << 8));
}

std::uint32_t unpack_e4m3_native(std::uint16_t codes) {
  return pack_f16(float_of_e4m3(codes & 0xffu), float_of_e4m3(static_cast<std::uint32_t>(codes) >> 8));
}

}  // namespace hetkv::gpu
