// The host twins of instructions.cuh against the layouts as CUTLASS writes them (thread and value strides, not g and t), and
// against plain matrix products over data without any symmetry.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "planted_kernels.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

using simt::Device;

std::uint16_t bf16(float x) { return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16); }  // of exact values
std::uint16_t f16(int x) {                                                                                 // 0..2048
  if (x == 0) return 0;
  const int exponent = static_cast<int>(std::bit_width(static_cast<unsigned>(x))) - 1;
  return static_cast<std::uint16_t>(((exponent + 15) << 10) | (((x << 10) >> exponent) & 1023));
}

// The offset of (thread, value) in a column-major matrix by the layout ((4, 8), (v0, v1, v2)) of thread and value strides.
struct Layout {
  int thread0, thread1;             // strides of lane % 4 and lane / 4
  std::vector<int> sizes, strides;  // of the value index, first mode fastest
  int operator()(int lane, int value) const {
    int offset = lane % 4 * thread0 + lane / 4 * thread1;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      offset += value % sizes[i] * strides[i];
      value /= sizes[i];
    }
    return offset;
  }
};

// SM80_16x8x16 and SM89_16x8x32: A is (16, k), B is (8, k), C is (16, 8), all column-major.
const Layout kA16{32, 1, {2, 2, 2}, {16, 8, 128}};
const Layout kB16{16, 1, {2, 2}, {8, 64}};
const Layout kA32{64, 1, {4, 2, 2}, {16, 8, 256}};
const Layout kB32{32, 1, {4, 2}, {8, 128}};
const Layout kC{32, 1, {2, 2}, {16, 8}};

template <typename Encode>
void check_fragments(int kind, int depth, const Layout& layout_a, const Layout& layout_b, Encode&& encode) {
  const int per_register = depth / 8, bits = 32 / per_register;
  std::mt19937 random(3);
  std::vector<int> a(static_cast<std::size_t>(16 * depth)), b(static_cast<std::size_t>(8 * depth)), c(128);
  for (int& x : a) x = static_cast<int>(random() % 8);
  for (int& x : b) x = static_cast<int>(random() % 8);
  for (int& x : c) x = static_cast<int>(random() % 1000);
  std::vector<std::uint32_t> ra(128), rb(64);
  for (int lane = 0; lane < 32; ++lane) {
    for (int value = 0; value < 4 * per_register; ++value) {
      const auto code = static_cast<std::uint32_t>(encode(a[static_cast<std::size_t>(layout_a(lane, value))]));
      ra[static_cast<std::size_t>(4 * lane + value / per_register)] |= code << (bits * (value % per_register));
    }
    for (int value = 0; value < 2 * per_register; ++value) {
      const auto code = static_cast<std::uint32_t>(encode(b[static_cast<std::size_t>(layout_b(lane, value))]));
      rb[static_cast<std::size_t>(2 * lane + value / per_register)] |= code << (bits * (value % per_register));
    }
  }
  simt::for_every_schedule([&](Device& device) {
    std::vector<float> rc(128);
    for (int lane = 0; lane < 32; ++lane) {
      for (int v = 0; v < 4; ++v)
        rc[static_cast<std::size_t>(4 * lane + v)] = static_cast<float>(c[static_cast<std::size_t>(kC(lane, v))]);
    }
    device.reads("a", ra);
    device.reads("b", rb);
    device.updates("c", rc);
    planted::fragment(ra.data(), rb.data(), rc.data(), kind);
    for (int lane = 0; lane < 32; ++lane) {
      for (int v = 0; v < 4; ++v) {
        const int at = kC(lane, v), m = at % 16, n = at / 16;
        int expected = c[static_cast<std::size_t>(at)];
        for (int k = 0; k < depth; ++k)
          expected += a[static_cast<std::size_t>(m + 16 * k)] * b[static_cast<std::size_t>(n + 8 * k)];
        EXPECT_EQ(rc[static_cast<std::size_t>(4 * lane + v)], static_cast<float>(expected)) << "m " << m << ", n " << n;
      }
    }
  });
}

TEST(Instructions, FragmentsOfBf16) {
  check_fragments(0, 16, kA16, kB16, [](int x) { return bf16(static_cast<float>(x)); });
}
TEST(Instructions, FragmentsOfF16) { check_fragments(1, 16, kA16, kB16, f16); }
TEST(Instructions, FragmentsOfE4m3) {
  constexpr std::uint8_t kCodes[8] = {0x00, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e};  // 0..7
  check_fragments(2, 32, kA32, kB32, [&](int x) { return kCodes[x]; });
}

class Products : public testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Products, LoadMatrixAndMma) {
  const auto [kind, swizzled] = GetParam();
  std::mt19937 random(11);
  std::vector<int> a(16 * 64), b(16 * 64);
  for (int& x : a) x = static_cast<int>(random() % 128);
  for (int& x : b) x = static_cast<int>(random() % 128);
  const int depth = kind == 1 ? 16 : 64;
  simt::for_every_schedule([&, kind = kind, swizzled = swizzled](Device& device) {
    std::vector<std::uint16_t> in_a, in_b;
    for (const int x : a) in_a.push_back(kind == 2 ? f16(x) : bf16(static_cast<float>(x)));
    for (const int x : b) in_b.push_back(kind == 2 ? f16(x) : bf16(static_cast<float>(x)));
    std::vector<float> d(256);
    device.reads("a", in_a);
    device.reads("b", in_b);
    device.writes("d", d);
    planted::matmul(in_a.data(), in_b.data(), d.data(), kind, swizzled);
    for (std::size_t m = 0; m < 16; ++m) {
      for (std::size_t n = 0; n < 16; ++n) {
        int expected = 0;
        for (std::size_t k = 0; k < static_cast<std::size_t>(depth); ++k) {
          expected += a[m * 64 + k] * (kind == 1 ? b[k * 64 + n] : b[n * 64 + k]);
        }
        EXPECT_EQ(d[m * 16 + n], static_cast<float>(expected)) << "m " << m << ", n " << n;
      }
    }
    EXPECT_EQ(device.counts().matrix_phases, static_cast<std::uint64_t>(depth) / 16 * 8);
    // Rows of 128 bytes: without the swizzle all eight rows of a phase meet in four banks.
    EXPECT_EQ(device.counts().bank_conflicts, swizzled ? 0u : 7 * device.counts().matrix_phases);
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, Products, testing::Combine(testing::Values(0, 1, 2), testing::Bool()));

TEST(Instructions, E4m3OfEveryBf16) {
  simt::Device device;
  std::vector<float> in(65536), back(65536);
  std::vector<std::uint8_t> by_integers(65536), native(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) in[i] = std::bit_cast<float>(i << 16);
  device.reads("in", in);
  device.writes("by_integers", by_integers);
  device.updates("native", native);
  device.writes("back", back);
  planted::e4m3(in.data(), by_integers.data(), native.data(), back.data(), 256);
  EXPECT_EQ(device.report(), "");
  EXPECT_EQ(by_integers, native);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (std::isnan(in[i])) {
      wrong += native[i] != 0x7f ? 1u : 0u;
      continue;
    }
    // The value must be as near as any code's can be: half a step, 2^-10 at least.
    const float size = std::fmin(std::fabs(in[i]), 448.0f);
    const float step = std::fmax(std::ldexp(1.0f, std::ilogb(std::fmax(size, 0x1p-6f)) - 3), 0x1p-9f);
    wrong += std::fabs(std::copysign(size, in[i]) - back[i]) > step / 2 ? 1u : 0u;
  }
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace hetkv
