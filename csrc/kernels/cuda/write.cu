// One vector (a head of a row) per group of 8 to 128 lanes. The vector stays in registers from the load to the store. The grid
// follows from shapes alone; slots that are -1 or outside the arena are skipped.
#include "kernels/write.h"

#include <algorithm>

#include "kernels/cuda/entry_row.cuh"
#include "kernels/cuda/launch.cuh"

namespace hetkv {
namespace {

using gpu::kRun;

constexpr int kThreads = 256;
constexpr int kMaxGridY = 65535;

// The rotation where the partner of a value may lie in another lane: through `vector`, shared memory of this group.
HETKV_DEVICE_INLINE void rotate_apart(float (&run)[kRun], const WriteParams& params, std::int64_t row, int start, float* vector,
                                      const gpu::Lane& lane) {
  const int pairs = params.rope / 2;
  const int step = params.rope_interleaved ? 2 : 1, apart = params.rope_interleaved ? 1 : pairs;
  const auto place = [&lane](int index) { return index % kRun * lane.lanes + index / kRun; };  // lanes in neighbouring banks
#pragma unroll
  for (int j = 0; j < kRun; ++j) vector[j * lane.lanes + lane.index] = run[j];
  gpu::group_barrier(lane);
  for (int pair = lane.index; pair < pairs; pair += lane.lanes) {
    const int first = place(start + pair * step), second = place(start + pair * step + apart);
    const float c = params.cos[row * pairs + pair], s = params.sin[row * pairs + pair];
    const float a = vector[first], b = vector[second];
    vector[first] = a * c - b * s;
    vector[second] = b * c + a * s;
  }
  gpu::group_barrier(lane);
#pragma unroll
  for (int j = 0; j < kRun; ++j) run[j] = vector[j * lane.lanes + lane.index];
  gpu::group_barrier(lane);
}

__global__ void __launch_bounds__(kThreads, 4) write_rows_kernel(const WriteParams params, const int lane_shift) {
  HETKV_SHARED(float[kThreads * kRun], vectors);
  HETKV_SHARED(float[kThreads / 32], scratch);
  const PagedRows& target = params.target;
  const gpu::Lane lane = gpu::lane_of(static_cast<int>(threadIdx.x), lane_shift);
  const int group = static_cast<int>(threadIdx.x) >> lane_shift, groups_per_block = kThreads >> lane_shift;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * groups_per_block;
  const std::int64_t head_bytes = entry_data_bytes(target.format, target.width);
  const int start = params.rope_trailing ? target.width - params.rope : 0;
  const bool neighbours = params.rope_interleaved && start % 2 == 0;
  // The loops are the block's, not the group's: barriers and shuffles need every thread.
  for (std::int64_t base = static_cast<std::int64_t>(blockIdx.x) * groups_per_block; base < params.num_rows; base += stride) {
    const std::int64_t row = base + group < params.num_rows ? base + group : base;
    const std::int64_t slot = params.slots[row];
    const bool active = base + group < params.num_rows && slot_fits(target, slot);
    for (int head = static_cast<int>(blockIdx.y); head < params.heads; head += static_cast<int>(gridDim.y)) {
      const std::byte* const vector = params.rows + row * params.row_stride + head * params.head_stride;
      float run[kRun];
      gpu::load_run(vector, params.row_format, lane.first, active ? target.width : 0, run);
      if (params.norm_weight != nullptr) {
        gpu::norm_run(run, params.norm_weight, target.width, params.norm_eps, lane, scratch);
      }
      if (params.rope > 0 && neighbours) {
        const std::int64_t turn = row * (params.rope / 2);
        gpu::rotate_neighbours(run, params.cos + turn, params.sin + turn, start, params.rope, lane);
      } else if (params.rope > 0) {
        rotate_apart(run, params, row, start, vectors + group * kRun * lane.lanes, lane);
      }
      RowAddress address{target.arena, target.arena};
      if (active) address = slot_address(target, slot);
      address.data += head * head_bytes;
      gpu::store_entry(run, target, address, lane, active, scratch);
    }
  }
}

}  // namespace

void write_rows_cuda(const WriteParams& params, void* stream) {
  static_assert(kMaxWriteWidth <= kThreads * kRun);
  const int lane_shift = gpu::lane_shift_for(params.target.width);
  const std::int64_t groups = kThreads >> lane_shift;
  const dim3 grid(static_cast<unsigned>(std::min((params.num_rows + groups - 1) / groups, kMaxGridX)),
                  static_cast<unsigned>(std::min(params.heads, kMaxGridY)));
  launch<write_rows_kernel>("write_rows", grid, dim3(kThreads), 0, static_cast<cudaStream_t>(stream), params, lane_shift);
}

}  // namespace hetkv
