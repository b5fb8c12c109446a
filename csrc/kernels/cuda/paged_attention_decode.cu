// Attention of few tokens of a sequence over many keys: bound by the reading of the keys.
//
// A block takes 16 query rows (token x head of one group) of one sequence and one KV head. Each of its 4 warps reads keys of its own, 16
// at a time, every 64th, into a ring of its own in shared memory: there is no block barrier among the keys. A split is 1024 keys; at
// its end the warps' parts are joined, warp 0 first. Splits begin at multiples of 1024 keys and are joined in order, either by one
// block that takes them all, with its total so far in the workspace, or, where blocks are few, by a second launch from partial results
// that one block each has written there: the same bits, since the operations are the same.
#include "kernels/cuda/flash_tile.cuh"
#include "kernels/cuda/paged_tiles.cuh"

namespace hetkv {
namespace {

using gpu::kWarpRows;

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kStepKeys = 16;                   // of a warp
constexpr int kRoundKeys = kWarps * kStepKeys;  // of the block; rounds begin at multiples of it
constexpr int kThreadsOfRow = kThreads / kWarpRows;
constexpr int kCombineWarps = 4;
constexpr int kCombineAhead = 4;  // splits that are loaded together

static_assert(kAttentionSplit % kRoundKeys == 0);

// Slots hold 16 keys or 16 values. The largest block has 98.5 KiB, so that every card from sm_80 on can run it.
template <int kDim>
struct Ring {
  static constexpr int kSlots = kDim == 64 ? 8 : kDim == 128 ? 4 : 3;
  static constexpr int kSlotBytes = kStepKeys * 2 * kDim;
  static constexpr int kBytes = kSlots * kSlotBytes;  // of a warp
  static constexpr int kBlocksPerMultiprocessor = kDim == 256 ? 2 : 3;
  // Queries stay in registers but for the last 64 columns, where registers are short: these are read from shared memory again.
  static constexpr int kSharedSteps = kDim == 64 ? 0 : 4;
  static constexpr int kSteps = kDim / 16 - kSharedSteps;
  static constexpr int kQueryBytes = kWarpRows * kSharedSteps * 32;
  static constexpr int kOutStride = kDim + 8;  // floats of a row of output, which replaces the ring at the end of a split
  static_assert(kWarpRows * kOutStride * 4 <= kBytes);
};

HETKV_DEVICE_INLINE gpu::StepTile decode_tile(const PagedAttentionParams& params, const PagedAttentionPlan& plan,
                                              std::int64_t task) {
  if (!plan.mixed) return gpu::tile_of_task(params, task, plan.tile_tokens);
  const std::int64_t tiles = (plan.short_tokens + plan.tile_tokens - 1) / plan.tile_tokens;
  gpu::StepTile tile = gpu::tile_of_sequence(params, task / tiles, task % tiles, plan.tile_tokens);
  if (tile.step_tokens > plan.short_tokens) tile.count = 0;
  return tile;
}

// Where the rows of a block's tile come from: row r is head first_head + r % heads of token r / heads. In shared memory, for the end of
// a split: among the keys registers are short.
struct TileRows {
  std::int32_t heads, first_head, count;
  std::int32_t token, index, sequence;  // of the tile
};

HETKV_DEVICE_INLINE int head_of(const TileRows& rows, int row) { return rows.first_head + row % rows.heads; }
HETKV_DEVICE_INLINE std::int64_t vector_of(const PagedAttentionParams& params, const TileRows& rows, int row) {
  return std::int64_t{rows.token + row / rows.heads} * params.heads + head_of(rows, row);
}

// The row of the workspace.
HETKV_DEVICE_INLINE std::int64_t partial_row(const PagedAttentionParams& params, const PagedAttentionPlan& plan,
                                             const TileRows& rows, int row) {
  const std::int32_t token = row / rows.heads;
  const std::int64_t place =
      plan.mixed ? std::int64_t{rows.sequence} * plan.short_tokens + rows.index + token : rows.token + token;
  return place * params.heads + head_of(rows, row);
}

// A split's result, or what a block has joined so far. Without splits there is one slot.
struct Partial {
  float* out;   // [dim], not yet divided by the sum
  float* ends;  // largest, sum
};

HETKV_DEVICE_INLINE Partial partial_of(const PagedAttentionParams& params, const PagedAttentionPlan& plan, float* workspace,
                                       std::int64_t row, std::int32_t slot) {
  const std::int64_t slots = plan.splits > 0 ? plan.splits : 1, place = slot * plan.partial_rows + row;
  return {workspace + place * params.dim, workspace + slots * plan.partial_rows * params.dim + 2 * place};
}

// 4 values of a row of output, from column `column` on.
template <EntryFormat kFormat>
HETKV_DEVICE_INLINE void store_out(const PagedAttentionParams& params, std::int64_t vector, int column, const float4& values,
                                   float factor) {
  const uint2 pairs = make_uint2(gpu::pack_pair<kFormat>(values.x * factor, values.y * factor),
                                 gpu::pack_pair<kFormat>(values.z * factor, values.w * factor));
  *reinterpret_cast<uint2*>(params.out + 2 * (vector * params.dim + column)) = pairs;
}

template <EntryFormat kFormat, int kDim>
__global__ void __launch_bounds__(kThreads, Ring<kDim>::kBlocksPerMultiprocessor)
    attend_decode_kernel(const PagedAttentionParams params, const PagedAttentionPlan plan, float* workspace) {
  using R = Ring<kDim>;
  constexpr int kChunks = kDim / 8, kRowsOfPass = 32 / kChunks;
  HETKV_DYNAMIC_SHARED(shared);
  HETKV_SHARED(float[kWarps * kWarpRows], warp_largest);
  HETKV_SHARED(float[kWarps * kWarpRows], warp_sums);
  HETKV_SHARED(TileRows, kept_rows);
  const gpu::StepTile tile = decode_tile(params, plan, blockIdx.x);
  if (tile.count <= 0) return;
  const gpu::TileKeys keys = gpu::keys_of(params, tile);
  std::int32_t first_split = keys.begin / kAttentionSplit, end_split = first_split;
  if (keys.end > keys.begin) end_split = (keys.end - 1) / kAttentionSplit + 1;
  if (plan.splits > 0) {
    first_split += static_cast<std::int32_t>(blockIdx.z);
    if (first_split >= end_split) return;
    end_split = first_split + 1;
  }

  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int group = params.heads / params.kv_heads;
  const int kv_head = static_cast<int>(blockIdx.y) / plan.head_tiles;
  const int first_head = static_cast<int>(blockIdx.y) % plan.head_tiles * kWarpRows;
  const int heads = group - first_head < kWarpRows ? group - first_head : kWarpRows;
  const int real_rows = heads * tile.count < kWarpRows ? heads * tile.count : kWarpRows;
  const TileRows rows{heads, kv_head * group + first_head, real_rows, tile.token, tile.index, tile.sequence};

  std::uint32_t queries[std::size_t{R::kSteps}][4];
  std::int32_t positions[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = g + 8 * h;
    positions[h] = tile.position + row / heads;
    const std::byte* const from = params.query + 2 * vector_of(params, rows, row) * params.dim;
#pragma unroll
    for (int step = 0; step < R::kSteps; ++step) {
      const bool real = row < real_rows && 16 * step < params.dim;
      const auto* const pairs = reinterpret_cast<const std::uint32_t*>(from + 2 * (16 * step + 2 * t));
      queries[step][h] = real ? pairs[0] : 0u;
      queries[step][2 + h] = real ? pairs[4] : 0u;
    }
  }
  const std::uint32_t shared_queries = gpu::shared_address(shared + kWarps * R::kBytes);
  if constexpr (R::kSharedSteps > 0) {
    const int row = thread / 8, column = 16 * R::kSteps + 8 * (thread % 8);
    const bool real = row < real_rows && column < params.dim;
    gpu::copy_async_16(gpu::swizzled<64>(shared_queries, row, thread % 8),
                       real ? params.query + 2 * (vector_of(params, rows, row) * params.dim + column) : params.query,
                       real ? 16 : 0);
    gpu::copy_async_commit();
    gpu::copy_async_wait<0>();
  }
  if (thread == 0) kept_rows = rows;
  __syncthreads();

  const std::int32_t head_offset = 2 * kv_head * params.dim;  // bytes
  const gpu::Scaling scaling = gpu::scaling_of(params.scale, params.softcap);
  std::byte* const ring = shared + warp * R::kBytes;
  const std::uint32_t ring_address = gpu::shared_address(ring);

  // A thread joins 4 columns in every 32 of one row.
  const int own_row = thread / kThreadsOfRow, own_column = 4 * (thread % kThreadsOfRow);
  if (first_split == end_split) {  // no keys
    if (own_row >= real_rows) return;
    const std::int64_t vector = vector_of(params, rows, own_row);
    for (int column = own_column; column < params.dim; column += 32) {
      store_out<kFormat>(params, vector, column, make_float4(0.0f, 0.0f, 0.0f, 0.0f), 0.0f);
    }
    if (own_column == 0) params.lse[vector] = -INFINITY;
    return;
  }
  float total_largest = -INFINITY, total_sum = 0.0f;

  for (std::int32_t split = first_split; split < end_split; ++split) {
    const std::int32_t split_begin = split * kAttentionSplit;
    const std::int32_t from = keys.begin > split_begin ? keys.begin : split_begin;
    const std::int32_t to = keys.end < split_begin + kAttentionSplit ? keys.end : split_begin + kAttentionSplit;
    const std::int32_t origin = from / kRoundKeys * kRoundKeys + warp * kStepKeys;  // the warp's first key
    const std::int32_t steps = to > origin ? (to - origin + kRoundKeys - 1) / kRoundKeys : 0;
    gpu::TileKeys split_keys = keys;
    split_keys.begin = from;
    split_keys.end = to;

    // Slots are filled in the order of use: keys and values of a step in turn, kSlots - 1 slots ahead.
    std::int32_t block = -1, next_block = split_keys.block_of(origin + (lane & 15));
    std::uint32_t present = 0;  // bit s % 32: whether the lane's key of step s is there
    const auto fetch = [&](const PagedRows& section, bool is_value, std::int32_t step, int slot) {
      if (step < steps) {
        const std::int32_t first = origin + step * kRoundKeys;
        if (!is_value) {
          block = next_block;
          next_block = split_keys.block_of(first + kRoundKeys + (lane & 15));
          const std::uint32_t bit = 1u << (step & 31);
          present = block >= 0 ? present | bit : present & ~bit;
        }
        const std::uint32_t into = ring_address + static_cast<std::uint32_t>(slot * R::kSlotBytes);
        const int chunk = lane % kChunks;
#pragma unroll 1  // unrolled, its addresses cost registers that are not there
        for (int pass = 0; pass < kStepKeys / kRowsOfPass; ++pass) {
          const int row = pass * kRowsOfPass + lane / kChunks;
          const std::int32_t of_row = __shfl_sync(gpu::kAllLanes, block, row);
          const bool real = of_row >= 0 && 8 * chunk < params.dim;
          gpu::copy_async_16(gpu::swizzled<kDim>(into, row, chunk),
                             gpu::chunk_source(section, params, real ? of_row : -1, first + row, head_offset + 16 * chunk),
                             real ? 16 : 0);
        }
      }
      gpu::copy_async_commit();
    };
    const auto fetch_item = [&](int item, int slot) {  // of an even number: keys
      if (item % 2 == 0) {
        fetch(params.keys, false, item / 2, slot);
      } else {
        fetch(params.values, true, item / 2, slot);
      }
    };

    gpu::Softmax softmax;
    float out[std::size_t{kDim / 8}][4];
    gpu::reset(softmax, out);
#pragma unroll 1
    for (int item = 0; item < R::kSlots - 1; ++item) fetch_item(item, item);
    int slot = 0, free_slot = R::kSlots - 1;
    constexpr int kAhead = R::kSlots - 1;
    const auto next_slot = [&] {
      free_slot = slot;
      slot = slot + 1 == R::kSlots ? 0 : slot + 1;
    };
    for (std::int32_t step = 0; step < steps; ++step) {
      gpu::copy_async_wait<R::kSlots - 2>();
      __syncwarp();  // the keys are there for all lanes, and none reads the slot that is filled next
      if constexpr (kAhead % 2 == 0) {
        fetch(params.keys, false, step + kAhead / 2, free_slot);
      } else {
        fetch(params.values, true, step + kAhead / 2, free_slot);
      }
      float scores[2][4] = {};
      const std::uint32_t key_slot = ring_address + static_cast<std::uint32_t>(slot * R::kSlotBytes);
#pragma unroll
      for (int k = 0; k < R::kSteps; ++k) {
        gpu::add_scores<kFormat, kDim>(scores[0], scores[1], queries[k], key_slot, 0, k, lane);
      }
#pragma unroll
      for (int k = 0; k < R::kSharedSteps; ++k) {
        std::uint32_t a[4];
        gpu::load_queries<64>(a, shared_queries, k, lane);
        gpu::add_scores<kFormat, kDim>(scores[0], scores[1], a, key_slot, 0, R::kSteps + k, lane);
      }
      const std::uint32_t there = __ballot_sync(gpu::kAllLanes, static_cast<int>((present >> (step & 31)) & 1u));
      const std::int32_t first = origin + step * kRoundKeys;
      const bool all_seen = (there & 0xffffu) == 0xffffu && gpu::sees(tile.position, 0, first + kStepKeys - 1) &&
                            gpu::sees(tile.position + tile.count - 1, params.window, first);
      gpu::scale_scores(scores, scaling);
      if (!all_seen) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = 8 * n + 2 * t + i % 2;
            const bool there_is = ((there >> key) & 1u) != 0;
            if (!there_is || !gpu::sees(positions[i / 2], params.window, first + key)) scores[n][i] = -INFINITY;
          }
        }
      }
      gpu::weigh(scores, softmax, out);
      next_slot();
      gpu::copy_async_wait<R::kSlots - 2>();
      __syncwarp();
      if constexpr (kAhead % 2 == 0) {
        fetch(params.values, true, step + kAhead / 2, free_slot);
      } else {
        fetch(params.keys, false, step + kAhead / 2 + 1, free_slot);
      }
      std::uint32_t weights[4];
      gpu::pack_weights<kFormat>(weights, scores[0], scores[1]);
      const std::uint32_t value_slot = ring_address + static_cast<std::uint32_t>(slot * R::kSlotBytes);
      if (all_seen || tile.count == 1) {  // one token: its rows see the same keys, and all others are 0
        gpu::add_values<kFormat, kDim>(out, weights, value_slot, 0, lane);
      } else {
        gpu::add_values_apart<kFormat, kDim>(out, weights, value_slot, 0, lane);
      }
      next_slot();
    }
    gpu::copy_async_wait<0>();
    __syncwarp();  // the ring is free

