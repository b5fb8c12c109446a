// csrc/kernels/cuda/sparse_*.cu on the executor, against a softmax in double over the values that the blocks hold.
//
// Bounds: weights and outputs are rounded to 16 bits once each, so an output may be off by two half units of the last place of the largest
// sum of |weight * value| that its head has; float rows: 1e-5 of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/math/float8.h"
#include "kernels/sparse_attention.h"
#include "kernels/write.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

constexpr EntryFormat kF32 = EntryFormat::kFloat32, kF16 = EntryFormat::kFloat16, kB16 = EntryFormat::kBFloat16,
                      kPacked = EntryFormat::kFp8Packed;
constexpr std::size_t kSm80 = 166912, kSm90 = 232448, kSm120 = 101376;

struct Sequence {
  std::int32_t first_position, count;  // count < 0: padding rows, of a sequence that is not used
};

struct Shape {
  EntryFormat query_format = kB16, window_format = kB16, entry_format = kB16;
  std::int32_t heads = 64, dim = 512, value_dim = 0, window = 40, ratio = 4;  // value_dim 0: dim
  std::int32_t num_selected = 24;                                             // -1: all that are visible; -2: no entries at all
  std::int32_t rope = 64;                                                     // 0: no rotation
  std::int32_t columns = 4;                                                   // of each table
  bool sinks = true;
  std::size_t shared_limit = kSm90;
  std::int64_t first_block = 0;  // the arena's pointer is biased, so that block offsets begin here
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "formats " << static_cast<int>(s.query_format) << static_cast<int>(s.window_format) << static_cast<int>(s.entry_format)
       << ", " << s.heads << " x " << s.dim << ", value " << s.value_dim << ", window " << s.window << ", ratio " << s.ratio
       << ", selected " << s.num_selected << ", rope " << s.rope << ", columns " << s.columns << ", shared " << s.shared_limit
       << ", first block " << s.first_block;
}

float half_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31, mantissa = bits & 1023;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                   : std::ldexp(1024.0f + static_cast<float>(mantissa), exponent - 25);
  return (bits & 0x8000) != 0 ? -size : size;
}

float value_at(EntryFormat format, const std::byte* from, std::int64_t index) {
  std::uint32_t bits = 0;
  if (format == kF32) {
    std::memcpy(&bits, from + 4 * index, 4);
    return std::bit_cast<float>(bits);
  }
  std::memcpy(&bits, from + 2 * index, 2);
  return format == kF16 ? half_value(static_cast<std::uint16_t>(bits)) : std::bit_cast<float>(bits << 16);
}

void put_value(EntryFormat format, std::byte* to, std::int64_t index, float value) {  // of few bits: exact in every format
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if (format == kF32) {
    std::memcpy(to + 4 * index, &bits, 4);
    return;
  }
  if (format == kB16) {
    bits >>= 16;
  } else if (value != 0.0f) {
    const int exponent = std::ilogb(value);
    bits = (value < 0 ? 0x8000u : 0u) | static_cast<std::uint32_t>((exponent + 15) << 10) |
           static_cast<std::uint32_t>(std::ldexp(std::fabs(value), 10 - exponent) - 1024.0f);
  }
  std::memcpy(to + 2 * index, &bits, 2);
}

