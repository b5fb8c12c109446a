// csrc/kernels/cuda/row_copy.cu on the executor, bit for bit against a plain loop.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/row_copy.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

struct Shape {
  std::int64_t num_layers, num_rows, row_bytes, rows_per_block_shift, first_offset;
  std::int64_t shift = 0;        // bytes by which both sides are off their 16-byte alignment
  std::int64_t packed_gap = 0;   // bytes between packed rows
  std::int64_t first_block = 0;  // the arena's pointer is biased, so that block numbers begin here
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << s.num_layers << " layers, " << s.num_rows << " rows of " << s.row_bytes << " bytes, shift " << s.shift << ", gap "
       << s.packed_gap << ", first block " << s.first_block;
}

constexpr std::int64_t kBadSlot = -7;

class RowCopy : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const Shape shape = GetParam();
    const std::int64_t per_block = std::int64_t{1} << shape.rows_per_block_shift;
    const std::int64_t section = (shape.first_offset + shape.num_layers * per_block * shape.row_bytes + 15) / 16 * 16;
    block_units_ = (section + 255) / 256;
    num_blocks_ = (shape.num_rows + per_block - 1) / per_block + 2;
    arena_bytes_ = num_blocks_ * block_units_ * 256;
    params_.num_layers = shape.num_layers;
    params_.num_rows = shape.num_rows;
    params_.row_bytes = shape.row_bytes;
    params_.rows_row_stride = shape.row_bytes + shape.packed_gap;
    params_.rows_layer_stride = params_.rows_row_stride * shape.num_rows;
    params_.first_offset = shape.first_offset;
    params_.layer_stride = per_block * shape.row_bytes;
    params_.block_shift = static_cast<std::int32_t>(shape.rows_per_block_shift);
    params_.start_limit = (shape.first_block << kBlockOffsetShift) + arena_bytes_ - section + (per_block - 1) * shape.row_bytes;
    // Distinct slots in random order, some of them bad.
    std::mt19937 random(5);
    std::vector<std::int64_t> all;
    for (std::int64_t block = 0; block < num_blocks_; ++block) {
      for (std::int64_t row = 0; row < per_block; ++row) {
        all.push_back((shape.first_block + block * block_units_) * per_block + row);
      }
    }
    std::shuffle(all.begin(), all.end(), random);
    slots_.assign(all.begin(), all.begin() + shape.num_rows);
    if (shape.num_rows > 2) {
      slots_[1] = kBadSlot;
      slots_.back() = ((params_.start_limit >> kBlockOffsetShift) + 1) * per_block;  // one block too far
    }
    packed_bytes_ = params_.rows_layer_stride * shape.num_layers;
  }

  // 64-byte aligned memory, `shift` bytes in.
  std::byte* place(std::vector<std::byte>& memory, std::int64_t bytes, bool fill) {
    memory.assign(static_cast<std::size_t>(bytes + 128), std::byte{0xee});
    const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
    std::byte* const at = memory.data() + ((begin + 63) / 64 * 64 - begin) + GetParam().shift;
    if (fill) {
      std::mt19937 random(9);
      for (std::int64_t i = 0; i < bytes; ++i) at[i] = static_cast<std::byte>(random());
    }
    return at;
  }

  // Where row `row` of layer `layer` is in the arena; null for a bad slot.
  std::byte* block_row(std::byte* arena, std::int64_t layer, std::int64_t row) const {
    const std::int64_t per_block = std::int64_t{1} << params_.block_shift;
    const std::int64_t slot = slots_[static_cast<std::size_t>(row)];
    const std::int64_t block = slot / per_block - GetParam().first_block;
    if (slot < 0 || block < 0 || block + block_units_ > num_blocks_ * block_units_) return nullptr;
    return arena + block * 256 + params_.first_offset + layer * params_.layer_stride + slot % per_block * params_.row_bytes;
  }

  void run(bool scatter) {
    simt::for_every_schedule([&](simt::Device& device) {
      std::vector<std::byte> arena_memory, rows_memory, expected_memory;
      std::byte* const arena = place(arena_memory, arena_bytes_, !scatter);
      std::byte* const rows = place(rows_memory, packed_bytes_, scatter);
      std::byte* const expected =
          scatter ? place(expected_memory, arena_bytes_, false) : place(expected_memory, packed_bytes_, false);
      params_.arena = arena - (GetParam().first_block << kBlockOffsetShift);
      params_.rows = rows;
      params_.slots = slots_.data();
      for (std::int64_t layer = 0; layer < params_.num_layers; ++layer) {
        for (std::int64_t row = 0; row < params_.num_rows; ++row) {
          std::byte* const in_block = block_row(scatter ? expected : arena, layer, row);
          if (in_block == nullptr) continue;
          std::byte* const packed =
              (scatter ? rows : expected) + layer * params_.rows_layer_stride + row * params_.rows_row_stride;
          std::memcpy(scatter ? in_block : packed, scatter ? packed : in_block, static_cast<std::size_t>(params_.row_bytes));
        }
      }
      device.reads("slots", slots_);
      device.allow("arena", arena, static_cast<std::size_t>(arena_bytes_), scatter ? simt::Rights::kWrite : simt::Rights::kRead);
      device.allow("rows", rows, static_cast<std::size_t>(packed_bytes_), scatter ? simt::Rights::kRead : simt::Rights::kWrite);
      scatter ? scatter_rows_cuda(params_, nullptr) : gather_rows_cuda(params_, nullptr);
      EXPECT_EQ(0,
                std::memcmp(scatter ? arena : rows, expected, static_cast<std::size_t>(scatter ? arena_bytes_ : packed_bytes_)));
      std::uint64_t good = 0;
      for (std::int64_t row = 0; row < params_.num_rows; ++row) good += block_row(arena, 0, row) != nullptr ? 1u : 0u;
      const auto copied = good * static_cast<std::uint64_t>(params_.num_layers * params_.row_bytes);
      EXPECT_EQ(copied, device.counts().global_bytes_written);
    });
  }

  RowCopyParams params_;
  std::vector<std::int64_t> slots_;
  std::int64_t block_units_ = 0, num_blocks_ = 0, arena_bytes_ = 0, packed_bytes_ = 0;
};