    gpu::sum_quad(softmax);
    float* const warp_out = reinterpret_cast<float*>(ring);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = g + 8 * h;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        *reinterpret_cast<float2*>(warp_out + row * R::kOutStride + 8 * n + 2 * t) =
            make_float2(out[n][2 * h], out[n][2 * h + 1]);
      }
      if (t == 0) {
        warp_largest[warp * kWarpRows + row] = softmax.largest[h];
        warp_sums[warp * kWarpRows + row] = softmax.sum[h];
      }
    }
    __syncthreads();
    float largest = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, warp_largest[w * kWarpRows + own_row]);
    const float base = gpu::base_of(largest);
    const gpu::Join join = gpu::join_of(total_largest, largest);
    float worth[kWarps], sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      worth[w] = gpu::exp2_approx(warp_largest[w * kWarpRows + own_row] - base);
      sum = __fmaf_rn(warp_sums[w * kWarpRows + own_row], worth[w], sum);
    }
    total_sum = gpu::joined(total_sum, sum, join);
    total_largest = join.largest;
    const bool last = plan.splits == 0 && split + 1 == end_split;
    const bool own_real = own_row < kept_rows.count;
    const std::int64_t vector = vector_of(params, kept_rows, own_row);
    const float sink = params.sinks == nullptr || !own_real ? -INFINITY : params.sinks[head_of(kept_rows, own_row)];
    const gpu::Finish finish = gpu::finish_of(total_largest, total_sum, sink);
    const Partial partial = partial_of(params, plan, workspace, partial_row(params, plan, kept_rows, own_row),
                                       plan.splits > 0 ? split % plan.splits : 0);