// A step: an arena of NaN bytes with rows where tokens have them, shuffled blocks, and its tensors.
class World {
 public:
  World(const Shape& shape, std::vector<Sequence> sequences, unsigned seed = 5)
      : shape_(shape), sequences_(std::move(sequences)) {
    std::mt19937 random(seed);
    const auto batch = static_cast<std::int64_t>(sequences_.size());
    params_.window_rows = section(shape.window_format, kWindowShift);
    params_.entries = section(shape.entry_format, kEntryShift);
    const bool has_entries = shape.num_selected > -2;
    const std::int64_t blocks = 2 * batch * shape.columns + 1;
    block_units_ = std::max(units(params_.window_rows), units(params_.entries));
    arena_bytes_ = (blocks * block_units_) << kBlockOffsetShift;
    memory_.assign(static_cast<std::size_t>(arena_bytes_) + 256, std::byte{0xff});
    arena_ = memory_.data() + (256 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 256) % 256;
    for (PagedRows* rows : {&params_.window_rows, &params_.entries}) {
      rows->arena = arena_ - (shape.first_block << kBlockOffsetShift);
      rows->arena_bytes = (shape.first_block << kBlockOffsetShift) + arena_bytes_;
    }
    std::vector<std::int32_t> order(static_cast<std::size_t>(blocks));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (std::int32_t& block : order) block = static_cast<std::int32_t>(shape.first_block + block * block_units_);
    const auto half = static_cast<std::ptrdiff_t>(batch * shape.columns);
    window_table_.assign(order.begin(), order.begin() + half);
    entry_table_.assign(order.begin() + half, order.begin() + 2 * half);

    cu_seqlens_.push_back(0);
    for (std::int64_t b = 0; b < batch; ++b) {
      const Sequence& sequence = sequences_[static_cast<std::size_t>(b)];
      const bool real = sequence.count > 0;
      const std::int32_t count = std::abs(sequence.count), used = real ? sequence.first_position + count : 0;
      cu_seqlens_.push_back(cu_seqlens_.back() + count);
      seqused_.push_back(used);
      if (shape.window > 0)
        write(params_.window_rows, window_table_, b, std::max(0, sequence.first_position + 1 - shape.window), used, random);
      if (has_entries) write(params_.entries, entry_table_, b, 0, used / shape.ratio, random);
    }
    params_.num_sequences = batch;
    params_.num_tokens = cu_seqlens_.back() + 1;  // one token behind the last sequence
    random.seed(seed + 1);                        // tensors of the first tokens do not depend on the rows of later sequences
    make_tensors(random);
  }

  // A table entry that points nowhere: its rows are absent.
  void lose_window_block(std::int64_t sequence, std::int64_t column) { window_table_[at(sequence, column)] = -1; }
  void lose_entry_block(std::int64_t sequence, std::int64_t column, std::int32_t block) {
    entry_table_[at(sequence, column)] = block;
  }

  struct Result {
    std::vector<std::byte> out;
    std::vector<float> lse;
  };

  Result run(simt::Device& device) {
    Result result;
    const std::int64_t vectors = params_.num_tokens * shape_.heads;
    result.out.assign(static_cast<std::size_t>(vectors * out_bytes()), std::byte{0xff});
    result.lse.assign(static_cast<std::size_t>(vectors), std::numeric_limits<float>::quiet_NaN());
    std::vector<float4> workspace(static_cast<std::size_t>(sparse_workspace_floats(params_) + 3) / 4);
    params_.out = result.out.data();
    params_.lse = result.lse.data();
    device.allow("arena", arena_, static_cast<std::size_t>(arena_bytes_), simt::Rights::kRead);
    device.reads("window_table", window_table_);
    device.reads("entry_table", entry_table_);
    device.reads("cu_seqlens_q", cu_seqlens_);
    device.reads("seqused_k", seqused_);
    device.reads("query", query_);
    if (!selected_.empty()) device.reads("selected", selected_);
    if (!sinks_.empty()) device.reads("sinks", sinks_);
    if (!cos_.empty()) device.reads("cos", cos_);
    if (!sin_.empty()) device.reads("sin", sin_);
    device.writes("out", result.out);
    device.writes("lse", result.lse);
    if (!workspace.empty()) device.workspace("workspace", workspace);
    sparse_attention_cuda(params_, reinterpret_cast<float*>(workspace.data()), nullptr);
    return result;
  }

  void expect_right(const Result& result) const {
    for (std::int64_t token = 0; token < params_.num_tokens; ++token) {
      for (std::int64_t head = 0; head < shape_.heads; ++head) check_vector(result, token, head);
    }
  }

