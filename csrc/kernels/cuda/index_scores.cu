// Two kernels, both over (tokens, pieces of the entries).
//
// Tensor cores, for 64 or 128 values of 16-bit queries on keys of the same type, FP8 or MXFP4: keys are the rows, heads the columns.
// A warp holds 32 keys in registers, unpacked to the query's type, and runs over the heads of one or a few tokens, whose queries lie
// in shared memory. ReLU, weight and the sum over heads stay in registers; two shuffles join the four lanes of a key.
//  - Products are exact, sums are float32: e4m3 and e2m1 become f16 by moving bits (2^8 and 2^14 too small, made up for at the end)
//    or bf16 by one exact product. The scale of an FP8 row is a positive power of two, so it waits until after the sum; the scales of
//    an MXFP4 row are applied to the float32 sum of their group.
//  - Lane t of four loads values 8 t to 8 t + 7 of every 32 with one access, and calls them 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of two
//    steps of the product. Queries are laid down in shared memory in the same order.
// Everything else (float32, mixed types, other widths, odd addresses): float32 products, 16 keys x 16 heads of a block at a time.
//
// A score is the same in either row, warp, piece or batch: each product's element is a sum of its own, in an order fixed by shapes.
// Error of a score against exact sums: at most (dim + heads) 2^-22 of the sum of |weight| |query| |key|.
#include "kernels/index_scores.h"

#include <algorithm>
#include <cmath>

#include "kernels/cuda/entry_value.cuh"
#include "kernels/cuda/half_product.cuh"
#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/math/float8.h"

