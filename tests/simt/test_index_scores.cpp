// csrc/kernels/cuda/index_scores.cu on the executor: against float64 within the stated bound, and the CPU's bits where every sum is
// exact. The same bits for a token alone, and wherever a key stands.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/index_scores.h"
#include "kernels/math/float8.h"
#include "kernels/top_k.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

constexpr EntryFormat kF32 = EntryFormat::kFloat32, kF16 = EntryFormat::kFloat16, kB16 = EntryFormat::kBFloat16,
                      kPacked = EntryFormat::kFp8Packed, kIndex = EntryFormat::kFp8Index, kMxfp4 = EntryFormat::kMxfp4Index;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Shape {
  EntryFormat keys = kIndex;
  EntryFormat query = kB16;
  std::int32_t dim = 128;
  std::int32_t heads = 64;
  std::int64_t data_offset = 64;
  std::int64_t first_block = 0;  // the arena's pointer is biased, so that block offsets begin here
  bool tensor_cores = true;
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "keys " << static_cast<int>(s.keys) << ", query " << static_cast<int>(s.query) << ", " << s.heads << " x " << s.dim
       << ", offset " << s.data_offset << ", first block " << s.first_block;
}

struct Sequence {
  std::int32_t used, count;
};

constexpr std::int32_t kBlockShift = 3;
constexpr std::int64_t kRatio = 4;

