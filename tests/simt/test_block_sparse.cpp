// csrc/kernels/cuda/block_scores.cu and block_sparse_attention.cu on the executor, against plain loops in double.
//
// All values are halves up to 1.5, exact in every format, so scores must be exact. Attention: 1e-5 of the largest sum of |weight * value|
// of a head, and the rounding of 16-bit outputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/block_scores.h"
#include "kernels/block_sparse_attention.h"
#include "kernels/write.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

constexpr EntryFormat kF32 = EntryFormat::kFloat32, kF16 = EntryFormat::kFloat16, kB16 = EntryFormat::kBFloat16;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Sequence {
  std::int32_t first_position, count;  // count < 0: padding rows, of a sequence that is not used
};

struct Shape {
  EntryFormat query_format = kB16, entry_format = kB16, index_format = kB16;
  std::int32_t kv_heads = 2, group = 4, dim = 32, index_heads = 2, index_dim = 64;
  std::int32_t num_selected = 4, columns = 8, routed_tokens = 6, local_blocks = 1;
  bool sinks = true;
  std::int64_t first_block = 0;  // the arena's pointer is biased, so that block offsets begin here
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "formats " << static_cast<int>(s.query_format) << static_cast<int>(s.entry_format) << static_cast<int>(s.index_format)
       << ", " << s.kv_heads << " x " << s.group << " x " << s.dim << ", index " << s.index_heads << " x " << s.index_dim
       << ", selected " << s.num_selected << ", routed " << s.routed_tokens << ", first block " << s.first_block;
}

float value_at(EntryFormat format, const std::byte* from, std::int64_t index) {
  std::uint32_t bits = 0;
  if (format == kF32) {
    std::memcpy(&bits, from + 4 * index, 4);
    return std::bit_cast<float>(bits);
  }
  std::memcpy(&bits, from + 2 * index, 2);
  if (format == kB16) return std::bit_cast<float>(bits << 16);
  const int exponent = static_cast<int>((bits >> 10) & 31u), mantissa = static_cast<int>(bits & 1023u);
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                   : std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25);
  return exponent == 31 ? std::numeric_limits<float>::quiet_NaN() : (bits & 0x8000u) != 0 ? -size : size;
}

// A step: an arena of NaN bytes with rows where tokens have them, shuffled blocks, and its tensors.
class World {
 public:
  explicit World(const Shape& shape, std::vector<Sequence> sequences, unsigned seed = 5)
      : shape_(shape), sequences_(std::move(sequences)), random_(seed) {
    const auto batch = static_cast<std::int64_t>(sequences_.size());
    index_ = section(shape.index_format, 1, shape.index_dim, 48);
    keys_ = section(shape.entry_format, shape.kv_heads, shape.dim, behind(index_));
    values_ = section(shape.entry_format, shape.kv_heads, shape.dim, behind(keys_));
    const std::int64_t units = (behind(values_) + 255) >> kBlockOffsetShift, blocks = batch * shape.columns + 1;
    arena_bytes_ = (blocks * units) << kBlockOffsetShift;
    memory_.assign(static_cast<std::size_t>(arena_bytes_) + 256, std::byte{0xff});
    arena_ = memory_.data() + (256 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 256) % 256;
    for (PagedRows* rows : {&index_, &keys_, &values_}) {
      rows->arena = arena_ - (shape.first_block << kBlockOffsetShift);
      rows->arena_bytes = (shape.first_block << kBlockOffsetShift) + arena_bytes_;
    }
    table_.resize(static_cast<std::size_t>(blocks));
    std::iota(table_.begin(), table_.end(), 0);
    std::shuffle(table_.begin(), table_.end(), random_);
    for (std::int32_t& block : table_) block = static_cast<std::int32_t>(shape.first_block + block * units);

    cu_seqlens_.push_back(0);
    for (std::int64_t b = 0; b < batch; ++b) {
      const Sequence& sequence = sequences_[static_cast<std::size_t>(b)];
      const std::int32_t count = std::abs(sequence.count), used = sequence.count > 0 ? sequence.first_position + count : 0;
      cu_seqlens_.push_back(cu_seqlens_.back() + count);
      seqused_.push_back(used);
      for (const auto& [rows, into] : {std::pair{&index_, &index_rows_}, {&keys_, &key_rows_}, {&values_, &value_rows_}}) {
        into->push_back(write(*rows, b, used));
      }
    }
    num_tokens_ = cu_seqlens_.back() + 1;                // one token behind the last sequence
    const auto restart = [&] { random_.seed(++seed); };  // what a token has does not depend on later tokens
    restart();
    query_ = vectors(num_tokens_ * heads(), shape.dim);
    restart();
    index_query_ = vectors(num_tokens_ * shape.index_heads, shape.index_dim);
    restart();
    make_lists();
    restart();
    for (std::int32_t head = 0; shape.sinks && head < heads(); ++head) sinks_.push_back(head % 3 == 2 ? -kInfinity : halves());
  }

