// csrc/kernels/cuda/compress.cu on the executor, against the CPU kernel.
//
// Entries of random rows are compared as floats, since the two exponentials differ in their last bits; every other byte of the
// arena, rings included, must be equal. Packed entries are compared byte for byte on rows whose pooling and norm are exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/compress.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

struct Shape {
  EntryFormat format = EntryFormat::kFloat32;
  EntryFormat raw_format = EntryFormat::kFloat32;
  std::int32_t width = 512;
  std::int64_t ratio = 4;
  bool overlap = true;
  std::int32_t rope = 64;
  std::int64_t first_block = 0;  // the arena's pointer is biased, so that block offsets begin here
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "format " << static_cast<int>(s.format) << " from " << static_cast<int>(s.raw_format) << ", width " << s.width
       << ", ratio " << s.ratio << (s.overlap ? ", overlap" : "") << ", rope " << s.rope << ", first block " << s.first_block;
}

constexpr std::int64_t kBlockShift = 2, kPaddingTokens = 3;

enum class Kind : std::uint8_t { kReal, kPadding, kBadRing };

struct Sequence {
  std::int64_t first_position, count;
  Kind kind = Kind::kReal;
};

// A step of a batch: its tensors, and an arena with the rings as earlier steps left them.
class World {
 public:
  // exact: rows whose entries are the same however they are computed.
  World(const Shape& shape, std::vector<Sequence> sequences, bool exact) : shape_(shape), sequences_(std::move(sequences)) {
    std::mt19937 random(17);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> eighths(-32, 32);
    const auto batch = static_cast<std::int64_t>(sequences_.size());
    PagedRows& entries = params_.entries;
    entries.format = shape.format;
    entries.width = shape.width;
    entries.data_bytes = entry_data_bytes(shape.format, shape.width);
    entries.scale_bytes = entry_scale_bytes(shape.format, shape.width);
    entries.block_shift = kBlockShift;
    entries.data_offset = 48;
    entries.scale_offset = 48 + (entries.data_bytes << kBlockShift);
    params_.raw_format = shape.raw_format;
    params_.overlap = shape.overlap;
    params_.ratio = shape.ratio;
    params_.rope = shape.rope;
    params_.norm_eps = exact ? 0.0f : 1e-6f;
    params_.num_sequences = batch;
    params_.ring_rows =
        static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>((shape.overlap ? 2 : 1) * shape.ratio)));
    const std::int64_t row_bytes = raw_row_bytes(params_), values = raw_width(params_);
    params_.ring_kv_offset = 16;
    params_.ring_gate_offset = 16 + params_.ring_rows * row_bytes;

    cu_seqlens_.push_back(0);
    for (const Sequence& sequence : sequences_) {
      cu_seqlens_.push_back(cu_seqlens_.back() + static_cast<std::int32_t>(sequence.count));
      seqused_.push_back(sequence.kind == Kind::kPadding ? 0
                                                         : static_cast<std::int32_t>(sequence.first_position + sequence.count));
    }
    params_.num_tokens = cu_seqlens_.back() + kPaddingTokens;

    const std::int64_t ring_units = (params_.ring_gate_offset + params_.ring_rows * row_bytes + 255) / 256;
    const std::int64_t entry_units = (entries.scale_offset + (entries.scale_bytes << kBlockShift) + 255) / 256;
    const std::int64_t entry_blocks = (params_.num_tokens >> kBlockShift) + 1;
    const std::int64_t units = batch * ring_units + entry_blocks * entry_units;
    arena_.assign(static_cast<std::size_t>(units * 256 + 16), std::byte{0xff});  // NaN
    entries.arena_bytes = (shape.first_block + units) * 256;
    for (std::int64_t b = 0; b < batch; ++b) ring_table_.push_back(static_cast<std::int32_t>(shape.first_block + b * ring_units));

    kv_ = raw_rows(params_.num_tokens * values, normal, random);
    gate_ = raw_rows(params_.num_tokens * values, normal, random);
    for (std::int64_t b = 0; b < batch; ++b) {  // the rows of the ring that hold something
      const Sequence& sequence = sequences_[static_cast<std::size_t>(b)];
      const std::int64_t from = std::max<std::int64_t>(0, sequence.first_position - params_.ring_rows);
      for (std::int64_t position = from; position < sequence.first_position; ++position) {
        for (const std::int64_t offset : {params_.ring_kv_offset, params_.ring_gate_offset}) {
          const std::vector<std::byte> row = raw_rows(values, normal, random);
          const std::int64_t at = b * ring_units * 256 + offset + (position & (params_.ring_rows - 1)) * row_bytes;
          std::memcpy(arena(arena_) + at, row.data(), static_cast<std::size_t>(row_bytes));
          if (exact) {
            make_exact(arena(arena_) + at, b, offset == params_.ring_gate_offset);
          }
        }
      }
      for (std::int64_t i = 0; exact && i < sequence.count; ++i) {
        const std::int64_t token = cu_seqlens_[static_cast<std::size_t>(b)] + i;
        make_exact(kv_.data() + token * row_bytes, b, false);
        make_exact(gate_.data() + token * row_bytes, b, true);
      }
    }
    for (std::int64_t i = 0; i < shape.ratio * values; ++i) bias_.push_back(exact ? 0.0f : normal(random));
    for (std::int32_t i = 0; i < shape.width; ++i) weight_.push_back(static_cast<float>(eighths(random)) / 8.0f);
    for (std::int64_t i = 0; i < params_.num_tokens * shape.rope / 2; ++i) {
      cos_.push_back(static_cast<float>(eighths(random)) / 32.0f);
      sin_.push_back(static_cast<float>(eighths(random)) / 32.0f);
    }

    slots_.assign(static_cast<std::size_t>(params_.num_tokens), std::numeric_limits<std::int64_t>::min());  // never read
    good_slots_ = slots_;
    std::vector<std::int64_t> free;
    for (std::int64_t i = 0; i < entry_blocks << kBlockShift; ++i) {
      const std::int64_t block = shape.first_block + batch * ring_units + (i >> kBlockShift) * entry_units;
      free.push_back((block << kBlockShift) + (i & ((1 << kBlockShift) - 1)));
    }
    std::shuffle(free.begin(), free.end(), random);
    std::int64_t closed = 0;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
      const Sequence& sequence = sequences_[b];
      for (std::int64_t i = 0; sequence.kind != Kind::kPadding && i < sequence.count; ++i) {
        if ((sequence.first_position + i + 1) % shape.ratio != 0) continue;
        const auto token = static_cast<std::size_t>(cu_seqlens_[b] + i);
        slots_[token] = good_slots_[token] = free[static_cast<std::size_t>(closed)];
        ++closed;
        if (closed == 3) slots_[token] = good_slots_[token] = -1;
        if (closed == 5) slots_[token] = (entries.arena_bytes >> kBlockOffsetShift) << kBlockShift;
        if (closed == 6) slots_[token] = -5;
        if (closed == 7) slots_[token] = std::numeric_limits<std::int64_t>::max();
        if (closed >= 5 && closed <= 7) good_slots_[token] = -1;
        if (good_slots_[token] >= 0 && sequence.kind == Kind::kReal) stored_.push_back(good_slots_[token]);
      }
    }
    good_table_ = ring_table_;
    good_seqused_ = seqused_;
    std::int32_t bad = -3;
    for (std::size_t b = 0; b < sequences_.size(); ++b) {
      if (sequences_[b].kind == Kind::kBadRing) {
        ring_table_[b] = bad;
        bad = static_cast<std::int32_t>(entries.arena_bytes >> kBlockOffsetShift) - 1;  // begins inside, ends outside
        good_seqused_[b] = 0;
      }
      if (sequences_[b].kind == Kind::kPadding) ring_table_[b] = -1;
    }
  }

  // The arena after the CPU kernel, which gets the good slots and rings only.
  std::vector<std::byte> expected() {
    std::vector<std::byte> bytes(arena_.size());
    CompressParams params = bound(bytes);
    params.slots = good_slots_.data();
    params.seqused_k = good_seqused_.data();
    params.ring_table.blocks = good_table_.data();
    EXPECT_EQ(CompressProblem::Kind::kNone, find_compress_problem(params).kind);
    compress_entries_cpu(params, 0, params.num_tokens);
    compress_rings_cpu(params, 0, params.num_tokens);
    return trimmed(bytes);
  }

  // The arena after the CUDA kernel.
  std::vector<std::byte> run(simt::Device& device) {
    std::vector<std::byte> bytes(arena_.size());
    const CompressParams params = bound(bytes);
    device.reads("kv", kv_);
    device.reads("gate", gate_);
    device.reads("position_bias", bias_);
    device.reads("norm_weight", weight_);
    if (!cos_.empty()) device.reads("cos", cos_);
    if (!sin_.empty()) device.reads("sin", sin_);
    device.reads("cu_seqlens_q", cu_seqlens_);
    device.reads("seqused_k", seqused_);
    device.reads("ring_table", ring_table_);
    device.reads("slots", slots_);
    device.allow("arena", arena(bytes), arena_.size() - 16, simt::Rights::kReadWrite);
    compress_cuda(params, nullptr);
    return trimmed(bytes);
  }

  std::uint64_t bytes_to_write() const {
    std::int64_t ring_rows = 0;
    for (const Sequence& sequence : sequences_) {
      if (sequence.kind == Kind::kReal) ring_rows += std::min(sequence.count, params_.ring_rows);
    }
    const auto entries = static_cast<std::int64_t>(stored_.size());
    return static_cast<std::uint64_t>(entries * (params_.entries.data_bytes + params_.entries.scale_bytes) +
                                      2 * ring_rows * raw_row_bytes(params_));
  }

  // Bytes from the arena's start to each stored entry.
  std::vector<std::int64_t> entry_places() const {
    std::vector<std::int64_t> places;
    const std::int64_t mask = (1 << kBlockShift) - 1;
    for (const std::int64_t slot : stored_) {
      places.push_back(((slot >> kBlockShift) - shape_.first_block) * 256 + params_.entries.data_offset +
                       (slot & mask) * params_.entries.data_bytes);
    }
    return places;
  }

  const CompressParams& params() const { return params_; }

 private:
  static std::byte* arena(std::vector<std::byte>& bytes) {
    return bytes.data() + (16 - reinterpret_cast<std::uintptr_t>(bytes.data()) % 16) % 16;
  }
  static std::vector<std::byte> trimmed(std::vector<std::byte>& bytes) {
    return {arena(bytes), arena(bytes) + bytes.size() - 16};
  }

  std::vector<std::byte> raw_rows(std::int64_t count, std::normal_distribution<float>& normal, std::mt19937& random) const {
    const std::int64_t value_bytes = entry_data_bytes(shape_.raw_format, 1);
    std::vector<std::byte> rows(static_cast<std::size_t>(count * value_bytes));
    for (std::int64_t i = 0; i < count; ++i) put(rows.data() + i * value_bytes, normal(random));
    return rows;
  }

  // float16: cut off to a value that is surely normal.
  void put(std::byte* to, float value) const {
    auto bits = std::bit_cast<std::uint32_t>(value);
    if (shape_.raw_format == EntryFormat::kBFloat16) bits >>= 16;
    if (shape_.raw_format == EntryFormat::kFloat16) {
      const float size = std::clamp(std::fabs(value), 0.001f, 8.0f);
      bits = (bits >> 16 & 0x8000u) | ((std::bit_cast<std::uint32_t>(size) - 0x38000000u) >> 13);
    }
    std::memcpy(to, &bits, static_cast<std::size_t>(entry_data_bytes(shape_.raw_format, 1)));
  }

  // Equal gates, and one value of a channel in all rows of a sequence: +2 or -2, of which the norm makes +1 or -1.
  void make_exact(std::byte* row, std::int64_t sequence, bool is_gate) const {
    const std::int64_t value_bytes = entry_data_bytes(shape_.raw_format, 1);
    for (std::int64_t i = 0; i < raw_width(params_); ++i) {
      const auto mixed = static_cast<std::uint64_t>((i % shape_.width + 1) * 2654435761 + sequence * 40503);
      put(row + i * value_bytes, is_gate ? 1.0f : (mixed >> 13) % 2 == 0 ? 2.0f : -2.0f);
    }
  }

  CompressParams bound(std::vector<std::byte>& bytes) {
    std::copy_n(arena(arena_), arena_.size() - 16, arena(bytes));
    CompressParams params = params_;
    params.entries.arena = arena(bytes) - (shape_.first_block << kBlockOffsetShift);
    params.kv = kv_.data();
    params.gate = gate_.data();
    params.kv_stride = params.gate_stride = raw_row_bytes(params_);
    params.position_bias = bias_.data();
    params.norm_weight = weight_.data();
    params.cos = cos_.data();
    params.sin = sin_.data();
    params.cu_seqlens_q = cu_seqlens_.data();
    params.seqused_k = seqused_.data();
    params.ring_table = {ring_table_.data(), 1, 1};
    params.slots = slots_.data();
    return params;
  }

  Shape shape_;
  std::vector<Sequence> sequences_;
  CompressParams params_;
  std::vector<std::byte> arena_, kv_, gate_;
  std::vector<float> bias_, weight_, cos_, sin_;
  std::vector<std::int32_t> cu_seqlens_, seqused_, good_seqused_, ring_table_, good_table_;
  std::vector<std::int64_t> slots_, good_slots_, stored_;
};

