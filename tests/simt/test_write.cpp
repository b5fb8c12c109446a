// csrc/kernels/cuda/write.cu on the executor, byte for byte against the CPU kernel.
//
// Values are chosen so that every sum and product in float is exact: then neither the order of a sum nor a fused multiply-add can
// show, and bytes must be equal at every CPU level.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/write.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

enum class Rope : std::uint8_t { kNone, kNeighbours, kNeighboursLeading, kHalves, kHalvesLeading };

struct Shape {
  EntryFormat format = EntryFormat::kFloat32;
  EntryFormat row_format = EntryFormat::kFloat32;
  std::int32_t width = 512;
  std::int32_t heads = 1;
  std::int64_t num_rows = 21;
  bool norm = false;
  Rope turn = Rope::kNone;
  std::int32_t rope = 0;
  std::int64_t shift = 0;        // bytes by which rows and section are off their 16-byte alignment
  std::int64_t first_block = 0;  // the arena's pointer is biased, so that block offsets begin here
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "format " << static_cast<int>(s.format) << " from " << static_cast<int>(s.row_format) << ", " << s.num_rows
       << " rows of " << s.heads << " x " << s.width << ", norm " << s.norm << ", rope " << s.rope << " of kind "
       << static_cast<int>(s.turn) << ", shift " << s.shift << ", first block " << s.first_block;
}

constexpr std::int64_t kRowsPerBlockShift = 2, kBlockUnits = 64;

std::uint16_t half_of_eighths(int eighths) {  // bits of eighths / 8, for |eighths| < 2048
  if (eighths == 0) return 0;
  const float value = static_cast<float>(std::abs(eighths)) / 8.0f;
  const int exponent = std::ilogb(value);
  const int mantissa = static_cast<int>(std::ldexp(value, 10 - exponent)) - 1024;
  return static_cast<std::uint16_t>((eighths < 0 ? 0x8000 : 0) | ((exponent + 15) << 10) | mantissa);
}