class World {
 public:
  // exact: values of few bits, so that every sum is exact in any order. distinct: keys that differ; the others repeat.
  World(const Shape& shape, const std::vector<Sequence>& sequences, std::int64_t padding, bool exact,
        std::int64_t distinct = 1 << 30)
      : shape_(shape), random_(11) {
    PagedRows& keys = params_.keys;
    keys.format = shape.keys;
    keys.width = params_.dim = shape.dim;
    keys.data_bytes = entry_data_bytes(shape.keys, shape.dim);
    keys.scale_bytes = entry_scale_bytes(shape.keys, shape.dim);
    keys.block_shift = kBlockShift;
    keys.data_offset = shape.data_offset;
    keys.scale_offset = shape.data_offset + (keys.data_bytes << kBlockShift);
    params_.heads = shape.heads;
    params_.query_format = shape.query;
    params_.ratio = kRatio;
    params_.num_sequences = static_cast<std::int64_t>(sequences.size());
    cu_seqlens_.push_back(0);
    std::int32_t columns = 0;
    for (const Sequence& sequence : sequences) {
      cu_seqlens_.push_back(cu_seqlens_.back() + sequence.count);
      seqused_.push_back(sequence.used);
      columns = std::max(columns, static_cast<std::int32_t>(sequence.used / kRatio >> kBlockShift) + 2);
    }
    params_.num_tokens = cu_seqlens_.back() + padding;
    const std::int64_t units = (keys.scale_offset + (keys.scale_bytes << kBlockShift) + 255) / 256;
    const std::int64_t blocks = params_.num_sequences * columns;
    bytes_.assign(static_cast<std::size_t>(blocks * units * 256 + 16), std::byte{0xff});
    keys.arena = arena() - (shape.first_block << kBlockOffsetShift);
    keys.arena_bytes = (shape.first_block + blocks * units) << kBlockOffsetShift;
    for (std::int64_t i = 0; i < blocks; ++i)
      table_.push_back(static_cast<std::int32_t>(shape.first_block + (blocks - 1 - i) * units));
    params_.table = {table_.data(), columns, columns};
    for (std::int64_t b = 0; b < params_.num_sequences; ++b) {
      const std::int64_t entries = sequences[static_cast<std::size_t>(b)].used / kRatio;
      for (std::int64_t e = 0; e < entries; ++e) {
        const RowAddress to = row_address(keys, params_.table, b, e);
        if (e < distinct) {
          put_key(to, exact);
        } else {
          const RowAddress from = row_address(keys, params_.table, b, e % distinct);
          std::memcpy(to.data, from.data, static_cast<std::size_t>(keys.data_bytes));
          std::memcpy(to.scale, from.scale, static_cast<std::size_t>(keys.scale_bytes));
        }
      }
      for (std::int64_t column = (entries + 7) >> kBlockShift; column < columns; ++column) {  // not reached: anything
        table_[static_cast<std::size_t>(b * columns + column)] = column % 2 == 0 ? -1 : std::numeric_limits<std::int32_t>::max();
      }
    }
    const std::int64_t vectors = params_.num_tokens * shape.heads, value_bytes = entry_data_bytes(shape.query, 1);
    query_.assign(static_cast<std::size_t>(vectors * shape.dim * value_bytes + 16), std::byte{0});
    for (std::int64_t i = 0; i < vectors * shape.dim; ++i) put(query() + i * value_bytes, shape.query, value(exact));
    for (std::int64_t i = 0; i < vectors; ++i) weights_.push_back(exact ? value(true) / 8.0f : value(false));
    params_.query = query();
    params_.weights = weights_.data();
    params_.cu_seqlens_q = cu_seqlens_.data();
    params_.seqused_k = seqused_.data();
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::int64_t width() const { return std::int64_t{params_.table.columns} << kBlockShift; }
  const IndexScoresParams& params() const { return params_; }
  std::vector<std::int32_t>& table() { return table_; }

  struct Scores {
    std::vector<float> scores;
    std::vector<std::int32_t> visible;
  };

  // Tokens [first, first + count). counted: with the visible counts, and without filling.
  Scores run(simt::Device& device, std::int64_t first, std::int64_t count, bool counted) {
    Scores result;
    const std::int64_t stride = width() + 1;
    result.scores.assign(static_cast<std::size_t>(count * stride), -7.0f);
    result.visible.assign(static_cast<std::size_t>(count), -7);
    allow(device);
    device.writes("scores", result.scores);
    if (counted) device.writes("visible", result.visible);
    index_scores_cuda(params_, {first, count, result.scores.data(), stride, counted ? result.visible.data() : nullptr}, nullptr);
    return result;
  }

  void allow(simt::Device& device) {
    device.allow("arena", arena(), bytes_.size() - 16, simt::Rights::kRead);
    device.allow("query", query(), query_.size() - 16, simt::Rights::kRead);
    device.reads("weights", weights_);
    device.reads("table", table_);
    device.reads("cu_seqlens_q", cu_seqlens_);
    device.reads("seqused_k", seqused_);
  }

  // Of a token: its sequence and the entries it sees; sequence -1: none.
  IndexToken token_at(std::int64_t token) const {
    for (std::size_t b = 0; b < seqused_.size(); ++b) {
      if (token < cu_seqlens_[b] || token >= cu_seqlens_[b + 1]) continue;
      const std::int64_t seen = seqused_[b] == 0 ? 0 : (seqused_[b] - (cu_seqlens_[b + 1] - token) + 1) / kRatio;
      return {static_cast<std::int64_t>(b), token, seen};
    }
    return {-1, token, 0};
  }

  bool inside(const IndexToken& token, std::int64_t entry) const {
    const auto at = static_cast<std::size_t>(token.sequence * params_.table.stride + (entry >> kBlockShift));
    return block_inside(params_.keys, table_[at]);
  }

  struct Exact {
    double score = 0.0, magnitude = 0.0;
  };
  Exact exact(const IndexToken& token, std::int64_t entry) {
    const RowAddress key = row_address(params_.keys, params_.table, token.sequence, entry);
    Exact result;
    for (std::int64_t h = 0; h < shape_.heads; ++h) {
      const std::int64_t vector = token.token * shape_.heads + h;
      const double weight = weights_[static_cast<std::size_t>(vector)];
      double product = 0.0, magnitude = 0.0;
      for (int d = 0; d < shape_.dim; ++d) {
        const double q = plain(query() + (vector * shape_.dim + d) * entry_data_bytes(shape_.query, 1), shape_.query);
        const double k = key_value(key, d);
        product += q * k;
        magnitude += std::fabs(q * k);
      }
      result.score += weight * std::max(product, 0.0);
      result.magnitude += std::fabs(weight) * magnitude;
    }
    return result;
  }

 private:
  static std::byte* aligned(std::vector<std::byte>& bytes) {
    return bytes.data() + (16 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 16) % 16;
  }
  std::byte* arena() { return aligned(bytes_); }
  std::byte* query() { return aligned(query_); }

  float value(bool exact) {
    if (exact) return static_cast<float>(static_cast<int>(random_() % 7) - 3);
    return std::normal_distribution<float>()(random_);
  }

  // Cut off to the format; float16 to a value that is surely normal.
  static void put(std::byte* to, EntryFormat format, float value) {
    auto bits = std::bit_cast<std::uint32_t>(value);
    if (format == kB16) bits >>= 16;
    if (format == kF16) {
      const float size = std::fabs(value);
      bits = size < 0.001f ? 0 : (bits >> 16 & 0x8000u) | ((std::bit_cast<std::uint32_t>(size) - 0x38000000u) >> 13);
    }
    std::memcpy(to, &bits, format == kF32 ? 4 : 2);
  }

  static double plain(const std::byte* from, EntryFormat format) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, from, format == kF32 ? 4 : 2);
    if (format == kF32) return std::bit_cast<float>(bits);
    if (format == kB16) return std::bit_cast<float>(bits << 16);
    const double size = std::ldexp((bits >> 10 & 31) == 0 ? bits & 1023 : 1024 + (bits & 1023),
                                   std::max(1, static_cast<int>(bits >> 10 & 31)) - 25);
    return (bits & 0x8000u) != 0 ? -size : size;
  }

  void put_key(RowAddress to, bool exact) {
    const auto code = [&] {  // any but the two NaN codes
      if (exact) return to_e4m3(value(true));
      const auto any = static_cast<std::uint8_t>(random_());
      return static_cast<std::uint8_t>((any & 0x7f) == 0x7f ? 0 : any);
    };
    const auto exponent = [&] { return static_cast<int>(random_() % 3) - 1; };
    const int width = shape_.dim;
    switch (shape_.keys) {
      case kPacked:
        for (int i = 0; i < width - kPackedRope; ++i) to.data[i] = static_cast<std::byte>(code());
        for (int i = 0; i < kPackedRope; ++i) put(to.data + width - kPackedRope + 2 * i, kB16, value(exact));
        for (std::int64_t i = 0; i < params_.keys.scale_bytes; ++i) to.scale[i] = static_cast<std::byte>(127 + exponent());
        break;
      case kIndex: {
        for (int i = 0; i < width; ++i) to.data[i] = static_cast<std::byte>(code());
        const float scale = power_of_two(exponent());
        std::memcpy(to.scale, &scale, 4);
        break;
      }
      case kMxfp4:
        for (int i = 0; i < width / 2; ++i) to.data[i] = static_cast<std::byte>(random_());
        for (std::int64_t i = 0; i < params_.keys.scale_bytes; ++i) to.scale[i] = static_cast<std::byte>(127 + exponent());
        break;
      default:
        for (int i = 0; i < width; ++i) put(to.data + i * entry_data_bytes(shape_.keys, 1), shape_.keys, value(exact));
    }
  }

  double key_value(RowAddress key, int d) const {
    const int plain_values = shape_.dim - kPackedRope;
    const auto power = [](std::byte byte) { return std::ldexp(1.0, static_cast<int>(byte) - 127); };
    switch (shape_.keys) {
      case kPacked:
        if (d >= plain_values) return plain(key.data + plain_values + 2 * (d - plain_values), kB16);
        return from_e4m3(static_cast<std::uint8_t>(key.data[d])) * power(key.scale[d / kPackedGroup]);
      case kIndex: {
        float scale = 0.0f;
        std::memcpy(&scale, key.scale, 4);
        return static_cast<double>(from_e4m3(static_cast<std::uint8_t>(key.data[d]))) * scale;
      }
      case kMxfp4: {
        const auto pair = static_cast<unsigned>(key.data[d / 2]);
        return from_e2m1(static_cast<std::uint8_t>(d % 2 == 0 ? pair & 15u : pair >> 4)) * power(key.scale[d / kMxfp4Group]);
      }
      default:
        return plain(key.data + d * entry_data_bytes(shape_.keys, 1), shape_.keys);
    }
  }

  Shape shape_;
  std::mt19937 random_;
  IndexScoresParams params_;
  std::vector<std::byte> bytes_, query_;
  std::vector<float> weights_;
  std::vector<std::int32_t> cu_seqlens_, seqused_, table_;
};

