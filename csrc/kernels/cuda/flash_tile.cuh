// One warp's part of attention on tensor cores: 16 query rows against 16-bit keys and values that lie in shared memory, softmax as it
// goes. What the attention kernels over plain rows share.
//
// With g = lane / 4, t = lane % 4, a lane holds of every 16 x 8 product the columns 2t and 2t + 1 of row g, then of row g + 8:
// "half" 0 and 1. A tile in shared memory has rows of kDim values in 16-byte chunks, chunk c of row r at place c ^ (r & 7), its base
// 128-byte aligned: no bank conflicts for copies and matrix loads.
//
// Scores carry a factor log2(e). What a row gets depends on its own visible keys, their order and where 16-key steps begin: a step of
// which it sees nothing multiplies its sums by 1 and adds 0.
#pragma once

#include "kernels/cuda/half_product.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/softmax.cuh"
#include "kernels/paged_rows.h"

namespace hetkv::gpu {

inline constexpr int kWarpRows = 16;    // query rows of a warp
inline constexpr int kChunkBytes = 16;  // of a swizzled row

template <int kDim>
HETKV_DEVICE_INLINE std::uint32_t swizzled(std::uint32_t tile, int row, int chunk) {
  return tile + static_cast<std::uint32_t>(row * 2 * kDim + ((chunk ^ (row & 7)) * kChunkBytes));
}

// The same for chunk 2 step + odd, of a constant step: an xor and a constant, so that few addresses need registers.
template <int kDim>
HETKV_DEVICE_INLINE std::uint32_t swizzled_step(std::uint32_t tile, int row, int odd, int step) {
  const int of_lane = (odd ^ (row & 7)) * kChunkBytes;
  return tile + static_cast<std::uint32_t>(row * 2 * kDim) + static_cast<std::uint32_t>(of_lane ^ (step % 4 * 2 * kChunkBytes)) +
         static_cast<std::uint32_t>(step / 4 * 8 * kChunkBytes);
}

// Rows [0, 16) of a tile of queries, columns [16 step, 16 step + 16), as the first factor.
template <int kDim>
HETKV_DEVICE_INLINE void load_queries(std::uint32_t (&a)[4], std::uint32_t tile, int step, int lane) {
  load_matrix_x4(a, swizzled_step<kDim>(tile, lane & 15, lane >> 4, step));
}

// scores[2][4] += queries (columns of `step`) x 16 keys from row `first` of the tile on.
template <EntryFormat kFormat, int kDim>
HETKV_DEVICE_INLINE void add_scores(float (&low)[4], float (&high)[4], const std::uint32_t (&a)[4], std::uint32_t tile, int first,
                                    int step, int lane) {
  std::uint32_t b[4];
  load_matrix_x4(b, swizzled_step<kDim>(tile, first + ((lane >> 4) << 3) + (lane & 7), (lane >> 3) & 1, step));
  multiply_add<kFormat>(low, a, b[0], b[1]);
  multiply_add<kFormat>(high, a, b[2], b[3]);
}

// out += weights of 16 keys x their values, from row `first` of the tile on.
template <EntryFormat kFormat, int kDim>
HETKV_DEVICE_INLINE void add_values(float (&out)[kDim / 8][4], const std::uint32_t (&weights)[4], std::uint32_t tile, int first,
                                    int lane) {
#pragma unroll
  for (int pair = 0; pair < kDim / 16; ++pair) {
    std::uint32_t b[4];
    load_matrix_x4_trans(b, swizzled_step<kDim>(tile, first + (lane & 15), lane >> 4, pair));
    multiply_add<kFormat>(out[2 * pair], weights, b[0], b[1]);
    multiply_add<kFormat>(out[2 * pair + 1], weights, b[2], b[3]);
  }
}

// 1 in each half that is not finite / not 0.
template <EntryFormat kFormat>
HETKV_DEVICE_INLINE std::uint32_t halves_not_finite(std::uint32_t pair) {
  constexpr std::uint32_t kExponent = kFormat == EntryFormat::kBFloat16 ? 0x7f80u : 0x7c00u;
  return ((pair & kExponent) == kExponent ? 1u : 0u) | ((pair & (kExponent << 16)) == kExponent << 16 ? 0x10000u : 0u);
}
HETKV_DEVICE_INLINE std::uint32_t halves_not_zero(std::uint32_t pair) {
  return ((pair & 0x7fffu) != 0 ? 1u : 0u) | ((pair & 0x7fff0000u) != 0 ? 0x10000u : 0u);
}

// The same where not every row sees every key: a value that is not finite makes NaN of the output of rows that weigh it, and of no
// other, though 0 times it is NaN. Such values are multiplied as 0; a second product counts them for each row and column.
template <EntryFormat kFormat, int kDim>
HETKV_DEVICE_INLINE void add_values_apart(float (&out)[kDim / 8][4], const std::uint32_t (&weights)[4], std::uint32_t tile,
                                          int first, int lane) {
#ifdef HETKV_PLANT_ZERO_TIMES_NAN
  return add_values<kFormat, kDim>(out, weights, tile, first, lane);
#endif
  constexpr std::uint32_t kOne = kFormat == EntryFormat::kBFloat16 ? 0x3f80u : 0x3c00u;
#pragma unroll
  for (int pair = 0; pair < kDim / 16; ++pair) {
    std::uint32_t b[4], bad[4];
    load_matrix_x4_trans(b, swizzled_step<kDim>(tile, first + (lane & 15), lane >> 4, pair));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bad[i] = halves_not_finite<kFormat>(b[i]);
      b[i] &= ~(bad[i] * 0xffffu);
    }
    multiply_add<kFormat>(out[2 * pair], weights, b[0], b[1]);
    multiply_add<kFormat>(out[2 * pair + 1], weights, b[2], b[3]);
    if (__any_sync(kAllLanes, static_cast<int>((bad[0] | bad[1] | bad[2] | bad[3]) != 0)) == 0) continue;
    std::uint32_t weighed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weighed[i] = halves_not_zero(weights[i]) * kOne;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float count[4] = {};
      multiply_add<kFormat>(count, weighed, bad[2 * h] * kOne, bad[2 * h + 1] * kOne);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (count[i] > 0.0f) out[2 * pair + h][i] = NAN;
      }
    }
  }
}

