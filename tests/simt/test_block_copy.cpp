// csrc/kernels/cuda/block_copy.cu on the executor, against a plain copy of each pair.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/block_copy.h"
#include "kernels/paged_rows.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

struct Shape {
  std::int64_t num_bytes = 4096;
  std::int64_t begin = 0;
  std::int64_t source_shift = 0;  // bytes by which the arena is off its 16-byte alignment
  std::int64_t target_shift = 0;
  std::int64_t first_block = 0;  // pointers are biased, so that block offsets begin here
  std::int64_t num_pairs = 3;
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << s.num_pairs << " pairs of " << s.num_bytes << " bytes from " << s.begin << " on, shifts " << s.source_shift << " and "
       << s.target_shift << ", first block " << s.first_block;
}

// Random bytes, `shift` bytes off a 16-byte address.
class Memory {
 public:
  Memory(std::int64_t bytes, std::int64_t shift, std::uint32_t seed)
      : memory_(static_cast<std::size_t>(bytes + 64)), bytes_(bytes) {
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    start_ = memory_.data() + (16 - at % 16) % 16 + shift;
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < bytes; ++i) start_[i] = static_cast<std::byte>(random());
  }
  std::byte* start() { return start_; }
  std::vector<std::byte> copy() const { return {start_, start_ + bytes_}; }
  void allow(simt::Device& device, const char* name, simt::Rights rights) const {
    device.allow(name, start_, static_cast<std::size_t>(bytes_), rights);
  }

 private:
  std::vector<std::byte> memory_;
  std::int64_t bytes_;
  std::byte* start_ = nullptr;
};

class BlockCopy : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const Shape shape = GetParam();
    units_ = (shape.begin + shape.num_bytes + 255) / 256;
    // Blocks side by side; the last part ends with the memory, so that a byte behind it is a fault.
    bytes_ = ((2 * shape.num_pairs - 1) * units_ << kBlockOffsetShift) + shape.begin + shape.num_bytes;
    std::vector<std::int32_t> blocks;
    for (std::int64_t b = 0; b < 2 * shape.num_pairs; ++b) {
      blocks.push_back(static_cast<std::int32_t>(shape.first_block + b * units_));
    }
    std::shuffle(blocks.begin(), blocks.end(), std::mt19937(5));
    const auto half = blocks.begin() + shape.num_pairs;
    source_.assign(blocks.begin(), half);
    target_.assign(half, blocks.end());
    if (shape.num_pairs > 2) source_[2] = source_[0];
    const auto outside = static_cast<std::int32_t>(shape.first_block + 2 * shape.num_pairs * units_);
    for (const std::int32_t bad :
         {-1, outside, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()}) {
      source_.insert(source_.end(), {bad, source_[0]});
      target_.insert(target_.end(), {target_[0], bad});
    }
  }

  // Pairs that are skipped, with bad blocks, have good targets that others use: those must not be written twice.
  void run(Memory& source, Memory& target, bool one_arena, simt::Device& device) {
    const Shape shape = GetParam();
    const std::int64_t bias = shape.first_block << kBlockOffsetShift;
    BlockCopyParams params;
    params.source_arena = source.start() - bias;
    params.target_arena = target.start() - bias;
    params.source_arena_bytes = params.target_arena_bytes = bytes_ + bias;
    params.source = source_.data();
    params.target = target_.data();
    params.num_pairs = static_cast<std::int64_t>(source_.size());
    params.begin = shape.begin;
    params.num_bytes = shape.num_bytes;
    std::vector<std::byte> expected = target.copy();
    for (std::int64_t i = 0; i < shape.num_pairs; ++i) {
      const auto place = [&](const std::vector<std::int32_t>& blocks) {
        return ((blocks[static_cast<std::size_t>(i)] - shape.first_block) << kBlockOffsetShift) + shape.begin;
      };
      std::memcpy(expected.data() + place(target_), source.start() + place(source_), static_cast<std::size_t>(shape.num_bytes));
    }
    device.reads("source", source_);
    device.reads("target", target_);
    if (!one_arena) source.allow(device, "source arena", simt::Rights::kRead);
    target.allow(device, "target arena", one_arena ? simt::Rights::kReadWrite : simt::Rights::kWrite);
    copy_blocks_cuda("copy", params, nullptr);
    EXPECT_EQ(target.copy(), expected);
    EXPECT_EQ(device.counts().global_bytes_written, static_cast<std::uint64_t>(shape.num_pairs * shape.num_bytes));
  }

  std::int64_t units_ = 0, bytes_ = 0;
  std::vector<std::int32_t> source_, target_;
};

