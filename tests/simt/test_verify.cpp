// csrc/kernels/cuda/verify.cu on the executor: the checksum against its definition, the status against the CPU kernel.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/checksum.h"
#include "kernels/paged_rows.h"
#include "kernels/verify.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

struct Shape {
  std::int64_t block_bytes = 4096;
  std::int64_t shift = 0;        // bytes by which the arena is off its 16-byte alignment
  std::int64_t first_block = 0;  // the arena's pointer is biased, so that block offsets begin here
  std::int64_t num_blocks = 3;
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << s.num_blocks << " blocks of " << s.block_bytes << " bytes, shift " << s.shift << ", first block " << s.first_block;
}

// Blocks side by side, of random bytes, then the offsets of all of them in another order and of some that are outside. The last
// block ends with the memory, so that a byte behind it is a fault.
class Arena {
 public:
  explicit Arena(const Shape& shape, std::uint32_t seed = 1) : shape_(shape) {
    units_ = (shape.block_bytes + 255) / 256;
    bytes_ = (units_ * (shape.num_blocks - 1) << kBlockOffsetShift) + shape.block_bytes;
    memory_.resize(static_cast<std::size_t>(bytes_ + 64));
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    start_ = memory_.data() + (16 - at % 16) % 16 + shape.shift;
    std::mt19937 random(seed);
    for (std::int64_t i = 0; i < bytes_; ++i) start_[i] = static_cast<std::byte>(random());
    for (std::int64_t b = 0; b < shape.num_blocks; ++b) ids.push_back(static_cast<std::int32_t>(shape.first_block + b * units_));
    std::shuffle(ids.begin(), ids.end(), random);
    good = ids.size();
    for (const std::int64_t bad :
         {std::int64_t{-1}, shape.first_block + shape.num_blocks * units_, std::int64_t{std::numeric_limits<std::int32_t>::max()},
          std::int64_t{std::numeric_limits<std::int32_t>::min()}}) {
      ids.push_back(static_cast<std::int32_t>(bad));
    }
  }

  const std::byte* biased() const { return start_ - (shape_.first_block << kBlockOffsetShift); }
  std::int64_t bytes() const { return (shape_.first_block << kBlockOffsetShift) + bytes_; }
  std::byte* block(std::size_t i) { return start_ + ((ids[i] - shape_.first_block) << kBlockOffsetShift); }
  void allow(simt::Device& device) const {
    device.allow("arena", start_, static_cast<std::size_t>(bytes_), simt::Rights::kRead);
    device.reads("blocks", ids);
  }

  std::vector<std::int32_t> ids;
  std::size_t good;  // ids that are inside

 private:
  Shape shape_;
  std::int64_t units_ = 0, bytes_ = 0;
  std::vector<std::byte> memory_;
  std::byte* start_ = nullptr;
};

class Checksum : public testing::TestWithParam<Shape> {};

TEST_P(Checksum, IsTheDefinition) {
  const Shape shape = GetParam();
  Arena arena(shape);
  simt::for_every_schedule([&](simt::Device& device) {
    std::vector<std::int64_t> sums(arena.ids.size(), -1);
    ChecksumParams params;
    params.arena = arena.biased();
    params.arena_bytes = arena.bytes();
    params.blocks = arena.ids.data();
    params.num_blocks = static_cast<std::int64_t>(arena.ids.size());
    params.checksums = sums.data();
    params.block_bytes = shape.block_bytes;
    arena.allow(device);
    device.writes("checksums", sums);
    checksum_blocks_cuda(params, nullptr);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      SCOPED_TRACE(i);
      if (i < arena.good) {
        EXPECT_EQ(static_cast<std::uint64_t>(sums[i]), checksum(arena.block(i), static_cast<std::size_t>(shape.block_bytes)));
      } else {
        EXPECT_EQ(sums[i], 0);
      }
    }
    // Every byte once, and the offset once a thread.
    const auto warps = static_cast<std::size_t>(std::min<std::int64_t>((shape.block_bytes + 8191) / 8192, 8));
    EXPECT_EQ(device.counts().global_bytes_read,
              arena.good * static_cast<std::size_t>(shape.block_bytes) + arena.ids.size() * warps * 32 * sizeof(std::int32_t));
    EXPECT_EQ(device.counts().global_bytes_written, sums.size() * sizeof(std::int64_t));
  });
}

