// Tensor-core sparse attention for keys of 512 values that are values too, or of 576 whose first 512 are.
//
// A block has the heads of one token (all 64, or 32 of them) and goes through its keys in tiles. One tile in shared memory serves both
// products: row by row for the scores, transposed for the weighted sum. Scores are cut by heads, keys and values over the 8 warps; their
// parts meet in shared memory, where each row of the softmax belongs to a few lanes. The weighted sum is cut by values alone: each
// warp keeps 64 values of all heads in registers, so that every byte of the tile is read once.
//
// Plain rows come by asynchronous copies into two stages. Packed rows come as they are into one buffer while the tile before is used, and are
// unpacked to bfloat16 from there. Absent rows are zeros, and their scores -inf.
//
// Swizzle: 16-byte chunk c of row r lies at c ^ (r % 8), in tiles, queries and weights.
#include "kernels/sparse_attention.h"

#include <algorithm>

#include "kernels/cuda/half_product.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/softmax.cuh"
#include "kernels/cuda/sparse_combine.cuh"
#include "kernels/cuda/sparse_keys.cuh"
#include "kernels/cuda/sparse_rows.cuh"

namespace hetkv {
namespace {

using gpu::SparseKeys;

constexpr int kThreads = 256, kWarps = 8;
constexpr int kValues = kSparseTileValues, kOutBytes = 2 * kValues;
constexpr int kLatentDim = 576;                // of keys that have more values than they are worth
constexpr int kWarpValues = kValues / kWarps;  // of the weighted sum
constexpr int kPackedBytes = 576, kPackedChunks = kPackedBytes / 16, kCodeChunks = (kValues - kPackedRope) / 16;

// How a block cuts its work, and where things lie in shared memory.
template <int kHeads_, int kKeys_, bool kPacked_, int kDim_ = kValues>
struct Tiling {
  static constexpr int kHeads = kHeads_, kKeys = kKeys_, kDim = kDim_;
  static constexpr bool kPacked = kPacked_;
  static constexpr int kRowBytes = 2 * kDim, kChunks = kRowBytes / 16;
  static constexpr int kHeadGroups = kHeads / 32, kKeyGroups = kHeads == 64 || kDim / kWarps % 16 != 0 ? 2 : 1;
  static constexpr int kValueGroups = kWarps / (kHeadGroups * kKeyGroups);
  static constexpr int kGroupKeys = kKeys / kKeyGroups, kGroupValues = kDim / kValueGroups;
  static constexpr int kSteps = kGroupValues / 16;
  static constexpr bool kQueryInRegisters = kHeads == 32;  // each warp needs its values only
  static constexpr int kKeyTiles = kGroupKeys / 8;         // of a warp's scores
  static constexpr int kRowThreads = kThreads / kHeads;    // of a row of the softmax
  static constexpr int kQuads = kKeys / 4 / kRowThreads;   // of 4 keys, of such a thread

  static constexpr int kStages = kPacked ? 1 : 2;
  static constexpr int kTileBytes = kKeys * kRowBytes, kScoreBytes = kHeads * kKeys * 4;
  static constexpr int kTiles = kQueryInRegisters ? 0 : kHeads * kRowBytes;
  static constexpr int kRaw = kTiles + kStages * kTileBytes;
  static constexpr int kScores = kRaw + (kPacked ? kKeys * kPackedBytes : 0);
  static constexpr int kOffsets = kScores + kValueGroups * kScoreBytes;
  static constexpr int kScales = kOffsets + 3 * kKeys * 8;
  static constexpr int kAlphas = kScales + (kPacked ? 2 * kKeys * 8 : 0);
  static constexpr int kLses = kAlphas + kHeads * 4;
  static constexpr int kBytes = kLses + kHeads * 4;
  static_assert(kGroupKeys % 16 == 0 && kGroupValues % 16 == 0 && kChunks % 8 == 0 && (!kPacked || kDim == kValues) &&
                kKeys * 4 >= 128 && kOffsets % 8 == 0);
};

// Where a key's row begins, from the arena's start; -1: absent.
struct KeyPlace {
  std::int64_t data = -1, scale = 0;
};

// Finds the keys of a later tile in two loads that each have a part of an iteration to arrive.
class KeyFinder {
 public:
  HETKV_DEVICE_INLINE KeyFinder(const SparseAttentionParams& params, const SparseKeys& keys) : params_(params), keys_(keys) {}

