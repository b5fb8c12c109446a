// Which kernel serves a launch, and the kernel for what tensor cores do not: any dtypes, any dim, a warp per (token, head).
//
// The plain kernel takes a row's keys one by one, in order: its bits depend on nothing but the row.
#include "kernels/paged_attention.h"

#include <algorithm>

#include "kernels/cuda/entry_value.cuh"
#include "kernels/cuda/flash_tile.cuh"
#include "kernels/cuda/paged_tiles.cuh"

namespace hetkv {
namespace {

constexpr int kPlainWarps = 4;
constexpr int kPlainValues = kMaxAttentionDim / 32;  // of a lane
constexpr int kMaxFastDim = 256;
constexpr std::int64_t kShortRows = 32;               // rows of a sequence in the decode kernel, where a prefill kernel runs too
constexpr std::int64_t kFewBlocks = 1024;             // of the decode kernel: below that, splits have blocks of their own
constexpr std::int64_t kMaxPartialFloats = 64 << 20;  // 256 MiB: beyond that, they have not

bool aligned(std::int64_t value) { return value % gpu::kChunkBytes == 0; }

// Tensor cores take 16-bit rows of one type, copied 16 bytes at a time.
bool for_tensor_cores(const PagedAttentionParams& params) {
  return params.query_format != EntryFormat::kFloat32 && params.keys.format == params.query_format &&
         params.values.format == params.query_format && params.dim % 16 == 0 && params.dim <= kMaxFastDim &&
         aligned(params.keys.data_offset) && aligned(params.values.data_offset) &&
         aligned(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(params.query) % gpu::kChunkBytes));
}

std::int64_t divide_up(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

PagedAttentionPlan plan_of(const PagedAttentionParams& params) {
  PagedAttentionPlan plan;
  const std::int32_t group = params.heads / params.kv_heads;
  plan.short_tokens = static_cast<std::int32_t>(std::max<std::int64_t>(1, kShortRows / group));
  plan.tile_tokens = std::max(1, gpu::kWarpRows / group);
  plan.head_tiles = static_cast<std::int32_t>(divide_up(group, gpu::kWarpRows));
  plan.mixed = params.num_tokens > params.num_sequences * plan.short_tokens;
  plan.decode_tiles = plan.mixed ? params.num_sequences * divide_up(plan.short_tokens, plan.tile_tokens)
                                 : params.num_tokens / plan.tile_tokens + params.num_sequences + 2;
  std::int64_t splits = divide_up(static_cast<std::int64_t>(params.table.columns) << params.keys.block_shift, kAttentionSplit);
  if (params.window > 0) {  // a tile's keys are at most these
    const std::int64_t keys = static_cast<std::int64_t>(params.window) + plan.tile_tokens - 1;
    splits = std::min(splits, divide_up(keys - 1, kAttentionSplit) + 1);
  }
  const std::int64_t rows = (plan.mixed ? params.num_sequences * plan.short_tokens : params.num_tokens) * params.heads;
  const bool few = plan.decode_tiles * params.kv_heads * plan.head_tiles < kFewBlocks;
  if (splits > 1) plan.partial_rows = rows;
  if (splits > 1 && splits <= 65535 && few && splits * rows * (params.dim + 2) <= kMaxPartialFloats) {
    plan.splits = static_cast<std::int32_t>(splits);
  }
  return plan;
}

HETKV_DEVICE_INLINE const std::byte* vector_of(const PagedRows& rows, const PagedAttentionParams& params, std::int64_t sequence,
                                               std::int64_t key, int kv_head) {
  return row_address(rows, params.table, sequence, key).data + kv_head * (rows.data_bytes / params.kv_heads);
}

__global__ void __launch_bounds__(32 * kPlainWarps) attend_plain_kernel(const PagedAttentionParams params) {
  const std::int64_t vector = static_cast<std::int64_t>(blockIdx.x) * kPlainWarps + threadIdx.x / 32;
  if (vector >= params.num_tokens * params.heads) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, head = static_cast<int>(vector % params.heads);
  const int kv_head = head / (params.heads / params.kv_heads);
  const int value_bytes = params.query_format == EntryFormat::kFloat32 ? 4 : 2;
  const std::int64_t at = vector * params.dim * value_bytes;
  const gpu::StepTile tile = gpu::tile_of_token(params, vector / params.heads);
  const gpu::TileKeys keys = gpu::keys_of(params, tile);
  const gpu::Scaling scaling = gpu::scaling_of(params.scale, params.softcap);
  float query[kPlainValues], out[kPlainValues];
#pragma unroll
  for (int j = 0; j < kPlainValues; ++j) {
    const int column = lane + 32 * j;
    query[j] = column < params.dim ? gpu::plain_value(params.query + at, params.query_format, column) : 0.0f;
    out[j] = 0.0f;
  }
  float largest = -INFINITY, sum = 0.0f;
  for (std::int32_t key = keys.begin; key < keys.end; ++key) {
    if (keys.block_of(key) < 0) continue;
    const std::byte* const key_vector = vector_of(params.keys, params, tile.sequence, key, kv_head);
    const std::byte* const value_vector = vector_of(params.values, params, tile.sequence, key, kv_head);
    float product = 0.0f;
#pragma unroll
    for (int j = 0; j < kPlainValues; ++j) {
      const int column = lane + 32 * j;
      if (column < params.dim) product += query[j] * gpu::plain_value(key_vector, params.keys.format, column);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) product += __shfl_xor_sync(gpu::kAllLanes, product, offset);
    const float scaled = product * scaling.factor;
    const float score = scaling.cap > 0.0f ? gpu::tanh_of(scaled) * scaling.cap : scaled;
    const gpu::Join join = gpu::join_of(largest, score);
    // A NaN score makes the sum NaN, as in every other kernel.
    const float weight = gpu::exp2_approx(score - gpu::base_of(join.largest));
    sum = sum * join.keep + weight;
    largest = join.largest;
#pragma unroll
    for (int j = 0; j < kPlainValues; ++j) {
      const int column = lane + 32 * j;
      if (column >= params.dim) continue;
      out[j] = out[j] * join.keep + weight * gpu::plain_value(value_vector, params.values.format, column);
    }
  }
  const gpu::Finish finish = gpu::finish_of(largest, sum, params.sinks == nullptr ? -INFINITY : params.sinks[head]);
#pragma unroll
  for (int j = 0; j < kPlainValues; ++j) {
    const int column = lane + 32 * j;
    if (column >= params.dim) continue;
    gpu::store_plain_value(params.out + at, params.query_format, column, out[j] * finish.factor);
  }
  if (lane == 0) params.lse[vector] = finish.lse;
}

}  // namespace

std::int64_t attention_workspace_floats(const PagedAttentionParams& params) noexcept {
  if (!for_tensor_cores(params)) return 0;
  const PagedAttentionPlan plan = plan_of(params);
  return std::max(plan.splits, 1) * plan.partial_rows * (params.dim + 2);
}

void paged_attention_cuda(const PagedAttentionParams& params, float* workspace, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (!for_tensor_cores(params)) {
    const dim3 grid(static_cast<unsigned>(divide_up(params.num_tokens * params.heads, kPlainWarps)));
    launch<attend_plain_kernel>("paged_attention", grid, dim3(32 * kPlainWarps), 0, cuda_stream, params);
    return;
  }
  const PagedAttentionPlan plan = plan_of(params);
  launch_attention_decode(params, plan, workspace, cuda_stream);
  if (plan.mixed) launch_attention_prefill(params, plan, cuda_stream);
}

}  // namespace hetkv