INSTANTIATE_TEST_SUITE_P(Lengths, Checksum,
                         testing::Values(Shape{1}, Shape{7}, Shape{8}, Shape{9}, Shape{15}, Shape{16}, Shape{17}, Shape{511},
                                         Shape{512}, Shape{513}, Shape{520}, Shape{8191}, Shape{8192}, Shape{8193}, Shape{5000},
                                         Shape{7 * 8192 + 16}, Shape{8 * 8192}, Shape{8 * 8192 + 1}, Shape{37376},
                                         Shape{20 * 8192 + 1234}));
INSTANTIATE_TEST_SUITE_P(Edges, Checksum,
                         testing::Values(Shape{.block_bytes = 5003, .shift = 1}, Shape{.block_bytes = 4096, .shift = 8},
                                         Shape{.block_bytes = 9001, .shift = 4, .num_blocks = 2},
                                         Shape{.block_bytes = 4608, .first_block = (std::int64_t{1} << 23) + 1},
                                         Shape{.block_bytes = 777, .first_block = (std::int64_t{1} << 31) - 40},
                                         Shape{.block_bytes = 300, .num_blocks = 40}));

// Ranges that tile a block: of every type, of zeros, and gaps. Everything is good, gaps are all NaN.
struct Ranges {
  std::vector<std::int64_t> zero, finite;

  Ranges(std::int64_t block_bytes, std::int64_t largest, std::mt19937& random) {
    for (std::int64_t at = 0; at < block_bytes;) {
      const auto kind = static_cast<std::int64_t>(random() % 6);  // 4: zeros, 5: a gap
      const std::int64_t value = kind < 4 ? finite_type_bytes(static_cast<FiniteType>(kind)) : 1;
      const std::int64_t length =
          std::min(static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(largest)), block_bytes - at) / value * value;
      if (kind < 4) {
        finite.insert(finite.end(), {at, at + length, kind});
      } else if (kind == 4) {
        zero.insert(zero.end(), {at, at + length});
      }
      at += length + static_cast<std::int64_t>(random() % 4);
    }
  }

  void fill(std::byte* block, std::int64_t block_bytes, std::mt19937& random) const {
    std::memset(block, 0xff, static_cast<std::size_t>(block_bytes));
    for (std::size_t r = 0; r < zero.size(); r += 2) {
      std::memset(block + zero[r], 0, static_cast<std::size_t>(zero[r + 1] - zero[r]));
    }
    for (std::size_t r = 0; r < finite.size(); r += 3) {
      const std::int64_t value = finite_type_bytes(static_cast<FiniteType>(finite[r + 2]));
      for (std::int64_t at = finite[r]; at < finite[r + 1]; at += value) {
        for (std::int64_t i = 0; i < value; ++i) block[at + i] = static_cast<std::byte>(random());
        block[at + value - 1] &= std::byte{0xbf};  // an exponent bit is 0
      }
    }
  }
};

class Verify : public testing::TestWithParam<Shape> {
 protected:
  // The status of the CPU kernel and of the CUDA kernel, which must agree, per block. Everything on.
  std::vector<std::int32_t> check(Arena& arena, const Ranges& ranges, const std::vector<std::int64_t>* sums) {
    VerifyParams params;
    params.arena = arena.biased();
    params.arena_bytes = arena.bytes();
    params.blocks = arena.ids.data();
    params.num_blocks = static_cast<std::int64_t>(arena.ids.size());
    params.block_bytes = GetParam().block_bytes;
    params.checksums = sums == nullptr ? nullptr : sums->data();
    params.zero_ranges = ranges.zero.data();
    params.num_zero_ranges = static_cast<std::int64_t>(ranges.zero.size()) / 2;
    params.finite_ranges = ranges.finite.data();
    params.num_finite_ranges = static_cast<std::int64_t>(ranges.finite.size()) / 3;
    params.base_alignment = base_alignment;
    params.stride_alignment = stride_alignment;
    std::vector<std::int32_t> expected(arena.ids.size(), -1);
    params.status = expected.data();
    verify_blocks_cpu(params, 0, params.num_blocks);
    const auto run = [&](simt::Device& device) {
      std::vector<std::int32_t> status(arena.ids.size(), -1);
      params.status = status.data();
      arena.allow(device);
      if (sums != nullptr) device.reads("checksums", *sums);
      if (!ranges.zero.empty()) device.reads("zero_ranges", ranges.zero);
      if (!ranges.finite.empty()) device.reads("finite_ranges", ranges.finite);
      device.writes("status", status);
      verify_blocks_cuda(params, nullptr);
      EXPECT_EQ(status, expected);
      EXPECT_EQ(device.counts().global_bytes_written, status.size() * sizeof(std::int32_t));
    };
    if (every_schedule) {
      simt::for_every_schedule(run);
    } else {
      simt::Device device;
      run(device);
      EXPECT_EQ(device.report(), "");
    }
    return expected;
  }