  const SparseAttentionParams& params() const { return params_; }
  std::int64_t vector_bytes() const { return entry_data_bytes(shape_.query_format, shape_.dim); }
  std::int64_t out_bytes() const { return entry_data_bytes(shape_.query_format, value_dim()); }

 private:
  struct alignas(16) float4 {
    float values[4];
  };
  static constexpr int kWindowShift = 5, kEntryShift = 4;

  std::int32_t value_dim() const { return shape_.value_dim == 0 ? shape_.dim : shape_.value_dim; }
  std::size_t at(std::int64_t sequence, std::int64_t column) const {
    return static_cast<std::size_t>(sequence * shape_.columns + column);
  }
  std::int64_t units(const PagedRows& rows) const {
    const std::int64_t data = rows.data_offset + (rows.data_bytes << rows.block_shift);
    const std::int64_t scale = rows.scale_offset + (rows.scale_bytes << rows.block_shift);
    return (std::max(data, scale) + 255) >> kBlockOffsetShift;
  }
  PagedRows section(EntryFormat format, int shift) const {
    PagedRows rows;
    rows.format = format;
    rows.width = shape_.dim;
    rows.data_bytes = entry_data_bytes(format, shape_.dim);
    rows.scale_bytes = entry_scale_bytes(format, shape_.dim);
    rows.block_shift = shift;
    rows.data_offset = 48;
    rows.scale_offset = rows.data_offset + (rows.data_bytes << shift) + 8;
    return rows;
  }

  void write(const PagedRows& rows, const std::vector<std::int32_t>& table, std::int64_t sequence, std::int64_t begin,
             std::int64_t end, std::mt19937& random) {
    std::uniform_int_distribution<int> eighths(-16, 16);
    for (std::int64_t row = begin; row < end; ++row) {
      ASSERT_LT(row >> rows.block_shift, shape_.columns);
      std::vector<std::byte> values(static_cast<std::size_t>(4 * shape_.dim));
      for (std::int32_t d = 0; d < shape_.dim; ++d) put_value(kF32, values.data(), d, static_cast<float>(eighths(random)) / 8.0f);
      const std::int64_t mask = (std::int64_t{1} << rows.block_shift) - 1;
      const std::int64_t slot = (std::int64_t{table[at(sequence, row >> rows.block_shift)]} << rows.block_shift) + (row & mask);
      WriteParams params;
      params.target = rows;
      params.rows = values.data();
      params.slots = &slot;
      params.num_rows = 1;
      params.heads = 1;
      params.row_format = kF32;
      write_rows_cpu(params, 0, 1);
    }
  }