#pragma unroll 1
    for (int j = 0; j < kDim / 32; ++j) {
      const int column = own_column + 32 * j;
      float4 part = make_float4(0.0f, 0.0f, 0.0f, 0.0f), total = part;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float4 of_warp = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(shared + w * R::kBytes) +
                                                                own_row * R::kOutStride + column);
        part.x = __fmaf_rn(of_warp.x, worth[w], part.x);
        part.y = __fmaf_rn(of_warp.y, worth[w], part.y);
        part.z = __fmaf_rn(of_warp.z, worth[w], part.z);
        part.w = __fmaf_rn(of_warp.w, worth[w], part.w);
      }
      if (!own_real || column >= params.dim) continue;
      if (split > first_split) total = *reinterpret_cast<const float4*>(partial.out + column);
      total = gpu::joined(total, part, join);
      if (last) {
        store_out<kFormat>(params, vector, column, total, finish.factor);
      } else {
        *reinterpret_cast<float4*>(partial.out + column) = total;
      }
    }
    if (own_real && own_column == 0) {
      if (last) params.lse[vector] = finish.lse;
      if (plan.splits > 0) *reinterpret_cast<float2*>(partial.ends) = make_float2(total_largest, total_sum);
    }
    __syncthreads();
  }
}

// A warp per (token, head): its splits in order, 4 columns of every 128 a lane.
template <EntryFormat kFormat>
__global__ void __launch_bounds__(32 * kCombineWarps)
    combine_decode_kernel(const PagedAttentionParams params, const PagedAttentionPlan plan, float* workspace) {
  const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kCombineWarps + threadIdx.x / 32;
  if (item >= plan.partial_rows) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, head = static_cast<int>(item % params.heads);
  const std::int64_t place = item / params.heads;
  gpu::StepTile tile;  // of this one token
  if (plan.mixed) {
    tile = gpu::tile_of_sequence(params, place / plan.short_tokens, place % plan.short_tokens, 1);
    if (tile.count <= 0 || tile.step_tokens > plan.short_tokens) return;
  } else {
    tile = gpu::tile_of_token(params, place);
  }
  const gpu::TileKeys keys = gpu::keys_of(params, tile);
  std::int32_t split = keys.begin / kAttentionSplit, end_split = split;
  if (keys.end > keys.begin) end_split = (keys.end - 1) / kAttentionSplit + 1;
  float4 total[2];
  total[0] = total[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float total_largest = -INFINITY, total_sum = 0.0f;
  for (; split < end_split; split += kCombineAhead) {
    float4 parts[kCombineAhead][2];
    float2 ends[kCombineAhead];
#pragma unroll
    for (int s = 0; s < kCombineAhead; ++s) {
      ends[s] = make_float2(-INFINITY, 0.0f);
      parts[s][0] = parts[s][1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (split + s >= end_split) continue;
      const Partial partial = partial_of(params, plan, workspace, item, (split + s) % plan.splits);
      ends[s] = *reinterpret_cast<const float2*>(partial.ends);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (4 * lane + 128 * j < params.dim) parts[s][j] = *reinterpret_cast<const float4*>(partial.out + 4 * lane + 128 * j);
      }
    }
#pragma unroll
    for (int s = 0; s < kCombineAhead; ++s) {  // a split behind the end changes nothing
      const gpu::Join join = gpu::join_of(total_largest, ends[s].x);
      total_largest = join.largest;
      total_sum = gpu::joined(total_sum, ends[s].y, join);
#pragma unroll
      for (int j = 0; j < 2; ++j) total[j] = gpu::joined(total[j], parts[s][j], join);
    }
  }
  const std::int64_t vector = std::int64_t{tile.token} * params.heads + head;
  const gpu::Finish finish = gpu::finish_of(total_largest, total_sum, params.sinks == nullptr ? -INFINITY : params.sinks[head]);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (4 * lane + 128 * j < params.dim) store_out<kFormat>(params, vector, 4 * lane + 128 * j, total[j], finish.factor);
  }
  if (lane == 0) params.lse[vector] = finish.lse;
}

