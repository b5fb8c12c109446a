#include "kernels/write.h"

#include "kernels/cpu/levels/entry_load.h"
#include "kernels/cpu/levels/entry_store.h"
#include "kernels/cpu/levels/simd.h"

namespace hetkv::HETKV_LEVEL {
namespace {

void norm(float* row, const float* weight, int width, float eps) {
  Float squares{};
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Float values = load_float(row + i);
    squares += values * values;
  }
  float total = sum(squares);
  for (; i < width; ++i) total += row[i] * row[i];
  const float scale = 1.0f / __builtin_sqrtf(total / static_cast<float>(width) + eps);
  for (int j = 0; j < width; ++j) row[j] = row[j] * scale * weight[j];
}

// (a, b) -> (a cos - b sin, b cos + a sin), pairs `apart` values apart and starting every `step`.
void rotate(float* values, const float* cos, const float* sin, int pairs, bool interleaved) {
  const int apart = interleaved ? 1 : pairs, step = interleaved ? 2 : 1;
  for (int i = 0; i < pairs; ++i) {
    const float a = values[i * step], b = values[i * step + apart];
    values[i * step] = a * cos[i] - b * sin[i];
    values[i * step + apart] = b * cos[i] + a * sin[i];
  }
}

}  // namespace

void write_rows(const WriteParams& params, std::int64_t begin, std::int64_t end) noexcept {
  const PagedRows& target = params.target;
  const int width = target.width, pairs = params.rope / 2;
  const std::int64_t stored_head_bytes = target.data_bytes / params.heads;
  alignas(64) float row[kMaxWriteWidth];
  for (std::int64_t i = begin; i < end; ++i) {
    if (params.slots[i] < 0) continue;
    RowAddress address = slot_address(target, params.slots[i]);
    for (int head = 0; head < params.heads; ++head) {
      load_plain(params.rows + i * params.row_stride + head * params.head_stride, params.row_format, width, row);
      if (params.norm_weight != nullptr) norm(row, params.norm_weight, width, params.norm_eps);
      if (pairs > 0) {
        float* const rotated = params.rope_trailing ? row + width - params.rope : row;
        rotate(rotated, params.cos + i * pairs, params.sin + i * pairs, pairs, params.rope_interleaved);
      }
      store_entry(row, target, address);
      address.data += stored_head_bytes;
    }
  }
}

}  // namespace hetkv::HETKV_LEVEL
