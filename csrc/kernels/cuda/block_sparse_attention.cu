// A block of threads per (token, head): its warps take the keys of each chosen block in turn, and their parts are added in the order of
// the warps, so that the bits follow from the list alone. Lanes hold the values l, l + 32, ... of query, key and sum.
#include "kernels/block_sparse_attention.h"

#include <algorithm>

#include "kernels/cuda/entry_value.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/softmax.cuh"
#include "kernels/cuda/token_place.cuh"

namespace hetkv {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kValues = kMaxBlockSparseDim / 32;  // of a lane

// Keys and values of one KV head: where its vectors begin in a row.
struct Head {
  std::int64_t sequence = 0, bytes_before = 0;
};

struct Sums {
  float out[kValues] = {};
  float largest = -INFINITY, sum = 0.0f;  // base 2
};

// The smallest block of the list behind `before` that begins at or before block `own`; larger than `own` if there is none.
HETKV_DEVICE_INLINE std::int64_t next_block(const std::int32_t* list, int count, std::int64_t before, std::int64_t own) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t next = 0xffffffffu;  // numbers of blocks are below 2^31
  for (int i = lane; i < count; i += 32) {
    const std::int64_t block = list[i];
    if (block > before && block <= own) next = min(next, static_cast<std::uint32_t>(block));
  }
  for (int apart = 16; apart > 0; apart /= 2) next = min(next, __shfl_xor_sync(gpu::kAllLanes, next, apart));
  return next == 0xffffffffu ? own + 1 : static_cast<std::int64_t>(next);
}

HETKV_DEVICE_INLINE void load_vector(const BlockSparseParams& params, const PagedRows& rows, const Head& head, int block,
                                     std::int64_t row, float (&values)[kValues]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t in_block = row & ((std::int64_t{1} << rows.block_shift) - 1);
  const std::byte* const vector = row_in_block(rows, block, in_block).data + head.bytes_before;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[i] = lane + 32 * i < params.dim ? gpu::plain_value(vector, rows.format, lane + 32 * i) : 0.0f;
  }
}

HETKV_DEVICE_INLINE void add_key(const BlockSparseParams& params, const Head& head, std::int64_t row,
                                 const float (&query)[kValues], Sums& sums) {
  const int block = gpu::block_of_row(params.keys, params.table, head.sequence, row);
  if (block < 0 || !block_inside(params.values, block)) return;
  float vector[kValues];
  load_vector(params, params.keys, head, block, row, vector);
  float score = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) score += vector[i] * query[i];
  for (int apart = 16; apart > 0; apart /= 2) score += __shfl_xor_sync(gpu::kAllLanes, score, apart);
  const float largest = fmaxf(sums.largest, score), base = gpu::base_of(largest);
  const float shrink = gpu::exp2_approx(sums.largest - base), weight = gpu::exp2_approx(score - base);
  sums.largest = largest;
  sums.sum = sums.sum * shrink + weight;
  load_vector(params, params.values, head, block, row, vector);
#pragma unroll
  for (int i = 0; i < kValues; ++i) sums.out[i] = sums.out[i] * shrink + weight * vector[i];
}

HETKV_DEVICE_INLINE void attend_keys(const BlockSparseParams& params, const gpu::TokenPlace& place, std::int64_t vector,
                                     Sums& sums) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int group = params.heads / params.kv_heads;
  const std::int64_t token = vector / params.heads;
  const std::int64_t kv_head = vector % params.heads / group;
  const std::int32_t* const list = params.selected + (token * params.kv_heads + kv_head) * params.num_selected;
  const Head head{place.sequence, kv_head * (params.keys.data_bytes / params.kv_heads)};
  const std::byte* const from = params.query + vector * entry_data_bytes(params.query_format, params.dim);
  float query[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const int value = lane + 32 * i;
    query[i] = value < params.dim ? gpu::plain_value(from, params.query_format, value) * (params.scale * gpu::kLog2e) : 0.0f;
  }
  const std::int64_t own = place.position / params.routed_tokens;
  for (std::int64_t block = next_block(list, params.num_selected, -1, own); block <= own;
       block = next_block(list, params.num_selected, block, own)) {
    const std::int64_t begin = block * params.routed_tokens;
    std::int64_t end = begin + params.routed_tokens;
#ifndef HETKV_PLANT_WHOLE_BLOCK
    if (end > place.position + 1) end = place.position + 1;
#endif
    for (std::int64_t row = begin + warp; row < end; row += kWarps) add_key(params, head, row, query, sums);
  }
}

__global__ void __launch_bounds__(kThreads) block_sparse_attention_kernel(const BlockSparseParams params) {
  HETKV_SHARED(float[kWarps][kMaxBlockSparseDim], parts);
  HETKV_SHARED(float2[kWarps], states);  // largest score and sum of weights
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t vectors = params.num_tokens * params.heads;
  const std::int64_t vector_bytes = entry_data_bytes(params.query_format, params.dim);
  for (std::int64_t vector = blockIdx.x; vector < vectors; vector += gridDim.x) {
    const gpu::TokenPlace place = gpu::token_place(params, vector / params.heads);
    Sums sums;
    if (place.position >= 0) attend_keys(params, place, vector, sums);
#pragma unroll
    for (int i = 0; i < kValues; ++i) parts[warp][lane + 32 * i] = sums.out[i];
    if (lane == 0) states[warp] = make_float2(sums.largest, sums.sum);
    __syncthreads();

    float largest = -INFINITY;
    for (int part = 0; part < kWarps; ++part) {
      if (states[part].y > 0.0f) largest = fmaxf(largest, states[part].x);
    }
    float sum = 0.0f, weights[kWarps];
#pragma unroll
    for (int part = 0; part < kWarps; ++part) {
      const float2 state = states[part];
      weights[part] = state.y == 0.0f ? 0.0f : gpu::exp2_approx(state.x - largest);  // NaN is no 0: it must show
      if (state.y != 0.0f) sum += weights[part] * state.y;
    }
    const int head = static_cast<int>(vector % params.heads);
    const gpu::Finish finish = gpu::finish_of(largest, sum, params.sinks == nullptr ? -INFINITY : params.sinks[head]);
    std::byte* const out = params.out + vector * vector_bytes;
    for (int value = static_cast<int>(threadIdx.x); value < params.dim; value += kThreads) {
      float total = 0.0f;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        if (weights[part] != 0.0f) total += weights[part] * parts[part][value];
      }
      gpu::store_plain_value(out, params.query_format, value, total * finish.factor);
    }
    if (threadIdx.x == 0) params.lse[vector] = finish.lse;
    __syncthreads();
  }
}

}  // namespace

void block_sparse_attention_cuda(const BlockSparseParams& params, void* stream) {
  const std::int64_t vectors = params.num_tokens * params.heads;
  launch<block_sparse_attention_kernel>("block_sparse_attention", dim3(static_cast<unsigned>(std::min(vectors, kMaxGridX))),
                                        dim3(kThreads), 0, static_cast<cudaStream_t>(stream), params);
}

}  // namespace hetkv