  void lose_block(std::int64_t sequence, std::int64_t column, std::int32_t block) {
    table_[static_cast<std::size_t>(sequence * shape_.columns + column)] = block;
  }

  std::vector<float> score(simt::Device& device) {
    BlockScoresParams params;
    std::vector<float> scores(static_cast<std::size_t>(num_tokens_ * shape_.index_heads * num_blocks()), 7.0f);
    common(device, params);
    params.keys = index_;
    params.query = index_query_.data();
    params.scores = scores.data();
    params.num_blocks = num_blocks();
    params.local_blocks = shape_.local_blocks;
    params.heads = shape_.index_heads;
    params.dim = shape_.index_dim;
    device.reads("query", index_query_);
    device.writes("scores", scores);
    block_scores_cuda(params, nullptr);
    return scores;
  }

  struct Result {
    std::vector<std::byte> out;
    std::vector<float> lse;
  };
  Result attend(simt::Device& device) {
    BlockSparseParams params;
    Result result;
    result.out.assign(static_cast<std::size_t>(num_tokens_ * heads() * vector_bytes()), std::byte{0xff});
    result.lse.assign(static_cast<std::size_t>(num_tokens_ * heads()), 7.0f);
    common(device, params);
    params.keys = keys_;
    params.values = values_;
    params.selected = selected_.data();
    params.query = query_.data();
    params.out = result.out.data();
    params.lse = result.lse.data();
    params.sinks = sinks_.empty() ? nullptr : sinks_.data();
    params.num_selected = shape_.num_selected;
    params.heads = heads();
    params.kv_heads = shape_.kv_heads;
    params.dim = shape_.dim;
    params.scale = kScale;
    device.reads("query", query_);
    device.reads("selected", selected_);
    if (!sinks_.empty()) device.reads("sinks", sinks_);
    device.writes("out", result.out);
    device.writes("lse", result.lse);
    block_sparse_attention_cuda(params, nullptr);
    return result;
  }

  void expect_scores(const std::vector<float>& scores) const {
    for (std::int64_t token = 0; token < num_tokens_; ++token) {
      const Place at = place(token);
      for (std::int64_t head = 0; head < shape_.index_heads; ++head) {
        for (std::int64_t block = 0; block < num_blocks(); ++block) {
          const std::int64_t own = at.position < 0 ? -1 : at.position / shape_.routed_tokens;
          float wanted = block <= own && block > own - shape_.local_blocks ? kInfinity : -kInfinity;
          if (block <= own && wanted < 0) {
            for (std::int64_t row = block * shape_.routed_tokens; row < (block + 1) * shape_.routed_tokens && row <= at.position;
                 ++row) {
              if (!there(index_, at.sequence, row)) continue;
              const float* const key = row_of(index_rows_, at.sequence, row, shape_.index_dim);
              wanted = std::max(
                  wanted, static_cast<float>(product(index_query_, token * shape_.index_heads + head, key, shape_.index_dim)));
            }
          }
          const std::int64_t index = (token * shape_.index_heads + head) * num_blocks() + block;
          EXPECT_EQ(wanted, scores[static_cast<std::size_t>(index)])
              << "token " << token << ", head " << head << ", block " << block;
        }
      }
    }
  }

  void expect_attention(const Result& result) const {
    for (std::int64_t vector = 0; vector < num_tokens_ * heads(); ++vector) check_vector(result, vector);
  }

  std::int64_t vector_bytes() const { return entry_data_bytes(shape_.query_format, shape_.dim); }
  std::int32_t heads() const { return shape_.kv_heads * shape_.group; }
  std::int64_t num_blocks() const {
    return ((std::int64_t{shape_.columns} << kShift) + shape_.routed_tokens - 1) / shape_.routed_tokens;
  }