namespace hetkv {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTileKeys = 32;  // of a warp
constexpr int kHeadTile = 16;
constexpr std::int64_t kShortPiece = std::int64_t{kWarps} * kTileKeys, kLongPiece = 4 * kShortPiece;
constexpr std::int64_t kManyBlocks = 512;      // enough for any card: then pieces are long, so that a query is loaded less often
constexpr std::int64_t kMaxTokensOfBlock = 4;  // that share loaded keys
constexpr std::int64_t kManyTokens = 512;      // with fewer, a block has one token
constexpr std::int64_t kQueryBytes = 48 * 1024;  // of shared memory, so that two blocks fit on any card
constexpr int kPlainThreads = 256, kPlainKeys = 16, kPlainHeads = 16;
constexpr std::int64_t kPlainPiece = 128;
constexpr std::int64_t kMaxGridY = 65535;
constexpr std::int64_t kNoToken = std::int64_t{1} << 31;  // no sequence has a token there

static_assert(kMaxIndexHeads * (128 * 2 + 4) <= kQueryBytes);
static_assert(kPlainThreads == kPlainKeys * kPlainHeads);

// What a launch computes beside the params, and how it is cut.
struct Work {
  std::int64_t first_token, num_tokens;
  float* scores;  // row i: token first_token + i
  std::int64_t stride;
  std::int32_t* visible;  // null: scores beyond the visible ones are filled
  std::int64_t piece;     // keys
  std::int64_t tokens_of_block;
};

struct Sequence {
  std::int64_t index = -1;  // -1: the token belongs to none
  std::int64_t end = 0;     // the step's first token after it
  std::int64_t used = 0;
};

HETKV_DEVICE_INLINE Sequence sequence_of(const IndexScoresParams& params, std::int64_t token) {
  std::int64_t low = 0, high = params.num_sequences + 1;  // the first place whose start is beyond the token
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (params.cu_seqlens_q[middle] <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  Sequence sequence;
  if (low == 0 || low > params.num_sequences) return sequence;
  sequence.index = low - 1;
  sequence.end = params.cu_seqlens_q[low];
  sequence.used = params.seqused_k[low - 1];
  return sequence;
}

HETKV_DEVICE_INLINE std::int64_t table_width(const IndexScoresParams& params) {
  return std::int64_t{params.table.columns} << params.keys.block_shift;
}

HETKV_DEVICE_INLINE std::int64_t visible_of(const IndexScoresParams& params, const Sequence& sequence, std::int64_t token) {
  if (sequence.index < 0 || sequence.used <= 0) return 0;
  const std::int64_t tokens = sequence.used - (sequence.end - token) + 1;
  if (tokens <= 0) return 0;
  const std::int64_t ratio = params.ratio < kNoToken ? params.ratio : kNoToken;  // 32-bit division: no call
  const std::int64_t visible = static_cast<std::uint32_t>(tokens) / static_cast<std::uint32_t>(ratio),
                     width = table_width(params);
  return visible < width ? visible : width;
}

// Whether the entry's block is inside the arena; if so, its address. The entry is inside the table.
HETKV_DEVICE_INLINE bool find_entry(const IndexScoresParams& params, std::int64_t sequence, std::int64_t entry,
                                    RowAddress& address) {
  const std::int64_t block = params.table.blocks[sequence * params.table.stride + (entry >> params.keys.block_shift)];
  if (!block_inside(params.keys, block)) return false;
  address = row_in_block(params.keys, block, entry & ((std::int64_t{1} << params.keys.block_shift) - 1));
  return true;
}

HETKV_DEVICE_INLINE void put_score(const Work& work, std::int64_t row, std::int64_t entry, std::int64_t visible,
                                   std::int64_t width, bool there, float score) {
  if (entry < (work.visible == nullptr ? width : visible)) {
    work.scores[row * work.stride + entry] = there && entry < visible ? score : -INFINITY;
  }
}

// NaN stays.
HETKV_DEVICE_INLINE float relu(float x) { return x < 0.0f ? 0.0f : x; }

enum class Keys : std::uint8_t { kAsQuery, kE4m3, kE2m1 };

// Values [8 place, 8 place + 8) of a row as four pairs.
template <Keys kKeys, bool kBFloat16>
HETKV_DEVICE_INLINE void load_pairs(const std::byte* row, int place, std::uint32_t (&pairs)[4]) {
  constexpr std::uint32_t kTwo120 = 0x7b807b80u, kTwo126 = 0x7e807e80u;  // pairs of bf16
  if constexpr (kKeys == Keys::kAsQuery) {
    const uint4 all = reinterpret_cast<const uint4*>(row)[place];
    pairs[0] = all.x;
    pairs[1] = all.y;
    pairs[2] = all.z;
    pairs[3] = all.w;
  } else if constexpr (kKeys == Keys::kE4m3) {
    const uint2 codes = reinterpret_cast<const uint2*>(row)[place];
    const std::uint32_t fours[2] = {codes.x, codes.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kBFloat16) {
        gpu::spread_e4m3_bf16(fours[i], pairs[2 * i], pairs[2 * i + 1]);
        pairs[2 * i] = gpu::mul_bf16x2(pairs[2 * i], kTwo120);
        pairs[2 * i + 1] = gpu::mul_bf16x2(pairs[2 * i + 1], kTwo120);
      } else {
        const std::uint32_t low = __byte_perm(fours[i], 0u, 0x1404u), high = __byte_perm(fours[i], 0u, 0x3424u);
        pairs[2 * i] = (low & 0x80008000u) | ((low >> 1) & 0x3f803f80u);
        pairs[2 * i + 1] = (high & 0x80008000u) | ((high >> 1) & 0x3f803f80u);
      }
    }
  } else {
    const std::uint32_t codes = reinterpret_cast<const std::uint32_t*>(row)[place];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t pair = codes >> (8 * i);
      const std::uint32_t spread = (pair & 0xfu) | ((pair & 0xf0u) << 12);
      const std::uint32_t sign = (spread & 0x00080008u) << 12, size = spread & 0x00070007u;
      pairs[i] = kBFloat16 ? gpu::mul_bf16x2(sign | size << 6, kTwo126) : sign | size << 9;
    }
  }
}

// 32 keys of a warp. Lane 4 g + t: values of keys g, g + 8, g + 16, g + 24, as the fragments of two products of 16 rows.
template <int kSteps>
struct KeyTile {
  std::uint32_t fragments[2][static_cast<std::size_t>(kSteps)][4];
  std::uint32_t scales[4];  // MXFP4: of each key, a byte per group
};

