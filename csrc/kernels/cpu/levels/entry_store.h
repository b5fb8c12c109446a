// Storing one row of floats in any format.
//
//   store_entry(row, rows, address)   row[rows.width], at `address` (row_address, slot_address)
//   store_plain(row, format, n, to)   n values in an unpacked format
//
// Packed formats round to bfloat16 first, as their source does, then quantise each group with its own power of two. The formulas are
// those of math/float8.h, so every level, and CUDA, writes the same bytes.
#pragma once

#include "kernels/cpu/levels/simd.h"
#include "kernels/math/float8.h"
#include "kernels/paged_rows.h"

namespace hetkv::HETKV_LEVEL {
namespace {

template <bool kBFloat16>
inline void store_halves(const float* row, int count, std::byte* to) {
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    const Float values = load_float(row + i);
    store(to + std::ptrdiff_t{2} * i, kBFloat16 ? to_bfloat16(values) : to_float16(values));
  }
  for (int i = whole; i < count; ++i) {
    const Half bits = kBFloat16 ? to_bfloat16(splat(row[i])) : to_float16(splat(row[i]));
    __builtin_memcpy(to + std::ptrdiff_t{2} * i, &bits, 2);
  }
}

inline void round_to_bfloat16(const float* row, int count, float* out) {
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) store(out + i, from_bfloat16(to_bfloat16(load_float(row + i))));
  for (int i = whole; i < count; ++i) out[i] = from_bfloat16(to_bfloat16(splat(row[i])))[0];
}

// NaN never is the largest.
inline float largest_magnitude(const float* row, int count) {
  const int whole = count / kLanes * kLanes;
  Int largest{};  // bits of non-negative floats rise with their values
  for (int i = 0; i < whole; i += kLanes) {
    const Int magnitude = (Int)load_float(row + i) & 0x7fffffff;
    const Int number = magnitude > 0x7f800000 ? Int{} : magnitude;
    largest = number > largest ? number : largest;
  }
  std::int32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = largest[i] > most ? largest[i] : most;
  for (int i = whole; i < count; ++i) {
    const auto magnitude = static_cast<std::int32_t>(float_bits(row[i]) & 0x7fffffffu);
    if (magnitude <= 0x7f800000 && magnitude > most) most = magnitude;
  }
  return float_from_bits(static_cast<std::uint32_t>(most));
}

// to_e4m3 of math/float8.h, on vectors.
inline UInt to_e4m3(Float values) {
  const UInt bits = (UInt)values;
  const UInt magnitude = bits & 0x7fffffffu;
  const UInt small = (UInt)((Float)magnitude + 16384.0f) - 0x46800000u;
  const UInt normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const UInt largest = UInt{} + 0x7eu;
  UInt code = magnitude < 0x3c800000u ? small : (normal < largest ? normal : largest);
  code |= (bits >> 24) & 0x80u;
  return magnitude > 0x7f800000u ? UInt{} + 0x7fu : code;
}

// Groups of 64 or more values; count is a multiple of kLanes for all of them.
inline void store_e4m3(const float* row, int count, int exponent, std::byte* to) {
  using Narrow = std::uint8_t __attribute__((vector_size(kLanes)));
  const Float by = splat(power_of_two(-exponent));
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) store(to + i, __builtin_convertvector(to_e4m3(load_float(row + i) * by), Narrow));
  for (int i = whole; i < count; ++i) to[i] = static_cast<std::byte>(hetkv::to_e4m3(row[i] * power_of_two(-exponent)));
}

inline void store_packed(const float* row, const PagedRows& rows, RowAddress address) {
  const int plain = rows.width - kPackedRope;
  float rounded[kPackedGroup];
  __builtin_memset(address.scale, 0, static_cast<std::size_t>(rows.scale_bytes));
  for (int group = 0; group * kPackedGroup < plain; ++group) {
    round_to_bfloat16(row + group * kPackedGroup, kPackedGroup, rounded);
    const int exponent = scale_exponent(largest_magnitude(rounded, kPackedGroup), kE4m3Max);
    store_e4m3(rounded, kPackedGroup, exponent, address.data + group * kPackedGroup);
    address.scale[group] = static_cast<std::byte>(exponent + 127);
  }
  store_halves<true>(row + plain, kPackedRope, address.data + plain);
}

constexpr int kMaxIndexWidth = 512;

inline void store_index(const float* row, const PagedRows& rows, RowAddress address) {
  float rounded[kMaxIndexWidth];
  round_to_bfloat16(row, rows.width, rounded);
  const int exponent = scale_exponent(largest_magnitude(rounded, rows.width), kE4m3Max);
  store_e4m3(rounded, rows.width, exponent, address.data);
  const float scale = power_of_two(exponent);
  __builtin_memcpy(address.scale, &scale, 4);
}

inline void store_mxfp4(const float* row, const PagedRows& rows, RowAddress address) {
  float rounded[kMxfp4Group];
  for (int group = 0; group * kMxfp4Group < rows.width; ++group) {
    round_to_bfloat16(row + group * kMxfp4Group, kMxfp4Group, rounded);
    const int exponent = scale_exponent(largest_magnitude(rounded, kMxfp4Group), kE2m1Max);
    const float by = power_of_two(-exponent);
    for (int i = 0; i < kMxfp4Group; i += 2) {
      const int pair = to_e2m1(rounded[i] * by) | to_e2m1(rounded[i + 1] * by) << 4;
      address.data[(group * kMxfp4Group + i) / 2] = static_cast<std::byte>(pair);
    }
    address.scale[group] = static_cast<std::byte>(exponent + 127);
  }
}

inline void store_plain(const float* row, EntryFormat format, int count, std::byte* to) {
  switch (format) {
    case EntryFormat::kFloat16:
      store_halves<false>(row, count, to);
      break;
    case EntryFormat::kBFloat16:
      store_halves<true>(row, count, to);
      break;
    default:
      __builtin_memcpy(to, row, static_cast<std::size_t>(count) * 4);
  }
}

inline void store_entry(const float* row, const PagedRows& rows, RowAddress address) {
  switch (rows.format) {
    case EntryFormat::kFloat32:
    case EntryFormat::kFloat16:
    case EntryFormat::kBFloat16:
      store_plain(row, rows.format, rows.width, address.data);
      break;
    case EntryFormat::kFp8Packed:
      store_packed(row, rows, address);
      break;
    case EntryFormat::kFp8Index:
      store_index(row, rows, address);
      break;
    case EntryFormat::kMxfp4Index:
      store_mxfp4(row, rows, address);
      break;
  }
}

}  // namespace
}  // namespace hetkv::HETKV_LEVEL
