// Two launches: the entries of the step, then the ring rows, since windows of the step still read the rings.
//
// Entries: a block per window that may close. Which window that is follows from device positions, the number of blocks from shapes: a
// sequence of q tokens from token s on closes at most ceil(q / ratio) <= floor((s + q) / ratio) + 1 - floor(s / ratio) windows,
// so that the blocks from floor(s / ratio) + b on are those of sequence b. A block without a window leaves.
//
// A thread pools 4 channels of every n-th row of the window; the n parts of a channel are then joined in order. Which rows a part has
// follows from the widths alone, so an entry has the same bits for every chunking of the prompt.
#include "kernels/compress.h"

#include <algorithm>

#include "kernels/cuda/entry_row.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/softmax.cuh"

namespace hetkv {
namespace {

using gpu::kRun;

constexpr int kThreads = 256;
constexpr int kChannels = 4;   // of a thread
constexpr int kRowsAhead = 4;  // rows of a thread that are loaded together
constexpr int kMaxParts = 8;
constexpr int kBlocksPerMultiprocessor = 2;  // with 32 KiB of float rows in flight each: more than enough

static_assert(kMaxCompressWidth <= kThreads * kChannels && kMaxCompressWidth <= kThreads * kRun);

// A window that closes in this step, or nothing.
struct Window {
  StepTokens tokens;
  std::int64_t index = -1;  // of the window in its sequence; -1: nothing closes
  std::int64_t token = 0;   // that closes it
  std::int64_t slot = 0;
  std::int64_t ring_block = 0;
};

HETKV_DEVICE_INLINE Window window_of(const CompressParams& params, std::int64_t task) {
  Window window;
  std::int64_t low = 0, high = params.num_sequences;  // the last sequence whose blocks begin at or before the task
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (params.cu_seqlens_q[middle] / params.ratio + middle <= task) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0) return window;
  const std::int64_t sequence = low - 1;
  window.tokens = step_tokens(params, sequence);
  if (window.tokens.count == 0) return window;
  const std::int64_t place = task - (params.cu_seqlens_q[sequence] / params.ratio + sequence);
  const std::int64_t index = window.tokens.first_position / params.ratio + place;
  const std::int64_t step = (index + 1) * params.ratio - 1 - window.tokens.first_position;
  if (step >= window.tokens.count) return window;
  window.token = window.tokens.first_token + step;
  window.slot = params.slots[window.token];
  window.ring_block = params.ring_table.blocks[sequence * params.ring_table.stride];
  const PagedRows& entries = params.entries;
  const bool good =
      window.slot >= 0 && block_inside(entries, window.slot >> entries.block_shift) && ring_inside(params, window.ring_block);
  if (good) window.index = index;
  return window;
}

template <EntryFormat kFormat>
HETKV_DEVICE_INLINE void load_channels(const std::byte* from, float (&values)[kChannels]) {
  if constexpr (kFormat == EntryFormat::kFloat32) {
    const float4 all = *reinterpret_cast<const float4*>(from);
    values[0] = all.x;
    values[1] = all.y;
    values[2] = all.z;
    values[3] = all.w;
  } else {
    const uint2 pairs = *reinterpret_cast<const uint2*>(from);
    constexpr bool kHalf = kFormat == EntryFormat::kFloat16;
    values[0] = kHalf ? gpu::low_f16(pairs.x) : gpu::low_bf16(pairs.x);
    values[1] = kHalf ? gpu::high_f16(pairs.x) : gpu::high_bf16(pairs.x);
    values[2] = kHalf ? gpu::low_f16(pairs.y) : gpu::low_bf16(pairs.y);
    values[3] = kHalf ? gpu::high_f16(pairs.y) : gpu::high_bf16(pairs.y);
  }
}

// Per channel: the largest logit so far, and the sums of e^(logit - largest) and of that times the value.
struct Pool {
  float largest[kChannels];
  float sum[kChannels];
  float weighted[kChannels];
};

HETKV_DEVICE_INLINE float power(float logit, float base) { return gpu::exp2_approx((logit - base) * gpu::kLog2e); }

// Rows part, part + parts, ... of the window, channels [channel, channel + 4).
template <EntryFormat kFormat>
HETKV_DEVICE_INLINE void pool_rows(const CompressParams& params, const Window& window, int part, int parts, int channel,
                                   Pool& pool) {
  constexpr std::int64_t kValueBytes = kFormat == EntryFormat::kFloat32 ? 4 : 2;
  const int width = params.entries.width, late_half = params.overlap ? width : 0;
  const std::int64_t early = params.overlap && window.index > 0 ? params.ratio : 0;
  const std::int64_t rows = early + params.ratio, row_bytes = raw_row_bytes(params);
  const std::byte* const ring = params.entries.arena + (window.ring_block << kBlockOffsetShift);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    pool.largest[c] = -INFINITY;
    pool.sum[c] = 0.0f;
    pool.weighted[c] = 0.0f;
  }
  for (std::int64_t first = part; first < rows; first += std::int64_t{kRowsAhead} * parts) {
    float logits[kRowsAhead][kChannels], values[kRowsAhead][kChannels];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const std::int64_t row = first + i * parts;
      if (row >= rows) {
#pragma unroll
        for (int c = 0; c < kChannels; ++c) {
          logits[i][c] = -INFINITY;
          values[i][c] = 0.0f;
        }
        continue;
      }
      const std::int64_t position = window.index * params.ratio - early + row;
      const std::int64_t step = position - window.tokens.first_position;
      const std::int64_t bias_row = row < early ? row : row - early;
      const int at = (row < early ? 0 : late_half) + channel;
      const std::int64_t ring_start = (position & (params.ring_rows - 1)) * row_bytes;
      const std::int64_t token = window.tokens.first_token + step;
      const std::byte* const gate =
          step >= 0 ? params.gate + token * params.gate_stride : ring + params.ring_gate_offset + ring_start;
      const std::byte* const kv = step >= 0 ? params.kv + token * params.kv_stride : ring + params.ring_kv_offset + ring_start;
      load_channels<kFormat>(gate + at * kValueBytes, logits[i]);
      load_channels<kFormat>(kv + at * kValueBytes, values[i]);
      const float* const bias = params.position_bias + bias_row * (width + late_half) + at;
#pragma unroll
      for (int c = 0; c < kChannels; ++c) logits[i][c] += bias[c];
    }
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      float largest = pool.largest[c];
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) largest = largest > logits[i][c] ? largest : logits[i][c];
      const float base = gpu::base_of(largest), shrink = power(pool.largest[c], base);
      float sum = pool.sum[c] * shrink, weighted = pool.weighted[c] * shrink;
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        const float weight = power(logits[i][c], base);
        sum += weight;
        weighted += weight * values[i][c];
      }
      pool.largest[c] = largest;
      pool.sum[c] = sum;
      pool.weighted[c] = weighted;
    }
  }
}

