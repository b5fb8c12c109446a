// The k best of a row of scores, in a fixed order: score descending, then index ascending. Parameters and entry points.
//
// -0 equals +0, and NaN is below -inf. Rows with fewer than k scores end with -1. The result depends on nothing but the scores.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace hetkv {

inline constexpr std::int32_t kMaxTopKCuda = 4096;  // the largest k of the CUDA kernel; the CPU takes any

struct TopKParams {
  const float* scores = nullptr;         // [num_rows, width], rows `stride` floats apart
  const std::int32_t* counts = nullptr;  // [num_rows]: only the first counts[r] scores of row r count; null: all
  std::int32_t* indices = nullptr;       // [num_rows, k]
  std::int64_t num_rows = 0;
  std::int64_t width = 0;
  std::int64_t stride = 0;
  std::int32_t k = 0;  // >= 1
};

// Rises with the order of scores: a larger key is a better score. NaN gives 0.
HETKV_HOST_DEVICE inline std::uint32_t score_key(float score) {
#ifdef HETKV_PLANT_MINUS_ZERO
  const float plain = score;
#else
  const float plain = score + 0.0f;  // -0 + 0 = +0
#endif
  if (!(plain == plain)) return 0;
  std::uint32_t bits = 0;
  __builtin_memcpy(&bits, &plain, sizeof bits);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// 64-bit words of scratch for rows of up to `width` scores.
std::int64_t top_k_scratch_words(std::int64_t width, std::int64_t k) noexcept;

// Row by row. scratch: top_k_scratch_words(params.width, params.k). Thread-safe over disjoint rows; allocates nothing.
void top_k_cpu(const TopKParams& params, std::int64_t begin, std::int64_t end, std::uint64_t* scratch) noexcept;

// One row of `count` scores; indices[k]. scratch: top_k_scratch_words(count, k).
void top_k_row_cpu(const float* scores, std::int64_t count, std::int32_t k, std::int32_t* indices,
                   std::uint64_t* scratch) noexcept;

// 64-bit words of workspace that top_k_cuda needs: k per chunk of a long row, none for rows of one chunk. From shapes alone.
std::int64_t top_k_cuda_workspace_words(const TopKParams& params);
// k at most kMaxTopKCuda. counts are read on the device. One launch, or two for long rows, both sized by shapes: may be captured.
// Allocates nothing, does not block. Throws CudaError if a launch is refused.
void top_k_cuda(const TopKParams& params, std::uint64_t* workspace, void* stream);

// The builds of cpu/levels: of scores [begin, end) those with score_key >= least, as score_key << 32 | ~index, in order. Stops where less
// than a vector of the room, at least 16 words, is left; writes nothing beyond it. Returns how many were taken.
using TakeScoresFn = std::int64_t(const float* scores, std::int64_t begin, std::int64_t end, std::uint32_t least,
                                  std::uint64_t* taken, std::int64_t room, std::int64_t* stopped) noexcept;
namespace portable {
TakeScoresFn take_scores;
}
namespace avx2 {
TakeScoresFn take_scores;
}
namespace avx512 {
TakeScoresFn take_scores;
}

}  // namespace hetkv
