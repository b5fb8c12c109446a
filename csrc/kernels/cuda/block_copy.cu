// A CTA copies up to 16 KiB of a pair at a time, four 16-byte loads a thread before the first store. The parts of a pair that
// overlap are the work of one CTA, which walks from the side where nothing unread is overwritten. The grid follows from shapes
// alone.
#include "kernels/block_copy.h"

#include <algorithm>

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/paged_rows.h"

namespace hetkv {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kUnroll = 4;

// How every pair is cut, the same for all: blocks lie at multiples of 256 bytes.
struct Cut {
  std::int64_t units = 0;    // whole units behind the head
  std::int64_t steps = 0;    // of threads * kUnroll units; at least 1
  std::int32_t threads = 0;  // of a CTA
  std::int32_t head = 0;     // bytes before the first aligned unit, fewer than a unit
  std::int32_t tail = 0;     // bytes behind the last
};

// kOnce: no thread of the launch writes these bytes.
template <bool kOnce, typename Unit>
HETKV_DEVICE_INLINE void load_step(Unit (&values)[kUnroll], const Unit* from, std::int64_t first, const Cut& cut) {
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const std::int64_t unit = first + i * cut.threads;
    if (unit >= cut.units) continue;
    if constexpr (kOnce && sizeof(Unit) == 16) {
      values[i] = gpu::load_once_16(from + unit);
    } else {
      values[i] = from[unit];
    }
  }
}

template <typename Unit>
HETKV_DEVICE_INLINE void store_step(Unit* to, const Unit (&values)[kUnroll], std::int64_t first, const Cut& cut) {
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const std::int64_t unit = first + i * cut.threads;
    if (unit < cut.units) to[unit] = values[i];
  }
}

template <typename Unit>
__global__ void __launch_bounds__(kMaxThreads) copy_blocks_kernel(const BlockCopyParams params, const Cut cut) {
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t work = params.num_pairs * cut.steps, step_units = static_cast<std::int64_t>(cut.threads) * kUnroll;
  for (std::int64_t item = blockIdx.x; item < work; item += gridDim.x) {
    const std::int64_t pair = item / cut.steps, step = item - pair * cut.steps;
    const std::int64_t source = std::int64_t{params.source[pair]} << kBlockOffsetShift;
    const std::int64_t target = std::int64_t{params.target[pair]} << kBlockOffsetShift;
    const std::int64_t part_end = params.begin + params.num_bytes;
    if (source < 0 || source > params.source_arena_bytes - part_end) continue;
    if (target < 0 || target > params.target_arena_bytes - part_end) continue;
    const std::byte* const from = params.source_arena + source + params.begin;
    std::byte* const to = params.target_arena + target + params.begin;
    if (to == from) continue;
    const auto a = reinterpret_cast<std::uintptr_t>(from), b = reinterpret_cast<std::uintptr_t>(to);
    const auto distance = static_cast<std::int64_t>(a < b ? b - a : a - b);
    const bool apart = distance >= params.num_bytes;
    if (!apart && step != 0) continue;

    // The bytes at both ends, one a thread; read before anything of this pair is written.
    std::int64_t edge = -1;
    if (step == 0 && thread < cut.head) edge = thread;
    if (step == 0 && thread >= cut.threads - cut.tail) edge = params.num_bytes - (cut.threads - thread);
    std::byte edge_byte{};
    if (edge >= 0) edge_byte = from[edge];

    const Unit* const units_from = reinterpret_cast<const Unit*>(from + cut.head);
    Unit* const units_to = reinterpret_cast<Unit*>(to + cut.head);
    Unit values[kUnroll];
    if (apart) {
      const std::int64_t first = step * step_units + thread;
      load_step<true>(values, units_from, first, cut);
      store_step(units_to, values, first, cut);
    } else {
      // A step overwrites only what it and the steps before it have read, so one barrier between its loads and stores is enough.
#ifdef HETKV_PLANT_COPY_FORWARD
      const bool forward = true;
#else
      const bool forward = b < a;
#endif
      for (std::int64_t done = 0; done < cut.steps; ++done) {
        const std::int64_t first = (forward ? done : cut.steps - 1 - done) * step_units + thread;
        load_step<false>(values, units_from, first, cut);
        __syncthreads();
        store_step(units_to, values, first, cut);
      }
    }
    if (edge >= 0) to[edge] = edge_byte;
  }
}

template <typename Unit>
void launch_units(const char* op, const BlockCopyParams& params, void* stream) {
  constexpr auto kUnit = static_cast<std::int64_t>(sizeof(Unit));
  const auto past_unit = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(params.source_arena + params.begin) % kUnit);
  Cut cut;
  cut.head = static_cast<std::int32_t>(std::min((kUnit - past_unit) % kUnit, params.num_bytes));
  cut.units = (params.num_bytes - cut.head) / kUnit;
  cut.tail = static_cast<std::int32_t>((params.num_bytes - cut.head) % kUnit);
  cut.threads = 32;  // at least both edges
  while (cut.threads < kMaxThreads && cut.threads * kUnroll < cut.units) cut.threads *= 2;
  const std::int64_t step_units = static_cast<std::int64_t>(cut.threads) * kUnroll;
  cut.steps = std::max<std::int64_t>(1, (cut.units + step_units - 1) / step_units);
  const dim3 grid(static_cast<unsigned>(std::min(params.num_pairs * cut.steps, kMaxGridX)));
  launch<copy_blocks_kernel<Unit>>(op, grid, dim3(static_cast<unsigned>(cut.threads)), 0, static_cast<cudaStream_t>(stream),
                                   params, cut);
}

}  // namespace

void copy_blocks_cuda(const char* op, const BlockCopyParams& params, void* stream) {
  // Inside one arena both parts are equally far from a 16-byte address; between two arenas they need not be.
  const auto apart =
      reinterpret_cast<std::uintptr_t>(params.source_arena) - reinterpret_cast<std::uintptr_t>(params.target_arena);
  if (apart % sizeof(uint4) == 0) {
    launch_units<uint4>(op, params, stream);
  } else if (apart % sizeof(std::uint32_t) == 0) {
    launch_units<std::uint32_t>(op, params, stream);
  } else {
    launch_units<std::uint8_t>(op, params, stream);
  }
}

}  // namespace hetkv