  std::int64_t base_alignment = 1, stride_alignment = 1;
  bool every_schedule = true;
};

TEST_P(Verify, EqualsTheCpuKernel) {
  const Shape shape = GetParam();
  std::mt19937 random(3);
  Arena arena(shape);
  const Ranges ranges(shape.block_bytes, std::min<std::int64_t>(shape.block_bytes, 6000), random);
  std::vector<std::int64_t> sums(arena.ids.size(), 7);
  for (std::size_t i = 0; i < arena.good; ++i) {
    ranges.fill(arena.block(i), shape.block_bytes, random);
    sums[i] = static_cast<std::int64_t>(checksum(arena.block(i), static_cast<std::size_t>(shape.block_bytes)));
  }
  // All is well, and nothing in the gaps counts.
  std::vector<std::int32_t> wanted(arena.ids.size(), kBlockOutside);
  std::fill_n(wanted.begin(), arena.good, 0);
  EXPECT_EQ(check(arena, ranges, &sums), wanted);
  EXPECT_EQ(check(arena, ranges, nullptr), wanted);
  base_alignment = 4096;
  stride_alignment = 1 << 20;
  check(arena, ranges, &sums);
  base_alignment = stride_alignment = 1;
  every_schedule = false;
  // One bad byte in one block: 0xff is NaN in the last byte of a value, and not zero.
  for (int i = 0; i < 24; ++i) {
    const std::size_t victim = random() % arena.good;
    std::byte* const at = arena.block(victim) + random() % static_cast<std::uint64_t>(shape.block_bytes);
    const std::byte old = *at;
    *at = old ^ static_cast<std::byte>(1 + random() % 255);
    check(arena, ranges, i % 2 == 0 ? &sums : nullptr);
    *at = old;
  }
  const auto plant = [&](std::int64_t at, std::int64_t bytes, std::byte value, std::int32_t bit) {
    const std::size_t victim = random() % arena.good;
    std::byte* const where = arena.block(victim) + at;
    const std::vector<std::byte> old(where, where + bytes);
    std::fill_n(where, bytes, value);
    wanted[victim] = bit;
    EXPECT_EQ(check(arena, ranges, nullptr), wanted) << "bytes from " << at;
    std::copy(old.begin(), old.end(), where);
    wanted[victim] = 0;
  };
  // The first and the last value of ranges, those included that begin off a word's address.
  for (std::size_t r = 0; r < std::min<std::size_t>(ranges.finite.size(), 24); r += 3) {
    if (ranges.finite[r] == ranges.finite[r + 1]) continue;
    const std::int64_t value = finite_type_bytes(static_cast<FiniteType>(ranges.finite[r + 2]));
    plant(ranges.finite[r], value, std::byte{0xff}, kBlockNotFinite);
    plant(ranges.finite[r + 1] - value, value, std::byte{0xff}, kBlockNotFinite);
  }
  for (std::size_t r = 0; r < std::min<std::size_t>(ranges.zero.size(), 12); r += 2) {
    if (ranges.zero[r] == ranges.zero[r + 1]) continue;
    plant(ranges.zero[r], 1, std::byte{0x80}, kBlockPadding);
    plant(ranges.zero[r + 1] - 1, 1, std::byte{1}, kBlockPadding);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Verify,
                         testing::Values(Shape{.block_bytes = 64, .num_blocks = 2}, Shape{.block_bytes = 4096, .num_blocks = 2},
                                         Shape{.block_bytes = 9000, .num_blocks = 2},
                                         Shape{.block_bytes = 37376, .num_blocks = 1},
                                         Shape{.block_bytes = 5003, .shift = 1, .num_blocks = 2},
                                         Shape{.block_bytes = 6002, .shift = 2, .num_blocks = 1},
                                         Shape{.block_bytes = 4500, .first_block = (std::int64_t{1} << 31) - 100}));

// Every value of the narrow types, and the neighbours of infinity of float32, all in one block: one range a value.
TEST(VerifyValues, WhatIsFinite) {
  struct Case {
    FiniteType type;
    std::uint32_t bits;
    bool finite;
  };
  std::vector<Case> cases;
  for (const std::uint32_t sign : {0u, 1u}) {
    for (std::uint32_t code = 0; code < 128; ++code) cases.push_back({FiniteType::kE4m3, sign << 7 | code, code != 0x7f});
    for (const std::uint32_t low : {0u, 1u, 0x3ffu}) {
      cases.push_back({FiniteType::kFloat16, sign << 15 | 0x7c00 | low, false});
      cases.push_back({FiniteType::kFloat16, sign << 15 | 0x7800 | low, true});
      cases.push_back({FiniteType::kFloat16, sign << 15 | 0x3c00 | low, true});
      cases.push_back({FiniteType::kBFloat16, sign << 15 | 0x7f80 | (low & 0x7f), false});
      cases.push_back({FiniteType::kBFloat16, sign << 15 | 0x7f00 | (low & 0x7f), true});
      cases.push_back({FiniteType::kFloat32, sign << 31 | 0x7f800000 | low, false});
      cases.push_back({FiniteType::kFloat32, sign << 31 | 0x7f000000 | 0x7fffff, true});
      cases.push_back({FiniteType::kFloat32, sign << 31 | low, true});
    }
  }
  // Block i holds value i, at one of the places that its type has in a chunk.
  std::vector<std::uint32_t> arena(64 * cases.size());
  std::vector<std::int32_t> blocks, wanted;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const std::int64_t bytes = finite_type_bytes(cases[i].type);
    auto* const at = reinterpret_cast<std::byte*>(arena.data() + 64 * i) + 32 + static_cast<std::int64_t>(i) * bytes % 16;
    std::memcpy(at, &cases[i].bits, static_cast<std::size_t>(bytes));
  }
  for (int type = 0; type < 4; ++type) {
    blocks.clear();
    wanted.clear();
    for (std::size_t i = 0; i < cases.size(); ++i) {
      if (cases[i].type != static_cast<FiniteType>(type)) continue;
      blocks.push_back(static_cast<std::int32_t>(i));
      wanted.push_back(cases[i].finite ? 0 : kBlockNotFinite);
    }
    const std::vector<std::int64_t> range = {0, 256, type};
    std::vector<std::int32_t> status(blocks.size(), -1);
    VerifyParams params;
    params.arena = reinterpret_cast<const std::byte*>(arena.data());
    params.arena_bytes = static_cast<std::int64_t>(4 * arena.size());
    params.blocks = blocks.data();
    params.num_blocks = static_cast<std::int64_t>(blocks.size());
    params.finite_ranges = range.data();
    params.num_finite_ranges = 1;
    params.status = status.data();
    params.block_bytes = 256;
    simt::Device device;
    device.reads("arena", arena);
    device.reads("blocks", blocks);
    device.reads("range", range);
    device.writes("status", status);
    verify_blocks_cuda(params, nullptr);
    EXPECT_EQ(status, wanted) << "type " << type;
    EXPECT_EQ(device.report(), "");
  }
}