class Write : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const Shape shape = GetParam();
    const bool packed = shape.format >= EntryFormat::kFp8Packed;
    std::mt19937 random(11);
    PagedRows& target = params_.target;
    target.format = shape.format;
    target.width = shape.width;
    target.data_bytes = shape.heads * entry_data_bytes(shape.format, shape.width);
    target.scale_bytes = entry_scale_bytes(shape.format, shape.width);
    target.block_shift = kRowsPerBlockShift;
    target.data_offset = 32 + shape.shift;
    target.scale_offset = target.data_offset + (target.data_bytes << kRowsPerBlockShift) + (packed ? 3 * shape.shift : 0);
    ASSERT_LE(target.scale_offset + (target.scale_bytes << kRowsPerBlockShift), kBlockUnits << kBlockOffsetShift);
    const std::int64_t blocks = (shape.num_rows >> kRowsPerBlockShift) + 2;
    arena_bytes_ = (blocks * kBlockUnits) << kBlockOffsetShift;
    target.arena_bytes = (shape.first_block << kBlockOffsetShift) + arena_bytes_;
    for (std::int64_t block = 0; block < blocks; ++block) {
      for (std::int64_t row = 0; row < std::int64_t{1} << kRowsPerBlockShift; ++row) {
        slots_.push_back(((shape.first_block + block * kBlockUnits) << kRowsPerBlockShift) + row);
      }
    }
    std::shuffle(slots_.begin(), slots_.end(), random);
    slots_.resize(static_cast<std::size_t>(shape.num_rows));
    good_slots_ = slots_;
    if (shape.num_rows > 4) {
      slots_[1] = -1;
      slots_[2] = -9;
      slots_[3] = (target.arena_bytes >> kBlockOffsetShift) << kRowsPerBlockShift;  // one block too far
      slots_.back() = std::numeric_limits<std::int64_t>::max();
      for (const std::size_t i : {std::size_t{1}, std::size_t{2}, std::size_t{3}, slots_.size() - 1}) good_slots_[i] = -1;
    }

    const bool is_float = shape.row_format == EntryFormat::kFloat32;
    const std::int64_t value_bytes = is_float ? 4 : 2;
    params_.head_stride = (shape.width + (shape.heads > 1 ? 8 : 0)) * value_bytes;
    params_.row_stride = shape.heads * params_.head_stride + 16;
    rows_.assign(static_cast<std::size_t>(shape.num_rows * params_.row_stride + 64), std::byte{0xff});
    const auto at = reinterpret_cast<std::uintptr_t>(rows_.data());
    std::byte* const rows = rows_.data() + (64 - at % 64) % 16 + shape.shift;
    params_.rows = rows;
    std::uniform_int_distribution<int> eighths(-32, 32);
    const bool square = shape.norm && shape.turn != Rope::kNone;  // a norm that divides by a power of two
    for (std::int64_t row = 0; row < shape.num_rows; ++row) {
      for (std::int64_t head = 0; head < shape.heads; ++head) {
        for (std::int64_t i = 0; i < shape.width; ++i) {
          const int number = square ? (eighths(random) < 0 ? -16 : 16) : row == 5 ? 0 : eighths(random);
          std::byte* const to = rows + row * params_.row_stride + head * params_.head_stride + i * value_bytes;
          const float value = static_cast<float>(number) / 8.0f;
          std::uint32_t bits = 0;
          std::memcpy(&bits, &value, 4);
          if (shape.row_format == EntryFormat::kBFloat16) bits >>= 16;
          if (shape.row_format == EntryFormat::kFloat16) bits = half_of_eighths(number);
          std::memcpy(to, &bits, static_cast<std::size_t>(value_bytes));
        }
      }
    }
    params_.slots = slots_.data();
    params_.num_rows = shape.num_rows;
    params_.heads = shape.heads;
    params_.row_format = shape.row_format;
    if (shape.norm) {
      for (std::int32_t i = 0; i < shape.width; ++i) weight_.push_back(static_cast<float>(eighths(random)) / 8.0f);
      params_.norm_weight = weight_.data();
      params_.norm_eps = square ? 0.0f : 1e-6f;
    }
    if (shape.turn != Rope::kNone) {
      for (std::int64_t i = 0; i < shape.num_rows * shape.rope / 2; ++i) {
        cos_.push_back(static_cast<float>(eighths(random)) / 32.0f);
        sin_.push_back(static_cast<float>(eighths(random)) / 32.0f);
      }
      params_.cos = cos_.data();
      params_.sin = sin_.data();
      params_.rope = shape.rope;
      params_.rope_interleaved = shape.turn == Rope::kNeighbours || shape.turn == Rope::kNeighboursLeading;
      params_.rope_trailing = shape.turn == Rope::kNeighbours || shape.turn == Rope::kHalves;
    }
  }

  // What the CPU kernel makes of an arena of 0xee bytes.
  std::vector<std::byte> expected() const {
    std::vector<std::byte> arena(static_cast<std::size_t>(arena_bytes_), std::byte{0xee});
    WriteParams params = params_;
    params.target.arena = arena.data() - (GetParam().first_block << kBlockOffsetShift);
    params.slots = good_slots_.data();
    EXPECT_EQ(-1, find_bad_write_slot(params));
    write_rows_cpu(params, 0, params.num_rows);
    return arena;
  }

  void check() {
    const std::vector<std::byte> wanted = expected();
    simt::for_every_schedule([&](simt::Device& device) {
      std::vector<std::byte> memory(static_cast<std::size_t>(arena_bytes_) + 16, std::byte{0xee});
      std::byte* const arena = memory.data() + (16 - reinterpret_cast<std::uintptr_t>(memory.data()) % 16) % 16;
      params_.target.arena = arena - (GetParam().first_block << kBlockOffsetShift);
      device.reads("slots", slots_);
      device.reads("rows", rows_);
      if (!weight_.empty()) device.reads("norm_weight", weight_);
      if (!cos_.empty()) device.reads("cos", cos_);
      if (!sin_.empty()) device.reads("sin", sin_);
      device.allow("arena", arena, wanted.size(), simt::Rights::kWrite);
      write_rows_cuda(params_, nullptr);
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), arena))
          << "first difference at byte " << std::mismatch(wanted.begin(), wanted.end(), arena).first - wanted.begin();
      const auto good = std::count_if(good_slots_.begin(), good_slots_.end(), [](std::int64_t slot) { return slot >= 0; });
      EXPECT_EQ(static_cast<std::uint64_t>(good * (params_.target.data_bytes + params_.target.scale_bytes)),
                device.counts().global_bytes_written);
    });
  }

  WriteParams params_;
  std::vector<std::int64_t> slots_, good_slots_;
  std::vector<std::byte> rows_;
  std::vector<float> weight_, cos_, sin_;
  std::int64_t arena_bytes_ = 0;
};

