// A block per row, or per chunk of a long row. The keys of a round of scores stay in registers: each warp has 512 neighbours, so that
// order within a warp follows from ballots, and order between warps from one sum over the counts of the warps before.
//
// Histograms of 11, 11 and 10 bits (shared memory, integer atomics: no order to depend on) name the k-th best key, and how many of its
// equals are still wanted; those are the first ones. What is kept goes to its place in order of index. Rows of one chunk are sorted at
// once. Longer ones keep k of each chunk as 64-bit words, score key above inverted index; a second launch selects among these, again
// in order of index, and sorts. No atomic ever chooses a place, and nothing depends on the chunks.
#include "kernels/top_k.h"

#include <algorithm>
#include <climits>

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/launch.cuh"

namespace hetkv {
namespace {

constexpr int kKeys = 16;  // of a thread, in registers
constexpr int kFewThreads = 256, kManyThreads = 1024;
constexpr std::int64_t kFewScores = std::int64_t{kFewThreads} * kKeys;
constexpr std::int64_t kChunk = std::int64_t{kManyThreads} * kKeys;
constexpr int kBins = 2048;
constexpr std::int64_t kMaxGridY = 65535;

static_assert(kMaxTopKCuda <= kFewScores && kMaxTopKCuda * sizeof(std::uint64_t) + kBins * 4 + 1024 <= kPlainSharedBytes);

template <int kThreads>
struct SelectShared {
  static constexpr std::size_t kWarps = static_cast<std::size_t>(kThreads) / 32;
  std::uint32_t bins[kBins];
  std::uint32_t totals[kWarps];  // of bins, by warp
  int greater[kWarps];           // keys of a warp
  int equal[kWarps];
  std::uint32_t bin, above, here;  // the bin of the k-th best key, keys in the bins above it, keys in it
};
using FewShared = SelectShared<kFewThreads>;
using ManyShared = SelectShared<kManyThreads>;

// Where keys come from. word: the key above the inverted index, unique.
struct Scores {
  const float* scores;
  std::uint32_t first;  // index of scores[0]
  HETKV_DEVICE_INLINE std::uint32_t key(std::int64_t i) const { return score_key(scores[i]); }
  HETKV_DEVICE_INLINE std::uint64_t word(std::int64_t i, std::uint32_t key) const {
    return static_cast<std::uint64_t>(key) << 32 | (0xffffffffu - (first + static_cast<std::uint32_t>(i)));
  }
};
struct Survivors {
  const std::uint64_t* words;
  HETKV_DEVICE_INLINE std::uint32_t key(std::int64_t i) const { return static_cast<std::uint32_t>(words[i] >> 32); }
  HETKV_DEVICE_INLINE std::uint64_t word(std::int64_t i, std::uint32_t) const { return words[i]; }
};

// Sum over the warps before, and over all of them.
template <typename T, std::size_t kWarps>
HETKV_DEVICE_INLINE void sum_warps(const T (&of_warp)[kWarps], T& before, T& all) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const T value = lane < static_cast<int>(kWarps) ? of_warp[lane] : T{0};
  before = __reduce_add_sync(gpu::kAllLanes, lane < warp ? value : T{0});
  all = __reduce_add_sync(gpu::kAllLanes, value);
}

// The highest bin such that it and the bins above hold at least `wanted` keys, into shared. Between two barriers.
template <int kThreads>
HETKV_DEVICE_INLINE void find_bin(SelectShared<kThreads>& shared, std::uint32_t wanted) {
  constexpr int kEach = kBins / kThreads;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int top = kBins - 1 - thread * kEach;
  std::uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += shared.bins[top - i];
  std::uint32_t before = sum;
#pragma unroll
  for (unsigned offset = 1; offset < 32; offset *= 2) {
    const std::uint32_t other = __shfl_up_sync(gpu::kAllLanes, before, offset);
    if (lane >= static_cast<int>(offset)) before += other;
  }
  if (lane == 31) shared.totals[thread / 32] = before;
  __syncthreads();
  std::uint32_t above = 0, all = 0;
  sum_warps(shared.totals, above, all);
  above += before - sum;
  if (above >= wanted || above + sum < wanted) return;  // one thread goes on
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const std::uint32_t here = shared.bins[top - i];
    if (above < wanted && above + here >= wanted) {
      shared.bin = static_cast<std::uint32_t>(top - i);
      shared.above = above;
      shared.here = here;
    }
    above += here;
  }
}

