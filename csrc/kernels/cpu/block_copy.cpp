#include "kernels/block_copy.h"

#include <cstring>

#include "kernels/cpu/pick_level.h"
#include "kernels/paged_rows.h"

namespace hetkv {

void copy_blocks_cpu(const BlockCopyParams& params, std::int64_t begin, std::int64_t end) noexcept {
  CopyApartFn* const copy_apart = pick_level(portable::copy_apart, avx2::copy_apart, avx512::copy_apart);
  const auto bytes = static_cast<std::size_t>(params.num_bytes);
  for (std::int64_t i = begin; i < end; ++i) {
    const std::byte* const from = params.source_arena + (std::int64_t{params.source[i]} << kBlockOffsetShift) + params.begin;
    std::byte* const to = params.target_arena + (std::int64_t{params.target[i]} << kBlockOffsetShift) + params.begin;
    const auto a = reinterpret_cast<std::uintptr_t>(from), b = reinterpret_cast<std::uintptr_t>(to);
    if (a + bytes <= b || b + bytes <= a) {
      copy_apart(to, from, bytes);
    } else {
      std::memmove(to, from, bytes);
    }
  }
}

}  // namespace hetkv
