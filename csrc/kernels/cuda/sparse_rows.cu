// A warp per token and head; lanes hold the values l, l + 32, ... of the query and the sum, and keys come one at a time.
#include "kernels/cuda/sparse_rows.cuh"

#include <algorithm>

#include "kernels/cuda/entry_value.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/softmax.cuh"
#include "kernels/cuda/sparse_keys.cuh"

namespace hetkv::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kValues = kMaxSparseDim / 32;  // of a lane

struct Sums {
  float out[kValues] = {};
  float largest = -INFINITY, sum = 0.0f;
};

HETKV_DEVICE_INLINE void add_key(const PagedRows& rows, RowAddress address, const float (&query)[kValues], int lane, Sums& sums) {
  float key[kValues];
  float score = 0.0f;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    key[i] = lane + 32 * i < rows.width ? entry_value(rows, address, lane + 32 * i) : 0.0f;
    score += key[i] * query[i];
  }
  for (int apart = 16; apart > 0; apart /= 2) score += __shfl_xor_sync(kAllLanes, score, apart);
  const float largest = fmaxf(sums.largest, score), base = base_of(largest);
  const float shrink = exp2_approx(sums.largest - base), weight = exp2_approx(score - base);
  sums.largest = largest;
  sums.sum = sums.sum * shrink + weight;
#pragma unroll
  for (int i = 0; i < kValues; ++i) sums.out[i] = sums.out[i] * shrink + weight * key[i];
}

__global__ void __launch_bounds__(kThreads) sparse_rows_kernel(const SparseAttentionParams params) {
  HETKV_SHARED(float[kThreads / 32][kMaxSparseDim], vectors);
  const std::int64_t tasks = params.num_tokens * params.heads, stride = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* const vector = vectors[threadIdx.x / 32];
  const std::int64_t vector_bytes = entry_data_bytes(params.query_format, params.dim);
  for (std::int64_t task = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; task < tasks;
       task += stride) {
    const std::int64_t token = task / params.heads;
    const int head = static_cast<int>(task % params.heads);
    const SparseKeys keys = sparse_keys_of(params, token);
    float query[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const int value = lane + 32 * i;
      query[i] = value < params.dim
                     ? plain_value(params.query + task * vector_bytes, params.query_format, value) * (params.scale * kLog2e)
                     : 0.0f;
    }
    Sums sums;
    for (int place = 0; place < keys.window_rows + keys.entries; ++place) {
      const bool of_window = place < keys.window_rows;
      const PagedRows& rows = of_window ? params.window_rows : params.entries;
      const std::int64_t row = of_window ? keys.first_row + place : listed_entry(params, keys, place - keys.window_rows);
      const int block = block_of_row(rows, of_window ? params.window_table : params.entry_table, keys.sequence, row);
      if (block < 0) continue;
      add_key(rows, row_in_block(rows, block, row & ((std::int64_t{1} << rows.block_shift) - 1)), query, lane, sums);
    }
    const Finish finish = finish_of(sums.largest, sums.sum, params.sinks == nullptr ? -INFINITY : params.sinks[head]);
#pragma unroll
    for (int i = 0; i < kValues; ++i) vector[lane + 32 * i] = sums.out[i] * finish.factor;
    __syncwarp();
    float* const turned = vector + params.value_dim - params.rope;
    for (int pair = lane; pair < params.rope / 2; pair += 32) {
      const std::int64_t at = token * (params.rope / 2) + pair;
      const float a = turned[2 * pair], b = turned[2 * pair + 1];
      turned[2 * pair] = a * params.cos[at] + b * params.sin[at];
      turned[2 * pair + 1] = b * params.cos[at] - a * params.sin[at];
    }
    __syncwarp();
    std::byte* const out = params.out + task * entry_data_bytes(params.query_format, params.value_dim);
    for (int value = lane; value < params.value_dim; value += 32) {
      store_plain_value(out, params.query_format, value, vector[value]);
    }
    if (lane == 0) params.lse[task] = finish.lse;
    __syncwarp();
  }
}

}  // namespace

void sparse_attention_rows(const SparseAttentionParams& params, cudaStream_t stream) {
  const std::int64_t blocks = (params.num_tokens * params.heads + kThreads / 32 - 1) / (kThreads / 32);
  launch<sparse_rows_kernel>("sparse_attention", dim3(static_cast<unsigned>(std::min(blocks, kMaxGridX))), dim3(kThreads), 0,
                             stream, params);
}

}  // namespace hetkv::gpu
