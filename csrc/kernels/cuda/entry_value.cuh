// Single values as float: of a plain row, of a stored row of any format, and into a plain row.
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "kernels/math/float8.h"
#include "kernels/paged_rows.h"

namespace hetkv::gpu {

HETKV_DEVICE_INLINE float plain_value(const std::byte* row, EntryFormat format, int index) {
  if (format == EntryFormat::kFloat32) return reinterpret_cast<const float*>(row)[index];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(row)[index];
  return format == EntryFormat::kFloat16 ? f16_to_float(bits) : bf16_to_float(bits);
}

// Rounds to nearest even.
HETKV_DEVICE_INLINE void store_plain_value(std::byte* row, EntryFormat format, std::int64_t index, float value) {
  if (format == EntryFormat::kFloat32) {
    reinterpret_cast<float*>(row)[index] = value;
  } else {
    reinterpret_cast<std::uint16_t*>(row)[index] = format == EntryFormat::kFloat16 ? float_to_f16(value) : float_to_bf16(value);
  }
}

// Of bytes at any address.
HETKV_DEVICE_INLINE std::uint32_t bytes_as_word(const std::byte* from, int count) {
  std::uint32_t word = 0;
  for (int i = 0; i < count; ++i) word |= static_cast<std::uint32_t>(from[i]) << (8 * i);
  return word;
}

HETKV_DEVICE_INLINE float entry_value(const PagedRows& rows, RowAddress address, int index) {
  switch (rows.format) {
    case EntryFormat::kFp8Packed: {
      const int plain = rows.width - kPackedRope;
      if (index >= plain) return __uint_as_float(bytes_as_word(address.data + plain + 2 * (index - plain), 2) << 16);
      const float scale = power_of_two(static_cast<int>(address.scale[index / kPackedGroup]) - 127);
      return from_e4m3(static_cast<std::uint8_t>(address.data[index])) * scale;
    }
    case EntryFormat::kFp8Index:
      return from_e4m3(static_cast<std::uint8_t>(address.data[index])) * __uint_as_float(bytes_as_word(address.scale, 4));
    case EntryFormat::kMxfp4Index: {
      const auto pair = static_cast<std::uint32_t>(address.data[index / 2]);
      const float scale = power_of_two(static_cast<int>(address.scale[index / kMxfp4Group]) - 127);
      return from_e2m1(static_cast<std::uint8_t>((pair >> (index % 2 * 4)) & 15u)) * scale;
    }
    default:
      return plain_value(address.data, rows.format, index);
  }
}

}  // namespace hetkv::gpu