  // Key `lane` of a tile, which starts at place `place` of the window rows or entries.
  HETKV_DEVICE_INLINE void name(bool of_window, int place) {
    of_window_ = of_window;
    if (of_window) {
      row_ = place < keys_.window_rows ? keys_.first_row + place : -1;
    } else {
      row_ = gpu::listed_entry(params_, keys_, place);
    }
  }
  HETKV_DEVICE_INLINE void look_up() {
    const PagedRows& rows = of_window_ ? params_.window_rows : params_.entries;
    block_ = gpu::block_of_row(rows, of_window_ ? params_.window_table : params_.entry_table, keys_.sequence, row_);
  }
  HETKV_DEVICE_INLINE KeyPlace place() const {
    if (block_ < 0) return {};
    const PagedRows& rows = of_window_ ? params_.window_rows : params_.entries;
    const std::int64_t start = static_cast<std::int64_t>(block_) << kBlockOffsetShift;
    const std::int64_t row = row_ & ((std::int64_t{1} << rows.block_shift) - 1);
    return {start + rows.data_offset + row * rows.data_bytes, start + rows.scale_offset + row * rows.scale_bytes};
  }

 private:
  const SparseAttentionParams& params_;
  const SparseKeys& keys_;
  std::int64_t row_ = -1;
  int block_ = -1;
  bool of_window_ = true;
};

HETKV_DEVICE_INLINE std::uint32_t swizzled(std::uint32_t base, int row, int row_bytes, int chunk) {
  return base + static_cast<std::uint32_t>(row * row_bytes + ((chunk ^ (row & 7)) << 4));
}
// The place of column `column`, in floats, of row `row` of a score part: neither the pair stores of the fragments nor the 16-byte loads of the
// softmax meet in a bank.
HETKV_DEVICE_INLINE int score_column(int row, int column) { return column ^ (((row & 3) << 3) | (row & 4)); }

// Rows of plain values into a tile; `nowhere`: any address that may be read.
template <typename T>
HETKV_DEVICE_INLINE void copy_rows(const std::byte* arena, const std::byte* nowhere, const std::int64_t* offsets,
                                   std::uint32_t tile) {
  const auto copy = [&](int row, int chunk) {
    const std::int64_t offset = offsets[row];
    gpu::copy_async_16(swizzled(tile, row, T::kRowBytes, chunk), offset < 0 ? nowhere : arena + offset + chunk * 16,
                       offset < 0 ? 0 : 16);
  };
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kThreads % T::kChunks == 0) {  // a thread keeps its chunk
#pragma unroll 4
    for (int row = thread / T::kChunks; row < T::kKeys; row += kThreads / T::kChunks) copy(row, thread % T::kChunks);
  } else {
#pragma unroll 4
    for (int item = thread; item < T::kKeys * T::kChunks; item += kThreads) copy(item / T::kChunks, item % T::kChunks);
  }
}

// Packed rows as they are.
template <typename T>
HETKV_DEVICE_INLINE void copy_packed(const std::byte* arena, const std::byte* nowhere, const std::int64_t* offsets,
                                     std::uint32_t raw) {
#pragma unroll 4
  for (int item = static_cast<int>(threadIdx.x); item < T::kKeys * kPackedChunks; item += kThreads) {
    const int row = item / kPackedChunks, chunk = item % kPackedChunks;
    const std::int64_t offset = offsets[row];
    gpu::copy_async_16(raw + static_cast<std::uint32_t>(item * 16), offset < 0 ? nowhere : arena + offset + chunk * 16,
                       offset < 0 ? 0 : 16);
  }
}

// 16 codes to bfloat16: exact for every scale whose products bfloat16 has.
HETKV_DEVICE_INLINE void unpack_codes(const uint4& codes, std::uint32_t scale, uint4& low, uint4& high) {
  constexpr std::uint32_t kUp = 0x7b807b80u;  // 2^120
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  std::uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) gpu::spread_e4m3_bf16(words[i], pairs[2 * i], pairs[2 * i + 1]);
#pragma unroll
  for (int i = 0; i < 8; ++i) pairs[i] = gpu::mul_bf16x2(gpu::mul_bf16x2(pairs[i], kUp), scale);
  low = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  high = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// The raw rows into the tile. scales: 8 bytes a key.
template <typename T>
HETKV_DEVICE_INLINE void unpack_rows(const std::byte* raw, const std::byte* scales, std::byte* tile) {
  const auto store = [tile](int row, int chunk, const uint4& value) {
    *reinterpret_cast<uint4*>(tile + row * T::kRowBytes + ((chunk ^ (row & 7)) << 4)) = value;
  };
#pragma unroll 1
  for (int item = static_cast<int>(threadIdx.x); item < T::kKeys * kPackedChunks; item += kThreads) {
    const int row = item / kPackedChunks, chunk = item % kPackedChunks;
    const uint4 bytes = *reinterpret_cast<const uint4*>(raw + item * 16);
    if (chunk >= kCodeChunks) {
      store(row, kCodeChunks + chunk, bytes);
      continue;
    }
    const std::uint32_t exponent = static_cast<std::uint32_t>(scales[row * 8 + chunk / 4]);
    const std::uint32_t bits = exponent == 0 ? 0x40u : exponent << 7;  // 2^-127 is a denormal
    uint4 low, high;
    unpack_codes(bytes, bits | (bits << 16), low, high);
    const int turn = (chunk >> 2) & 1;  // neighbours in other banks
    store(row, 2 * chunk + turn, turn == 0 ? low : high);
    store(row, 2 * chunk + 1 - turn, turn == 0 ? high : low);
  }
}

// The queries of 32 heads from `head` on, values [first, first + kGroupValues), as fragments for steps of 16.
template <typename T>
struct QueryRegisters {
  std::uint32_t a[2][T::kSteps][4];
};
template <typename T>
HETKV_DEVICE_INLINE void load_query(const SparseAttentionParams& params, std::int64_t token, int head, int first,
                                    QueryRegisters<T>& query) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
  const std::byte* const base = params.query + token * params.heads * T::kRowBytes;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int step = 0; step < T::kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = head + m * 16 + g + 8 * (i % 2), value = first + step * 16 + 2 * t + 8 * (i / 2);
        query.a[m][step][i] =
            row < params.heads
                ? *reinterpret_cast<const std::uint32_t*>(base + static_cast<std::int64_t>(row) * T::kRowBytes + 2 * value)
                : 0u;
      }
    }
  }
}