  void make_tensors(std::mt19937& random) {
    std::uniform_int_distribution<int> eighths(-16, 16);
    const std::int64_t tokens = params_.num_tokens, vectors = tokens * shape_.heads;
    query_.resize(static_cast<std::size_t>(vectors * vector_bytes()) + 16);
    std::byte* const query = query_.data() + (16 - reinterpret_cast<std::uintptr_t>(query_.data()) % 16) % 16;
    for (std::int64_t i = 0; i < vectors * shape_.dim; ++i) {
      put_value(shape_.query_format, query, i, static_cast<float>(eighths(random)) / 8.0f);
    }
    params_.query = query;
    params_.query_format = shape_.query_format;
    params_.heads = shape_.heads;
    params_.dim = shape_.dim;
    params_.value_dim = value_dim();
    params_.window = shape_.window;
    params_.ratio = shape_.ratio;
    params_.scale = 2.0f / std::sqrt(static_cast<float>(shape_.dim));
    params_.cu_seqlens_q = cu_seqlens_.data();
    params_.seqused_k = seqused_.data();
    params_.window_table = {window_table_.data(), shape_.columns, shape_.columns};
    if (shape_.window == 0) {
      params_.window_rows = params_.entries;
      params_.window_table = {};
    }
    if (shape_.num_selected > -2) params_.entry_table = {entry_table_.data(), shape_.columns, shape_.columns};
    if (shape_.num_selected >= 0) {
      for (std::int64_t token = 0; token < tokens; ++token) {
        std::vector<std::int32_t> all(static_cast<std::size_t>(std::max<std::int64_t>(0, position_of(token) + 1) / shape_.ratio));
        std::iota(all.begin(), all.end(), 0);
        std::shuffle(all.begin(), all.end(), random);
        if (!all.empty()) {
          all.push_back(static_cast<std::int32_t>(all.size()) + 3);  // one that the token does not see
          std::swap(all.front(), all.back());
        }
        for (std::int32_t i = 0; i < shape_.num_selected; ++i) {
          selected_.push_back(static_cast<std::size_t>(i) < all.size() ? all[static_cast<std::size_t>(i)] : -1);
        }
      }
      selected_.push_back(-1);  // a list of none is a list
      params_.selected = selected_.data();
      params_.num_selected = shape_.num_selected;
    }
    if (shape_.sinks) {
      for (std::int32_t head = 0; head < shape_.heads; ++head) {
        sinks_.push_back(head % 5 == 4 ? -std::numeric_limits<float>::infinity() : static_cast<float>(eighths(random)) / 4.0f);
      }
      params_.sinks = sinks_.data();
    }
    if (shape_.rope > 0) {
      for (std::int64_t i = 0; i < tokens * shape_.rope / 2; ++i) {
        cos_.push_back(std::cos(static_cast<float>(i)));
        sin_.push_back(std::sin(static_cast<float>(i)));
      }
      params_.cos = cos_.data();
      params_.sin = sin_.data();
      params_.rope = shape_.rope;
    }
  }

