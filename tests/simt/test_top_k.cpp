// csrc/kernels/cuda/top_k.cu on the executor: the CPU's indices, exactly, for one chunk and for several.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/top_k.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

enum class Values : std::uint8_t { kNormal, kFewLevels, kEqual, kZeros, kOneBitApart, kOdd };

struct Shape {
  std::int64_t width = 0;
  std::int32_t k = 1;
  Values values = Values::kNormal;
  std::vector<std::int32_t> counts{};  // empty: all scores count, in two rows
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "width " << s.width << ", k " << s.k << ", values " << static_cast<int>(s.values) << ", " << s.counts.size()
       << " counts";
}

float value_of(Values values, std::mt19937& random) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const auto bits = static_cast<std::uint32_t>(random());
  switch (values) {
    case Values::kNormal:
      return std::normal_distribution<float>()(random);
    case Values::kFewLevels:
      return static_cast<float>(bits % 5) - 2.0f;
    case Values::kEqual:
      return 1.5f;
    case Values::kZeros:
      return bits % 2 == 0 ? 0.0f : -0.0f;
    case Values::kOneBitApart:
      return std::bit_cast<float>(0x3f800000u + bits % 3);
    case Values::kOdd: {
      const float odd[] = {kInf,   -kInf,  std::bit_cast<float>(0x7fc00001u), std::bit_cast<float>(0xffc00000u), 0.0f, -0.0f,
                           1e-45f, -1e-45f};
      return odd[bits % 8];
    }
  }
  return 0.0f;
}

class TopK : public testing::TestWithParam<Shape> {};

TEST_P(TopK, SameAsTheCpu) {
  const Shape& shape = GetParam();
  std::mt19937 random(3);
  TopKParams params;
  params.num_rows = shape.counts.empty() ? 2 : static_cast<std::int64_t>(shape.counts.size());
  params.width = shape.width;
  params.stride = shape.width + 3;
  params.k = shape.k;
  params.counts = shape.counts.empty() ? nullptr : shape.counts.data();
  std::vector<float> scores(static_cast<std::size_t>(params.num_rows * params.stride));
  for (float& score : scores) score = value_of(shape.values, random);
  params.scores = scores.data();

  std::vector<std::int32_t> expected(static_cast<std::size_t>(params.num_rows * shape.k), -7);
  std::vector<std::uint64_t> scratch(static_cast<std::size_t>(top_k_scratch_words(shape.width, shape.k)));
  params.indices = expected.data();
  top_k_cpu(params, 0, params.num_rows, scratch.data());

  simt::for_every_schedule([&](simt::Device& device) {
    std::vector<std::int32_t> indices(expected.size(), -7);
    std::vector<std::uint64_t> workspace(static_cast<std::size_t>(top_k_cuda_workspace_words(params)));
    TopKParams on_device = params;
    on_device.indices = indices.data();
    // What does not count is not read.
    for (std::int64_t row = 0; row < params.num_rows; ++row) {
      const std::int64_t count = shape.counts.empty()
                                     ? shape.width
                                     : std::clamp<std::int64_t>(shape.counts[static_cast<std::size_t>(row)], 0, shape.width);
      if (count > 0) {
        device.allow("row", params.scores + row * params.stride, static_cast<std::size_t>(count) * 4, simt::Rights::kRead);
      }
    }
    if (!shape.counts.empty()) device.reads("counts", shape.counts);
    device.writes("indices", indices);
    if (!workspace.empty()) device.workspace("workspace", workspace);
    top_k_cuda(on_device, workspace.data(), nullptr);
    EXPECT_EQ(expected, indices);
    EXPECT_EQ(workspace.empty() ? 1u : 2u, device.counts().launches);
  });
}

constexpr Values kNormal = Values::kNormal, kFew = Values::kFewLevels, kEqual = Values::kEqual, kZeros = Values::kZeros,
                 kApart = Values::kOneBitApart, kOdd = Values::kOdd;

INSTANTIATE_TEST_SUITE_P(OneChunk, TopK,
                         testing::Values(Shape{0, 3}, Shape{1, 1}, Shape{1, 5}, Shape{33, 1, kOdd}, Shape{513, 64, kZeros},
                                         Shape{700, 100, kOdd, {700, 0, 1, 99, 100, 101, -4, 5000, 513}},
                                         Shape{1000, 512, kNormal}, Shape{4096, 512, kFew}, Shape{4096, 4096, kNormal},
                                         Shape{4096, 17, kApart}, Shape{4097, 512, kEqual},
                                         Shape{16383, 2048, kFew, {16383, 600}}, Shape{16384, 64, kNormal, {16384}}));
INSTANTIATE_TEST_SUITE_P(Chunks, TopK,
                         testing::Values(Shape{16385, 16, kEqual, {16385, 16384, 0}}, Shape{16385, 2048, kNormal, {16385}},
                                         Shape{16385, 2048, kFew, {16385}}, Shape{40000, 512, kFew, {40000, 33000, 32768, 700}},
                                         Shape{40000, 512, kOdd, {40000}}, Shape{70000, 4096, kApart, {70000}}));

TEST(TopKShapes, NoRows) {
  simt::for_every_schedule([&](simt::Device& device) {
    TopKParams params;
    params.width = 20;
    params.k = 3;
    top_k_cuda(params, nullptr, nullptr);
    EXPECT_EQ(0u, device.counts().launches);
  });
}

}  // namespace
}  // namespace hetkv
