// One row of floats in the registers of a group of lanes: loading, RMS norm, rotation, and storing in any format. What the kernels
// that write entries share.
//
// A group has 8, 16, 32, 64 or 128 lanes, neighbours in the block; lane l holds the 8 values from 8 l on, 0 behind the row's width. A
// thread never holds more, so registers do not grow with the width. All threads of the block call these functions, with one width
// and one format: a group without a row passes `active` = false.
//
// The bytes are those of cpu/levels/entry_store.h for the same floats; only a NaN stored as float16 may have another payload.
#pragma once

#include "kernels/cuda/entry_value.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/math/float8.h"
#include "kernels/paged_rows.h"

namespace hetkv::gpu {

inline constexpr int kRun = 8;
inline constexpr int kLanesOfFp8Group = kPackedGroup / kRun;
inline constexpr int kLanesOfMxfp4Group = kMxfp4Group / kRun;

template <typename Unit>
HETKV_DEVICE_INLINE bool aligned_for(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % sizeof(Unit) == 0;
}

// Values [first, first + 8) of a row of `width` values of a plain format. Wide accesses where the address allows.
HETKV_DEVICE_INLINE void load_run(const std::byte* row, EntryFormat format, int first, int width, float (&run)[kRun]) {
  const int value_bytes = format == EntryFormat::kFloat32 ? 4 : 2;
  const std::byte* const from = row + static_cast<std::int64_t>(first) * value_bytes;
  if (first + kRun > width || !aligned_for<uint4>(from)) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) run[j] = first + j < width ? plain_value(row, format, first + j) : 0.0f;
    return;
  }
  const uint4 low = reinterpret_cast<const uint4*>(from)[0];
  if (format == EntryFormat::kFloat32) {
    const uint4 high = reinterpret_cast<const uint4*>(from)[1];
    const std::uint32_t words[kRun] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < kRun; ++j) run[j] = __uint_as_float(words[j]);
    return;
  }
  const std::uint32_t pairs[kRun / 2] = {low.x, low.y, low.z, low.w};
#pragma unroll
  for (int j = 0; j < kRun / 2; ++j) {
    run[2 * j] = format == EntryFormat::kFloat16 ? low_f16(pairs[j]) : low_bf16(pairs[j]);
    run[2 * j + 1] = format == EntryFormat::kFloat16 ? high_f16(pairs[j]) : high_bf16(pairs[j]);
  }
}

struct Lane {
  int index;  // of the group
  int lanes;
  int first;  // value of the row
};

// The lane of a thread in a group for rows of `width` values, the smallest that covers them.
HETKV_HOST_DEVICE inline int lane_shift_for(int width) {
  int shift = 3;
  while ((kRun << shift) < width) ++shift;
  return shift;
}
HETKV_DEVICE_INLINE Lane lane_of(int thread, int lane_shift) {
  const int index = thread & ((1 << lane_shift) - 1);
  return {index, 1 << lane_shift, index * kRun};
}

// Orders shared memory among the lanes of each group.
HETKV_DEVICE_INLINE void group_barrier(const Lane& lane) {
  if (lane.lanes > 32) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

// The group's value of an operation that is the same in any order of its two operands, combined in an order that follows from the
// number of lanes alone. scratch: shared, one value per warp of the block.
template <typename T, typename Combine>
HETKV_DEVICE_INLINE T combine_lanes(T value, const Lane& lane, T* scratch, Combine combine) {
  for (int offset = (lane.lanes < 32 ? lane.lanes : 32) / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  if (lane.lanes <= 32) return value;
  const int warp = static_cast<int>(threadIdx.x) / 32, first_warp = warp - lane.index / 32;
  if (threadIdx.x % 32 == 0) scratch[warp] = value;
  __syncthreads();
  T total = scratch[first_warp];
  for (int i = 1; i < lane.lanes / 32; ++i) total = combine(total, scratch[first_warp + i]);
  __syncthreads();
  return total;
}

// The run of the row divided by its root mean square, times weight[width].
HETKV_DEVICE_INLINE void norm_run(float (&run)[kRun], const float* weight, int width, float eps, const Lane& lane,
                                  float* scratch) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kRun; ++j) squares += run[j] * run[j];
  const float total = combine_lanes(squares, lane, scratch, [](float a, float b) { return a + b; });
  const float scale = 1.0f / sqrtf(total / static_cast<float>(width) + eps);
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    if (lane.first + j < width) run[j] = run[j] * scale * weight[lane.first + j];
  }
}

