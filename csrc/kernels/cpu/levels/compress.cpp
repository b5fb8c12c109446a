// Entries of one level: windows pooled in groups of rows, all channels of a group before the next group, so that the raw rows are
// read once, in order, whatever the ratio. Maximum, sum and weighted sum of each channel stay in the first cache between groups.
#include "kernels/compress.h"
#include "kernels/cpu/levels/entry_store.h"
#include "kernels/cpu/levels/simd.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr int kGroup = 8;  // rows of a group: their logits live in registers
constexpr float kLog2e = 1.44269504f;

// Reads kCount values (kLanes, or the granule at the end of a row that is no multiple of kLanes); the other lanes are 0.
template <EntryFormat kFormat, int kCount>
inline Float load_raw(const std::byte* row, int channel) {
  if constexpr (kFormat == EntryFormat::kFloat32) {
    Float values{};
    __builtin_memcpy(&values, row + 4 * channel, std::size_t{4} * kCount);
    return values;
  } else {
    Half bits{};
    __builtin_memcpy(&bits, row + 2 * channel, std::size_t{2} * kCount);
    if constexpr (kFormat == EntryFormat::kFloat16) return from_float16(bits);
    return from_bfloat16(bits);
  }
}
template <int kCount>
inline Float load_part(const float* from) {
  Float values{};
  __builtin_memcpy(&values, from, std::size_t{4} * kCount);
  return values;
}
template <int kCount>
inline void store_part(float* to, Float values) {
  __builtin_memcpy(to, &values, std::size_t{4} * kCount);
}

// The window's rows of one group. Pointers to the half that is pooled.
struct Group {
  const std::byte* kv[kGroup];
  const std::byte* gate[kGroup];
  const float* bias[kGroup];
  std::int64_t kv_ahead, gate_ahead;  // bytes to rows that will be wanted soon, if they are rows of the step
};

// Per channel: the largest logit so far, and the sums of e^(logit - largest) and of that times the value.
struct Pool {
  float largest[kMaxCompressWidth];
  float sum[kMaxCompressWidth];
  float weighted[kMaxCompressWidth];
};

template <EntryFormat kFormat, int kRows, bool kFirst, int kCount>
inline void pool_channels(const Group& group, int channel, Pool& pool) {
  Float logits[std::size_t{kRows}];
  for (int i = 0; i < kRows; ++i) {
    logits[i] = load_raw<kFormat, kCount>(group.gate[i], channel) + load_part<kCount>(group.bias[i] + channel);
    __builtin_prefetch(group.gate[i] + group.gate_ahead + channel * (kFormat == EntryFormat::kFloat32 ? 4 : 2));
  }
  Float largest = kFirst ? logits[0] : max(load_part<kCount>(pool.largest + channel), logits[0]);
  for (int i = 1; i < kRows; ++i) largest = max(largest, logits[i]);
  const Float base = largest == -__builtin_inff() ? splat(0.0f) : largest;  // -inf - -inf would be NaN
  Float sum{}, weighted{};
  if constexpr (!kFirst) {
    const Float shrink = exp2((load_part<kCount>(pool.largest + channel) - base) * kLog2e);
    sum = load_part<kCount>(pool.sum + channel) * shrink;
    weighted = load_part<kCount>(pool.weighted + channel) * shrink;
  }
  for (int i = 0; i < kRows; ++i) {
    const Float weight = exp2((logits[i] - base) * kLog2e);
    sum += weight;
    weighted += weight * load_raw<kFormat, kCount>(group.kv[i], channel);
    __builtin_prefetch(group.kv[i] + group.kv_ahead + channel * (kFormat == EntryFormat::kFloat32 ? 4 : 2));
  }
  store_part<kCount>(pool.largest + channel, largest);
  store_part<kCount>(pool.sum + channel, sum);
  store_part<kCount>(pool.weighted + channel, weighted);
}

template <EntryFormat kFormat, int kRows, bool kFirst>
void pool_group(const Group& group, int width, Pool& pool) {
  int channel = 0;
  for (; channel + kLanes <= width; channel += kLanes) pool_channels<kFormat, kRows, kFirst, kLanes>(group, channel, pool);
  if constexpr (kLanes > kCompressGranule) {
    if (channel < width) pool_channels<kFormat, kRows, kFirst, kCompressGranule>(group, channel, pool);
  }
}

template <EntryFormat kFormat, int kRows>
void pool_group(const Group& group, int width, bool first, Pool& pool) {
  if (first) {
    pool_group<kFormat, kRows, true>(group, width, pool);
  } else {
    pool_group<kFormat, kRows, false>(group, width, pool);
  }
}

// What the windows of one sequence share.
struct Source {
  const CompressParams& params;
  StepTokens tokens;
  const std::byte* ring_kv;
  const std::byte* ring_gate;
  std::int64_t row_bytes;
};

