// Products and pairs of a 16-bit type that a kernel is compiled for: kBFloat16 or kFloat16.
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "kernels/paged_rows.h"

namespace hetkv::gpu {

template <EntryFormat kFormat>
HETKV_DEVICE_INLINE void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (kFormat == EntryFormat::kBFloat16) {
    mma_bf16(c, a, b0, b1);
  } else {
    mma_f16(c, a, b0, b1);
  }
}

template <EntryFormat kFormat>
HETKV_DEVICE_INLINE std::uint32_t pack_pair(float low, float high) {
  return kFormat == EntryFormat::kBFloat16 ? pack_bf16(low, high) : pack_f16(low, high);
}

}  // namespace hetkv::gpu