// (a, b) -> (a cos - b sin, b cos + a sin) for the neighbours from `start` on, an even index; cos, sin: [rope / 2].
HETKV_DEVICE_INLINE void rotate_neighbours(float (&run)[kRun], const float* cos, const float* sin, int start, int rope,
                                           const Lane& lane) {
#pragma unroll
  for (int j = 0; j < kRun; j += 2) {
    const int place = lane.first + j - start;
    if (place < 0 || place >= rope) continue;
    const float c = cos[place / 2], s = sin[place / 2];
    const float a = run[j], b = run[j + 1];
    run[j] = a * c - b * s;
    run[j + 1] = b * c + a * s;
  }
}

template <int kWords>
HETKV_DEVICE_INLINE void store_words(std::byte* to, const std::uint32_t (&words)[kWords]) {
  if constexpr (kWords == 4) {
    if (aligned_for<uint4>(to)) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      return;
    }
  } else if constexpr (kWords == 2) {
    if (aligned_for<uint2>(to)) {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
      return;
    }
  } else {
    if (aligned_for<std::uint32_t>(to)) {
      *reinterpret_cast<std::uint32_t*>(to) = words[0];
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < 4 * kWords; ++i) to[i] = static_cast<std::byte>(words[i / 4] >> (8 * (i % 4)));
}

// As the CPU rounds: NaN keeps its upper bits. The instruction alone makes every NaN the same.
HETKV_DEVICE_INLINE std::uint32_t round_to_bf16_pair(float low, float high) {
  std::uint32_t pair = pack_bf16(low, high);
  if (low != low) pair = (pair & 0xffff0000u) | (__float_as_uint(low) >> 16) | 0x40u;
  if (high != high) pair = (pair & 0xffffu) | (__float_as_uint(high) & 0xffff0000u) | 0x400000u;
  return pair;
}

// The run, rounded to bfloat16 in place.
HETKV_DEVICE_INLINE void round_run(float (&run)[kRun]) {
#pragma unroll
  for (int j = 0; j < kRun; j += 2) {
    const std::uint32_t pair = pack_bf16(run[j], run[j + 1]);
    run[j] = low_bf16(pair);
    run[j + 1] = high_bf16(pair);
  }
}

// Largest magnitude of a run as bits, which rise with the values. NaN never is the largest.
HETKV_DEVICE_INLINE std::uint32_t largest_of_run(const float (&run)[kRun]) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const std::uint32_t magnitude = __float_as_uint(run[j]) & 0x7fffffffu;
    if (magnitude <= 0x7f800000u && magnitude > largest) largest = magnitude;
  }
  return largest;
}

// Over `lanes` neighbours inside a warp.
HETKV_DEVICE_INLINE std::uint32_t largest_of_lanes(std::uint32_t largest, int lanes) {
  for (int offset = 1; offset < lanes; offset *= 2) largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  return largest;
}

HETKV_DEVICE_INLINE void store_bf16_run(std::byte* to, const float (&run)[kRun]) {
  std::uint32_t words[kRun / 2];
#pragma unroll
  for (int j = 0; j < kRun / 2; ++j) words[j] = round_to_bf16_pair(run[2 * j], run[2 * j + 1]);
  store_words(to, words);
}

HETKV_DEVICE_INLINE void store_e4m3_run(std::byte* to, const float (&run)[kRun], int exponent) {
  const float by = power_of_two(-exponent);
  std::uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const std::uint32_t low = pack_e4m3(run[4 * w] * by, run[4 * w + 1] * by);
    words[w] = low | static_cast<std::uint32_t>(pack_e4m3(run[4 * w + 2] * by, run[4 * w + 3] * by)) << 16;
  }
  store_words(to, words);
}

HETKV_DEVICE_INLINE void store_plain(const float (&run)[kRun], EntryFormat format, int width, std::byte* row, int first) {
  if (first >= width) return;
  const bool whole = first + kRun <= width;
  if (format == EntryFormat::kFloat32) {
    float* const to = reinterpret_cast<float*>(row) + first;
    if (whole && aligned_for<uint4>(to)) {
      reinterpret_cast<float4*>(to)[0] = make_float4(run[0], run[1], run[2], run[3]);
      reinterpret_cast<float4*>(to)[1] = make_float4(run[4], run[5], run[6], run[7]);
      return;
    }
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      if (first + j < width) to[j] = run[j];
    }
    return;
  }
  std::uint16_t* const to = reinterpret_cast<std::uint16_t*>(row) + first;
  std::uint32_t words[kRun / 2];