template <EntryFormat kFormat>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    compress_entries_kernel(const CompressParams params, const int lane_shift) {
  HETKV_SHARED(Pool[kThreads], pools);
  HETKV_SHARED(float[kMaxCompressWidth], pooled);
  HETKV_SHARED(float[kThreads / 32], scratch);
  const int width = params.entries.width, threads_of_row = width / kChannels, thread = static_cast<int>(threadIdx.x);
  const int parts = kThreads / threads_of_row < kMaxParts ? kThreads / threads_of_row : kMaxParts;
  const std::int64_t tasks = params.num_tokens / params.ratio + params.num_sequences;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const Window window = window_of(params, task);
    if (window.index < 0) continue;  // equal for all threads
    const int part = thread / threads_of_row, channel = thread % threads_of_row * kChannels;
    if (part < parts) {
      Pool pool;
      pool_rows<kFormat>(params, window, part, parts, channel, pool);
      pools[thread] = pool;
    }
    __syncthreads();
    if (part == 0) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        float largest = pools[thread].largest[c];
        for (int i = 1; i < parts; ++i) {
          const float other = pools[i * threads_of_row + thread].largest[c];
          largest = largest > other ? largest : other;
        }
        const float base = gpu::base_of(largest);
        float sum = 0.0f, weighted = 0.0f;
        for (int i = 0; i < parts; ++i) {
          const Pool& pool = pools[i * threads_of_row + thread];
          const float shrink = power(pool.largest[c], base);
          sum += pool.sum[c] * shrink;
          weighted += pool.weighted[c] * shrink;
        }
        pooled[channel + c] = weighted / sum;
      }
    }
    __syncthreads();
    const gpu::Lane lane = gpu::lane_of(thread, lane_shift);
    const bool active = thread < lane.lanes;  // one group stores the entry
    float run[kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) run[j] = active && lane.first + j < width ? pooled[lane.first + j] : 0.0f;
    gpu::norm_run(run, params.norm_weight, width, params.norm_eps, lane, scratch);
    const std::int64_t turn = window.token * (params.rope / 2);
    gpu::rotate_neighbours(run, params.cos + turn, params.sin + turn, width - params.rope, params.rope, lane);
    gpu::store_entry(run, params.entries, slot_address(params.entries, window.slot), lane, active, scratch);
    __syncthreads();
  }
}