// One warp's part of the scores: 32 heads x kGroupKeys keys over kGroupValues values, stored to its place in `scores`.
template <typename T, EntryFormat kHalf>
HETKV_DEVICE_INLINE void score_tile(std::uint32_t query, const QueryRegisters<T>& registers, std::uint32_t tile, float* scores) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int value_group = warp / (T::kHeadGroups * T::kKeyGroups);
  const int head = warp % T::kHeadGroups * 32, key = warp / T::kHeadGroups % T::kKeyGroups * T::kGroupKeys;
  const int first_chunk = value_group * T::kGroupValues / 8;
  float sums[2][T::kKeyTiles][4] = {};
  const int a_row = head + lane % 16, a_chunk = first_chunk + lane / 16;
  const int b_row = key + lane % 8 + lane / 16 * 8, b_chunk = first_chunk + lane / 8 % 2;
#pragma unroll(T::kQueryInRegisters ? T::kSteps : 2)
  for (int step = 0; step < T::kSteps; ++step) {
    std::uint32_t a[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if constexpr (T::kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[m][i] = registers.a[m][step][i];
      } else {
        gpu::load_matrix_x4(a[m], swizzled(query, a_row + m * 16, T::kRowBytes, a_chunk + 2 * step));
      }
    }
#pragma unroll
    for (int n = 0; n < T::kKeyTiles; n += 2) {
      std::uint32_t b[4];
      gpu::load_matrix_x4(b, swizzled(tile, b_row + n * 8, T::kRowBytes, b_chunk + 2 * step));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        gpu::multiply_add<kHalf>(sums[m][n], a[m], b[0], b[1]);
        gpu::multiply_add<kHalf>(sums[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
  float* const part = scores + value_group * T::kHeads * T::kKeys;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < T::kKeyTiles; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = head + m * 16 + lane / 4 + 8 * half, column = score_column(row, key + n * 8 + lane % 4 * 2);
        *reinterpret_cast<float2*>(part + row * T::kKeys + column) = make_float2(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
      }
    }
  }
}

// The softmax state of a row, spread over its lanes: `sum` is this lane's part.
struct SoftmaxRow {
  float largest = -INFINITY, sum = 0.0f;
};

template <typename T>
HETKV_DEVICE_INLINE int softmax_row() {
  constexpr int kRows = 32 / T::kRowThreads;  // of a warp
  return static_cast<int>(threadIdx.x) / 32 * kRows + static_cast<int>(threadIdx.x) % kRows;
}

// Scores to weights, which replace the first part of the scores; the factor for what was summed before goes to alphas.
template <typename T, EntryFormat kHalf>
HETKV_DEVICE_INLINE void soften_tile(float* scores, const std::int64_t* offsets, float scale, SoftmaxRow& state, float* alphas) {
  constexpr int kRows = 32 / T::kRowThreads;
  const int row = softmax_row<T>(), part = static_cast<int>(threadIdx.x) % 32 / kRows;
  float values[T::kQuads][4];
  float largest = state.largest;
#pragma unroll
  for (int i = 0; i < T::kQuads; ++i) {
    const int column = 4 * (part + i * T::kRowThreads);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int group = 0; group < T::kValueGroups; ++group) {
      const float4 add =
          *reinterpret_cast<const float4*>(scores + (group * T::kHeads + row) * T::kKeys + score_column(row, column));
      sum = make_float4(sum.x + add.x, sum.y + add.y, sum.z + add.z, sum.w + add.w);
    }
    const float all[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[i][j] = offsets[column + j] < 0 ? -INFINITY : all[j] * scale;
      largest = fmaxf(largest, values[i][j]);
    }
  }
#pragma unroll
  for (int apart = kRows; apart < 32; apart *= 2) largest = fmaxf(largest, __shfl_xor_sync(gpu::kAllLanes, largest, apart));
  const float base = gpu::base_of(largest);
  const float alpha = gpu::exp2_approx(state.largest - base);
  if (part == 0) alphas[row] = alpha;
  state.largest = largest;
  state.sum *= alpha;
  __syncwarp();  // the row's scores have been read
  std::byte* const weights = reinterpret_cast<std::byte*>(scores + row * T::kKeys);
#pragma unroll
  for (int i = 0; i < T::kQuads; ++i) {
    float p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      p[j] = gpu::exp2_approx(values[i][j] - base);
      state.sum += p[j];
    }
    const int column = 4 * (part + i * T::kRowThreads);
    *reinterpret_cast<uint2*>(weights + (((column / 8) ^ (row & 7)) << 4) + column % 8 * 2) =
        make_uint2(gpu::pack_pair<kHalf>(p[0], p[1]), gpu::pack_pair<kHalf>(p[2], p[3]));
  }
}

