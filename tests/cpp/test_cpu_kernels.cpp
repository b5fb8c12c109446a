// The CPU kernels at every level of this machine, on memory of exactly the size that they may touch, so that a sanitizer sees a byte
// too many. Values are compared with plain loops in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/checksum.h"
#include "base/cpu_level.h"
#include "kernels/block_copy.h"
#include "kernels/compress.h"
#include "kernels/index_scores.h"
#include "kernels/paged_attention.h"
#include "kernels/sparse_attention.h"
#include "kernels/top_k.h"
#include "kernels/verify.h"
#include "kernels/write.h"

namespace hetkv {
namespace {

constexpr std::int64_t kUnit = 256;

class CpuKernels : public ::testing::TestWithParam<CpuLevel> {
 protected:
  void SetUp() override {
    if (GetParam() > best_cpu_level()) GTEST_SKIP() << "this machine has no " << cpu_level_name(GetParam());
  }
  template <typename Function>
  Function* level(Function* portable, Function* avx2, Function* avx512) const {
    return GetParam() == CpuLevel::kAvx512 ? avx512 : GetParam() == CpuLevel::kAvx2 ? avx2 : portable;
  }
  std::vector<float> random(std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal_(engine_);
    return values;
  }

 private:
  std::mt19937 engine_{7};
  std::normal_distribution<float> normal_;
};

// One section of float rows in `blocks` blocks, the last of which ends with the arena.
struct FloatArena {
  std::vector<std::byte> bytes;
  std::vector<std::int32_t> table;
  PagedRows rows;