 private:
  static constexpr int kShift = 3;
  static constexpr float kScale = 0.3f;

  struct Place {
    std::int64_t sequence = 0, position = -1;
  };

  static std::int64_t behind(const PagedRows& rows) {
    return std::max(rows.data_offset + (rows.data_bytes << kShift), rows.scale_offset + (rows.scale_bytes << kShift)) + 16;
  }
  static PagedRows section(EntryFormat format, std::int32_t heads, std::int32_t width, std::int64_t offset) {
    PagedRows rows;
    rows.format = format;
    rows.width = width;
    rows.data_bytes = heads * entry_data_bytes(format, width);
    rows.scale_bytes = entry_scale_bytes(format, width);
    rows.block_shift = kShift;
    rows.data_offset = (offset + 15) / 16 * 16;
    rows.scale_offset = rows.data_offset + (rows.data_bytes << kShift) + 8;
    return rows;
  }
  float halves() { return static_cast<float>(std::uniform_int_distribution<int>(-3, 3)(random_)) / 2.0f; }

  // Rows [0, count) of a sequence; returns their values.
  std::vector<float> write(const PagedRows& rows, std::int64_t sequence, std::int64_t count) {
    const std::int64_t heads = rows.data_bytes / entry_data_bytes(rows.format, rows.width), width = heads * rows.width;
    std::vector<float> values(static_cast<std::size_t>(count * width));
    std::vector<std::int64_t> slots;
    for (float& value : values) value = halves();
    for (std::int64_t row = 0; row < count; ++row) {
      slots.push_back((std::int64_t{table_[static_cast<std::size_t>(sequence * shape_.columns + (row >> kShift))]} << kShift) +
                      (row & ((1 << kShift) - 1)));
    }
    WriteParams params;
    params.target = rows;
    params.rows = reinterpret_cast<const std::byte*>(values.data());
    params.slots = slots.data();
    params.num_rows = count;
    params.row_stride = 4 * width;
    params.head_stride = std::int64_t{4} * rows.width;
    params.heads = static_cast<std::int32_t>(heads);
    params.row_format = kF32;
    write_rows_cpu(params, 0, count);
    return values;
  }

  std::vector<std::byte> vectors(std::int64_t count, std::int64_t dim) {
    const std::int64_t bytes = entry_data_bytes(shape_.query_format, 1);
    std::vector<std::byte> stored(static_cast<std::size_t>(count * dim * bytes));
    for (std::int64_t i = 0; i < count * dim; ++i) {
      std::uint32_t bits = std::bit_cast<std::uint32_t>(halves());
      if (shape_.query_format == kB16) {
        bits >>= 16;
      } else if (shape_.query_format == kF16 && bits << 1 != 0) {
        bits = ((bits >> 16) & 0x8000u) | (((bits & 0x7fffffffu) - (112u << 23)) >> 13);
      }
      std::memcpy(stored.data() + i * bytes, &bits, static_cast<std::size_t>(bytes));
    }
    return stored;
  }

