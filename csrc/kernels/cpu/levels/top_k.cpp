#include "kernels/top_k.h"

#include "kernels/cpu/levels/simd.h"

namespace hetkv::HETKV_LEVEL {
namespace {

inline UInt score_keys(Float scores) {  // score_key
  UInt bits = (UInt)scores;
#ifndef HETKV_PLANT_MINUS_ZERO
  bits = bits == 0x80000000u ? UInt{} : bits;  // -0; these sources are compiled as if signs of zeros did not matter
#endif
  const UInt negative = (UInt)((Int)bits >> 31);
  const UInt key = bits ^ (negative | 0x80000000u);
  return scores == scores ? key : UInt{};
}

#if defined(__AVX512F__)
// Appends the keys of the lanes of `mask`; writes kLanes words.
inline std::uint64_t* append(UInt keys, UInt inverted, std::uint32_t mask, std::uint64_t* to) {
  for (int half = 0; half < 2; ++half) {
    const auto eight = static_cast<__mmask8>(mask >> (8 * half));
    const __m256i key = half == 0 ? _mm512_castsi512_si256((__m512i)keys) : _mm512_extracti64x4_epi64((__m512i)keys, 1);
    const __m256i index = half == 0 ? _mm512_castsi512_si256((__m512i)inverted) : _mm512_extracti64x4_epi64((__m512i)inverted, 1);
    const __m512i all = _mm512_or_si512(_mm512_slli_epi64(_mm512_cvtepu32_epi64(key), 32), _mm512_cvtepu32_epi64(index));
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi64(eight, all));  // a compressing store would be slow
    to += __builtin_popcount(eight);
  }
  return to;
}
#endif

}  // namespace

std::int64_t take_scores(const float* scores, std::int64_t begin, std::int64_t end, std::uint32_t least, std::uint64_t* taken,
                         std::int64_t room, std::int64_t* stopped) noexcept {
  std::uint64_t *to = taken, *const last = taken + room - kLanes;  // there is room for a vector up to here
#if defined(__AVX512F__)
  UInt lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<std::uint32_t>(i);
#endif
  std::int64_t at = begin;
  for (; at + kLanes <= end && to <= last; at += kLanes) {
    const UInt keys = score_keys(load_float(scores + at));
#if defined(__AVX512F__)
    const std::uint32_t mask = _mm512_cmpge_epu32_mask((__m512i)keys, _mm512_set1_epi32(static_cast<int>(least)));
    if (mask != 0) to = append(keys, 0xffffffffu - (lanes + static_cast<std::uint32_t>(at)), mask, to);
#else
    const Int good = keys >= least;
#if defined(__AVX2__)
    const bool none = _mm256_testz_si256((__m256i)good, (__m256i)good) != 0;
#else
    const bool none = (good[0] | good[1] | good[2] | good[3]) == 0;
#endif
    if (none) continue;
    for (int i = 0; i < kLanes; ++i) {
      if (good[i] == 0) continue;
      *to++ = std::uint64_t{keys[i]} << 32 | (0xffffffffu - static_cast<std::uint32_t>(at + i));
    }
#endif
  }
  if (at + kLanes > end) {
    for (; at < end && to < taken + room; ++at) {
      const UInt key = score_keys(splat(scores[at]));
      if (key[0] >= least) *to++ = std::uint64_t{key[0]} << 32 | (0xffffffffu - static_cast<std::uint32_t>(at));
    }
  }
  *stopped = at;
  return to - taken;
}

}  // namespace hetkv::HETKV_LEVEL