  FloatArena(std::int64_t blocks, std::int64_t rows_per_block, std::int32_t width, std::int64_t heads = 1) {
    rows.width = width;
    rows.data_bytes = 4 * width * heads;
    while ((std::int64_t{1} << rows.block_shift) < rows_per_block) ++rows.block_shift;
    const std::int64_t section = rows_per_block * rows.data_bytes, units = (section + kUnit - 1) / kUnit;
    bytes.resize(static_cast<std::size_t>((blocks - 1) * units * kUnit + section));
    for (std::int64_t i = 0; i < blocks; ++i) table.push_back(static_cast<std::int32_t>(i * units));
    std::reverse(table.begin(), table.end());
    rows.arena = bytes.data();
    rows.arena_bytes = static_cast<std::int64_t>(bytes.size());
  }
  BlockTable block_table() const {
    return {table.data(), static_cast<std::int64_t>(table.size()), static_cast<std::int32_t>(table.size())};
  }
  float* row(std::int64_t index) { return reinterpret_cast<float*>(row_address(rows, block_table(), 0, index).data); }
  void fill(const std::vector<float>& values, std::int64_t per_row) {
    for (std::int64_t i = 0; i * per_row < static_cast<std::int64_t>(values.size()); ++i) {
      std::copy_n(values.begin() + i * per_row, per_row, row(i));
    }
  }
};

const std::byte* as_bytes(const std::vector<float>& values) { return reinterpret_cast<const std::byte*>(values.data()); }

TEST_P(CpuKernels, WriteRowsOfEveryFormatTouchTheirRowOnly) {
  for (const EntryFormat format : {EntryFormat::kFloat32, EntryFormat::kFloat16, EntryFormat::kBFloat16, EntryFormat::kFp8Packed,
                                   EntryFormat::kFp8Index, EntryFormat::kMxfp4Index}) {
    const std::int32_t width = 128;
    const std::vector<float> rows = random(3 * width), cos(3 * 2, 0.6f), sin(3 * 2, 0.8f), weight(width, 1.5f);
    WriteParams params;
    params.target.format = format;
    params.target.width = width;
    params.target.data_bytes = entry_data_bytes(format, width);
    params.target.scale_bytes = entry_scale_bytes(format, width);
    params.target.scale_offset = 4 * params.target.data_bytes;
    params.target.block_shift = 2;
    std::vector<std::byte> arena(static_cast<std::size_t>(4 * (params.target.data_bytes + params.target.scale_bytes)),
                                 std::byte{0xee});
    params.target.arena = arena.data();
    params.target.arena_bytes = static_cast<std::int64_t>(arena.size());
    const std::vector<std::int64_t> slots{3, -1, 0};
    params.rows = as_bytes(rows);
    params.row_stride = 4 * width;
    params.slots = slots.data();
    params.num_rows = 3;
    params.norm_weight = weight.data();
    params.norm_eps = 1e-6f;
    params.cos = cos.data();
    params.sin = sin.data();
    params.rope = 4;
    ASSERT_EQ(find_bad_write_slot(params), -1);
    level(portable::write_rows, avx2::write_rows, avx512::write_rows)(params, 0, 3);
    for (std::int64_t row = 1; row < 3; ++row) {  // rows 1 and 2 were not named
      for (std::int64_t i = 0; i < params.target.data_bytes; ++i) {
        ASSERT_EQ(arena[static_cast<std::size_t>(row * params.target.data_bytes + i)], std::byte{0xee});
      }
    }
    EXPECT_NE(arena[0], std::byte{0xee});
  }
}

TEST_P(CpuKernels, PagedAttentionAgainstDouble) {
  for (const std::int32_t dim : {3, 16, 64, 72}) {
    for (const std::int32_t window : {0, 7}) {
      const std::int32_t heads = 6, kv_heads = 2;
      const std::int64_t tokens = 70, queries = 5;
      FloatArena keys(9, 8, dim, kv_heads), values(9, 8, dim, kv_heads);
      const std::vector<float> k = random(tokens * kv_heads * dim), v = random(tokens * kv_heads * dim),
                               q = random(queries * heads * dim);
      keys.fill(k, kv_heads * dim);
      values.fill(v, kv_heads * dim);
      std::vector<float> out(q.size()), lse(static_cast<std::size_t>(queries * heads));
      const std::vector<std::int32_t> cu{0, queries}, used{tokens};
      const BlockTable table = keys.block_table();
      PagedAttentionParams params;
      params.keys = keys.rows;
      params.values = values.rows;
      params.table = table;
      params.query = as_bytes(q);
      params.out = reinterpret_cast<std::byte*>(out.data());
      params.lse = lse.data();
      params.cu_seqlens_q = cu.data();
      params.seqused_k = used.data();
      params.num_tokens = queries;
      params.num_sequences = 1;
      params.heads = heads;
      params.kv_heads = kv_heads;
      params.dim = dim;
      params.window = window;
      params.scale = 0.3f;
      // One arena, the values behind the keys, both with the same block offsets.
      const auto behind = static_cast<std::int64_t>((keys.bytes.size() + kUnit - 1) / kUnit * kUnit);
      std::vector<std::byte> joint(static_cast<std::size_t>(behind) + values.bytes.size());
      std::memcpy(joint.data(), keys.bytes.data(), keys.bytes.size());
      std::memcpy(joint.data() + behind, values.bytes.data(), values.bytes.size());
      params.keys.arena = params.values.arena = joint.data();
      params.keys.arena_bytes = params.values.arena_bytes = static_cast<std::int64_t>(joint.size());
      params.values.data_offset = behind;
      std::vector<float> scratch(static_cast<std::size_t>(attention_scratch_floats(params)));
      const AttentionTile tile{0, 0, tokens - queries, static_cast<std::int32_t>(queries)};
      for (std::int32_t head = 0; head < kv_heads; ++head) {
        level(portable::attend_tile, avx2::attend_tile, avx512::attend_tile)(params, tile, head, 1, scratch.data());
      }
      for (std::int64_t t = 0; t < queries; ++t) {
        for (std::int32_t h = 0; h < heads; ++h) {
          const std::int64_t position = tokens - queries + t, first = window == 0 ? 0 : position + 1 - window;
          const std::int32_t kv = h / (heads / kv_heads);
          double sum = 0.0;
          std::vector<double> expected(static_cast<std::size_t>(dim));
          for (std::int64_t key = first; key <= position; ++key) {
            double score = 0.0;
            for (std::int32_t d = 0; d < dim; ++d) {
              score += double{q[static_cast<std::size_t>((t * heads + h) * dim + d)]} *
                       k[static_cast<std::size_t>((key * kv_heads + kv) * dim + d)];
            }
            const double weight = std::exp(score * 0.3);
            sum += weight;
            for (std::int32_t d = 0; d < dim; ++d) {
              expected[static_cast<std::size_t>(d)] += weight * v[static_cast<std::size_t>((key * kv_heads + kv) * dim + d)];
            }
          }
          for (std::int32_t d = 0; d < dim; ++d) {
            ASSERT_NEAR(out[static_cast<std::size_t>((t * heads + h) * dim + d)], expected[static_cast<std::size_t>(d)] / sum,
                        2e-5);
          }
          ASSERT_NEAR(lse[static_cast<std::size_t>(t * heads + h)], std::log(sum), 1e-4);
        }
      }
      // The last token alone, its heads together, whole and cut: the same bits.
      const std::vector<float> wanted(out.end() - heads * dim, out.end());
      const AttentionTile last{0, queries - 1, tokens - 1, 1};
      std::fill(out.begin(), out.end(), 0.0f);
      level(portable::attend_tile, avx2::attend_tile, avx512::attend_tile)(params, last, 0, kv_heads, scratch.data());
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), out.end() - heads * dim)) << "dim " << dim << ", window " << window;
      std::fill(out.begin(), out.end(), 0.0f);
      const auto floats = static_cast<std::size_t>(attention_partial_floats(params));
      std::vector<float> partials(2 * floats);
      level(portable::attend_split, avx2::attend_split, avx512::attend_split)(params, last, 0, kv_heads, 0, partials.data(),
                                                                              scratch.data());
      for (std::int32_t head = 0; head < kv_heads; ++head) {
        const float* const partial = partials.data() + static_cast<std::size_t>(head) * floats;
        level(portable::combine_splits, avx2::combine_splits, avx512::combine_splits)(params, last, head, 1, &partial,
                                                                                      scratch.data());
      }
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), out.end() - heads * dim)) << "dim " << dim << ", window " << window;
    }
  }
}