#pragma unroll
  for (int j = 0; j < kRun / 2; ++j) {
    words[j] =
        format == EntryFormat::kFloat16 ? pack_f16(run[2 * j], run[2 * j + 1]) : round_to_bf16_pair(run[2 * j], run[2 * j + 1]);
  }
  if (whole && aligned_for<uint4>(to)) {
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    return;
  }
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    if (first + j < width) to[j] = static_cast<std::uint16_t>(words[j / 2] >> (16 * (j % 2)));
  }
}

HETKV_DEVICE_INLINE void store_packed(float (&run)[kRun], const PagedRows& rows, RowAddress address, const Lane& lane,
                                      bool active) {
  const int plain = rows.width - kPackedRope, groups = plain / kPackedGroup;
  if (active && lane.first >= plain && lane.first < rows.width) store_bf16_run(address.data + 2 * lane.first - plain, run);
  round_run(run);
#ifdef HETKV_PLANT_HALF_A_GROUP
  const std::uint32_t largest = largest_of_lanes(largest_of_run(run), kLanesOfFp8Group / 2);
#else
  const std::uint32_t largest = largest_of_lanes(largest_of_run(run), kLanesOfFp8Group);
#endif
  if (!active) return;
  if (lane.first < plain) {
    const int exponent = scale_exponent(__uint_as_float(largest), kE4m3Max);
    store_e4m3_run(address.data + lane.first, run, exponent);
    if (lane.index % kLanesOfFp8Group == 0) address.scale[lane.first / kPackedGroup] = static_cast<std::byte>(exponent + 127);
  }
  if (groups + lane.index < rows.scale_bytes) address.scale[groups + lane.index] = std::byte{0};  // at most 7 bytes of padding
}

HETKV_DEVICE_INLINE void store_index(float (&run)[kRun], const PagedRows& rows, RowAddress address, const Lane& lane, bool active,
                                     float* scratch) {
  round_run(run);
  const float of_run = __uint_as_float(largest_of_run(run));  // never NaN
  const float largest = combine_lanes(of_run, lane, scratch, [](float a, float b) { return a > b ? a : b; });
  if (!active || lane.first >= rows.width) return;
  const int exponent = scale_exponent(largest, kE4m3Max);
  store_e4m3_run(address.data + lane.first, run, exponent);
  const std::uint32_t scale[1] = {__float_as_uint(power_of_two(exponent))};
  if (lane.index == 0) store_words(address.scale, scale);
}

HETKV_DEVICE_INLINE void store_mxfp4(float (&run)[kRun], const PagedRows& rows, RowAddress address, const Lane& lane,
                                     bool active) {
  round_run(run);
  const std::uint32_t largest = largest_of_lanes(largest_of_run(run), kLanesOfMxfp4Group);
  if (!active || lane.first >= rows.width) return;
  const int exponent = scale_exponent(__uint_as_float(largest), kE2m1Max);
  const float by = power_of_two(-exponent);
  std::uint32_t codes[1] = {0};
#pragma unroll
  for (int j = 0; j < kRun; ++j) codes[0] |= static_cast<std::uint32_t>(to_e2m1(run[j] * by)) << (4 * j);
  store_words(address.data + lane.first / 2, codes);
  if (lane.index % kLanesOfMxfp4Group == 0) address.scale[lane.first / kMxfp4Group] = static_cast<std::byte>(exponent + 127);
}

// Stores the row at `address`. Packed formats round to bfloat16 first, then quantise each group with its own power of two. The
// run is used up. scratch: shared, one value per warp of the block.
HETKV_DEVICE_INLINE void store_entry(float (&run)[kRun], const PagedRows& rows, RowAddress address, const Lane& lane, bool active,
                                     float* scratch) {
  switch (rows.format) {
    case EntryFormat::kFp8Packed:
      store_packed(run, rows, address, lane, active);
      break;
    case EntryFormat::kFp8Index:
      store_index(run, rows, address, lane, active, scratch);
      break;
    case EntryFormat::kMxfp4Index:
      store_mxfp4(run, rows, address, lane, active);
      break;
    default:
      if (active) store_plain(run, rows.format, rows.width, address.data, lane.first);
  }
}

}  // namespace hetkv::gpu