  std::int64_t sequence_of_token(std::int64_t token) const {
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
      if (token < cu_seqlens_[b + 1]) return static_cast<std::int64_t>(b);
    }
    return -1;
  }
  std::int64_t position_of(std::int64_t token) const {  // -1: of no sequence
    const std::int64_t b = sequence_of_token(token);
    if (b < 0 || sequences_[static_cast<std::size_t>(b)].count <= 0) return -1;
    return sequences_[static_cast<std::size_t>(b)].first_position + token - cu_seqlens_[static_cast<std::size_t>(b)];
  }

  void add_row(const PagedRows& rows, const std::vector<std::int32_t>& table, std::int64_t sequence, std::int64_t row,
               std::vector<std::vector<float>>& keys) const {
    const std::int32_t block = table[at(sequence, row >> rows.block_shift)];
    if (!block_inside(rows, block)) return;
    const RowAddress from = row_in_block(rows, block, row & ((std::int64_t{1} << rows.block_shift) - 1));
    std::vector<float> key(static_cast<std::size_t>(shape_.dim));
    for (std::int32_t d = 0; d < shape_.dim; ++d) {
      if (rows.format != kPacked) {
        key[static_cast<std::size_t>(d)] = value_at(rows.format, from.data, d);
      } else if (d >= shape_.dim - kPackedRope) {
        key[static_cast<std::size_t>(d)] = value_at(kB16, from.data + shape_.dim - kPackedRope, d - (shape_.dim - kPackedRope));
      } else {
        const float scale = std::ldexp(1.0f, static_cast<int>(from.scale[d / kPackedGroup]) - 127);
        key[static_cast<std::size_t>(d)] = from_e4m3(static_cast<std::uint8_t>(from.data[d])) * scale;
      }
    }
    keys.push_back(std::move(key));
  }

  void check_vector(const Result& result, std::int64_t token, std::int64_t head) const {
    SCOPED_TRACE("token " + std::to_string(token) + ", head " + std::to_string(head));
    const std::int64_t position = position_of(token), sequence = sequence_of_token(token);
    std::vector<std::vector<float>> keys;
    if (position >= 0) {
      for (std::int64_t row = std::max<std::int64_t>(0, position + 1 - shape_.window); row <= position; ++row) {
        add_row(params_.window_rows, window_table_, sequence, row, keys);
      }
      const std::int64_t visible = shape_.num_selected > -2 ? (position + 1) / shape_.ratio : 0;
      for (std::int64_t i = 0; i < (shape_.num_selected >= 0 ? shape_.num_selected : visible); ++i) {
        const std::int64_t entry =
            shape_.num_selected >= 0 ? selected_[static_cast<std::size_t>(token * shape_.num_selected + i)] : i;
        if (entry >= 0 && entry < visible) add_row(params_.entries, entry_table_, sequence, entry, keys);
      }
    }
    const std::int64_t vector = token * shape_.heads + head;
    std::vector<double> weights;
    double total = shape_.sinks ? std::exp(static_cast<double>(sinks_[static_cast<std::size_t>(head)])) : 0.0, sum = 0.0;
    for (const std::vector<float>& key : keys) {
      double score = 0.0;
      for (std::int32_t d = 0; d < shape_.dim; ++d) {
        score += static_cast<double>(value_at(shape_.query_format, params_.query, vector * shape_.dim + d)) *
                 static_cast<double>(key[static_cast<std::size_t>(d)]);
      }
      weights.push_back(std::exp(score * static_cast<double>(params_.scale)));
      sum += weights.back();
    }
    total += sum;
    const float lse = result.lse[static_cast<std::size_t>(vector)];
    if (keys.empty()) {
      EXPECT_EQ(-std::numeric_limits<float>::infinity(), lse);
    } else {
      EXPECT_NEAR(std::log(sum), static_cast<double>(lse), 2e-5);
    }
    std::vector<double> wanted(static_cast<std::size_t>(value_dim())), sizes(wanted.size());
    for (std::size_t d = 0; d < wanted.size(); ++d) {
      for (std::size_t k = 0; k < keys.size(); ++k) {
        wanted[d] += weights[k] / total * static_cast<double>(keys[k][d]);
        sizes[d] += weights[k] / total * std::fabs(static_cast<double>(keys[k][d]));
      }
    }
    for (std::int32_t i = 0; i < shape_.rope / 2; ++i) {
      const auto at_cos = static_cast<std::size_t>(token * shape_.rope / 2 + i),
                 first = wanted.size() - static_cast<std::size_t>(shape_.rope - 2 * i);
      const double c = static_cast<double>(cos_[at_cos]), s = static_cast<double>(sin_[at_cos]);
      const double a = wanted[first], b = wanted[first + 1];
      wanted[first] = a * c + b * s;
      wanted[first + 1] = b * c - a * s;
    }
    const double size = *std::max_element(sizes.begin(), sizes.end());
    const double unit = shape_.query_format == kB16 ? 0x1p-7 : shape_.query_format == kF16 ? 0x1p-10 : 1e-5;
    double worst = 0.0;
    for (std::size_t d = 0; d < wanted.size(); ++d) {
      const float got = value_at(shape_.query_format, result.out.data(), vector * value_dim() + static_cast<std::int64_t>(d));
      const double off = std::fabs(static_cast<double>(got) - wanted[d]);
      worst = off <= worst ? worst : off;  // NaN is the worst
    }
    const double least = shape_.query_format == kF16 ? 0x1p-24 : 0.0;  // denormals
    EXPECT_LE(worst, size * unit + least);
  }

  Shape shape_;
  std::vector<Sequence> sequences_;
  SparseAttentionParams params_;
  std::vector<std::byte> memory_, query_;
  std::byte* arena_ = nullptr;
  std::int64_t arena_bytes_ = 0, block_units_ = 0;
  std::vector<std::int32_t> window_table_, entry_table_, cu_seqlens_, seqused_, selected_;
  std::vector<float> sinks_, cos_, sin_;
};