// No entry, some, a block's edge; no token; a padded one; more than one tile.
const std::vector<Sequence> kBatch = {{2, 2}, {33, 2}, {7, 0}, {0, 1}, {160, 3}};

class IndexScores : public testing::TestWithParam<Shape> {};

TEST_P(IndexScores, WithinTheBoundOfFloat64) {
  World world(GetParam(), kBatch, 1, false);
  const double bound = std::ldexp(GetParam().dim + GetParam().heads, -22);
  simt::for_every_schedule([&](simt::Device& device) {
    const std::int64_t tokens = world.params().num_tokens, stride = world.width() + 1;
    const World::Scores got = world.run(device, 0, tokens, false);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const IndexToken token = world.token_at(t);
      const float* const row = got.scores.data() + t * stride;
      for (std::int64_t e = 0; e < world.width(); ++e) {
        if (e >= token.visible) {
          ASSERT_EQ(-kInf, row[e]) << "token " << t << ", entry " << e;
          continue;
        }
        const World::Exact expected = world.exact(token, e);
        ASSERT_NEAR(expected.score, row[e], bound * expected.magnitude) << "token " << t << ", entry " << e;
      }
      ASSERT_EQ(-7.0f, row[world.width()]);
    }
    EXPECT_EQ(0u, device.counts().bank_conflicts);
    EXPECT_EQ(GetParam().tensor_cores, device.counts().matrix_products > 0);
  });
}