// Steps that close nothing, one and many windows; windows from the ring, from the step and from both; padding; rings outside the arena.
std::vector<Sequence> batch(std::int64_t ratio) {
  return {{0, 1},
          {0, 2 * ratio + 1},
          {ratio + 1, 2 * ratio},
          {2 * ratio - 1, 1},
          {ratio / 2, ratio, Kind::kPadding},
          {ratio - 1, 1},
          {2 * ratio, 0},
          {ratio, 2 * ratio, Kind::kBadRing},
          {4 * ratio - 2, 5 * ratio + 1},
          {0, ratio, Kind::kBadRing}};
}

class Compress : public testing::TestWithParam<Shape> {};

TEST_P(Compress, FloatEntriesAndRings) {
  World world(GetParam(), batch(GetParam().ratio), false);
  const std::vector<std::byte> wanted = world.expected();
  simt::for_every_schedule([&](simt::Device& device) {
    std::vector<std::byte> arena = world.run(device);
    ASSERT_FALSE(world.entry_places().empty());
    for (const std::int64_t place : world.entry_places()) {
      const auto width = static_cast<std::size_t>(GetParam().width);
      std::vector<float> entry(width), reference(width);
      std::memcpy(entry.data(), arena.data() + place, 4 * width);
      std::memcpy(reference.data(), wanted.data() + place, 4 * width);
      for (std::size_t i = 0; i < width; ++i) ASSERT_NEAR(entry[i], reference[i], 1e-5f * (1.0f + std::fabs(reference[i])));
      std::memcpy(arena.data() + place, wanted.data() + place, 4 * width);
    }
    EXPECT_TRUE(wanted == arena) << "first difference outside of entries: byte "
                                 << std::mismatch(wanted.begin(), wanted.end(), arena.begin()).first - wanted.begin();
    EXPECT_EQ(world.bytes_to_write(), device.counts().global_bytes_written);
    EXPECT_EQ(2u, device.counts().launches);
  });
}

