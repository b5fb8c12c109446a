#include "kernels/write.h"

#include "kernels/cpu/pick_level.h"

namespace hetkv {

std::int64_t find_bad_write_slot(const WriteParams& params) noexcept {
  for (std::int64_t i = 0; i < params.num_rows; ++i) {
    if (params.slots[i] != -1 && !slot_fits(params.target, params.slots[i])) return i;
  }
  return -1;
}

void write_rows_cpu(const WriteParams& params, std::int64_t begin, std::int64_t end) noexcept {
  pick_level(portable::write_rows, avx2::write_rows, avx512::write_rows)(params, begin, end);
}

}  // namespace hetkv