// out = out * alpha + weights * tile, for this warp's values of all heads.
template <typename T, EntryFormat kHalf>
HETKV_DEVICE_INLINE void weigh_tile(std::uint32_t weights, std::uint32_t tile, const float* alphas,
                                    float (&out)[T::kHeads / 16][kWarpValues / 8][4]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < T::kHeads / 16; ++m) {
    const float low = alphas[m * 16 + lane / 4], high = alphas[m * 16 + lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < kWarpValues / 8; ++n) {
      out[m][n][0] *= low;
      out[m][n][1] *= low;
      out[m][n][2] *= high;
      out[m][n][3] *= high;
    }
  }
#pragma unroll 1
  for (int step = 0; step < T::kKeys / 16; ++step) {
    std::uint32_t a[T::kHeads / 16][4];
#pragma unroll
    for (int m = 0; m < T::kHeads / 16; ++m) {
      gpu::load_matrix_x4(a[m], swizzled(weights, m * 16 + lane % 16, T::kKeys * 4, 2 * step + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < kWarpValues / 8; n += 2) {
      std::uint32_t b[4];
      gpu::load_matrix_x4_trans(b, swizzled(tile, step * 16 + lane % 16, T::kRowBytes, warp * kWarpValues / 8 + n + lane / 16));
#pragma unroll
      for (int m = 0; m < T::kHeads / 16; ++m) {
        gpu::multiply_add<kHalf>(out[m][n], a[m], b[0], b[1]);
        gpu::multiply_add<kHalf>(out[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// This warp's values of all heads, finished: factors[head] * out, rotated back, in 16 bits.
template <typename T, EntryFormat kHalf>
HETKV_DEVICE_INLINE void store_out(const SparseAttentionParams& params, std::int64_t token, int head, const float* factors,
                                   const float (&out)[T::kHeads / 16][kWarpValues / 8][4]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#ifdef HETKV_PLANT_OUT_AS_WIDE_AS_KEYS
  constexpr int kVectorBytes = T::kRowBytes;
#else
  constexpr int kVectorBytes = kOutBytes;
#endif
#pragma unroll
  for (int n = 0; n < kWarpValues / 8; ++n) {
    const int value = warp * kWarpValues + n * 8 + lane % 4 * 2, pair = (value - (kValues - params.rope)) / 2;
    const bool turned = params.rope > 0 && value >= kValues - params.rope;
    const float cos = turned ? params.cos[token * (params.rope / 2) + pair] : 1.0f;
    const float sin = turned ? params.sin[token * (params.rope / 2) + pair] : 0.0f;
#pragma unroll
    for (int m = 0; m < T::kHeads / 16; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + lane / 4 + 8 * half;
        if (head + row >= params.heads) continue;
        const float a = out[m][n][2 * half] * factors[row], b = out[m][n][2 * half + 1] * factors[row];
        const std::uint32_t bits =
            turned ? gpu::pack_pair<kHalf>(a * cos + b * sin, b * cos - a * sin) : gpu::pack_pair<kHalf>(a, b);
        *reinterpret_cast<std::uint32_t*>(params.out + (token * params.heads + head + row) * kVectorBytes + 2 * value) = bits;
      }
    }
  }
}

template <typename T>
HETKV_DEVICE_INLINE void store_part(const SparseAttentionParams& params, const gpu::SparseParts& parts, std::int64_t token,
                                    int split, int head, const float (&out)[T::kHeads / 16][kWarpValues / 8][4]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < T::kHeads / 16; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + lane / 4 + 8 * half;
      if (head + row >= params.heads) continue;
      float* const to = parts.out(params, token, split, head + row) + warp * kWarpValues + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kWarpValues / 8; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(out[m][n][2 * half], out[m][n][2 * half + 1]);
      }
    }
  }
}

// Grid: (tokens, head blocks, splits). parts: where partial results go, null with one split.
template <typename T, EntryFormat kHalf>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_attention_kernel(const SparseAttentionParams params, const gpu::SparseParts parts) {
  HETKV_DYNAMIC_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x);
  const int head = static_cast<int>(blockIdx.y) * T::kHeads, split = static_cast<int>(blockIdx.z);
  const std::int64_t token = blockIdx.x;
  const SparseKeys keys = gpu::sparse_keys_of(params, token);
  const int window_tiles = (keys.window_rows + T::kKeys - 1) / T::kKeys;
  const std::int64_t tiles = window_tiles + (keys.entries + T::kKeys - 1) / T::kKeys;
  const int first = static_cast<int>(tiles * split / gridDim.z), end = static_cast<int>(tiles * (split + 1) / gridDim.z);

  float* const scores = reinterpret_cast<float*>(shared + T::kScores);
  auto* const offsets = reinterpret_cast<std::int64_t*>(shared + T::kOffsets);
  float* const alphas = reinterpret_cast<float*>(shared + T::kAlphas);
  float* const lses = reinterpret_cast<float*>(shared + T::kLses);
  const std::uint32_t query = gpu::shared_address(shared), tile_base = query + T::kTiles, raw = query + T::kRaw;

  // Which thread finds which key; of tile `tile`, the offsets lie in offsets[tile % 3].
  KeyFinder finder(params, keys);
  const bool finds = thread < T::kKeys;
  const auto name = [&](int tile) {
    const bool of_window = tile < window_tiles;
    finder.name(of_window, (of_window ? tile : tile - window_tiles) * T::kKeys + thread);
  };
  const auto is_packed = [&](int tile) {
    return T::kPacked && (tile < window_tiles ? params.window_rows : params.entries).format == EntryFormat::kFp8Packed;
  };
  std::int64_t scale_offset = 0;  // of this thread's key in the next tile; -1: absent
  const auto put_place = [&](int tile) {
    const KeyPlace place = finder.place();
    offsets[tile % 3 * T::kKeys + thread] = place.data;
    scale_offset = place.data < 0 ? -1 : place.scale;
  };
  const auto load_scales = [&](int tile) {  // 8 exponents; 2^0 where there is no key
    uint2 scales = make_uint2(0x7f7f7f7fu, 0x7f7f7f7fu);
    if (is_packed(tile) && scale_offset >= 0) {
      scales = *reinterpret_cast<const uint2*>(params.window_rows.arena + scale_offset);
    }
    return scales;
  };
  const auto put_scales = [&](int tile, const uint2& scales) {
    *reinterpret_cast<uint2*>(shared + T::kScales + (tile % 2 * T::kKeys + thread) * 8) = scales;
  };

  QueryRegisters<T> registers;
  if constexpr (T::kQueryInRegisters) {
    load_query<T>(params, token, head, thread / 32 / (T::kHeadGroups * T::kKeyGroups) * T::kGroupValues, registers);
  } else {
    for (int item = thread; item < T::kHeads * T::kChunks; item += kThreads) {
      const int row = item / T::kChunks, chunk = item % T::kChunks;
      const bool real = head + row < params.heads;
      gpu::copy_async_16(swizzled(query, row, T::kRowBytes, chunk),
                         params.query + (real ? (token * params.heads + head + row) * T::kRowBytes + chunk * 16 : 0),
                         real ? 16 : 0);
    }
    gpu::copy_async_commit();
  }
  if (finds && first < end) {
    for (int tile = first; tile < first + 2 && tile < end; ++tile) {
      name(tile);
      finder.look_up();
      put_place(tile);
      if constexpr (T::kPacked) {
        if (tile == first) put_scales(tile, load_scales(tile));
      }
    }
  }
  __syncthreads();
  const auto fill = [&](int tile) {
    if (tile < end) {
      const std::int64_t* const places = offsets + tile % 3 * T::kKeys;
      if constexpr (!T::kPacked) {
        copy_rows<T>(params.window_rows.arena, params.query, places,
                     tile_base + static_cast<std::uint32_t>(tile % 2 * T::kTileBytes));
      } else {
        if (is_packed(tile)) copy_packed<T>(params.window_rows.arena, params.query, places, raw);
      }
    }
    gpu::copy_async_commit();
  };
  fill(first);

  float out[T::kHeads / 16][kWarpValues / 8][4] = {};
  SoftmaxRow state;
  for (int tile = first; tile < end; ++tile) {
    const std::int64_t* const places = offsets + tile % 3 * T::kKeys;
    const std::uint32_t at = tile_base + static_cast<std::uint32_t>(T::kPacked ? 0 : tile % 2 * T::kTileBytes);
    const bool seeks = finds && tile + 2 < end;
    uint2 next_scales{};
    if (seeks) name(tile + 2);
    gpu::copy_async_wait<0>();
    __syncthreads();  // the rows of this tile are here, and nobody reads the tile before any more
    if constexpr (T::kPacked) {
      if (is_packed(tile)) {
        unpack_rows<T>(shared + T::kRaw, shared + T::kScales + tile % 2 * T::kKeys * 8, shared + T::kTiles);
      } else {
        copy_rows<T>(params.window_rows.arena, params.query, places, at);
        gpu::copy_async_commit();
        gpu::copy_async_wait<0>();
      }
      __syncthreads();
      if (finds && tile + 1 < end) next_scales = load_scales(tile + 1);
    }
    fill(tile + 1);
    score_tile<T, kHalf>(query, registers, at, scores);
    if (seeks) finder.look_up();
    __syncthreads();
    soften_tile<T, kHalf>(scores, places, params.scale * gpu::kLog2e, state, alphas);
    if constexpr (T::kPacked) {
      if (finds && tile + 1 < end) put_scales(tile + 1, next_scales);
    }
    if (seeks) put_place(tile + 2);
#ifndef HETKV_PLANT_NO_WEIGHTS_BARRIER
    __syncthreads();
#endif
    weigh_tile<T, kHalf>(gpu::shared_address(scores), at, alphas, out);
  }
  gpu::copy_async_wait<0>();

  constexpr int kRows = 32 / T::kRowThreads;
#pragma unroll
  for (int apart = kRows; apart < 32; apart *= 2) state.sum += __shfl_xor_sync(gpu::kAllLanes, state.sum, apart);
  const int row = softmax_row<T>();
  const bool stores = thread % 32 < kRows && head + row < params.heads;
  if (gridDim.z > 1) {
    if (stores) *parts.state(params, token, split, head + row) = make_float2(state.largest, state.sum);
    if (first < end) store_part<T>(params, parts, token, split, head, out);
    return;
  }
  __syncthreads();  // alphas have been read
  if (thread % 32 < kRows) {
    const float sink = params.sinks == nullptr || head + row >= params.heads ? -INFINITY : params.sinks[head + row];
    const gpu::Finish finish = gpu::finish_of(state.largest, state.sum, sink);
    alphas[row] = finish.factor;
    lses[row] = finish.lse;
  }
  __syncthreads();
  if (stores) params.lse[token * params.heads + head + row] = lses[row];
  store_out<T, kHalf>(params, token, head, alphas, out);
}

template <typename T, EntryFormat kHalf>
void launch_tiles(const SparseAttentionParams& params, const gpu::SparseParts& parts, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.num_tokens), static_cast<unsigned>((params.heads + T::kHeads - 1) / T::kHeads),
                  static_cast<unsigned>(parts.splits));
  launch<sparse_attention_kernel<T, kHalf>>("sparse_attention", grid, dim3(kThreads), T::kBytes, stream, params, parts);
}

