// Vectors of float of the level that a file of cpu/levels is compiled for, as GCC vector types.
//
// Everything here is in the level's own namespace, and files of cpu/levels call no inline function of a standard header that the
// linker could share between levels.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef HETKV_LEVEL
#error "cpu/levels is compiled once per level, with HETKV_LEVEL defined"
#endif

namespace hetkv::HETKV_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

using Float = float __attribute__((vector_size(kLanes * 4)));
using Int = std::int32_t __attribute__((vector_size(kLanes * 4)));
using UInt = std::uint32_t __attribute__((vector_size(kLanes * 4)));
using Half = std::uint16_t __attribute__((vector_size(kLanes * 2)));  // bits of 16-bit values

inline Float splat(float value) { return Float{} + value; }

template <typename Vector, typename From>
inline Vector load(const From* from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof(Vector));
  return value;
}
template <typename Vector, typename To>
inline void store(To* to, Vector value) {
  __builtin_memcpy(to, &value, sizeof(Vector));
}
inline Float load_float(const float* from) { return load<Float>(from); }

inline Float max(Float a, Float b) { return a > b ? a : b; }
inline Float min(Float a, Float b) { return a < b ? a : b; }

// A fixed tree, so that a sum depends on nothing but its values.
inline float sum(Float v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
inline float max_lane(Float v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

inline UInt widen(Half bits) {  // gcc would do it by halves
#if defined(__AVX512F__)
  return (UInt)_mm512_cvtepu16_epi32((__m256i)bits);
#elif defined(__AVX2__)
  return (UInt)_mm256_cvtepu16_epi32((__m128i)bits);
#else
  return __builtin_convertvector(bits, UInt);
#endif
}

inline Float from_bfloat16(Half bits) { return (Float)(widen(bits) << 16); }

// Round to nearest even. NaN stays NaN.
inline Half to_bfloat16(Float value) {
  const UInt bits = (UInt)value;
  const UInt rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UInt quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector(value == value ? rounded : quiet, Half);
}

inline Float from_float16(Half bits) {
#if defined(__AVX512F__)
  return (Float)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
  return (Float)_mm256_cvtph_ps((__m128i)bits);
#else
  // The exponent of a half is moved by a multiplication, so denormals come out right; infinity and NaN are put back.
  const UInt wide = __builtin_convertvector(bits, UInt);
  const UInt sign = (wide & 0x8000u) << 16;
  const UInt magnitude = (wide & 0x7fffu) << 13;
  const Float scaled = (Float)magnitude * 0x1p112f;
  const UInt special = magnitude | 0x7f800000u;
  return (Float)(((wide & 0x7c00u) == 0x7c00u ? special : (UInt)scaled) | sign);
#endif
}

inline Half to_float16(Float value) {
#if defined(__AVX512F__)
  return (Half)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Half)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const UInt bits = (UInt)value;
  const UInt sign = (bits >> 16) & 0x8000u;
  const UInt magnitude = bits & 0x7fffffffu;
  // Below the smallest normal half, an addition in float rounds at the right bit; above, the exponent is moved and rounded.
  const Float tiny = (Float)magnitude + 0.5f;
  const UInt small = (UInt)tiny - 0x3f000000u;
  const UInt normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const UInt nan = UInt{} + 0x7e00u;
  const UInt infinity = UInt{} + 0x7c00u;
  UInt half = magnitude < 0x38800000u ? small : normal;
  half = magnitude >= 0x477ff000u ? infinity : half;
  half = magnitude > 0x7f800000u ? nan : half;
  return __builtin_convertvector(half | sign, Half);
#endif
}

// 2^x, relative error below 3e-7 for x in [-126, 127]; exactly 0 below -126 (also for -inf), NaN
// for NaN, unspecified above 127.
inline Float exp2(Float x) {
  const Float clamped = x < -126.0f ? splat(-126.0f) : x;
#if defined(__AVX512F__)
  const Float whole = (Float)_mm512_roundscale_ps((__m512)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  const Float whole = (Float)_mm256_round_ps((__m256)clamped, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Float magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Float whole = (clamped + magic) - magic;
#endif
  const Float r = clamped - whole;  // [-0.5, 0.5]
  Float p = splat(1.5403530e-4f);
  p = p * r + splat(1.3333558e-3f);
  p = p * r + splat(9.6181291e-3f);
  p = p * r + splat(5.5504109e-2f);
  p = p * r + splat(2.4022651e-1f);
  p = p * r + splat(6.9314718e-1f);
  p = p * r + splat(1.0f);
  const Int exponent = __builtin_convertvector(whole, Int);
  const Float scaled = (Float)((Int)p + (exponent << 23));
  return x < -126.0f ? splat(0.0f) : scaled;
}

// Lanes 0, 0', 1, 1', ... of the lower or upper halves of two vectors.
template <typename Vector>
inline Vector zip_low(Vector a, Vector b) {
#if defined(__AVX512F__)
  return __builtin_shuffle(a, b, Int{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#elif defined(__AVX2__)
  return __builtin_shuffle(a, b, Int{0, 8, 1, 9, 2, 10, 3, 11});
#else
  return __builtin_shuffle(a, b, Int{0, 4, 1, 5});
#endif
}
template <typename Vector>
inline Vector zip_high(Vector a, Vector b) {
#if defined(__AVX512F__)
  return __builtin_shuffle(a, b, Int{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#elif defined(__AVX2__)
  return __builtin_shuffle(a, b, Int{4, 12, 5, 13, 6, 14, 7, 15});
#else
  return __builtin_shuffle(a, b, Int{2, 6, 3, 7});
#endif
}

// Row i of the square becomes column i. Each zip moves the top bit of the row's number to the end of the column's.
template <typename Vector>
inline void transpose(Vector (&rows)[kLanes]) {
  for (int stage = 1; stage < kLanes; stage *= 2) {
    Vector next[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zip_low(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = zip_high(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// sum() of kLanes vectors at once, the same bits. Uses up the vectors.
inline Float sums_of(Float (&vectors)[kLanes]) {
  transpose(vectors);
#pragma GCC unroll 4
  for (int width = kLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) vectors[i] += vectors[i + width];
  }
  return vectors[0];
}

}  // namespace
}  // namespace hetkv::HETKV_LEVEL