// Pools window `window`: its slots are the rows of `slots` positions, the first `early` of them with their first halves.
template <EntryFormat kFormat>
void pool_window(const Source& source, std::int64_t window, Pool& pool) {
  const CompressParams& params = source.params;
  const std::int64_t ratio = params.ratio;
  const std::int64_t early = params.overlap && window > 0 ? ratio : 0;
  const std::int64_t slots = early + ratio;
  const std::int64_t first_position = window * ratio - early;
  const int width = params.entries.width;
  const std::int64_t late_half = params.overlap ? width : 0;  // values
  const std::int64_t value_bytes = kFormat == EntryFormat::kFloat32 ? 4 : 2;
  Group group;
  const std::int64_t ahead = ratio < kGroup ? ratio : kGroup;
  group.kv_ahead = ahead * params.kv_stride;
  group.gate_ahead = ahead * params.gate_stride;
  for (std::int64_t slot = 0; slot < slots;) {
    const std::int64_t left = slots - slot;
    const int rows = left >= kGroup ? kGroup : left >= kGroup / 2 ? kGroup / 2 : 1;
    for (int i = 0; i < rows; ++i) {
      const std::int64_t position = first_position + slot + i;
      const std::int64_t half = slot + i < early ? 0 : late_half;
      const std::int64_t row_of_window = slot + i < early ? slot + i : slot + i - early;
      const std::int64_t step_row = position - source.tokens.first_position;
      if (step_row >= 0) {
        group.kv[i] = params.kv + (source.tokens.first_token + step_row) * params.kv_stride;
        group.gate[i] = params.gate + (source.tokens.first_token + step_row) * params.gate_stride;
      } else {
        const std::int64_t ring_row = position & (params.ring_rows - 1);
        group.kv[i] = source.ring_kv + ring_row * source.row_bytes;
        group.gate[i] = source.ring_gate + ring_row * source.row_bytes;
      }
      group.kv[i] += half * value_bytes;
      group.gate[i] += half * value_bytes;
      group.bias[i] = params.position_bias + row_of_window * (width + late_half) + half;
    }
    switch (rows) {
      case kGroup:
        pool_group<kFormat, kGroup>(group, width, slot == 0, pool);
        break;
      case kGroup / 2:
        pool_group<kFormat, kGroup / 2>(group, width, slot == 0, pool);
        break;
      default:
        pool_group<kFormat, 1>(group, width, slot == 0, pool);
    }
    slot += rows;
  }
}

// entry = N(weighted / sum): the pooled row, normed.
void norm_pooled(const Pool& pool, const float* weight, int width, float eps, float* entry) {
  Float squares{};
  int channel = 0;
  const auto divide = [&]<int kCount>() {
    const Float sums = load_part<kCount>(pool.sum + channel);
    const Float value = load_part<kCount>(pool.weighted + channel) / (sums == 0.0f && kCount < kLanes ? splat(1.0f) : sums);
    store_part<kCount>(entry + channel, value);
    squares += value * value;
  };
  for (; channel + kLanes <= width; channel += kLanes) divide.template operator()<kLanes>();
  if constexpr (kLanes > kCompressGranule) {
    if (channel < width) divide.template operator()<kCompressGranule>();
  }
  const float scale = 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps);
  for (int i = 0; i < width; ++i) entry[i] = entry[i] * scale * weight[i];
}

void rotate_trailing_pairs(float* pairs, const float* cos, const float* sin, int count) {
  for (int i = 0; i < count; ++i) {
    const float a = pairs[2 * i], b = pairs[2 * i + 1];
    pairs[2 * i] = a * cos[i] - b * sin[i];
    pairs[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

template <EntryFormat kFormat>
void compress_tokens(const Source& source, std::int64_t begin, std::int64_t end) {
  const CompressParams& params = source.params;
  const std::int64_t ratio = params.ratio;
  const int width = params.entries.width, rope = params.rope;
  alignas(64) Pool pool;
  alignas(64) float entry[kMaxCompressWidth];
  const std::int64_t shift = source.tokens.first_position - source.tokens.first_token;  // position - token
  for (std::int64_t window = (begin + shift) / ratio; (window + 1) * ratio <= end + shift; ++window) {
    const std::int64_t token = (window + 1) * ratio - 1 - shift;
    const std::int64_t slot = params.slots[token];
    if (slot < 0) continue;
    pool_window<kFormat>(source, window, pool);
    norm_pooled(pool, params.norm_weight, width, params.norm_eps, entry);
    rotate_trailing_pairs(entry + width - rope, params.cos + token * (rope / 2), params.sin + token * (rope / 2), rope / 2);
    store_entry(entry, params.entries, slot_address(params.entries, slot));
  }
}

}  // namespace

void compress_entries(const CompressParams& params, std::int64_t begin, std::int64_t end) noexcept {
  const std::int64_t row_bytes = raw_row_bytes(params);
  for (std::int64_t b = sequence_of(params, begin); b < params.num_sequences && params.cu_seqlens_q[b] < end; ++b) {
    const StepTokens tokens = step_tokens(params, b);
    if (tokens.count == 0) continue;
    const std::int64_t block = params.ring_table.blocks[b * params.ring_table.stride];
    const std::byte* const ring = params.entries.arena + (block << kBlockOffsetShift);
    const Source source{params, tokens, ring + params.ring_kv_offset, ring + params.ring_gate_offset, row_bytes};
    const std::int64_t last = tokens.first_token + tokens.count;
    const std::int64_t from = begin > tokens.first_token ? begin : tokens.first_token;
    const std::int64_t to = end < last ? end : last;
    switch (params.raw_format) {
      case EntryFormat::kFloat16:
        compress_tokens<EntryFormat::kFloat16>(source, from, to);
        break;
      case EntryFormat::kBFloat16:
        compress_tokens<EntryFormat::kBFloat16>(source, from, to);
        break;
      default:
        compress_tokens<EntryFormat::kFloat32>(source, from, to);
    }
  }
}

}  // namespace hetkv::HETKV_LEVEL