// The largest tile that the card has room for. It depends on the card and the heads, never on the batch.
template <bool kPacked, EntryFormat kHalf>
void launch_fitting(const SparseAttentionParams& params, const gpu::SparseParts& parts, cudaStream_t stream) {
  using Large = Tiling<64, 64, kPacked>;
  using Middle = Tiling<64, 32, kPacked>;
  using Small = Tiling<32, 32, kPacked>;
  static_assert(Large::kBytes <= 232448 && Middle::kBytes <= 166912 && Small::kBytes <= 101376);
  const std::size_t limit = shared_bytes_limit("sparse_attention");
  if (params.heads <= 32 || limit < Middle::kBytes) {
    launch_tiles<Small, kHalf>(params, parts, stream);
  } else if (limit < Large::kBytes) {
    launch_tiles<Middle, kHalf>(params, parts, stream);
  } else {
    launch_tiles<Large, kHalf>(params, parts, stream);
  }
}

// The same for keys of 576 values: 64 heads leave no room for more than 32 keys.
template <EntryFormat kHalf>
void launch_latent(const SparseAttentionParams& params, const gpu::SparseParts& parts, cudaStream_t stream) {
  using Middle = Tiling<64, 32, false, kLatentDim>;
  using Small = Tiling<32, 32, false, kLatentDim>;
  static_assert(Middle::kBytes <= 166912 && Small::kBytes <= 101376);
  if (params.heads <= 32 || shared_bytes_limit("sparse_attention") < Middle::kBytes) {
    launch_tiles<Small, kHalf>(params, parts, stream);
  } else {
    launch_tiles<Middle, kHalf>(params, parts, stream);
  }
}