template <Keys kKeys, bool kBFloat16, int kSteps>
HETKV_DEVICE_INLINE void load_keys(const IndexScoresParams& params, std::int64_t sequence, std::int64_t first, std::int64_t most,
                                   KeyTile<kSteps>& tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const std::int64_t entry = first + lane / 4 + 8 * r;
    RowAddress address{nullptr, nullptr};
    const bool there = entry < most && find_entry(params, sequence, entry, address);
    tile.scales[r] = 0;
#pragma unroll
    for (int m = 0; m < kSteps / 2; ++m) {
      std::uint32_t pairs[4] = {0, 0, 0, 0};
      if (there) {
        load_pairs<kKeys, kBFloat16>(address.data, 4 * m + lane % 4, pairs);
        if constexpr (kKeys == Keys::kE2m1) tile.scales[r] |= static_cast<std::uint32_t>(address.scale[m]) << (8 * m);
      }
      tile.fragments[r / 2][2 * m][r % 2] = pairs[0];
      tile.fragments[r / 2][2 * m][r % 2 + 2] = pairs[1];
      tile.fragments[r / 2][2 * m + 1][r % 2] = pairs[2];
      tile.fragments[r / 2][2 * m + 1][r % 2 + 2] = pairs[3];
    }
  }
}

// Shared bytes of 16-byte chunk `chunk` of a head's row: chunks are swapped within groups of eight, so that eight rows' chunks lie
// in different banks.
template <int kSteps>
HETKV_DEVICE_INLINE int chunk_place(int head, int chunk) {
  return (head * 2 * kSteps + (chunk ^ (head & 7))) * 16;
}

// The token's query and weights to shared memory; heads beyond the last one are zeros of weight 0.
template <int kSteps>
HETKV_DEVICE_INLINE void lay_query(const IndexScoresParams& params, std::int64_t token, int heads, std::byte* query,
                                   float* weights) {
  constexpr int kChunks = 2 * kSteps;  // of 8 values
  const uint4* const from = reinterpret_cast<const uint4*>(params.query) + token * params.heads * kChunks;
  for (int i = static_cast<int>(threadIdx.x); i < heads * kChunks; i += kThreads) {
    const int head = i / kChunks, place = i % kChunks;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (head < params.heads) values = from[i];
    const int chunk = place / 4 * 4, at = place % 4 * 4;
    *reinterpret_cast<std::uint32_t*>(query + chunk_place<kSteps>(head, chunk) + at) = values.x;
    *reinterpret_cast<std::uint32_t*>(query + chunk_place<kSteps>(head, chunk + 1) + at) = values.y;
    *reinterpret_cast<std::uint32_t*>(query + chunk_place<kSteps>(head, chunk + 2) + at) = values.z;
    *reinterpret_cast<std::uint32_t*>(query + chunk_place<kSteps>(head, chunk + 3) + at) = values.w;
  }
  for (int head = static_cast<int>(threadIdx.x); head < heads; head += kThreads) {
    weights[head] = head < params.heads ? params.weights[token * params.heads + head] : 0.0f;
  }
}