TEST_P(Write, EqualsTheCpuKernel) { check(); }

constexpr EntryFormat kF32 = EntryFormat::kFloat32, kF16 = EntryFormat::kFloat16, kB16 = EntryFormat::kBFloat16,
                      kPacked = EntryFormat::kFp8Packed, kIndex = EntryFormat::kFp8Index, kMxfp4 = EntryFormat::kMxfp4Index;

// Every stored format from every input, and the three instantiations with groups of 8, 16 and 32 lanes.
INSTANTIATE_TEST_SUITE_P(
    Formats, Write,
    testing::Values(
        Shape{.format = kF32, .row_format = kF32, .width = 512}, Shape{.format = kF32, .row_format = kF16, .width = 40},
        Shape{.format = kF16, .row_format = kF16, .width = 64, .heads = 5},
        Shape{.format = kF16, .row_format = kB16, .width = 1024},
        Shape{.format = kB16, .row_format = kB16, .width = 128, .heads = 8},
        Shape{.format = kB16, .row_format = kF32, .width = 256}, Shape{.format = kPacked, .row_format = kB16, .width = 512},
        Shape{.format = kPacked, .row_format = kF32, .width = 128}, Shape{.format = kPacked, .row_format = kF16, .width = 1024},
        Shape{.format = kIndex, .row_format = kB16, .width = 128}, Shape{.format = kIndex, .row_format = kF32, .width = 16},
        Shape{.format = kIndex, .row_format = kF16, .width = 512}, Shape{.format = kMxfp4, .row_format = kB16, .width = 128},
        Shape{.format = kMxfp4, .row_format = kF32, .width = 32}, Shape{.format = kMxfp4, .row_format = kF32, .width = 992}));

// Ragged widths, addresses that no wide access fits, one row, many blocks of a launch, block offsets beyond 2^23 and beyond 2^31.
INSTANTIATE_TEST_SUITE_P(
    Edges, Write,
    testing::Values(
        Shape{.format = kF32, .row_format = kF32, .width = 1, .num_rows = 1},
        Shape{.format = kF16, .row_format = kF32, .width = 37, .heads = 3},
        Shape{.format = kB16, .row_format = kB16, .width = 301, .shift = 2},
        Shape{.format = kF32, .row_format = kF32, .width = 72, .shift = 4},
        Shape{.format = kPacked, .row_format = kB16, .width = 512, .shift = 2},
        Shape{.format = kPacked, .row_format = kF32, .width = 256, .shift = 4},
        Shape{.format = kIndex, .row_format = kB16, .width = 128, .shift = 2},
        Shape{.format = kMxfp4, .row_format = kB16, .width = 64, .shift = 2},
        Shape{.format = kB16, .row_format = kB16, .width = 64, .num_rows = 150},
        Shape{.format = kPacked, .row_format = kB16, .width = 512, .first_block = (std::int64_t{1} << 23) + 1},
        Shape{.format = kB16, .row_format = kB16, .width = 128, .heads = 2, .first_block = (std::int64_t{1} << 31) + 5}));