// Whether the rows are of one 16-bit type or packed, where 16-byte copies reach them.
bool fits_tiles(const PagedRows& rows, EntryFormat half) {
  if (rows.data_offset % 16 != 0) return false;
  if (rows.format == EntryFormat::kFp8Packed)
    return rows.width == kValues && half == EntryFormat::kBFloat16 && rows.scale_offset % 8 == 0;
  return rows.format == half;
}

}  // namespace

void sparse_attention_cuda(const SparseAttentionParams& params, float* workspace, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool has_entries = params.entry_table.blocks != nullptr;
  const EntryFormat half = params.query_format;
  const bool latent = params.dim == kLatentDim;
  const bool tiles = params.value_dim == kValues && (params.dim == kValues || latent) && half != EntryFormat::kFloat32 &&
                     fits_tiles(params.window_rows, half) && (!has_entries || fits_tiles(params.entries, half));
  if (!tiles || params.num_tokens > kMaxGridX) {
    gpu::sparse_attention_rows(params, cuda_stream);
    return;
  }
  const gpu::SparseParts parts = gpu::sparse_parts(params, workspace);
  const bool packed =
      params.window_rows.format == EntryFormat::kFp8Packed || (has_entries && params.entries.format == EntryFormat::kFp8Packed);
  if (latent) {
    if (half == EntryFormat::kBFloat16) {
      launch_latent<EntryFormat::kBFloat16>(params, parts, cuda_stream);
    } else {
      launch_latent<EntryFormat::kFloat16>(params, parts, cuda_stream);
    }
  } else if (packed) {
    launch_fitting<true, EntryFormat::kBFloat16>(params, parts, cuda_stream);
  } else if (half == EntryFormat::kBFloat16) {
    launch_fitting<false, EntryFormat::kBFloat16>(params, parts, cuda_stream);
  } else {
    launch_fitting<false, EntryFormat::kFloat16>(params, parts, cuda_stream);
  }
  if (parts.splits > 1) gpu::combine_sparse_parts(params, parts, cuda_stream);
}

}  // namespace hetkv