// The sum over heads for the lane's key (row lane / 4 + 8 (lane % 4) of the tile), before the key's scale.
template <Keys kKeys, bool kBFloat16, int kSteps>
HETKV_DEVICE_INLINE float score_keys(const KeyTile<kSteps>& tile, int heads, std::uint32_t query, const float* weights) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head_of_lane = (lane & 7) + (lane >> 4) * 8, half = (lane >> 3) & 1;
  float totals[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = 0; first < heads; first += kHeadTile) {
    float products[2][2][4] = {};
    float groups[2][2][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      std::uint32_t b[4];
      gpu::load_matrix_x4(b, query + static_cast<std::uint32_t>(chunk_place<kSteps>(first + head_of_lane, 2 * s + half)));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        gpu::multiply_add<kBFloat16 ? EntryFormat::kBFloat16 : EntryFormat::kFloat16>(products[m][0], tile.fragments[m][s], b[0],
                                                                                      b[1]);
        gpu::multiply_add<kBFloat16 ? EntryFormat::kBFloat16 : EntryFormat::kFloat16>(products[m][1], tile.fragments[m][s], b[2],
                                                                                      b[3]);
      }
      if constexpr (kKeys == Keys::kE2m1) {
        if (s % 2 == 0) continue;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const float scale = __uint_as_float((tile.scales[2 * m + c / 2] >> (4 * (s - 1)) & 0xffu) << 23);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              groups[m][n][c] += products[m][n][c] * scale;
              products[m][n][c] = 0.0f;
            }
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 weight = *reinterpret_cast<const float2*>(weights + first + 8 * n + lane % 4 * 2);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float product = kKeys == Keys::kE2m1 ? groups[m][n][c] : products[m][n][c];
          totals[2 * m + c / 2] += (c % 2 == 0 ? weight.x : weight.y) * relu(product);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    totals[r] += __shfl_xor_sync(gpu::kAllLanes, totals[r], 1);
    totals[r] += __shfl_xor_sync(gpu::kAllLanes, totals[r], 2);
  }
  const float low = lane % 2 == 0 ? totals[0] : totals[1], high = lane % 2 == 0 ? totals[2] : totals[3];
  return lane % 4 < 2 ? low : high;
}

template <Keys kKeys, bool kBFloat16>
HETKV_DEVICE_INLINE float scaled(float sum, RowAddress address) {
  if constexpr (kKeys == Keys::kE4m3) {
    return (kBFloat16 ? sum : sum * 256.0f) * *reinterpret_cast<const float*>(address.scale);
  } else if constexpr (kKeys == Keys::kE2m1) {
    return kBFloat16 ? sum : sum * 16384.0f;
  } else {
    return sum;
  }
}

template <Keys kKeys, bool kBFloat16, int kSteps>
__global__ void __launch_bounds__(kThreads, kKeys == Keys::kE2m1 ? 2 : 3)
    index_scores_kernel(const IndexScoresParams params, const Work work) {
  HETKV_DYNAMIC_SHARED(shared);
  const int heads = (params.heads + kHeadTile - 1) / kHeadTile * kHeadTile;
  const int query_bytes = heads * kSteps * 32, warp = static_cast<int>(threadIdx.x) / 32,
            lane = static_cast<int>(threadIdx.x) % 32;
  float* const weights = reinterpret_cast<float*>(shared + work.tokens_of_block * query_bytes);
  const std::int64_t width = table_width(params);
  const std::int64_t block_begin = static_cast<std::int64_t>(blockIdx.x) * work.tokens_of_block;
  const std::int64_t block_rest = work.num_tokens - block_begin;
  const std::int64_t block_end = block_begin + (block_rest < work.tokens_of_block ? block_rest : work.tokens_of_block);

  for (std::int64_t begin = block_begin; begin < block_end;) {  // tokens of one sequence at a time
    const Sequence sequence = sequence_of(params, work.first_token + begin);
    const std::int64_t rest = sequence.index < 0 ? 1 : sequence.end - (work.first_token + begin);
    const std::int64_t end = rest < block_end - begin ? begin + rest : block_end;
    const std::int64_t most = visible_of(params, sequence, work.first_token + end - 1);  // it rises with the token
    if (work.visible != nullptr && blockIdx.y == 0 && threadIdx.x < end - begin) {
      const std::int64_t row = begin + threadIdx.x;
      work.visible[row] = static_cast<std::int32_t>(visible_of(params, sequence, work.first_token + row));
    }
    const std::int64_t piece = blockIdx.y * work.piece;
    if (piece < most) {
      for (std::int64_t row = begin; row < end; ++row) {
        lay_query<kSteps>(params, work.first_token + row, heads, shared + (row - begin) * query_bytes,
                          weights + (row - begin) * heads);
      }
    }
    __syncthreads();
    const std::int64_t limit = work.visible == nullptr ? width : most;
    const std::int64_t piece_end = limit < piece + work.piece ? limit : piece + work.piece;
    for (std::int64_t first = piece + warp * kTileKeys; first < piece_end; first += kShortPiece) {
      const std::int64_t own = first + lane / 4 + lane % 4 * 8;
      if (first >= most) {
        for (std::int64_t row = begin; row < end; ++row) put_score(work, row, own, 0, width, false, 0.0f);
        continue;
      }
      KeyTile<kSteps> tile;
      load_keys<kKeys, kBFloat16>(params, sequence.index, first, most, tile);
      RowAddress address{nullptr, nullptr};
      const bool there = own < most && find_entry(params, sequence.index, own, address);
      for (std::int64_t row = begin; row < end; ++row) {
        const int place = static_cast<int>(row - begin);
        float score =
            score_keys<kKeys, kBFloat16>(tile, heads, gpu::shared_address(shared + place * query_bytes), weights + place * heads);
        if (there) score = scaled<kKeys, kBFloat16>(score, address);
#ifdef HETKV_PLANT_SEES_OPEN_ENTRY
        const std::int64_t visible = most;
#else
        const std::int64_t visible = visible_of(params, sequence, work.first_token + row);
#endif
        put_score(work, row, own, visible, width, there, score);
      }
    }
    __syncthreads();
    begin = end;
  }
}

