// One row per group of lanes: a warp, or the smallest power of two of lanes that covers the row. Four loads per lane are in
// flight before the first store. The grid follows from shapes alone, so a captured launch serves any slots.
#include "kernels/row_copy.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"

namespace hetkv {
namespace {

enum class Direction : std::uint8_t { kScatter, kGather };

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr std::int64_t kMaxGridY = 65535;

template <Direction kDirection, typename Unit>
__global__ void __launch_bounds__(kThreads) row_copy_kernel(const RowCopyParams params, const int lane_shift) {
  const int lanes = 1 << lane_shift;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const std::int64_t groups = static_cast<std::int64_t>(gridDim.x) * (kThreads >> lane_shift);
  const std::int64_t units = params.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
  const std::int64_t first_row =
      static_cast<std::int64_t>(blockIdx.x) * (kThreads >> lane_shift) + (static_cast<int>(threadIdx.x) >> lane_shift);
  for (std::int64_t row = first_row; row < params.num_rows; row += groups) {
    const std::int64_t start = row_start(params, params.slots[row]);
    if (start < 0) continue;
    for (std::int64_t layer = blockIdx.y; layer < params.num_layers; layer += gridDim.y) {
      std::byte* const block_side = params.arena + start + layer * params.layer_stride;
      std::byte* const packed_side = params.rows + layer * params.rows_layer_stride + row * params.rows_row_stride;
      constexpr bool kToArena = kDirection == Direction::kScatter;
      const Unit* const from = reinterpret_cast<const Unit*>(kToArena ? packed_side : block_side);
      Unit* const to = reinterpret_cast<Unit*>(kToArena ? block_side : packed_side);
      for (std::int64_t unit = lane; unit < units; unit += static_cast<std::int64_t>(lanes) * kUnroll) {
        Unit values[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          if (unit + i * lanes < units) values[i] = from[unit + i * lanes];
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
#ifdef HETKV_PLANT_COPY_PAST_ROW
          to[unit + i * lanes] = values[i];
#else
          if (unit + i * lanes < units) to[unit + i * lanes] = values[i];
#endif
        }
      }
    }
  }
}

// Whether every address of the copy is a multiple of `bytes`. Layers and rows that do not repeat need no stride.
bool aligned_to(const RowCopyParams& params, std::uint64_t bytes) {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(params.arena) | reinterpret_cast<std::uintptr_t>(params.rows) |
                       static_cast<std::uint64_t>(params.row_bytes) | static_cast<std::uint64_t>(params.first_offset);
  if (params.num_layers > 1) {
    bits |= static_cast<std::uint64_t>(params.layer_stride) | static_cast<std::uint64_t>(params.rows_layer_stride);
  }
  if (params.num_rows > 1) bits |= static_cast<std::uint64_t>(params.rows_row_stride);
  return bits % bytes == 0;
}

template <Direction kDirection, typename Unit>
void launch_units(const RowCopyParams& params, cudaStream_t stream, const char* op) {
  const std::int64_t units = params.row_bytes / static_cast<std::int64_t>(sizeof(Unit));
  int lane_shift = 0;
  while (lane_shift < 5 && (std::int64_t{1} << lane_shift) < units) ++lane_shift;
  const std::int64_t groups_per_block = kThreads >> lane_shift;
  const dim3 grid(static_cast<unsigned>(std::min((params.num_rows + groups_per_block - 1) / groups_per_block, kMaxGridX)),
                  static_cast<unsigned>(std::min(params.num_layers, kMaxGridY)));
  launch<row_copy_kernel<kDirection, Unit>>(op, grid, dim3(kThreads), 0, stream, params, lane_shift);
}

// 16-byte accesses wherever the addresses allow, else 4, else single bytes: three instantiations a direction are enough.
template <Direction kDirection>
void launch_widest(const RowCopyParams& params, void* stream, const char* op) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (aligned_to(params, sizeof(uint4))) {
    launch_units<kDirection, uint4>(params, cuda_stream, op);
  } else if (aligned_to(params, sizeof(std::uint32_t))) {
    launch_units<kDirection, std::uint32_t>(params, cuda_stream, op);
  } else {
    launch_units<kDirection, std::uint8_t>(params, cuda_stream, op);
  }
}

}  // namespace

void scatter_rows_cuda(const RowCopyParams& params, void* stream) {
  launch_widest<Direction::kScatter>(params, stream, "scatter_rows");
}

void gather_rows_cuda(const RowCopyParams& params, void* stream) {
  launch_widest<Direction::kGather>(params, stream, "gather_rows");
}

}  // namespace hetkv