TEST_P(BlockCopy, EqualsAPlainCopy) {
  const Shape shape = GetParam();
  simt::for_every_schedule([&](simt::Device& device) {
    Memory source(bytes_, shape.source_shift, 1), target(bytes_, shape.target_shift, 2);
    run(source, target, false, device);
  });
  simt::for_every_schedule([&](simt::Device& device) {
    Memory arena(bytes_, shape.source_shift, 1);
    run(arena, arena, true, device);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, BlockCopy,
                         testing::Values(Shape{1}, Shape{15}, Shape{16}, Shape{17}, Shape{256}, Shape{4000}, Shape{16384},
                                         Shape{16385}, Shape{40000}, Shape{1, 13}, Shape{2, 15}, Shape{16, 13}, Shape{20, 13},
                                         Shape{100, 3}, Shape{4096, 256}, Shape{16384, 8}, Shape{20001, 5}));
INSTANTIATE_TEST_SUITE_P(Edges, BlockCopy,
                         testing::Values(Shape{.num_bytes = 5000, .source_shift = 4, .target_shift = 4},
                                         Shape{.num_bytes = 5000, .source_shift = 4},
                                         Shape{.num_bytes = 5001, .begin = 2, .target_shift = 12},
                                         Shape{.num_bytes = 3000, .source_shift = 3},
                                         Shape{.num_bytes = 3001, .begin = 7, .source_shift = 1, .target_shift = 2},
                                         Shape{.num_bytes = 3, .begin = 1, .target_shift = 8},
                                         Shape{.num_bytes = 300, .begin = 1, .source_shift = 1, .target_shift = 1},
                                         Shape{.num_bytes = 700, .begin = 100, .first_block = (std::int64_t{1} << 23) + 1},
                                         Shape{.num_bytes = 2048, .first_block = (std::int64_t{1} << 31) - 60},
                                         Shape{.num_bytes = 100, .num_pairs = 90}));

// The parts of a pair overlap: the target ends with what the source held. Two such pairs in one call.
TEST(BlockCopyOverlap, TheTargetGetsWhatTheSourceHeld) {
  for (const std::int64_t num_bytes : {std::int64_t{300}, std::int64_t{5000}, std::int64_t{40007}, std::int64_t{66000}}) {
    for (const std::int64_t distance : {1, 2, 19, 63, 64, 65, 100}) {
      if (num_bytes > 50000 && distance != 64 && distance != 65) continue;
      for (const std::int64_t begin : {0, 13}) {
        for (const std::int64_t shift : {0, 4}) {
          SCOPED_TRACE(testing::Message() << num_bytes << " bytes from " << begin << ", " << distance << " apart, shift "
                                          << shift);
          const std::int64_t reach = distance + (begin + num_bytes + 255) / 256;
          const auto d = static_cast<std::int32_t>(distance), second = static_cast<std::int32_t>(reach);
          const std::vector<std::int32_t> source = {0, second + d}, target = {d, second};  // up, then down
          const auto check = [&](simt::Device& device) {
            Memory arena(2 * reach << kBlockOffsetShift, shift, 3);
            std::vector<std::byte> expected = arena.copy();
            for (std::size_t i = 0; i < 2; ++i) {
              std::memmove(expected.data() + target[i] * 256 + begin, expected.data() + source[i] * 256 + begin,
                           static_cast<std::size_t>(num_bytes));
            }
            BlockCopyParams params;
            params.source_arena = params.target_arena = arena.start();
            params.source_arena_bytes = params.target_arena_bytes = 2 * reach << kBlockOffsetShift;
            params.source = source.data();
            params.target = target.data();
            params.num_pairs = 2;
            params.begin = begin;
            params.num_bytes = num_bytes;
            device.reads("source", source);
            device.reads("target", target);
            arena.allow(device, "arena", simt::Rights::kReadWrite);
            copy_blocks_cuda("copy_blocks", params, nullptr);
            EXPECT_TRUE(arena.copy() == expected);
          };
          if (num_bytes < 50000 && distance < 60) {
            simt::for_every_schedule(check);
          } else {
            simt::Device device({.schedule = simt::Schedule::kShuffled});
            check(device);
            EXPECT_EQ(device.report(), "");
          }
        }
      }
    }
  }
}

TEST(BlockCopyOverlap, APairWithItselfAndNoPairs) {
  const std::vector<std::int32_t> blocks = {0};
  std::vector<std::byte> arena(256);
  simt::Device device;
  device.reads("blocks", blocks);
  device.reads("arena", arena);
  BlockCopyParams params;
  params.source_arena = params.target_arena = arena.data();
  params.source_arena_bytes = params.target_arena_bytes = 256;
  params.source = params.target = blocks.data();
  params.num_bytes = 256;
  params.num_pairs = 1;
  copy_blocks_cuda("copy_blocks", params, nullptr);
  params.num_pairs = 0;
  copy_blocks_cuda("copy_blocks", params, nullptr);
  EXPECT_EQ(device.report(), "");
  EXPECT_EQ(device.counts().global_bytes_written, 0u);
  EXPECT_EQ(device.counts().launches, 1u);
}

}  // namespace
}  // namespace hetkv