__global__ void __launch_bounds__(kPlainThreads, 2) index_scores_plain_kernel(const IndexScoresParams params, const Work work) {
  HETKV_DYNAMIC_SHARED(shared);
  const int dim = params.dim, pitch = dim + 1;
  float* const keys = reinterpret_cast<float*>(shared);
  float* const query = keys + kPlainKeys * pitch;
  const int line = static_cast<int>(threadIdx.x) / kPlainHeads, column = static_cast<int>(threadIdx.x) % kPlainHeads;
  const std::int64_t width = table_width(params), row = blockIdx.x, token = work.first_token + row;
  const Sequence sequence = sequence_of(params, token);
  const std::int64_t visible = visible_of(params, sequence, token), limit = work.visible == nullptr ? width : visible;
  if (work.visible != nullptr && blockIdx.y == 0 && threadIdx.x == 0) work.visible[row] = static_cast<std::int32_t>(visible);
  const int query_bytes = params.query_format == EntryFormat::kFloat32 ? 4 : 2;
  const std::byte* const vectors = params.query + token * params.heads * dim * query_bytes;
  const std::int64_t piece = blockIdx.y * work.piece, piece_end = limit < piece + work.piece ? limit : piece + work.piece;
  std::int64_t first = piece;
  for (; first < piece_end && first < visible; first += kPlainKeys) {
    const std::int64_t entry = first + line;
    RowAddress address{nullptr, nullptr};
    const bool there = entry < visible && find_entry(params, sequence.index, entry, address);
    for (int d = column; d < dim; d += kPlainHeads)
      keys[line * pitch + d] = there ? gpu::entry_value(params.keys, address, d) : 0.0f;
    float total = 0.0f;
    for (int head = 0; head < params.heads; head += kPlainHeads) {
      const bool filled = head + line < params.heads;
      const std::byte* const vector = vectors + static_cast<std::int64_t>(head + line) * dim * query_bytes;
      for (int d = column; d < dim; d += kPlainHeads) {
        query[line * pitch + d] = filled ? gpu::plain_value(vector, params.query_format, d) : 0.0f;
      }
      __syncthreads();
      float product = 0.0f;
      for (int d = 0; d < dim; ++d) product = __fmaf_rn(query[column * pitch + d], keys[line * pitch + d], product);
      if (head + column < params.heads) total += params.weights[token * params.heads + head + column] * relu(product);
      __syncthreads();
    }
#pragma unroll
    for (int offset = kPlainHeads / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(gpu::kAllLanes, total, offset);
    if (column == 0) put_score(work, row, entry, visible, width, there, total);
  }
  for (std::int64_t entry = first + threadIdx.x; entry < piece_end; entry += kPlainThreads) {
    put_score(work, row, entry, 0, width, false, 0.0f);
  }
}

// Blocks of tokens by pieces of `width` keys; pieces grow where they would be too many for a grid.
dim3 grid_of(std::int64_t blocks, std::int64_t width, Work& work) {
  const std::int64_t pieces = (width + work.piece - 1) / work.piece;
  if (pieces > kMaxGridY) work.piece *= (pieces + kMaxGridY - 1) / kMaxGridY;
  const std::int64_t lines = (width + work.piece - 1) / work.piece;
  return dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(std::max<std::int64_t>(lines, 1)));
}