// The first token of all, a prompt inside the window, one step of decoding past it, padding, and a token of no sequence.
const std::vector<Sequence> kSequences = {{0, 1}, {2, 2}, {99, 1}, {0, -1}};

class SparseAttention : public testing::TestWithParam<Shape> {};

TEST_P(SparseAttention, EqualsADoubleSoftmax) {
  World world(GetParam(), kSequences);
  simt::for_every_schedule(
      [&](simt::Device& device) {
        world.expect_right(world.run(device));
        EXPECT_EQ(0u, device.counts().bank_conflicts);
      },
      GetParam().shared_limit);
}

// Every tile on every kind of rows, with one split and with several.
INSTANTIATE_TEST_SUITE_P(
    Tiles, SparseAttention,
    testing::Values(Shape{.shared_limit = kSm90}, Shape{.shared_limit = kSm80}, Shape{.shared_limit = kSm120}, Shape{.heads = 20},
                    Shape{.query_format = kF16, .window_format = kF16, .entry_format = kF16},
                    Shape{.query_format = kF16, .window_format = kF16, .entry_format = kF16, .shared_limit = kSm80},
                    Shape{.query_format = kF16, .window_format = kF16, .entry_format = kF16, .heads = 32},
                    Shape{.window_format = kPacked, .entry_format = kPacked},
                    Shape{.window_format = kPacked, .entry_format = kPacked, .shared_limit = kSm80},
                    Shape{.window_format = kPacked, .entry_format = kPacked, .shared_limit = kSm120},
                    Shape{.window_format = kB16, .entry_format = kPacked, .heads = 16},
                    Shape{.window_format = kPacked, .entry_format = kB16},
                    Shape{.window_format = kPacked, .entry_format = kPacked, .window = 100, .num_selected = 200, .columns = 8},
                    Shape{.window = 100, .num_selected = 200, .columns = 8, .shared_limit = kSm80}));

// Selected tokens: keys of 576 values of which 512 are the value, without a window and, though no model does, with one.
constexpr Shape token_form(EntryFormat format, std::int32_t heads, std::int32_t num_selected, std::size_t shared_limit = kSm90) {
  return {.query_format = format == kPacked ? kB16 : format,
          .window_format = format,
          .entry_format = format,
          .heads = heads,
          .dim = 576,
          .value_dim = 512,
          .window = 0,
          .ratio = 1,
          .num_selected = num_selected,
          .rope = 0,
          .columns = 8,
          .sinks = false,
          .shared_limit = shared_limit};
}
INSTANTIATE_TEST_SUITE_P(Tokens, SparseAttention,
                         testing::Values(token_form(kB16, 64, 40), token_form(kB16, 64, 40, kSm120), token_form(kB16, 20, 400),
                                         token_form(kF16, 64, 400), token_form(kF16, 20, 40), token_form(kB16, 72, -1),
                                         token_form(kB16, 8, 0),
                                         Shape{.heads = 8, .dim = 576, .value_dim = 512, .window = 40, .columns = 8}));

INSTANTIATE_TEST_SUITE_P(
    Edges, SparseAttention,
    testing::Values(
        Shape{.heads = 8, .num_selected = -1}, Shape{.heads = 8, .num_selected = -2},
        Shape{.heads = 8, .num_selected = 0, .sinks = false}, Shape{.heads = 8, .window = 1, .num_selected = 3, .rope = 0},
        Shape{.heads = 8, .window = 33, .ratio = 1, .num_selected = -1, .rope = 512, .columns = 8},
        Shape{.heads = 72, .ratio = 128, .num_selected = -1},
        Shape{.window_format = kPacked, .entry_format = kPacked, .heads = 8, .first_block = (std::int64_t{1} << 23) + 3},
        Shape{.heads = 8, .first_block = (std::int64_t{1} << 30) + 3}));