// Calls take(place, i, key) for the best k of `count` keys, or for all if there are fewer; places count up from 0 in order of i.
template <int kThreads, typename Source, typename Take>
HETKV_DEVICE_INLINE void select_best(const Source& source, std::int64_t count, int k, SelectShared<kThreads>& shared,
                                     const Take& take) {
  constexpr int kRound = kThreads * kKeys;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first = warp * 32 * kKeys + lane;
  const std::int64_t rounds = (count + kRound - 1) / kRound;
  std::uint32_t keys[kKeys];
  std::int64_t held = -1;
  int left = 0;  // the thread's key j is there if 32 j < left
  const auto hold = [&](std::int64_t round) {
    if (round == held) return;
    held = round;
    const std::int64_t start = round * kRound + first, rest = count - start;
    left = rest < kRound ? static_cast<int>(rest) : kRound;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) keys[j] = 32 * j < left ? source.key(start + 32 * j) : 0u;
  };

  // Keys above `least` are taken, and the first `ties` of those that equal it.
  std::uint32_t least = 0;
  int ties = INT_MAX;
  if (count > k) {
    std::uint32_t wanted = static_cast<std::uint32_t>(k), prefix = 0;
    for (int digit = 0; digit < 3; ++digit) {
      const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bits = digit == 2 ? 10 : 11;
      for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) shared.bins[i] = 0;
      __syncthreads();
      for (std::int64_t round = 0; round < rounds; ++round) {
        hold(round);
#pragma unroll
        for (int j = 0; j < kKeys; ++j) {
          const bool counts = 32 * j < left && (digit == 0 || keys[j] >> (shift + bits) == prefix);
          if (counts) atomicAdd(&shared.bins[(keys[j] >> shift) & ((1u << bits) - 1)], 1u);
        }
      }
      __syncthreads();
      find_bin(shared, wanted);
      __syncthreads();
      prefix = prefix << bits | shared.bin;
      wanted -= shared.above;
      least = prefix << shift;
      if (shared.here == wanted) break;  // the whole bin: its keys are at least `least`
      if (digit == 2) ties = static_cast<int>(wanted);
    }
  }

  int greater = 0, equal = 0;  // of earlier rounds
  for (std::int64_t round = 0; round < rounds; ++round) {
    hold(round);
    int of_warp_greater = 0, of_warp_equal = 0;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      of_warp_greater += __popc(__ballot_sync(gpu::kAllLanes, 32 * j < left && keys[j] > least));
      of_warp_equal += __popc(__ballot_sync(gpu::kAllLanes, 32 * j < left && keys[j] == least));
    }
    if (lane == 0) {
      shared.greater[warp] = of_warp_greater;
      shared.equal[warp] = of_warp_equal;
    }
    __syncthreads();
    int greater_before = 0, equal_before = 0, all_greater = 0, all_equal = 0;
    sum_warps(shared.greater, greater_before, all_greater);
    sum_warps(shared.equal, equal_before, all_equal);
    greater_before += greater;
#ifndef HETKV_PLANT_TIES_OF_ROUND
    equal_before += equal;
#endif
    greater += all_greater;
    equal += all_equal;
    const std::uint32_t lanes_before = (1u << lane) - 1;
    const std::int64_t start = round * kRound + first;
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
      const bool is_greater = 32 * j < left && keys[j] > least, is_equal = 32 * j < left && keys[j] == least;
      const std::uint32_t lanes_greater = __ballot_sync(gpu::kAllLanes, is_greater);
      const std::uint32_t lanes_equal = __ballot_sync(gpu::kAllLanes, is_equal);
      const int tie = equal_before + __popc(lanes_equal & lanes_before);
      const int place = greater_before + __popc(lanes_greater & lanes_before) + (tie < ties ? tie : ties);
      if (is_greater || (is_equal && tie < ties)) take(place, start + 32 * j, keys[j]);
      greater_before += __popc(lanes_greater);
      equal_before += __popc(lanes_equal);
    }
    __syncthreads();
  }
}

// words[count], count a power of two. Pairs with a stride of at most 32 lie within 64 words, which are one warp's alone.
template <int kThreads>
HETKV_DEVICE_INLINE void sort_descending(std::uint64_t* words, int count) {
  bool others_wrote = true;
  for (int size = 2; size <= count; size *= 2) {
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const bool wide = stride > 32;
      if (wide || others_wrote) {
        __syncthreads();
      } else {
        __syncwarp();
      }
      others_wrote = wide;
      for (int pair = static_cast<int>(threadIdx.x); pair < count / 2; pair += kThreads) {
        const int low = 2 * pair - (pair & (stride - 1)), high = low + stride;
        const std::uint64_t a = words[low], b = words[high];
        if ((a < b) == ((low & size) == 0)) {
          words[low] = b;
          words[high] = a;
        }
      }
    }
  }
  __syncthreads();
}

