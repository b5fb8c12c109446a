// A warp per token and head. Splits are added in rising order, so that their number alone decides the bits.
#include "kernels/cuda/sparse_combine.cuh"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/softmax.cuh"

namespace hetkv::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kQuads = kSparseTileValues / 128;  // float4 of a lane

__global__ void __launch_bounds__(kThreads, 6)
    sparse_combine_kernel(const SparseAttentionParams params, const SparseParts parts) {
  const std::int64_t vectors = params.num_tokens * params.heads, stride = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t vector = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; vector < vectors;
       vector += stride) {
    const std::int64_t token = vector / params.heads;
    const int head = static_cast<int>(vector % params.heads);
    float largest = -INFINITY;
    for (std::int64_t split = 0; split < parts.splits; ++split) {
      const float2 state = *parts.state(params, token, split, head);
      if (state.y > 0.0f) largest = fmaxf(largest, state.x);
    }
    float sum = 0.0f;
    float out[kQuads][4] = {};
    for (std::int64_t split = 0; split < parts.splits; ++split) {
      const float2 state = *parts.state(params, token, split, head);
      if (state.y == 0.0f) continue;  // NaN is added: it must show
      const float weight = exp2_approx(state.x - largest);
      sum += weight * state.y;
      const float* const from = parts.out(params, token, split, head);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        const float4 add = *reinterpret_cast<const float4*>(from + 128 * i + 4 * lane);
        out[i][0] += weight * add.x;
        out[i][1] += weight * add.y;
        out[i][2] += weight * add.z;
        out[i][3] += weight * add.w;
      }
    }
    const Finish finish = finish_of(largest, sum, params.sinks == nullptr ? -INFINITY : params.sinks[head]);
    const float* const cos = params.cos + token * (params.rope / 2);
    const float* const sin = params.sin + token * (params.rope / 2);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int value = 128 * i + 4 * lane;
      std::uint32_t pairs[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float a = out[i][2 * j] * finish.factor, b = out[i][2 * j + 1] * finish.factor;
        const int pair = (value + 2 * j - (kSparseTileValues - params.rope)) / 2;
        if (params.rope > 0 && value + 2 * j >= kSparseTileValues - params.rope) {
          const float turned = a * cos[pair] + b * sin[pair];
          b = b * cos[pair] - a * sin[pair];
          a = turned;
        }
        pairs[j] = params.query_format == EntryFormat::kBFloat16 ? pack_bf16(a, b) : pack_f16(a, b);
      }
      *reinterpret_cast<uint2*>(params.out + 2 * (vector * kSparseTileValues + value)) = make_uint2(pairs[0], pairs[1]);
    }
    if (lane == 0) params.lse[vector] = finish.lse;
  }
}

}  // namespace

void combine_sparse_parts(const SparseAttentionParams& params, const SparseParts& parts, cudaStream_t stream) {
  const std::int64_t blocks = (params.num_tokens * params.heads + kThreads / 32 - 1) / (kThreads / 32);
  launch<sparse_combine_kernel>("sparse_attention", dim3(static_cast<unsigned>(std::min(blocks, kMaxGridX))), dim3(kThreads), 0,
                                stream, params, parts);
}

}  // namespace hetkv::gpu
