// A block of threads per (token, routed block): its warps share out the keys, the lanes of a warp the values of a key. Queries of a few
// heads at a time and the key lie in shared memory as float; a key is loaded once for all of them, and lane h keeps the maximum of head h.
#include "kernels/block_scores.h"

#include <algorithm>

#include "kernels/cuda/entry_value.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/token_place.cuh"

namespace hetkv {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kHeads = 8;  // at a time

// NaN stays.
HETKV_DEVICE_INLINE float larger(float largest, float score) {
  return score > largest ? score : score == score ? largest : score;
}

using Queries = float[kHeads][kMaxBlockScoreDim];

// The largest product, of head `lane` of `heads` over the keys [begin + warp, end) in steps of kWarps. key: of this warp.
HETKV_DEVICE_INLINE float largest_product(const BlockScoresParams& params, std::int64_t sequence, const Queries& queries,
                                          float* key, int heads, std::int64_t begin, std::int64_t end) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float largest = -INFINITY;
  for (std::int64_t row = begin + threadIdx.x / 32; row < end; row += kWarps) {
    const int block = gpu::block_of_row(params.keys, params.table, sequence, row);
    if (block < 0) continue;
    const RowAddress address = row_in_block(params.keys, block, row & ((std::int64_t{1} << params.keys.block_shift) - 1));
#pragma unroll 4
    for (int i = lane; i < params.dim; i += 32) key[i] = gpu::entry_value(params.keys, address, i);
    for (int head = 0; head < heads; ++head) {
      float product = 0.0f;
#pragma unroll 4
      for (int i = lane; i < params.dim; i += 32) product += key[i] * queries[head][i];
      for (int apart = 16; apart > 0; apart /= 2) product += __shfl_xor_sync(gpu::kAllLanes, product, apart);
      if (head == lane) largest = larger(largest, product);
    }
  }
  return largest;
}

__global__ void __launch_bounds__(kThreads) block_scores_kernel(const BlockScoresParams params) {
  HETKV_SHARED(Queries, queries);
  HETKV_SHARED(float[kWarps][kMaxBlockScoreDim], keys);  // each lane uses only what it stored
  HETKV_SHARED(float[kWarps][kHeads], parts);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t tasks = params.num_tokens * params.num_blocks;
  const std::int64_t vector_bytes = entry_data_bytes(params.query_format, params.dim);
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t token = task / params.num_blocks, block = task % params.num_blocks;
    float* const scores = params.scores + token * params.heads * params.num_blocks + block;  // of head 0
    const gpu::TokenPlace place = gpu::token_place(params, token);
    const bool seen = place.position >= 0 && block * params.routed_tokens <= place.position;
    if (!seen || block >= first_local_block(params, place.position)) {
      for (int head = static_cast<int>(threadIdx.x); head < params.heads; head += kThreads) {
        scores[head * params.num_blocks] = seen ? INFINITY : -INFINITY;
      }
      continue;
    }
    const std::int64_t begin = block * params.routed_tokens, behind = begin + params.routed_tokens;
    const std::int64_t end = behind < place.position + 1 ? behind : place.position + 1;
    for (int first = 0; first < params.heads; first += kHeads) {
      const int heads = params.heads - first < kHeads ? params.heads - first : kHeads;
      const std::byte* const from = params.query + (token * params.heads + first) * vector_bytes;
      for (int i = static_cast<int>(threadIdx.x); i < heads * params.dim; i += kThreads) {
        queries[i / params.dim][i % params.dim] = gpu::plain_value(from, params.query_format, i);
      }
      __syncthreads();
      const float largest = largest_product(params, place.sequence, queries, keys[warp], heads, begin, end);
      if (lane < kHeads) parts[warp][lane] = largest;
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < heads) {
        float score = -INFINITY;
        for (int part = 0; part < kWarps; ++part) score = larger(score, parts[part][threadIdx.x]);
        scores[(first + static_cast<int>(threadIdx.x)) * params.num_blocks] = score;
      }
      __syncthreads();
    }
  }
}

}  // namespace

void block_scores_cuda(const BlockScoresParams& params, void* stream) {
  const std::int64_t tasks = params.num_tokens * params.num_blocks;
  launch<block_scores_kernel>("block_scores", dim3(static_cast<unsigned>(std::min(tasks, kMaxGridX))), dim3(kThreads), 0,
                              static_cast<cudaStream_t>(stream), params);
}

}  // namespace hetkv