constexpr EntryFormat kF32 = EntryFormat::kFloat32, kF16 = EntryFormat::kFloat16, kB16 = EntryFormat::kBFloat16,
                      kPacked = EntryFormat::kFp8Packed, kIndex = EntryFormat::kFp8Index, kMxfp4 = EntryFormat::kMxfp4Index;

// Every input; one part of rows a window up to eight; a ratio that is no power of two, a width that leaves threads idle.
INSTANTIATE_TEST_SUITE_P(Steps, Compress,
                         testing::Values(Shape{}, Shape{.raw_format = kB16}, Shape{.raw_format = kF16, .width = 128},
                                         Shape{.width = 512, .ratio = 32, .overlap = false}, Shape{.width = 1024, .rope = 0},
                                         Shape{.raw_format = kB16, .width = 40, .ratio = 3, .overlap = false, .rope = 6},
                                         Shape{.width = 328, .ratio = 5, .rope = 328}, Shape{.width = 8, .ratio = 1, .rope = 2},
                                         Shape{.width = 64, .ratio = 128, .overlap = false},
                                         Shape{.width = 128, .first_block = (std::int64_t{1} << 23) + 1},
                                         Shape{.width = 64, .first_block = (std::int64_t{1} << 30) + 3}));

class CompressExact : public testing::TestWithParam<Shape> {};