// Ranges that the CPU op refuses before it starts: nothing outside the block is read, and the check counts as failed.
TEST(VerifyRanges, OneThatDoesNotFitIsAFailedCheck) {
  constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min(), kMax = std::numeric_limits<std::int64_t>::max();
  const std::vector<std::byte> arena(512);
  const std::vector<std::int32_t> blocks = {0, 1, 2};
  const auto status_with = [&](const std::vector<std::int64_t>& zero, const std::vector<std::int64_t>& finite) {
    std::vector<std::int32_t> status(3, -1);
    simt::Device device;
    device.reads("arena", arena);
    device.reads("blocks", blocks);
    if (!zero.empty()) device.reads("zero", zero);
    if (!finite.empty()) device.reads("finite", finite);
    device.writes("status", status);
    VerifyParams params;
    params.arena = arena.data();
    params.arena_bytes = 512;
    params.blocks = blocks.data();
    params.num_blocks = 3;
    params.block_bytes = 200;
    params.zero_ranges = zero.data();
    params.num_zero_ranges = static_cast<std::int64_t>(zero.size()) / 2;
    params.finite_ranges = finite.data();
    params.num_finite_ranges = static_cast<std::int64_t>(finite.size()) / 3;
    params.status = status.data();
    verify_blocks_cuda(params, nullptr);
    EXPECT_EQ(device.report(), "");
    return status;
  };
  using Status = std::vector<std::int32_t>;
  EXPECT_EQ(status_with({0, 200, 40, 40}, {0, 200, 0, 8, 8, 3}), (Status{0, 0, kBlockOutside}));
  const std::vector<std::vector<std::int64_t>> bad_places = {{0, 201}, {-1, 4}, {8, 4}, {kMin, kMax}, {kMax, kMax}, {kMin, 0}};
  for (const std::vector<std::int64_t>& bad : bad_places) {
    SCOPED_TRACE(bad[0]);
    EXPECT_EQ(status_with({0, 8, bad[0], bad[1]}, {}), (Status{kBlockPadding, kBlockPadding, kBlockOutside}));
    EXPECT_EQ(status_with({}, {bad[0], bad[1], 3}), (Status{kBlockNotFinite, kBlockNotFinite, kBlockOutside}));
  }
  for (const std::int64_t type : {std::int64_t{-1}, std::int64_t{4}, kMin, kMax, std::int64_t{1} << 32}) {
    EXPECT_EQ(status_with({}, {0, 8, type}), (Status{kBlockNotFinite, kBlockNotFinite, kBlockOutside}));
  }
  EXPECT_EQ(status_with({}, {0, 6, 0}), (Status{kBlockNotFinite, kBlockNotFinite, kBlockOutside}));
  EXPECT_EQ(status_with({}, {1, 4, 1}), (Status{kBlockNotFinite, kBlockNotFinite, kBlockOutside}));
}