TEST_P(CpuKernels, IndexScoresAgainstDouble) {
  const std::int32_t heads = 5, dim = 20;
  const std::int64_t entries = 33;
  FloatArena keys(5, 8, dim);
  const std::vector<float> k = random(entries * dim), q = random(heads * dim), w = random(heads);
  keys.fill(k, dim);
  IndexScoresParams params;
  params.keys = keys.rows;
  params.table = keys.block_table();
  params.query = as_bytes(q);
  params.weights = w.data();
  params.num_tokens = params.num_sequences = 1;
  params.heads = heads;
  params.dim = dim;
  std::vector<float> scores(static_cast<std::size_t>(entries)), scratch(static_cast<std::size_t>(index_scratch_floats(params)));
  level(portable::index_scores, avx2::index_scores, avx512::index_scores)(params, {0, 0, entries}, 0, entries, scores.data(),
                                                                          scratch.data());
  for (std::int64_t e = 0; e < entries; ++e) {
    double expected = 0.0;
    for (std::int32_t h = 0; h < heads; ++h) {
      double dot = 0.0;
      for (std::int32_t d = 0; d < dim; ++d)
        dot += double{q[static_cast<std::size_t>(h * dim + d)]} * k[static_cast<std::size_t>(e * dim + d)];
      expected += w[static_cast<std::size_t>(h)] * std::max(0.0, dot);
    }
    EXPECT_NEAR(scores[static_cast<std::size_t>(e)], expected, 1e-4);
  }
}

TEST_P(CpuKernels, SparseAttentionStaysInsideItsRows) {
  const std::int32_t heads = 3, dim = 24;
  FloatArena window(3, 8, dim), entries(2, 4, dim);
  const std::vector<float> rows = random(24 * dim), pooled = random(6 * dim), q = random(heads * dim);
  window.fill(rows, dim);
  entries.fill(pooled, dim);
  const std::vector<std::int32_t> selected{5, 0, -1};
  std::vector<float> out(q.size()), lse(heads);
  SparseAttentionParams params;
  params.window_rows = window.rows;
  params.entries = entries.rows;
  params.window_table = window.block_table();
  params.entry_table = entries.block_table();
  params.selected = selected.data();
  params.num_selected = 3;
  params.query = as_bytes(q);
  params.out = reinterpret_cast<std::byte*>(out.data());
  params.lse = lse.data();
  params.num_tokens = params.num_sequences = 1;
  params.ratio = 4;
  params.window = 10;
  params.heads = heads;
  params.dim = params.value_dim = dim;
  params.scale = 0.2f;
  std::vector<float> scratch(static_cast<std::size_t>(sparse_scratch_floats(params)));
  level(portable::sparse_attention, avx2::sparse_attention, avx512::sparse_attention)(params, {0, 0, 23}, 0, scratch.data());
  std::vector<const float*> keys;
  for (std::int64_t t = 14; t < 24; ++t) keys.push_back(rows.data() + t * dim);
  keys.push_back(pooled.data() + 5 * dim);
  keys.push_back(pooled.data());
  for (std::int32_t h = 0; h < heads; ++h) {
    double sum = 0.0;
    std::vector<double> expected(static_cast<std::size_t>(dim));
    for (const float* key : keys) {
      double score = 0.0;
      for (std::int32_t d = 0; d < dim; ++d) score += double{q[static_cast<std::size_t>(h * dim + d)]} * key[d];
      sum += std::exp(score * 0.2);
      for (std::int32_t d = 0; d < dim; ++d) expected[static_cast<std::size_t>(d)] += std::exp(score * 0.2) * key[d];
    }
    for (std::int32_t d = 0; d < dim; ++d) {
      EXPECT_NEAR(out[static_cast<std::size_t>(h * dim + d)], expected[static_cast<std::size_t>(d)] / sum, 2e-5);
    }
  }
}