TEST_P(IndexScores, TheBitsOfTheCpuWhereSumsAreExact) {
  World world(GetParam(), kBatch, 1, true);
  world.table()[static_cast<std::size_t>(4 * world.params().table.stride + 1)] = -3;
  world.table()[static_cast<std::size_t>(4 * world.params().table.stride + 3)] =
      static_cast<std::int32_t>(world.params().keys.arena_bytes >> kBlockOffsetShift);
  std::vector<float> scratch(static_cast<std::size_t>(index_scratch_floats(world.params())));
  simt::for_every_schedule([&](simt::Device& device) {
    const std::int64_t tokens = world.params().num_tokens - 1, stride = world.width() + 1;
    const World::Scores got = world.run(device, 1, tokens, true);
    for (std::int64_t t = 1; t <= tokens; ++t) {
      const IndexToken token = world.token_at(t);
      const float* const row = got.scores.data() + (t - 1) * stride;
      ASSERT_EQ(token.visible, got.visible[static_cast<std::size_t>(t - 1)]);
      for (std::int64_t e = 0; e < stride; ++e) {
        float expected = e < token.visible ? -kInf : -7.0f;
        if (e < token.visible && world.inside(token, e)) {
          index_scores_cpu(world.params(), token, e, e + 1, &expected, scratch.data());
        }
        ASSERT_EQ(expected, row[e]) << "token " << t << ", entry " << e;
      }
    }
  });
}

TEST_P(IndexScores, TheSameBitsAloneAndWhereverAKeyStands) {
  constexpr std::int64_t kDistinct = 5;
  World world(GetParam(), {{12, 1}, {170, 2}}, 0, false, kDistinct);
  std::vector<float> whole;
  {
    simt::Device device;
    whole = world.run(device, 0, 3, false).scores;
    EXPECT_EQ("", device.report());
  }
  simt::Device device;
  const std::vector<float> alone = world.run(device, 2, 1, true).scores;
  EXPECT_EQ("", device.report());
  const std::int64_t visible = world.token_at(2).visible;
  for (std::int64_t e = 0; e < visible; ++e) {
    const float score = whole[static_cast<std::size_t>(2 * (world.width() + 1) + e)];
    EXPECT_EQ(score, alone[static_cast<std::size_t>(e)]);
    EXPECT_EQ(alone[static_cast<std::size_t>(e % kDistinct)], score);
  }
}