  // In any order, with holes, a block twice, and blocks that the token does not see.
  void make_lists() {
    for (std::int64_t token = 0; token < num_tokens_; ++token) {
      const std::int64_t own = std::max<std::int64_t>(0, place(token).position) / shape_.routed_tokens;
      for (std::int32_t head = 0; head < shape_.kv_heads; ++head) {
        std::vector<std::int32_t> all(static_cast<std::size_t>(own + 1));
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin(), all.end(), random_);
        all.resize(std::min<std::size_t>(all.size(), static_cast<std::size_t>(std::max(1, shape_.num_selected - 2))));
        all.push_back(all.front());
        all.push_back(head % 2 == 0 ? static_cast<std::int32_t>(own + 1) : std::numeric_limits<std::int32_t>::max());
        all.resize(static_cast<std::size_t>(shape_.num_selected), -1);
        std::shuffle(all.begin(), all.end(), random_);
        selected_.insert(selected_.end(), all.begin(), all.end());
      }
    }
    selected_.push_back(-1);  // a list of none has an address
  }

  template <typename Params>
  void common(simt::Device& device, Params& params) {
    params.table = {table_.data(), shape_.columns, shape_.columns};
    params.cu_seqlens_q = cu_seqlens_.data();
    params.seqused_k = seqused_.data();
    params.num_tokens = num_tokens_;
    params.num_sequences = static_cast<std::int64_t>(sequences_.size());
    params.routed_tokens = shape_.routed_tokens;
    params.query_format = shape_.query_format;
    device.allow("arena", arena_, static_cast<std::size_t>(arena_bytes_), simt::Rights::kRead);
    device.reads("block_table", table_);
    device.reads("cu_seqlens_q", cu_seqlens_);
    device.reads("seqused_k", seqused_);
  }

  Place place(std::int64_t token) const {
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
      if (token >= cu_seqlens_[b + 1]) continue;
      if (sequences_[b].count <= 0) return {};
      return {static_cast<std::int64_t>(b), sequences_[b].first_position + token - cu_seqlens_[b]};
    }
    return {};
  }
  bool there(const PagedRows& rows, std::int64_t sequence, std::int64_t row) const {
    return block_inside(rows, table_[static_cast<std::size_t>(sequence * shape_.columns + (row >> kShift))]);
  }
  static const float* row_of(const std::vector<std::vector<float>>& rows, std::int64_t sequence, std::int64_t row,
                             std::int64_t width) {
    return rows[static_cast<std::size_t>(sequence)].data() + row * width;
  }
  double product(const std::vector<std::byte>& query, std::int64_t vector, const float* key, std::int64_t dim) const {
    double sum = 0.0;
    for (std::int64_t d = 0; d < dim; ++d) {
      sum += static_cast<double>(value_at(shape_.query_format, query.data(), vector * dim + d)) * static_cast<double>(key[d]);
    }
    return sum;
  }

  void check_vector(const Result& result, std::int64_t vector) const {
    SCOPED_TRACE("token " + std::to_string(vector / heads()) + ", head " + std::to_string(vector % heads()));
    const Place at = place(vector / heads());
    const std::int64_t kv_head = vector % heads() / shape_.group, width = std::int64_t{shape_.kv_heads} * shape_.dim;
    const auto list = selected_.begin() + (vector / heads() * shape_.kv_heads + kv_head) * shape_.num_selected;
    double sum = 0.0;
    std::vector<double> wanted(static_cast<std::size_t>(shape_.dim)), sizes(wanted.size());
    for (std::int64_t row = 0; row <= at.position; ++row) {
      if (std::find(list, list + shape_.num_selected, row / shape_.routed_tokens) == list + shape_.num_selected) continue;
      if (!there(keys_, at.sequence, row)) continue;
      const float* const key = row_of(key_rows_, at.sequence, row, width) + kv_head * shape_.dim;
      const float* const value = row_of(value_rows_, at.sequence, row, width) + kv_head * shape_.dim;
      const double weight = std::exp(product(query_, vector, key, shape_.dim) * static_cast<double>(kScale));
      sum += weight;
      for (std::size_t d = 0; d < wanted.size(); ++d) {
        wanted[d] += weight * static_cast<double>(value[d]);
        sizes[d] += weight * std::fabs(static_cast<double>(value[d]));
      }
    }
    const float lse = result.lse[static_cast<std::size_t>(vector)];
    if (sum == 0.0) {
      EXPECT_EQ(-kInfinity, lse);
    } else {
      EXPECT_NEAR(std::log(sum), static_cast<double>(lse), 2e-5);
    }
    const double sink = sinks_.empty() ? 0.0 : std::exp(static_cast<double>(sinks_[static_cast<std::size_t>(vector % heads())]));
    const double total = sum == 0.0 ? 1.0 : sum + sink;
    const double unit = shape_.query_format == kB16 ? 0x1p-8 : shape_.query_format == kF16 ? 0x1p-11 : 0.0;
    for (std::size_t d = 0; d < wanted.size(); ++d) {
      const float got = value_at(shape_.query_format, result.out.data(), vector * shape_.dim + static_cast<std::int64_t>(d));
      const double off = std::fabs(static_cast<double>(got) - wanted[d] / total);
      EXPECT_TRUE(off <= (1e-5 + unit) * sizes[d] / total + 0x1p-24)
          << "value " << d << ": " << got << ", not " << wanted[d] / total;
    }
  }

  Shape shape_;
  std::vector<Sequence> sequences_;
  std::mt19937 random_;
  PagedRows index_, keys_, values_;
  std::vector<std::byte> memory_, query_, index_query_;
  std::byte* arena_ = nullptr;
  std::int64_t arena_bytes_ = 0, num_tokens_ = 0;
  std::vector<std::int32_t> table_, cu_seqlens_, seqused_, selected_;
  std::vector<std::vector<float>> index_rows_, key_rows_, value_rows_;
  std::vector<float> sinks_;
};