TEST_P(CpuKernels, CompressStaysInsideItsRows) {
  const std::int32_t width = 24;
  const std::int64_t tokens = 11, ratio = 4, ring_rows = 8, raw = 2 * width;
  const std::vector<float> kv = random(tokens * raw), gate = random(tokens * raw), bias = random(ratio * raw),
                           weight(width, 1.0f);
  const std::vector<float> cos(static_cast<std::size_t>(tokens * 2), 1.0f), sin(cos.size(), 0.0f);
  FloatArena entries(1, 2, width);
  const auto ring_begin = static_cast<std::int64_t>((entries.bytes.size() + kUnit - 1) / kUnit * kUnit);
  entries.bytes.resize(static_cast<std::size_t>(ring_begin + 2 * ring_rows * raw * 4));
  CompressParams params;
  params.entries = entries.rows;
  params.entries.arena = entries.bytes.data();
  params.entries.arena_bytes = static_cast<std::int64_t>(entries.bytes.size());
  const std::vector<std::int32_t> cu{0, static_cast<std::int32_t>(tokens)}, used{static_cast<std::int32_t>(tokens)},
      ring{static_cast<std::int32_t>(ring_begin / kUnit)};
  std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens), -7);
  slots[3] = 0;
  slots[7] = 1;
  params.kv = as_bytes(kv);
  params.gate = as_bytes(gate);
  params.kv_stride = params.gate_stride = raw * 4;
  params.position_bias = bias.data();
  params.norm_weight = weight.data();
  params.cos = cos.data();
  params.sin = sin.data();
  params.cu_seqlens_q = cu.data();
  params.seqused_k = used.data();
  params.ring_table = {ring.data(), 1, 1};
  params.slots = slots.data();
  params.num_tokens = tokens;
  params.num_sequences = 1;
  params.ring_gate_offset = ring_rows * raw * 4;
  params.ring_rows = ring_rows;
  params.ratio = ratio;
  params.rope = 4;
  params.overlap = true;
  ASSERT_EQ(find_compress_problem(params).kind, CompressProblem::Kind::kNone);
  level(portable::compress_entries, avx2::compress_entries, avx512::compress_entries)(params, 0, tokens);
  compress_rings_cpu(params, 0, tokens);
  const auto* const second = reinterpret_cast<const float*>(entries.bytes.data()) + width;
  std::vector<double> pooled(static_cast<std::size_t>(width));
  double squares = 0.0;
  for (std::int32_t c = 0; c < width; ++c) {
    double sum = 0.0, weighted = 0.0;
    for (std::int64_t t = 0; t < 8; ++t) {
      const auto at = static_cast<std::size_t>(t * raw + c + (t < 4 ? 0 : width)),
                 b = static_cast<std::size_t>(t % 4 * raw + c + (t < 4 ? 0 : width));
      const double e = std::exp(double{gate[at]} + bias[b]);
      sum += e;
      weighted += e * kv[at];
    }
    pooled[static_cast<std::size_t>(c)] = weighted / sum;
    squares += weighted / sum * weighted / sum;
  }
  for (std::int32_t c = 0; c < width; ++c) {
    EXPECT_NEAR(second[c], pooled[static_cast<std::size_t>(c)] / std::sqrt(squares / width), 1e-4);
  }
}

TEST_P(CpuKernels, ChecksumOfSegmentsIsTheDefinition) {
  std::vector<std::byte> data(3 * kChecksumSegment);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * i + 7 * i);
  for (const std::size_t length :
       {std::size_t{0}, std::size_t{1}, std::size_t{8}, std::size_t{511}, std::size_t{512}, std::size_t{1501},
        kChecksumSegment - 1, kChecksumSegment, 2 * kChecksumSegment + 513, 3 * kChecksumSegment}) {
    std::uint64_t expected = 0;
    for (std::size_t begin = 0, s = 5; begin < length; begin += kChecksumSegment, ++s) {
      expected += checksum_segment(data.data() + begin, std::min(kChecksumSegment, length - begin), s);
    }
    const std::vector<std::byte> exact(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(length));
    EXPECT_EQ(level(portable::checksum_segments, avx2::checksum_segments, avx512::checksum_segments)(exact.data(), length, 5),
              expected)
        << length;
  }
}