// What tensor cores do not serve.
INSTANTIATE_TEST_SUITE_P(
    Plain, SparseAttention,
    testing::Values(token_form(kF32, 4, 40), token_form(kF32, 3, -1), token_form(kPacked, 2, 40), Shape{.heads = 2, .dim = 576},
                    Shape{.heads = 2, .value_dim = 448}, Shape{.heads = 2, .dim = 70, .value_dim = 33, .rope = 32},
                    Shape{.query_format = kF32, .window_format = kF32, .entry_format = kF32, .heads = 4},
                    Shape{.query_format = kF32, .window_format = kPacked, .entry_format = kB16, .heads = 3, .dim = 192},
                    Shape{.query_format = kB16, .window_format = kF32, .entry_format = kF16, .heads = 2, .dim = 70, .rope = 14},
                    Shape{.query_format = kF16, .window_format = kF16, .entry_format = kF16, .heads = 2, .dim = 33, .rope = 32}));

// Blocks that are nowhere: their rows are absent, a token may have no key at all, and its neighbours do not notice.
TEST(SparseAttentionLosses, BlocksOutsideTheArenaAreAbsent) {
  for (const EntryFormat format : {kB16, kPacked}) {
    World world({.window_format = format, .entry_format = format, .heads = 8, .ratio = 1, .num_selected = -1, .columns = 8},
                kSequences);
    world.lose_window_block(2, 2);
    world.lose_entry_block(2, 1, std::numeric_limits<std::int32_t>::max());
    world.lose_window_block(0, 0);
    world.lose_entry_block(0, 0, std::numeric_limits<std::int32_t>::min());
    simt::for_every_schedule([&](simt::Device& device) { world.expect_right(world.run(device)); });
  }
}

// Bits of a sequence in a step do not depend on what the other sequences are.
TEST(SparseAttentionBits, DoNotDependOnNeighbours) {
  const Shape few{.window_format = kPacked, .entry_format = kPacked, .heads = 8, .num_selected = -1, .columns = 8};
  Shape many = few;
  many.columns = 32;
  for (const Shape& shape : {few, many, token_form(kB16, 8, 40), token_form(kB16, 8, 400)}) {
    World one(shape, {{99, 1}, {0, 2}}), other(shape, {{99, 1}, {70, 2}});
    EXPECT_EQ(shape.columns == 32 || shape.num_selected == 400, sparse_splits(one.params()) > 1);
    const auto run = [](World& world) {
      simt::Device device;
      World::Result result = world.run(device);
      EXPECT_EQ("", device.report());
      return result;
    };
    const World::Result a = run(one), b = run(other);
    const auto bytes = static_cast<std::ptrdiff_t>(shape.heads * one.out_bytes());
    EXPECT_TRUE(std::equal(a.out.begin(), a.out.begin() + bytes, b.out.begin()));
    EXPECT_TRUE(std::equal(a.lse.begin(), a.lse.begin() + shape.heads, b.lse.begin()));
  }
}

TEST(SparseAttentionSplits, FollowFromShapes) {
  SparseAttentionParams params;
  params.num_tokens = 1;
  params.heads = 64;
  params.window = 128;
  params.window_table.columns = 64;
  params.window_rows.block_shift = 6;
  EXPECT_EQ(1, sparse_splits(params));
  const std::int32_t block = 0;
  params.entry_table = {&block, 1, 128};
  params.entries.block_shift = 6;
  EXPECT_EQ((128 + 8192 + 319) / 320, sparse_splits(params));
  params.selected = &block;
  params.num_selected = 512;
  EXPECT_EQ(2, sparse_splits(params));
  params.window = 0;  // selected tokens
  params.window_table.columns = 0;
  params.num_selected = 2048;
  EXPECT_EQ((2048 + 319) / 320, sparse_splits(params));
  EXPECT_EQ(7 * 64 * (512 + 2), sparse_workspace_floats(params));
  params.num_tokens = 129;
  EXPECT_EQ(1, sparse_splits(params));
  EXPECT_EQ(0, sparse_workspace_floats(params));
}

}  // namespace
}  // namespace hetkv