bool divides(std::int64_t unit, std::int64_t a, std::int64_t b = 0) { return a % unit == 0 && b % unit == 0; }

// Whether the addresses of the keys fit the accesses of `index_scores_kernel`.
bool fits_tensor_cores(const IndexScoresParams& params) {
  const PagedRows& keys = params.keys;
  const bool aligned = divides(16, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(params.query))) &&
                       divides(16, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(keys.arena)));
  if ((params.dim != 64 && params.dim != 128) || params.query_format == EntryFormat::kFloat32 || !aligned) return false;
  switch (keys.format) {
    case EntryFormat::kFp8Index:
      return divides(8, keys.data_offset, keys.data_bytes) && divides(4, keys.scale_offset, keys.scale_bytes);
    case EntryFormat::kMxfp4Index:
      return divides(4, keys.data_offset, keys.data_bytes);
    default:
      return keys.format == params.query_format && divides(16, keys.data_offset, keys.data_bytes);
  }
}

template <Keys kKeys, bool kBFloat16>
void launch_tensor_cores(const IndexScoresParams& params, Work work, std::int64_t width, cudaStream_t stream) {
  const std::int64_t heads = (params.heads + kHeadTile - 1) / kHeadTile * kHeadTile, token_bytes = heads * (params.dim * 2 + 4);
  if (work.num_tokens >= kManyTokens)
    work.tokens_of_block = std::clamp<std::int64_t>(kQueryBytes / token_bytes, 1, kMaxTokensOfBlock);
  const std::int64_t blocks = (work.num_tokens + work.tokens_of_block - 1) / work.tokens_of_block;
  work.piece = blocks * ((width + kLongPiece - 1) / kLongPiece) < kManyBlocks ? kShortPiece : kLongPiece;
  const dim3 grid = grid_of(blocks, width, work);
  const auto bytes = static_cast<std::size_t>(work.tokens_of_block * token_bytes);
  constexpr const char* kOp = "index_scores";
  if (params.dim == 64) {
    launch<index_scores_kernel<kKeys, kBFloat16, 4>>(kOp, grid, dim3(kThreads), bytes, stream, params, work);
  } else {
    launch<index_scores_kernel<kKeys, kBFloat16, 8>>(kOp, grid, dim3(kThreads), bytes, stream, params, work);
  }
}

template <bool kBFloat16>
void launch_for_keys(const IndexScoresParams& params, const Work& work, std::int64_t width, cudaStream_t stream) {
  switch (params.keys.format) {
    case EntryFormat::kFp8Index:
      return launch_tensor_cores<Keys::kE4m3, kBFloat16>(params, work, width, stream);
    case EntryFormat::kMxfp4Index:
      return launch_tensor_cores<Keys::kE2m1, kBFloat16>(params, work, width, stream);
    default:
      launch_tensor_cores<Keys::kAsQuery, kBFloat16>(params, work, width, stream);
  }
}

}  // namespace

void index_scores_cuda(const IndexScoresParams& params, const IndexScoresRows& rows, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const std::int64_t width = std::int64_t{params.table.columns} << params.keys.block_shift;
  if (rows.num_tokens == 0) return;
  Work work{rows.first_token, rows.num_tokens, rows.scores, rows.stride, rows.visible, kPlainPiece, 1};
  if (fits_tensor_cores(params)) {
    return params.query_format == EntryFormat::kBFloat16 ? launch_for_keys<true>(params, work, width, cuda_stream)
                                                         : launch_for_keys<false>(params, work, width, cuda_stream);
  }
  const dim3 grid = grid_of(rows.num_tokens, width, work);
  const auto bytes = sizeof(float) * static_cast<std::size_t>((kPlainKeys + kPlainHeads) * (params.dim + 1));
  launch<index_scores_plain_kernel>("index_scores", grid, dim3(kPlainThreads), bytes, cuda_stream, params, work);
}

}  // namespace hetkv