// The row's indices from the best k of a source. best: shared, k rounded up to a power of two.
template <int kThreads, typename Source>
HETKV_DEVICE_INLINE void store_best(const Source& source, std::int64_t count, int k, SelectShared<kThreads>& shared,
                                    std::uint64_t* best, std::int32_t* indices) {
  const int taken = count < k ? static_cast<int>(count) : k;
  int padded = 1;
  while (padded < taken) padded *= 2;
  for (int i = taken + static_cast<int>(threadIdx.x); i < padded; i += kThreads) best[i] = 0;  // below every word
  select_best(source, count, k, shared, [&](int place, std::int64_t i, std::uint32_t key) { best[place] = source.word(i, key); });
  sort_descending<kThreads>(best, padded);
  for (int i = static_cast<int>(threadIdx.x); i < k; i += kThreads) {
    indices[i] = i < taken ? static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(best[i])) : -1;
  }
  __syncthreads();
}

HETKV_DEVICE_INLINE std::int64_t count_of(const TopKParams& params, std::int64_t row) {
  if (params.counts == nullptr) return params.width;
  const std::int64_t count = params.counts[row];
  return count < 0 ? 0 : count < params.width ? count : params.width;
}

HETKV_HOST_DEVICE inline std::int64_t chunks_of(std::int64_t count) { return (count + kChunk - 1) / kChunk; }

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) top_k_row_kernel(const TopKParams params) {
  HETKV_SHARED(SelectShared<kThreads>, shared);
  HETKV_DYNAMIC_SHARED(bytes);
  for (std::int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    const Scores scores{params.scores + row * params.stride, 0};
    store_best<kThreads>(scores, count_of(params, row), params.k, shared, reinterpret_cast<std::uint64_t*>(bytes),
                         params.indices + row * params.k);
  }
}

__global__ void __launch_bounds__(kManyThreads, 1) top_k_chunk_kernel(const TopKParams params, std::uint64_t* survivors) {
  HETKV_SHARED(ManyShared, shared);
  const std::int64_t row_words = chunks_of(params.width) * params.k;
  for (std::int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    const std::int64_t count = count_of(params, row), chunks = chunks_of(count);
    for (std::int64_t chunk = blockIdx.y; chunk < chunks; chunk += gridDim.y) {
      const std::int64_t first = chunk * kChunk, rest = count - first;
      const Scores scores{params.scores + row * params.stride + first, static_cast<std::uint32_t>(first)};
      std::uint64_t* const kept = survivors + row * row_words + chunk * params.k;
      select_best(scores, rest < kChunk ? rest : kChunk, params.k, shared,
                  [&](int place, std::int64_t i, std::uint32_t key) { kept[place] = scores.word(i, key); });
    }
  }
}

__global__ void __launch_bounds__(kManyThreads, 1) top_k_merge_kernel(const TopKParams params, const std::uint64_t* survivors) {
  HETKV_SHARED(ManyShared, shared);
  HETKV_DYNAMIC_SHARED(bytes);
  const std::int64_t row_words = chunks_of(params.width) * params.k;
  for (std::int64_t row = blockIdx.x; row < params.num_rows; row += gridDim.x) {
    const std::int64_t count = count_of(params, row), whole = count / kChunk, rest = count % kChunk;
    const Survivors words{survivors + row * row_words};
    store_best<kManyThreads>(words, whole * params.k + (rest < params.k ? rest : params.k), params.k, shared,
                             reinterpret_cast<std::uint64_t*>(bytes), params.indices + row * params.k);
  }
}

}  // namespace

std::int64_t top_k_cuda_workspace_words(const TopKParams& params) {
  return params.width <= kChunk ? 0 : params.num_rows * chunks_of(params.width) * params.k;
}

void top_k_cuda(const TopKParams& params, std::uint64_t* workspace, void* stream) {
  constexpr const char* kOp = "top_k";
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  std::size_t sorted = 1;
  while (static_cast<std::int64_t>(sorted) < std::min<std::int64_t>(params.k, params.width)) sorted *= 2;
  sorted *= sizeof(std::uint64_t);
  const auto rows = static_cast<unsigned>(std::min(params.num_rows, kMaxGridX));
  if (params.width <= kFewScores) {
    return launch<top_k_row_kernel<kFewThreads>>(kOp, dim3(rows), dim3(kFewThreads), sorted, cuda_stream, params);
  }
  if (params.width <= kChunk) {
    return launch<top_k_row_kernel<kManyThreads>>(kOp, dim3(rows), dim3(kManyThreads), sorted, cuda_stream, params);
  }
  const dim3 chunks(rows, static_cast<unsigned>(std::min(chunks_of(params.width), kMaxGridY)));
  launch<top_k_chunk_kernel>(kOp, chunks, dim3(kManyThreads), 0, cuda_stream, params, workspace);
  const std::uint64_t* const survivors = workspace;
  launch<top_k_merge_kernel>(kOp, dim3(rows), dim3(kManyThreads), sorted, cuda_stream, params, survivors);
}

}  // namespace hetkv
