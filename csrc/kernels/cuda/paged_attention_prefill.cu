// Attention of many tokens of a sequence: bound by the tensor cores.
//
// A block takes up to 64 or 128 query rows (token x head of the group) of one sequence and one KV head, so that keys and values are
// read once per KV head; a warp has 16 of the rows. Keys come in tiles that begin at multiples of their size, two in flight: the keys of
// the next tile while this one's values are multiplied, its values while the next one's keys are. Tiles of late tokens, which have the
// most keys, come first.
#include "kernels/cuda/flash_tile.cuh"
#include "kernels/cuda/paged_tiles.cuh"

namespace hetkv {
namespace {

using gpu::kWarpRows;

// At most 96 KiB, so that every card from sm_80 on can run it.
template <int kDim>
struct Prefill {
  static constexpr int kWarps = kDim == 256 ? 4 : 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kWarpRows * kWarps;
  static constexpr int kKeys = kDim == 256 ? 32 : 64;
  static constexpr int kBlocksPerMultiprocessor = kDim == 256 ? 2 : 1;
  static constexpr int kQueryBytes = kRows * 2 * kDim;
  static constexpr int kTileBytes = kKeys * 2 * kDim;
  static constexpr int kSharedBytes = kQueryBytes + 4 * kTileBytes;
};

// The tile's rows of keys or values to shared memory; rows without a block become 0.
template <int kDim>
HETKV_DEVICE_INLINE void copy_tile(const PagedAttentionParams& params, const PagedRows& rows, const std::int32_t* blocks,
                                   std::int32_t first_key_of_tile, std::int32_t head_offset, std::uint32_t to) {
  using P = Prefill<kDim>;
  constexpr int kChunks = kDim / 8, kRowsOfPass = P::kThreads / kChunks;
  const int thread = static_cast<int>(threadIdx.x), chunk = thread % kChunks;
#pragma unroll 4
  for (int pass = 0; pass < P::kKeys / kRowsOfPass; ++pass) {
    const int row = pass * kRowsOfPass + thread / kChunks;
    const bool real = blocks[row] >= 0 && 8 * chunk < params.dim;
    gpu::copy_async_16(
        gpu::swizzled<kDim>(to, row, chunk),
        gpu::chunk_source(rows, params, real ? blocks[row] : -1, first_key_of_tile + row, head_offset + 16 * chunk),
        real ? 16 : 0);
  }
}

template <EntryFormat kFormat, int kDim>
__global__ void __launch_bounds__(Prefill<kDim>::kThreads, Prefill<kDim>::kBlocksPerMultiprocessor)
    attend_prefill_kernel(const PagedAttentionParams params, const std::int32_t tile_tokens, const std::int32_t short_tokens) {
  using P = Prefill<kDim>;
  constexpr int kChunks = kDim / 8, kSteps = P::kKeys / 16;
  HETKV_DYNAMIC_SHARED(shared);
  HETKV_SHARED(std::int32_t[2 * P::kKeys], blocks);  // of the keys of a tile, by its parity
  const gpu::StepTile tile = gpu::tile_of_task(params, gridDim.x - 1 - blockIdx.x, tile_tokens);
  if (tile.count <= 0 || (tile.of_sequence && tile.step_tokens <= short_tokens)) return;
  const gpu::TileKeys keys = gpu::keys_of(params, tile);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int group = params.heads / params.kv_heads, kv_head = static_cast<int>(blockIdx.y);
  const int real_rows = group * tile.count;
  const std::int64_t first_vector = std::int64_t{tile.token} * params.heads + kv_head * group;  // of row 0
  const std::int32_t head_offset = 2 * kv_head * params.dim;                                    // bytes
  const gpu::Scaling scaling = gpu::scaling_of(params.scale, params.softcap);
  const std::uint32_t queries = gpu::shared_address(shared), key_tiles = queries + P::kQueryBytes,
                      value_tiles = key_tiles + 2 * P::kTileBytes;
  const std::int32_t origin = keys.begin / P::kKeys * P::kKeys;
  const std::int32_t tiles = keys.end > keys.begin ? (keys.end - origin + P::kKeys - 1) / P::kKeys : 0;

#pragma unroll 4
  for (int i = thread; i < P::kRows * kChunks; i += P::kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    const bool real = row < real_rows && 8 * chunk < params.dim;
    const std::int64_t vector = first_vector + static_cast<std::int64_t>(row / group) * params.heads + row % group;
    gpu::copy_async_16(gpu::swizzled<kDim>(queries, row, chunk),
                       real ? params.query + 2 * (vector * params.dim + 8 * chunk) : params.query, real ? 16 : 0);
  }
  if (thread < P::kKeys) {
    blocks[thread] = keys.block_of(origin + thread);
    blocks[P::kKeys + thread] = keys.block_of(origin + P::kKeys + thread);
  }
  __syncthreads();
  if (tiles > 0) copy_tile<kDim>(params, params.keys, blocks, origin, head_offset, key_tiles);
  gpu::copy_async_commit();
  if (tiles > 0) copy_tile<kDim>(params, params.values, blocks, origin, head_offset, value_tiles);
  gpu::copy_async_commit();

  // The positions of the lane's two rows, and of the warp's first and last real row.
  const int first_row = warp * kWarpRows, last_row = min(first_row + kWarpRows, real_rows) - 1;
  const std::int32_t positions[2] = {tile.position + (first_row + g) / group, tile.position + (first_row + g + 8) / group};
  const std::int32_t first_position = tile.position + first_row / group, last_position = tile.position + last_row / group;

  gpu::Softmax softmax;
  float out[std::size_t{kDim / 8}][4];
  gpu::reset(softmax, out);
  for (std::int32_t i = 0; i < tiles; ++i) {
    const int parity = i & 1;
    const std::int32_t first = origin + i * P::kKeys;
    const std::uint32_t key_tile = key_tiles + static_cast<std::uint32_t>(parity * P::kTileBytes);
    const std::uint32_t value_tile = value_tiles + static_cast<std::uint32_t>(parity * P::kTileBytes);
    gpu::copy_async_wait<1>();
    __syncthreads();  // this tile's keys are there, and nobody reads the last tile any more
    if (i + 1 < tiles) {
      copy_tile<kDim>(params, params.keys, blocks + (1 - parity) * P::kKeys, first + P::kKeys, head_offset,
                      key_tiles + static_cast<std::uint32_t>((1 - parity) * P::kTileBytes));
    }
    gpu::copy_async_commit();
    const std::int32_t block_after = thread < P::kKeys ? keys.block_of(first + 2 * P::kKeys + thread) : -1;
    const bool some_seen = last_row >= first_row && first <= last_position &&
                           gpu::sees(first_position, params.window, min(first_position, first + P::kKeys - 1));
    bool all_seen = true;
    std::uint32_t weights[std::size_t{kSteps}][4];
    if (some_seen) {
      float scores[std::size_t{2 * kSteps}][4] = {};
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        std::uint32_t a[4];
        gpu::load_queries<kDim>(a, queries + static_cast<std::uint32_t>(first_row * 2 * kDim), k, lane);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          gpu::add_scores<kFormat, kDim>(scores[2 * s], scores[2 * s + 1], a, key_tile, 16 * s, k, lane);
        }
      }
      std::uint32_t there[P::kKeys / 32];
      all_seen = gpu::sees(first_position, 0, first + P::kKeys - 1) && gpu::sees(last_position, params.window, first);
#pragma unroll
      for (int w = 0; w < P::kKeys / 32; ++w) {
        there[w] = __ballot_sync(gpu::kAllLanes, static_cast<int>(blocks[parity * P::kKeys + 32 * w + lane] >= 0));
        all_seen = all_seen && there[w] == gpu::kAllLanes;
      }
      gpu::scale_scores(scores, scaling);
      if (!all_seen) {
#pragma unroll
        for (int n = 0; n < 2 * kSteps; ++n) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int key = 8 * n + 2 * t + j % 2;
            const bool present = ((there[n / 4] >> (key % 32)) & 1u) != 0;
            if (!present || !gpu::sees(positions[j / 2], params.window, first + key)) scores[n][j] = -INFINITY;
          }
        }
      }
      gpu::weigh(scores, softmax, out);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) gpu::pack_weights<kFormat>(weights[s], scores[2 * s], scores[2 * s + 1]);
    }
    gpu::copy_async_wait<1>();
    __syncthreads();  // this tile's values are there, and nobody needs its blocks any more
    if (thread < P::kKeys) blocks[parity * P::kKeys + thread] = block_after;
    if (i + 1 < tiles) {
      copy_tile<kDim>(params, params.values, blocks + (1 - parity) * P::kKeys, first + P::kKeys, head_offset,
                      value_tiles + static_cast<std::uint32_t>((1 - parity) * P::kTileBytes));
    }
    gpu::copy_async_commit();
    if (some_seen && all_seen) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) gpu::add_values<kFormat, kDim>(out, weights[s], value_tile, 16 * s, lane);
    } else if (some_seen) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) gpu::add_values_apart<kFormat, kDim>(out, weights[s], value_tile, 16 * s, lane);
    }
  }
  gpu::copy_async_wait<0>();

  gpu::sum_quad(softmax);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + g + 8 * h;
    if (row >= real_rows) continue;
    const int head = kv_head * group + row % group;
    const std::int64_t vector = std::int64_t{tile.token + row / group} * params.heads + head;
    const gpu::Finish finish =
        gpu::finish_of(softmax.largest[h], softmax.sum[h], params.sinks == nullptr ? -INFINITY : params.sinks[head]);
    auto* const to = reinterpret_cast<std::uint32_t*>(params.out + 2 * vector * params.dim);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n < params.dim) {
        to[4 * n + t] = gpu::pack_pair<kFormat>(out[n][2 * h] * finish.factor, out[n][2 * h + 1] * finish.factor);
      }
    }
    if (t == 0) params.lse[vector] = finish.lse;
  }
}