// Every instantiation; heads that are no multiple of 16; block offsets beyond 2^31 bytes; addresses and types of the plain kernel.
INSTANTIATE_TEST_SUITE_P(TensorCores, IndexScores,
                         testing::Values(Shape{.keys = kIndex, .query = kB16}, Shape{.keys = kIndex, .query = kF16, .heads = 5},
                                         Shape{.keys = kIndex, .query = kB16, .dim = 64, .heads = 33, .first_block = 1 << 25},
                                         Shape{.keys = kIndex, .query = kF16, .dim = 64, .heads = 16},
                                         Shape{.keys = kMxfp4, .query = kB16, .heads = 20},
                                         Shape{.keys = kMxfp4, .query = kF16, .heads = 64, .data_offset = 4},
                                         Shape{.keys = kMxfp4, .query = kB16, .dim = 64, .heads = 1},
                                         Shape{.keys = kMxfp4, .query = kF16, .dim = 64, .heads = 17},
                                         Shape{.keys = kB16, .query = kB16, .heads = 128},
                                         Shape{.keys = kF16, .query = kF16, .heads = 24},
                                         Shape{.keys = kB16, .query = kB16, .dim = 64, .heads = 8},
                                         Shape{.keys = kF16, .query = kF16, .dim = 64, .heads = 64}));
INSTANTIATE_TEST_SUITE_P(
    Plain, IndexScores,
    testing::Values(
        Shape{.keys = kF32, .query = kF32, .heads = 6, .tensor_cores = false},
        Shape{.keys = kF32, .query = kB16, .dim = 24, .heads = 20, .tensor_cores = false},
        Shape{.keys = kF16, .query = kB16, .dim = 128, .heads = 3, .tensor_cores = false},
        Shape{.keys = kB16, .query = kB16, .dim = 7, .heads = 16, .data_offset = 2, .tensor_cores = false},
        Shape{.keys = kIndex, .query = kF16, .heads = 6, .data_offset = 3, .first_block = 1 << 25, .tensor_cores = false},
        Shape{.keys = kMxfp4, .query = kF32, .dim = 64, .heads = 6, .data_offset = 1, .tensor_cores = false},
        Shape{.keys = kPacked, .query = kF32, .dim = 512, .heads = 2, .tensor_cores = false}));

// So many tokens that a block has several, of one sequence or of two.
TEST(IndexScoresBatch, BlocksOfSeveralTokens) {
  World world({.keys = kIndex, .query = kF16, .dim = 64, .heads = 3}, {{151, 150}, {400, 361}, {3, 2}}, 2, false);
  const std::int64_t tokens = world.params().num_tokens, stride = world.width() + 1;
  ASSERT_GE(tokens, 512);
  std::vector<float> whole;
  {
    simt::Device device;
    World::Scores got = world.run(device, 0, tokens, true);
    for (std::int64_t t = 0; t < tokens; ++t) ASSERT_EQ(world.token_at(t).visible, got.visible[static_cast<std::size_t>(t)]);
    EXPECT_EQ("", device.report());
    EXPECT_LT(device.counts().blocks, 512u);
    whole = std::move(got.scores);
  }
  for (const std::int64_t t : {0, 3, 148, 149, 150, 151, 380, 510, 512}) {
    simt::Device device;
    const std::vector<float> alone = world.run(device, t, 1, true).scores;
    for (std::int64_t e = 0; e < stride; ++e) {
      ASSERT_EQ(alone[static_cast<std::size_t>(e)], whole[static_cast<std::size_t>(t * stride + e)])
          << "token " << t << ", entry " << e;
    }
    EXPECT_EQ("", device.report());
  }
}