// A warp per token and half of its raw row (kv, gate).
__global__ void __launch_bounds__(kThreads, 4) compress_rings_kernel(const CompressParams params) {
  const std::int64_t units = raw_row_bytes(params) / static_cast<std::int64_t>(sizeof(uint4));
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * (kThreads / 32);
  const bool is_gate = blockIdx.y == 1;
  for (std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; token < params.num_tokens;
       token += stride) {
    const std::int64_t sequence = sequence_of(params, token);
    if (sequence == params.num_sequences) continue;
    const StepTokens tokens = step_tokens(params, sequence);
    const std::int64_t step = token - tokens.first_token;
    if (step < 0 || step >= tokens.count || step < tokens.count - params.ring_rows) continue;
    const std::int64_t block = params.ring_table.blocks[sequence * params.ring_table.stride];
    if (!ring_inside(params, block)) continue;
    const std::int64_t row = (tokens.first_position + step) & (params.ring_rows - 1);
    std::byte* const to = params.entries.arena + (block << kBlockOffsetShift) +
                          (is_gate ? params.ring_gate_offset : params.ring_kv_offset) + row * raw_row_bytes(params);
    const std::byte* const from = is_gate ? params.gate + token * params.gate_stride : params.kv + token * params.kv_stride;
    for (std::int64_t unit = threadIdx.x % 32; unit < units; unit += 32) {
      reinterpret_cast<uint4*>(to)[unit] = reinterpret_cast<const uint4*>(from)[unit];
    }
  }
}

void launch_entries(const CompressParams& params, cudaStream_t stream) {
  const int lane_shift = gpu::lane_shift_for(params.entries.width);
  const dim3 grid(static_cast<unsigned>(std::min(params.num_tokens / params.ratio + params.num_sequences, kMaxGridX)));
  constexpr const char* kOp = "compress";
  switch (params.raw_format) {
    case EntryFormat::kFloat16:
      return launch<compress_entries_kernel<EntryFormat::kFloat16>>(kOp, grid, dim3(kThreads), 0, stream, params, lane_shift);
    case EntryFormat::kBFloat16:
      return launch<compress_entries_kernel<EntryFormat::kBFloat16>>(kOp, grid, dim3(kThreads), 0, stream, params, lane_shift);
    default:
      launch<compress_entries_kernel<EntryFormat::kFloat32>>(kOp, grid, dim3(kThreads), 0, stream, params, lane_shift);
  }
}

void launch_rings(const CompressParams& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(std::min((params.num_tokens + kThreads / 32 - 1) / (kThreads / 32), kMaxGridX)), 2);
  launch<compress_rings_kernel>("compress", grid, dim3(kThreads), 0, stream, params);
}

}  // namespace

void compress_cuda(const CompressParams& params, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
#ifdef HETKV_PLANT_RINGS_FIRST
  launch_rings(params, cuda_stream);
  launch_entries(params, cuda_stream);
#else
  launch_entries(params, cuda_stream);
  launch_rings(params, cuda_stream);
#endif
}

}  // namespace hetkv