TEST(VerifyRanges, MoreThanLanesOfAWarp) {
  std::vector<std::byte> arena(9000);
  const std::vector<std::int32_t> blocks = {0};
  std::vector<std::int64_t> zero;
  for (std::int64_t at = 0; at + 90 <= 9000; at += 90) zero.insert(zero.end(), {at + 3, at + 60});
  simt::for_every_schedule([&](simt::Device& device) {
    std::vector<std::int32_t> status(1);
    device.reads("arena", arena);
    device.reads("blocks", blocks);
    device.reads("zero", zero);
    device.writes("status", status);
    VerifyParams params;
    params.arena = arena.data();
    params.arena_bytes = params.block_bytes = 9000;
    params.blocks = blocks.data();
    params.num_blocks = 1;
    params.zero_ranges = zero.data();
    params.num_zero_ranges = static_cast<std::int64_t>(zero.size()) / 2;
    params.status = status.data();
    for (const std::int64_t at : {std::int64_t{2}, std::int64_t{3}, std::int64_t{8999 - 30}, std::int64_t{60 * 90 + 59}}) {
      arena[static_cast<std::size_t>(at)] = std::byte{4};
      verify_blocks_cuda(params, nullptr);
      EXPECT_EQ(status[0], at % 90 >= 3 && at % 90 < 60 ? kBlockPadding : 0) << at;
      arena[static_cast<std::size_t>(at)] = std::byte{0};
    }
  });
}

TEST(VerifyRanges, NoBlocks) {
  simt::Device device;
  verify_blocks_cuda({}, nullptr);
  checksum_blocks_cuda({}, nullptr);
  EXPECT_EQ(device.counts().blocks, 0u);
}

}  // namespace
}  // namespace hetkv