TEST_P(RowCopy, Scatter) { run(true); }
TEST_P(RowCopy, Gather) { run(false); }

// Units of 16, 4 and 1 bytes; rows of one unit, of less and more than a warp's four loads; one row; many blocks of a launch.
INSTANTIATE_TEST_SUITE_P(
    Shapes, RowCopy,
    testing::Values(
        Shape{.num_layers = 1, .num_rows = 1, .row_bytes = 1, .rows_per_block_shift = 0, .first_offset = 0},
        Shape{.num_layers = 2, .num_rows = 70, .row_bytes = 16, .rows_per_block_shift = 6, .first_offset = 0},
        Shape{.num_layers = 3, .num_rows = 9, .row_bytes = 1024, .rows_per_block_shift = 2, .first_offset = 256},
        Shape{.num_layers = 1, .num_rows = 40, .row_bytes = 576, .rows_per_block_shift = 4, .first_offset = 32},
        Shape{.num_layers = 1, .num_rows = 5, .row_bytes = 4112, .rows_per_block_shift = 1, .first_offset = 0},
        Shape{.num_layers = 2, .num_rows = 33, .row_bytes = 584, .rows_per_block_shift = 3, .first_offset = 8},
        Shape{.num_layers = 2, .num_rows = 6, .row_bytes = 64, .rows_per_block_shift = 1, .first_offset = 0, .shift = 4},
        Shape{.num_layers = 2, .num_rows = 20, .row_bytes = 7, .rows_per_block_shift = 3, .first_offset = 3},
        Shape{.num_layers = 1, .num_rows = 5, .row_bytes = 130, .rows_per_block_shift = 1, .first_offset = 0, .shift = 1},
        Shape{.num_layers = 2, .num_rows = 12, .row_bytes = 48, .rows_per_block_shift = 2, .first_offset = 0, .packed_gap = 16},
        Shape{.num_layers = 2, .num_rows = 300, .row_bytes = 96, .rows_per_block_shift = 4, .first_offset = 64},
        Shape{.num_layers = 2,
              .num_rows = 30,
              .row_bytes = 64,
              .rows_per_block_shift = 2,
              .first_offset = 64,
              .first_block = (std::int64_t{1} << 23) + 1},
        Shape{.num_layers = 2,
              .num_rows = 30,
              .row_bytes = 584,
              .rows_per_block_shift = 2,
              .first_offset = 0,
              .first_block = (std::int64_t{1} << 30) + 3}));

TEST(RowCopyGrid, LayersBeyondTheGridsSecondDimension) {
  constexpr std::int64_t kLayers = 65537;
  simt::Device device;
  std::vector<std::uint8_t> arena(4 * kLayers + 256), rows(4 * kLayers);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<std::uint8_t>(i * 37 >> 3);
  const std::vector<std::int64_t> slots{0};
  RowCopyParams params;
  params.arena = reinterpret_cast<std::byte*>(arena.data());
  params.rows = reinterpret_cast<std::byte*>(rows.data());
  params.slots = slots.data();
  params.num_layers = kLayers;
  params.num_rows = 1;
  params.row_bytes = 4;
  params.rows_layer_stride = 4;
  params.layer_stride = 4;
  device.reads("slots", slots);
  device.reads("rows", rows);
  device.writes("arena", arena);
  scatter_rows_cuda(params, nullptr);
  EXPECT_EQ(0, std::memcmp(arena.data(), rows.data(), rows.size()));
  EXPECT_EQ("", device.report());
}

}  // namespace
}  // namespace hetkv