// Norm with exact sums, and rotations of every form, also where a pair lies across two lanes.
INSTANTIATE_TEST_SUITE_P(
    Steps, Write,
    testing::Values(Shape{.format = kF32, .width = 512, .norm = true}, Shape{.format = kPacked, .width = 512, .norm = true},
                    Shape{.format = kB16, .row_format = kB16, .width = 96, .heads = 2, .norm = true},
                    Shape{.format = kF32, .width = 1000, .norm = true},
                    Shape{
                        .format = kPacked, .row_format = kB16, .width = 512, .norm = true, .turn = Rope::kNeighbours, .rope = 64},
                    Shape{.format = kIndex, .row_format = kB16, .width = 128, .turn = Rope::kNeighbours, .rope = 64},
                    Shape{.format = kF32, .width = 96, .turn = Rope::kNeighboursLeading, .rope = 34},
                    Shape{.format = kF32, .width = 33, .norm = true, .turn = Rope::kNeighbours, .rope = 12},
                    Shape{.format = kB16, .row_format = kB16, .width = 128, .heads = 4, .turn = Rope::kHalves, .rope = 128},
                    Shape{.format = kF32, .width = 256, .norm = true, .turn = Rope::kHalves, .rope = 64},
                    Shape{.format = kF32, .width = 600, .norm = true, .turn = Rope::kHalvesLeading, .rope = 44},
                    Shape{.format = kF16, .row_format = kF16, .width = 50, .turn = Rope::kHalves, .rope = 18}));

// Random values, signed zeros, infinities, NaN, magnitudes from 1e-30 to 1e30: quantisation is the same for all of them.
TEST(WriteValues, EveryMagnitudeQuantisesAsOnTheCpu) {
  constexpr std::int64_t kRows = 64;
  constexpr std::int32_t kWidth = 512;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> rows(kRows * kWidth);
  for (std::size_t i = 0; i < rows.size(); ++i)
    rows[i] = normal(random) * std::pow(10.0f, static_cast<float>(i / kWidth) - 31.0f);
  for (std::size_t i = 0; i < rows.size(); i += 97) rows[i] = -0.0f;
  rows[20 * kWidth + 3] = std::numeric_limits<float>::infinity();
  rows[21 * kWidth + 500] = std::numeric_limits<float>::quiet_NaN();
  rows[22 * kWidth + 70] = -std::numeric_limits<float>::infinity();
  rows[23 * kWidth + 71] = -std::numeric_limits<float>::quiet_NaN();
  std::vector<std::int64_t> slots(kRows);
  for (std::int64_t i = 0; i < kRows; ++i) slots[static_cast<std::size_t>(i)] = i;
  for (const EntryFormat format : {kF32, kB16, kPacked, kIndex, kMxfp4}) {
    SCOPED_TRACE(static_cast<int>(format));
    WriteParams params;
    PagedRows& target = params.target;
    target.format = format;
    target.width = kWidth;
    target.data_bytes = entry_data_bytes(format, kWidth);
    target.scale_bytes = entry_scale_bytes(format, kWidth);
    target.block_shift = 6;
    target.scale_offset = kRows * target.data_bytes;
    target.arena_bytes = kRows * (target.data_bytes + target.scale_bytes);
    params.rows = reinterpret_cast<const std::byte*>(rows.data());
    params.row_stride = 4 * kWidth;
    params.slots = slots.data();
    params.num_rows = kRows;
    std::vector<std::byte> wanted(static_cast<std::size_t>(target.arena_bytes));
    target.arena = wanted.data();
    write_rows_cpu(params, 0, kRows);
    simt::for_every_schedule([&](simt::Device& device) {
      std::vector<std::byte> arena(wanted.size());
      target.arena = arena.data();
      device.reads("slots", slots);
      device.reads("rows", rows);
      device.writes("arena", arena);
      write_rows_cuda(params, nullptr);
      EXPECT_EQ(wanted, arena);
    });
  }
}

}  // namespace
}  // namespace hetkv