template <EntryFormat kFormat, int kDim>
void launch_dim(const PagedAttentionParams& params, const PagedAttentionPlan& plan, float* workspace, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(plan.decode_tiles), static_cast<unsigned>(params.kv_heads * plan.head_tiles),
                  static_cast<unsigned>(plan.splits > 0 ? plan.splits : 1));
  launch<attend_decode_kernel<kFormat, kDim>>("paged_attention", grid, dim3(kThreads),
                                              kWarps * Ring<kDim>::kBytes + Ring<kDim>::kQueryBytes, stream, params, plan,
                                              workspace);
}

template <EntryFormat kFormat>
void launch_format(const PagedAttentionParams& params, const PagedAttentionPlan& plan, float* workspace, cudaStream_t stream) {
  if (params.dim <= 64) {
    launch_dim<kFormat, 64>(params, plan, workspace, stream);
  } else if (params.dim <= 128) {
    launch_dim<kFormat, 128>(params, plan, workspace, stream);
  } else {
    launch_dim<kFormat, 256>(params, plan, workspace, stream);
  }
  if (plan.splits == 0) return;
  const dim3 grid(static_cast<unsigned>((plan.partial_rows + kCombineWarps - 1) / kCombineWarps));
  launch<combine_decode_kernel<kFormat>>("paged_attention", grid, dim3(32 * kCombineWarps), 0, stream, params, plan, workspace);
}

}  // namespace

void launch_attention_decode(const PagedAttentionParams& params, const PagedAttentionPlan& plan, float* workspace,
                             cudaStream_t stream) {
  if (params.query_format == EntryFormat::kBFloat16) {
    launch_format<EntryFormat::kBFloat16>(params, plan, workspace, stream);
  } else {
    launch_format<EntryFormat::kFloat16>(params, plan, workspace, stream);
  }
}

}  // namespace hetkv