// As select_entries works: some tokens at a time, in one workspace. Many scores are equal, and all sums are exact.
TEST(IndexScoresBatch, TheCpusEntriesAreSelected) {
  constexpr std::int32_t kBest = 12;
  constexpr std::int64_t kAtATime = 3;
  World world({.keys = kMxfp4, .query = kB16, .dim = 64, .heads = 2}, {{33, 2}, {170, 4}, {0, 1}}, 1, true, 17);
  const std::int64_t tokens = world.params().num_tokens, width = world.width();
  std::vector<std::int32_t> expected(static_cast<std::size_t>(tokens * kBest), -1);
  std::vector<float> scratch(static_cast<std::size_t>(index_scratch_floats(world.params())));
  std::vector<std::uint64_t> words(static_cast<std::size_t>(top_k_scratch_words(width, kBest)));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const IndexToken token = world.token_at(t);
    std::vector<float> scores(static_cast<std::size_t>(token.visible));
    if (token.visible > 0) index_scores_cpu(world.params(), token, 0, token.visible, scores.data(), scratch.data());
    top_k_row_cpu(scores.data(), token.visible, kBest, expected.data() + t * kBest, words.data());
  }
  simt::for_every_schedule([&](simt::Device& device) {
    std::vector<float> scores(static_cast<std::size_t>(kAtATime * width));
    std::vector<std::int32_t> visible(kAtATime), indices(expected.size(), -7);
    device.workspace("scores", scores);
    device.workspace("visible", visible);
    device.writes("indices", indices);
    world.allow(device);
    for (std::int64_t first = 0; first < tokens; first += kAtATime) {
      const std::int64_t count = std::min(kAtATime, tokens - first);
      index_scores_cuda(world.params(), {first, count, scores.data(), width, visible.data()}, nullptr);
      top_k_cuda({scores.data(), visible.data(), indices.data() + first * kBest, count, width, width, kBest}, nullptr, nullptr);
    }
    EXPECT_EQ(expected, indices);
  });
}

// The grid's second dimension ends at 65,535.
TEST(IndexScoresBatch, MorePiecesThanAGridHas) {
  World world({.keys = kF32, .query = kF32, .dim = 8, .heads = 1}, {{160, 1}}, 0, false);
  IndexScoresParams params = world.params();
  std::vector<std::int32_t> table(65535 * 128 / 8 + 40, -1);
  std::copy(world.table().begin(), world.table().end(), table.begin());
  params.table = {table.data(), 0, static_cast<std::int32_t>(table.size())};
  const std::size_t width = table.size() * 8;
  std::vector<float> scores(width, -7.0f);
  simt::Device device;
  world.allow(device);
  device.reads("long table", table);
  device.writes("scores", scores);
  index_scores_cuda(params, {0, 1, scores.data(), static_cast<std::int64_t>(width), nullptr}, nullptr);
  EXPECT_EQ("", device.report());
  EXPECT_EQ(
      40, std::count_if(scores.begin(), scores.begin() + 40, [](float score) { return std::isfinite(score) && score != -7.0f; }));
  EXPECT_EQ(scores.end(), std::find_if(scores.begin() + 40, scores.end(), [](float score) { return score != -kInf; }));
}

TEST(IndexScoresBatch, NoTokensNoColumns) {
  World world({.keys = kIndex, .query = kF16, .dim = 64, .heads = 3}, {{40, 2}}, 0, false);
  simt::Device device;
  world.run(device, 0, 0, true);
  EXPECT_EQ(0u, device.counts().launches);
  IndexScoresParams params = world.params();
  params.table.columns = 0;
  std::vector<std::int32_t> visible(2, -7);
  device.writes("visible", visible);
  index_scores_cuda(params, {0, 2, nullptr, 0, visible.data()}, nullptr);
  EXPECT_EQ((std::vector<std::int32_t>{0, 0}), visible);
  EXPECT_EQ("", device.report());
}

}  // namespace
}  // namespace hetkv