// The first token of all, a prompt, one step of decoding, padding, and a token of no sequence.
const std::vector<Sequence> kSequences = {{0, 1}, {2, 3}, {57, 1}, {0, -1}};

class BlockSparse : public testing::TestWithParam<Shape> {};

TEST_P(BlockSparse, ScoresAreExact) {
  World world(GetParam(), kSequences);
  simt::for_every_schedule([&](simt::Device& device) { world.expect_scores(world.score(device)); });
}

TEST_P(BlockSparse, AttentionEqualsADoubleSoftmax) {
  World world(GetParam(), kSequences);
  simt::for_every_schedule([&](simt::Device& device) { world.expect_attention(world.attend(device)); });
}

INSTANTIATE_TEST_SUITE_P(
    Formats, BlockSparse,
    testing::Values(Shape{}, Shape{.query_format = kF32, .entry_format = kF32, .index_format = kF32},
                    Shape{.query_format = kF16, .entry_format = kF16, .index_format = kF16},
                    Shape{.query_format = kF32, .entry_format = kB16, .index_format = EntryFormat::kFp8Index},
                    Shape{.query_format = kB16, .entry_format = kF32, .index_format = EntryFormat::kMxfp4Index},
                    Shape{
                        .query_format = kB16, .entry_format = kF16, .index_format = EntryFormat::kFp8Packed, .index_dim = 128}));

INSTANTIATE_TEST_SUITE_P(
    Edges, BlockSparse,
    testing::Values(Shape{.group = 16, .dim = 128, .index_heads = 1, .index_dim = 128, .routed_tokens = 16},
                    Shape{.kv_heads = 1, .group = 1, .dim = 512, .index_heads = 40, .index_dim = 32, .local_blocks = 2},
                    Shape{.kv_heads = 3,
                          .group = 1,
                          .dim = 33,
                          .index_heads = 3,
                          .index_dim = 7,
                          .num_selected = 1,
                          .routed_tokens = 1,
                          .local_blocks = 0},
                    Shape{.num_selected = 40, .routed_tokens = 2, .local_blocks = 0, .sinks = false},
                    Shape{.num_selected = 0, .routed_tokens = 1000}, Shape{.first_block = (std::int64_t{1} << 23) + 3},
                    Shape{.first_block = (std::int64_t{1} << 30) + 3}));

// Blocks that are nowhere: their rows are absent, a token may have no key at all, and its neighbours do not notice.
TEST(BlockSparseLosses, BlocksOutsideTheArenaAreAbsent) {
  World world({.num_selected = 20, .routed_tokens = 4, .local_blocks = 0}, kSequences);
  world.lose_block(0, 0, std::numeric_limits<std::int32_t>::min());
  world.lose_block(2, 2, -1);
  world.lose_block(2, 5, std::numeric_limits<std::int32_t>::max());
  simt::for_every_schedule([&](simt::Device& device) { world.expect_scores(world.score(device)); });
  simt::for_every_schedule([&](simt::Device& device) { world.expect_attention(world.attend(device)); });
}

// Bits of a sequence in a step do not depend on what the other sequences are.
TEST(BlockSparseBits, DoNotDependOnNeighbours) {
  World one({}, {{41, 1}, {0, 2}}), other({}, {{41, 1}, {30, 4}});
  const auto run = [](World& world) {
    simt::Device device;
    World::Result result = world.attend(device);
    EXPECT_EQ("", device.report());
    return result;
  };
  const World::Result a = run(one), b = run(other);
  EXPECT_TRUE(std::equal(a.out.begin(), a.out.begin() + one.heads() * one.vector_bytes(), b.out.begin()));
  EXPECT_TRUE(std::equal(a.lse.begin(), a.lse.begin() + one.heads(), b.lse.begin()));
}

TEST(BlockSparseNothing, NoTokensAndNoBlocksLaunchNothing) {
  simt::Device device;
  block_scores_cuda({}, nullptr);
  block_sparse_attention_cuda({}, nullptr);
  EXPECT_EQ(0u, device.counts().launches);
}

}  // namespace
}  // namespace hetkv
