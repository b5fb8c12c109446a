// 8-bit floats and power-of-two scales, the same on host and device. Source: OCP 8-bit and microscaling formats; DeepSeek-V4's packed
// rows (value = e4m3 * 2^e, one e per group of values).
//
// e4m3 has no infinity. The two NaN codes, 0x7f and 0xff, are written for NaN and read as +-480 * 2^e: readers shift bits and do not
// look for them; verify_blocks does.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/host_device.h"

namespace hetkv {

inline constexpr float kE4m3Max = 448.0f;
inline constexpr float kE2m1Max = 6.0f;
inline constexpr float kLeastAmax = 1e-4f;  // a group of zeros still has a scale

HETKV_HOST_DEVICE inline std::uint32_t float_bits(float value) {
  std::uint32_t bits = 0;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
HETKV_HOST_DEVICE inline float float_from_bits(std::uint32_t bits) {
  float value = 0;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// 2^exponent for exponents of normal floats.
HETKV_HOST_DEVICE inline float power_of_two(int exponent) {
  return float_from_bits(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// Round to nearest even, saturating at +-448; NaN becomes 0x7f.
HETKV_HOST_DEVICE inline std::uint8_t to_e4m3(float value) {
  const std::uint32_t bits = float_bits(value), magnitude = bits & 0x7fffffffu, sign = (bits >> 24) & 0x80u;
  if (magnitude > 0x7f800000u) return 0x7f;
  std::uint32_t code = 0;
  if (magnitude < 0x3c800000u) {  // below 2^-6 the step is 2^-9: an addition rounds there
    code = float_bits(float_from_bits(magnitude) + 16384.0f) - float_bits(16384.0f);
  } else {
    code = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    if (code > 0x7eu) code = 0x7e;
  }
  return static_cast<std::uint8_t>(code | sign);
}

HETKV_HOST_DEVICE inline float from_e4m3(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t exponent = (code >> 3) & 15u, mantissa = code & 7u;
  if (exponent == 0) return float_from_bits(float_bits(static_cast<float>(mantissa) * 0.001953125f) | sign);  // 2^-9
  return float_from_bits(((exponent + 120u) << 23) | (mantissa << 20) | sign);
}

// The exponent e of a group's scale 2^e: ceil(log2(max(amax, 1e-4) / largest)), from the bits of the quotient, so that every
// machine gets the same. amax: largest magnitude of the group, not NaN.
HETKV_HOST_DEVICE inline int scale_exponent(float amax, float largest) {
  const std::uint32_t bits = float_bits((amax > kLeastAmax ? amax : kLeastAmax) / largest);
  return static_cast<int>(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0 ? 1 : 0);
}

// e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Nearest, ties to the even code, saturating; any NaN becomes 6: machines
// differ in the sign of a NaN that they make.
HETKV_HOST_DEVICE inline std::uint8_t to_e2m1(float value) {
  const std::uint32_t sign = (float_bits(value) >> 28) & 8u;
  const float magnitude = float_from_bits(float_bits(value) & 0x7fffffffu);
  if (magnitude != magnitude) return 7;
  std::uint32_t code = 7;
  if (magnitude <= 0.25f) {
    code = 0;
  } else if (magnitude < 0.75f) {
    code = 1;
  } else if (magnitude <= 1.25f) {
    code = 2;
  } else if (magnitude < 1.75f) {
    code = 3;
  } else if (magnitude <= 2.5f) {
    code = 4;
  } else if (magnitude < 3.5f) {
    code = 5;
  } else if (magnitude <= 5.0f) {
    code = 6;
  }
  return static_cast<std::uint8_t>(code | sign);
}

HETKV_HOST_DEVICE inline float from_e2m1(std::uint8_t code) {
  const std::uint32_t exponent = (code >> 1) & 3u, mantissa = code & 1u;
  const float magnitude = exponent == 0
                              ? 0.5f * static_cast<float>(mantissa)
                              : (1.0f + 0.5f * static_cast<float>(mantissa)) * power_of_two(static_cast<int>(exponent) - 1);
  return (code & 8u) != 0 ? -magnitude : magnitude;
}

}  // namespace hetkv