// What makes a score of a product.
struct Scaling {
  float factor;  // times log2(e) where nothing is capped
  float cap;     // softcap * log2(e); 0: none
};

HETKV_DEVICE_INLINE Scaling scaling_of(float scale, float softcap) {
  return softcap > 0.0f ? Scaling{scale / softcap, softcap * kLog2e} : Scaling{scale * kLog2e, 0.0f};
}

// tanh(x) = 1 - 2 / (e^2x + 1), clamped where it is 1. NaN stays.
HETKV_DEVICE_INLINE float tanh_of(float x) {
  const float clamped = x > 15.0f ? 15.0f : x < -15.0f ? -15.0f : x;
  return 1.0f - __fdividef(2.0f, exp2_approx(clamped * (2.0f * kLog2e)) + 1.0f);
}

template <int kTiles>
HETKV_DEVICE_INLINE void scale_scores(float (&scores)[kTiles][4], const Scaling& scaling) {
  if (scaling.cap > 0.0f) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = tanh_of(scores[n][i] * scaling.factor) * scaling.cap;
    }
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] *= scaling.factor;
    }
  }
}

// Of the two rows of a lane. largest is the quad's, sum the lane's own part of it until sum_quad.
struct Softmax {
  float largest[2];
  float sum[2];
};

template <int kTiles>
HETKV_DEVICE_INLINE void reset(Softmax& softmax, float (&out)[kTiles][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    softmax.largest[h] = -INFINITY;
    softmax.sum[h] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
  }
}

// Scores become weights 2^(score - largest), -inf a weight of 0; sums and output move on to the new largest. All lanes.
template <int kTiles, int kOutTiles>
HETKV_DEVICE_INLINE void weigh(float (&scores)[kTiles][4], Softmax& softmax, float (&out)[kOutTiles][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = softmax.largest[h];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) largest = fmaxf(largest, fmaxf(scores[n][2 * h], scores[n][2 * h + 1]));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    const float base = base_of(largest), shrink = exp2_approx(softmax.largest[h] - base);
    float sum = softmax.sum[h] * shrink;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 2 * h; i < 2 * h + 2; ++i) {
        scores[n][i] = exp2_approx(scores[n][i] - base);
        sum += scores[n][i];
      }
    }
    softmax.largest[h] = largest;
    softmax.sum[h] = sum;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      out[n][2 * h] *= shrink;
      out[n][2 * h + 1] *= shrink;
    }
  }
}

HETKV_DEVICE_INLINE void sum_quad(Softmax& softmax) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    softmax.sum[h] += __shfl_xor_sync(kAllLanes, softmax.sum[h], 1);
    softmax.sum[h] += __shfl_xor_sync(kAllLanes, softmax.sum[h], 2);
  }
}

// The weights of 16 keys as the first factor of the product with their values.
template <EntryFormat kFormat>
HETKV_DEVICE_INLINE void pack_weights(std::uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = pack_pair<kFormat>(low[0], low[1]);
  a[1] = pack_pair<kFormat>(low[2], low[3]);
  a[2] = pack_pair<kFormat>(high[0], high[1]);
  a[3] = pack_pair<kFormat>(high[2], high[3]);
}

// Joins two parts of a softmax. Explicit operations: the same bits in every kernel that joins the same parts in the same order.
struct Join {
  float largest, keep, take;  // keep, take: what the total and the part are worth
};

HETKV_DEVICE_INLINE Join join_of(float total_largest, float part_largest) {
  const float largest = fmaxf(total_largest, part_largest), base = base_of(largest);
  return {largest, exp2_approx(total_largest - base), exp2_approx(part_largest - base)};
}

HETKV_DEVICE_INLINE float joined(float total, float part, const Join& join) {
  return __fmaf_rn(total, join.keep, __fmul_rn(part, join.take));
}

HETKV_DEVICE_INLINE float4 joined(const float4& total, const float4& part, const Join& join) {
  return make_float4(joined(total.x, part.x, join), joined(total.y, part.y, join), joined(total.z, part.z, join),
                     joined(total.w, part.w, join));
}

}  // namespace hetkv::gpu