TEST_P(CpuKernels, CopiesOfAnySizeAndPlace) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{100}, std::size_t{32768}, std::size_t{40001}}) {
    for (const std::size_t shift : {std::size_t{0}, std::size_t{13}}) {
      std::vector<std::byte> from(bytes + shift, std::byte{0x5a}), to(bytes + 2 * shift, std::byte{0});
      level(portable::copy_apart, avx2::copy_apart, avx512::copy_apart)(to.data() + shift, from.data() + shift, bytes);
      EXPECT_TRUE(std::equal(from.begin() + static_cast<std::ptrdiff_t>(shift), from.end(),
                             to.begin() + static_cast<std::ptrdiff_t>(shift)));
      EXPECT_EQ(std::count(to.begin(), to.end(), std::byte{0x5a}), static_cast<std::ptrdiff_t>(bytes));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, CpuKernels, ::testing::Values(CpuLevel::kPortable, CpuLevel::kAvx2, CpuLevel::kAvx512),
                         [](const auto& test) { return std::string(cpu_level_name(test.param)); });

std::vector<std::int32_t> stable_order(const std::vector<float>& scores, std::size_t k) {
  std::vector<std::int32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
  });
  order.resize(k, -1);
  return order;
}

void expect_best(const std::vector<float>& scores, std::int32_t k) {
  const auto count = static_cast<std::int64_t>(scores.size());
  std::vector<std::uint64_t> scratch(static_cast<std::size_t>(top_k_scratch_words(count, k)));
  std::vector<std::int32_t> got(static_cast<std::size_t>(k));
  top_k_row_cpu(scores.data(), count, k, got.data(), scratch.data());
  ASSERT_EQ(got, stable_order(scores, static_cast<std::size_t>(k))) << count << " scores, k " << k;
}

TEST(TopK, TiesGoToTheLowestIndexForEveryLength) {
  std::mt19937 engine(3);
  for (const std::size_t count : {0u, 1u, 5u, 256u, 257u, 3000u, 20000u}) {
    std::vector<float> scores(count);
    for (float& score : scores) {
      score = static_cast<float>(engine() % 7) - 3.0f;
      if (score == 0.0f && engine() % 2 == 0) score = -0.0f;  // no other number
    }
    for (const std::int32_t k : {1, 4, 300}) expect_best(scores, k);
  }
}

// Rising: every score is a candidate. A comb: the sampled scores are all high, so the guessed bar is too. Falling: the first k stay.
TEST(TopK, RowsThatMisleadTheGuess) {
  constexpr std::size_t kCount = 32768;
  std::vector<float> rising(kCount), falling(kCount), comb(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    rising[i] = static_cast<float>(i);
    falling[i] = -rising[i];
    comb[i] = i % 32 == 0 && i / 32 % 4 != 0 ? 1000.0f - static_cast<float>(i % 5) : static_cast<float>(i % 17);
  }
  for (const auto& scores : {rising, falling, comb}) {
    for (const std::int32_t k : {1, 700, 2000, 40000}) expect_best(scores, k);
  }
}

TEST_P(CpuKernels, ScoresThatReachABarAreTakenInOrder) {
  std::vector<float> scores(103);
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i * 37 % 103) - 50.0f;
  scores[7] = std::numeric_limits<float>::quiet_NaN();
  scores[8] = -0.0f;
  std::vector<std::uint64_t> wanted;
  for (std::size_t i = 3; i < scores.size(); ++i) {
    if (score_key(scores[i]) >= score_key(0.0f)) {
      wanted.push_back(std::uint64_t{score_key(scores[i])} << 32 | (0xffffffffu - static_cast<std::uint32_t>(i)));
    }
  }
  std::vector<std::uint64_t> got;
  for (std::int64_t at = 3; at < 103;) {  // in pieces: 20 words at a time
    std::vector<std::uint64_t> some(20);
    const std::int64_t found = level(portable::take_scores, avx2::take_scores, avx512::take_scores)(
        scores.data(), at, 103, score_key(0.0f), some.data(), 20, &at);
    got.insert(got.end(), some.begin(), some.begin() + found);
  }
  EXPECT_EQ(got, wanted);
}

}  // namespace
}  // namespace hetkv