TEST_P(CompressExact, EqualsTheCpuKernel) {
  World world(GetParam(), batch(GetParam().ratio), true);
  const std::vector<std::byte> wanted = world.expected();
  simt::for_every_schedule([&](simt::Device& device) {
    EXPECT_TRUE(wanted == world.run(device));
    EXPECT_EQ(world.bytes_to_write(), device.counts().global_bytes_written);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Formats, CompressExact,
    testing::Values(Shape{}, Shape{.format = kF16, .raw_format = kB16, .width = 64},
                    Shape{.format = kB16, .raw_format = kF16, .width = 256}, Shape{.format = kPacked, .raw_format = kB16},
                    Shape{.format = kPacked, .width = 1024}, Shape{.format = kIndex, .raw_format = kB16, .width = 128},
                    Shape{.format = kIndex, .width = 512, .ratio = 8}, Shape{.format = kMxfp4, .width = 128},
                    Shape{.format = kPacked, .ratio = 16, .overlap = false, .first_block = (std::int64_t{1} << 23) + 1}));

// One prompt in every two-way split: the same entries and the same ring, bit for bit. The second step reads what the first has left.
void check_splits(std::int64_t ratio, bool overlap, std::int64_t tokens) {
  constexpr std::int32_t kWidth = 64;
  std::mt19937 random(23);
  std::normal_distribution<float> normal;
  CompressParams params;
  PagedRows& entries = params.entries;
  entries.width = kWidth;
  entries.data_bytes = 4 * kWidth;
  entries.block_shift = 6;
  params.overlap = overlap;
  params.ratio = ratio;
  params.norm_eps = 1e-6f;
  params.ring_rows = static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>((overlap ? 2 : 1) * ratio)));
  const std::int64_t values = raw_width(params), row_bytes = raw_row_bytes(params);
  params.ring_gate_offset = params.ring_rows * row_bytes;
  const std::int64_t ring_units = (2 * params.ring_rows * row_bytes + 255) / 256;
  entries.arena_bytes = ring_units * 256 + 64 * entries.data_bytes;
  ASSERT_LE(tokens / ratio, 64);
  const auto draw = [&](std::int64_t count) {
    std::vector<float> drawn(static_cast<std::size_t>(count));
    for (float& value : drawn) value = normal(random);
    return drawn;
  };
  const std::vector<float> kv = draw(tokens * values), gate = draw(tokens * values), bias = draw(ratio * values),
                           weight = draw(kWidth);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(tokens));
  for (std::int64_t i = 0; i < tokens; ++i) slots[static_cast<std::size_t>(i)] = (ring_units << 6) + i / ratio;
  const std::vector<std::int32_t> ring_table{0};
  params.position_bias = bias.data();
  params.norm_weight = weight.data();
  params.ring_table = {ring_table.data(), 1, 1};
  params.kv_stride = params.gate_stride = row_bytes;
  params.num_sequences = 1;
  const auto run = [&](std::int64_t split) {
    std::vector<std::byte> arena(static_cast<std::size_t>(entries.arena_bytes), std::byte{0xff});
    entries.arena = arena.data();
    for (const auto& [from, to] : {std::pair{std::int64_t{0}, split}, std::pair{split, tokens}}) {
      const std::vector<std::int32_t> cu_seqlens{0, static_cast<std::int32_t>(to - from)}, seqused{static_cast<std::int32_t>(to)};
      params.num_tokens = to - from;
      params.kv = reinterpret_cast<const std::byte*>(kv.data() + from * values);
      params.gate = reinterpret_cast<const std::byte*>(gate.data() + from * values);
      params.cu_seqlens_q = cu_seqlens.data();
      params.seqused_k = seqused.data();
      params.slots = slots.data() + from;
      simt::Device device;
      device.reads("kv", kv);
      device.reads("gate", gate);
      device.reads("bias", bias);
      device.reads("weight", weight);
      device.reads("slots", slots);
      device.reads("ring_table", ring_table);
      device.reads("cu_seqlens_q", cu_seqlens);
      device.reads("seqused_k", seqused);
      device.updates("arena", arena);
      compress_cuda(params, nullptr);
      EXPECT_EQ("", device.report());
    }
    return arena;
  };
  const std::vector<std::byte> whole = run(tokens);
  for (std::int64_t split = 1; split < tokens; ++split) EXPECT_TRUE(whole == run(split)) << "split at " << split;
}

TEST(CompressSplits, Overlapping) { check_splits(4, true, 27); }
TEST(CompressSplits, Plain) { check_splits(16, false, 50); }

}  // namespace
}  // namespace hetkv