template <EntryFormat kFormat, int kDim>
void launch_dim(const PagedAttentionParams& params, const PagedAttentionPlan& plan, cudaStream_t stream) {
  using P = Prefill<kDim>;
  const std::int32_t group = params.heads / params.kv_heads;
  const std::int32_t tile_tokens = P::kRows / group;
  const dim3 grid(static_cast<unsigned>(params.num_tokens / tile_tokens + params.num_sequences + 2),
                  static_cast<unsigned>(params.kv_heads));
  launch<attend_prefill_kernel<kFormat, kDim>>("paged_attention", grid, dim3(P::kThreads), P::kSharedBytes, stream, params,
                                               tile_tokens, plan.short_tokens);
}

template <EntryFormat kFormat>
void launch_format(const PagedAttentionParams& params, const PagedAttentionPlan& plan, cudaStream_t stream) {
  if (params.dim <= 64) {
    launch_dim<kFormat, 64>(params, plan, stream);
  } else if (params.dim <= 128) {
    launch_dim<kFormat, 128>(params, plan, stream);
  } else {
    launch_dim<kFormat, 256>(params, plan, stream);
  }
}

}  // namespace

void launch_attention_prefill(const PagedAttentionParams& params, const PagedAttentionPlan& plan, cudaStream_t stream) {
  static_assert(Prefill<256>::kRows >= kMaxAttentionTileRows);
  if (params.query_format == EntryFormat::kBFloat16) {
    launch_format<EntryFormat::kBFloat16>(params, plan, stream);
  } else {
    launch_format<EntryFormat::kFloat16>(params, plan, stream);
  }
}

}  // namespace hetkv
