// Reading one stored row, of any format, as float.
//
//   load_entry(rows, address, out)   out[rows.width]; the row at `address` (row_address, slot_address)
//   load_plain(from, format, n, out) n values of an unpacked format
//   float_row(rows, address)         the row itself if it is stored as float, else nullptr
#pragma once

#include "kernels/cpu/levels/simd.h"
#include "kernels/math/float8.h"
#include "kernels/paged_rows.h"

namespace hetkv::HETKV_LEVEL {
namespace {

using Bytes = std::uint8_t __attribute__((vector_size(kLanes)));

inline const float* float_row(const PagedRows& rows, RowAddress address) {
  return rows.format == EntryFormat::kFloat32 ? reinterpret_cast<const float*>(address.data) : nullptr;
}

// e4m3 codes: shifted to the place of a half, a code's value is 2^8 too small, denormals included.
inline Float from_e4m3(Bytes codes, Float scale_by_256) {
  const Half wide = __builtin_convertvector(codes, Half);
  const Half bits = ((wide & 0x7f) << 7) | ((wide & 0x80) << 8);
  return from_float16(bits) * scale_by_256;
}

template <bool kBFloat16>
inline void load_halves(const std::byte* from, int count, float* out) {
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) {
    const Half bits = load<Half>(from + std::ptrdiff_t{2} * i);
    store(out + i, kBFloat16 ? from_bfloat16(bits) : from_float16(bits));
  }
  for (int i = whole; i < count; ++i) {
    Half bits{};
    __builtin_memcpy(&bits, from + std::ptrdiff_t{2} * i, 2);
    out[i] = (kBFloat16 ? from_bfloat16(bits) : from_float16(bits))[0];
  }
}

inline void load_e4m3(const std::byte* from, int count, float scale, float* out) {
  const Float by = splat(scale * 256.0f);
  const int whole = count / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) store(out + i, from_e4m3(load<Bytes>(from + i), by));
  for (int i = whole; i < count; ++i) {
    Bytes codes{};
    __builtin_memcpy(&codes, from + i, 1);
    out[i] = from_e4m3(codes, by)[0];
  }
}

inline void load_plain(const std::byte* from, EntryFormat format, int count, float* out) {
  switch (format) {
    case EntryFormat::kFloat16:
      load_halves<false>(from, count, out);
      break;
    case EntryFormat::kBFloat16:
      load_halves<true>(from, count, out);
      break;
    default:
      __builtin_memcpy(out, from, static_cast<std::size_t>(count) * 4);
  }
}

inline void load_entry(const PagedRows& rows, RowAddress address, float* out) {
  const int width = rows.width;
  switch (rows.format) {
    case EntryFormat::kFloat32:
    case EntryFormat::kFloat16:
    case EntryFormat::kBFloat16:
      load_plain(address.data, rows.format, width, out);
      break;
    case EntryFormat::kFp8Packed: {
      const int plain = width - kPackedRope;
      for (int group = 0; group * kPackedGroup < plain; ++group) {
        const int exponent = static_cast<int>(address.scale[group]) - 127;
        load_e4m3(address.data + group * kPackedGroup, kPackedGroup, power_of_two(exponent), out + group * kPackedGroup);
      }
      load_halves<true>(address.data + plain, kPackedRope, out + plain);
      break;
    }
    case EntryFormat::kFp8Index: {
      float scale = 0;
      __builtin_memcpy(&scale, address.scale, 4);
      load_e4m3(address.data, width, scale, out);
      break;
    }
    case EntryFormat::kMxfp4Index:
      for (int i = 0; i < width; ++i) {
        const auto pair = static_cast<std::uint8_t>(address.data[i / 2]);
        const int exponent = static_cast<int>(address.scale[i / kMxfp4Group]) - 127;
        out[i] = from_e2m1(static_cast<std::uint8_t>(i % 2 == 0 ? pair & 15 : pair >> 4)) * power_of_two(exponent);
      }
      break;
  }
}

}  // namespace
}  // namespace hetkv::HETKV_LEVEL
