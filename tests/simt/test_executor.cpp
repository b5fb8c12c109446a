// The executor itself: every kind of fault is caught in a small planted kernel, and right kernels are not blamed.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "planted_kernels.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

using simt::Device;
using simt::Kind;

// The body must be blamed for `kind` under every schedule, with a source line of the planted kernels.
template <typename Body>
void expect_fault(Kind kind, Body&& body) {
  for (const simt::Settings& settings : simt::kEverySchedule) {
    Device device(settings);
    body(device);
    EXPECT_TRUE(device.has(kind)) << "expected: " << simt::name_of(kind) << ", got: " << device.report();
    EXPECT_NE(device.report().find("planted_kernels.cu:"), std::string::npos) << device.report();
  }
}

struct Floats {
  std::vector<float> values = std::vector<float>(64, -1.0f);
};

TEST(Executor, ARightKernelIsNotBlamed) {
  simt::for_every_schedule([](Device& device) {
    std::vector<float> in(5 * 128), out(5 * 128);
    std::iota(in.begin(), in.end(), 1.0f);
    device.reads("in", in);
    device.writes("out", out);
    planted::reverse(in.data(), out.data(), 5, true);
    for (std::size_t i = 0; i < out.size(); ++i) {
      EXPECT_EQ(out[i], in[i / 128 * 128 + 127 - i % 128] * static_cast<float>(1 << (i % 4)));
    }
    EXPECT_EQ(device.counts().blocks, 5u);
    EXPECT_EQ(device.counts().barriers, 5u);
    EXPECT_EQ(device.counts().global_bytes_read, 5u * 128 * 4);
  });
}

TEST(Executor, AMissingBarrierIsARace) {
  for (const simt::Settings& settings : simt::kEverySchedule) {
    Device device(settings);
    std::vector<float> in(128, 1.0f), out(128);
    device.reads("in", in);
    device.writes("out", out);
    planted::reverse(in.data(), out.data(), 1, false);
    EXPECT_TRUE(device.has(Kind::kRace)) << device.report();
    EXPECT_TRUE(device.has(Kind::kUninitialised)) << device.report();
  }
}

TEST(Executor, WriteAfterReadAndWriteAfterWrite) {
  expect_fault(Kind::kRace, [](Device& device) {
    Floats out;
    device.writes("out", out.values);
    planted::write_after_read(out.values.data());
  });
  expect_fault(Kind::kRace, [](Device& device) {
    Floats out;
    device.writes("out", out.values);
    planted::write_after_write(out.values.data());
  });
}

TEST(Executor, BytesOfAWordAreApart) {
  simt::for_every_schedule([](Device& device) {
    std::vector<std::uint32_t> out(16);
    device.writes("out", out);
    planted::bytes(out.data(), false);
    EXPECT_EQ(out[1], 0x07060504u);
  });
  expect_fault(Kind::kRace, [](Device& device) {
    std::vector<std::uint32_t> out(16);
    device.writes("out", out);
    planted::bytes(out.data(), true);
  });
}

TEST(Executor, OnlyAWarpBarrierOrdersTheLanesOfAWarp) {
  for (const int how : {0, 2}) {
    simt::for_every_schedule([how](Device& device) {
      std::vector<float> out(32);
      device.writes("out", out);
      planted::warp_exchange(out.data(), how);
      EXPECT_EQ(out[6], 7.0f);
    });
  }
  for (const int how : {1, 3}) {
    expect_fault(Kind::kRace, [how](Device& device) {
      std::vector<float> out(32);
      device.writes("out", out);
      planted::warp_exchange(out.data(), how);
    });
  }
}

TEST(Executor, UninitialisedSharedMemoryAndWorkspace) {
  expect_fault(Kind::kUninitialised, [](Device& device) {
    Floats out;
    device.writes("out", out.values);
    planted::uninitialised(out.values.data());
    EXPECT_TRUE(out.values[1] != out.values[1]) << "unwritten shared memory holds NaN";
  });
  expect_fault(Kind::kUninitialised, [](Device& device) {
    std::vector<float> out(4);
    device.workspace("out", out);
    planted::read_back(out.data());
  });
}

TEST(Executor, Bounds) {
  for (const int index : {-1, 64, 100000}) {
    expect_fault(Kind::kOutOfBounds, [index](Device& device) {
      std::vector<float> memory(100002);
      device.allow("out", memory.data() + 1, 64 * sizeof(float), simt::Rights::kWrite);
      planted::out_of_bounds(memory.data() + 1, index);
      EXPECT_EQ(memory, std::vector<float>(100002)) << "the access must not happen";
    });
  }
  expect_fault(Kind::kOutOfBounds, [](Device& device) {
    Floats out;
    device.writes("out", out.values);
    planted::shared_out_of_bounds(out.values.data());
  });
  expect_fault(Kind::kOutOfBounds, [](Device& device) {  // half of the shared memory that the kernel uses
    std::vector<std::byte> in(1024);
    std::vector<std::uint32_t> out(256);
    device.reads("in", in);
    device.writes("out", out);
    planted::copy(in.data(), out.data(), 16, 0, 512);
  });
}

TEST(Executor, RightsAndAlignment) {
  expect_fault(Kind::kRights, [](Device& device) {
    const std::vector<float> in(4);
    device.reads("in", in);
    planted::out_of_bounds(const_cast<float*>(in.data()), 2);
  });
  expect_fault(Kind::kRights, [](Device& device) {
    std::vector<float> out(4);
    device.writes("out", out);
    planted::read_back(out.data());
  });
  expect_fault(Kind::kMisaligned, [](Device& device) {
    alignas(16) static float memory[16];
    const std::span<const float> in(memory, 8);
    const std::span<float> out(memory + 8, 8);
    device.allow("in", memory, 32, simt::Rights::kRead);
    device.allow("out", memory + 8, 32, simt::Rights::kWrite);
    planted::misaligned(in.data(), out.data());
  });
}

TEST(Executor, DivergentBarriers) {
  for (const int how : {0, 1}) {
    expect_fault(Kind::kDivergentBarrier, [how](Device& device) {
      Floats out;
      device.writes("out", out.values);
      planted::divergent(out.values.data(), how);
    });
  }
}

TEST(Executor, DivergentWarps) {
  for (const int how : {2, 3, 4}) {
    expect_fault(Kind::kDivergentWarp, [how](Device& device) {
      Floats out;
      device.writes("out", out.values);
      planted::divergent(out.values.data(), how);
    });
  }
}

TEST(Executor, BlocksThatMeet) {
  expect_fault(Kind::kBlockConflict, [](Device& device) {
    Floats out;
    device.updates("out", out.values);
    planted::block_write(out.values.data());
  });
  expect_fault(Kind::kBlockConflict, [](Device& device) {
    Floats out;
    device.updates("out", out.values);
    planted::block_read(out.values.data());
  });
  simt::for_every_schedule(
      [](Device& device) {  // one launch after another is no conflict, nor is a region where races are allowed
        Floats out;
        device.updates("out", out.values);
        planted::read_back(out.values.data());
        planted::read_back(out.values.data());
        device.allow_races(out.values.data(), 4);
        planted::block_write(out.values.data());
      });
  simt::for_every_schedule([](Device& device) {
    std::vector<int> out(2);
    device.updates("out", out);
    planted::atomics(out.data());
    EXPECT_EQ(out, (std::vector<int>{192, 191}));
  });
}

TEST(Executor, AsynchronousCopies) {
  for (const int source_bytes : {16, 0, 5}) {
    simt::for_every_schedule([source_bytes](Device& device) {
      std::vector<std::byte> in(1024);
      for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<std::byte>(i * 7 + 1);
      std::vector<std::uint32_t> out(256);
      device.reads("in", in);
      device.writes("out", out);
      planted::copy(in.data(), out.data(), source_bytes, 0);
      for (std::size_t row = 0; row < 64; ++row) {
        std::byte expected[16] = {};
        std::memcpy(expected, in.data() + 16 * (63 - row), static_cast<std::size_t>(source_bytes));
        EXPECT_EQ(0, std::memcmp(expected, out.data() + 4 * row, 16));
      }
    });
  }
  for (const int fault : {1, 2, 4}) {
    expect_fault(fault == 2 ? Kind::kRace : Kind::kInFlight, [fault](Device& device) {
      std::vector<std::byte> in(1024, std::byte{3});
      std::vector<std::uint32_t> out(256);
      device.reads("in", in);
      device.writes("out", out);
      planted::copy(in.data(), out.data(), 16, fault);
    });
  }
  // A source that changes between issue and wait: late and early copies see different bytes.
  const auto first_word = [](simt::Copies copies) {
    Device device({.copies = copies});
    std::vector<std::byte> in(1024, std::byte{3});
    std::vector<std::uint32_t> out(256);
    device.updates("in", in);
    device.writes("out", out);
    planted::copy(in.data(), out.data(), 16, 3);
    return out[0];
  };
  EXPECT_EQ(first_word(simt::Copies::kEarly), 0x03030303u);
  EXPECT_EQ(first_word(simt::Copies::kLate), 0x03030301u);
}

TEST(Executor, SharedMemoryOfASmallerCard) {
  Device device({.shared_limit = 101376});
  std::vector<std::byte> in(1024);
  std::vector<std::uint32_t> out(256);
  planted::copy(in.data(), out.data(), 16, 0, 101377);
  EXPECT_TRUE(device.has(Kind::kSharedMemory));
}

TEST(Executor, ShufflesVotesReductions) {
  simt::for_every_schedule([](Device& device) {
    std::vector<std::uint32_t> out(256);
    device.writes("out", out);
    planted::warp_calls(out.data());
    std::uint32_t ballot = 0;
    for (std::uint32_t t = 0; t < 32; ++t) ballot |= (t % 3 == 0 ? 1u : 0u) << t;
    for (std::uint32_t t = 0; t < 32; ++t) {
      EXPECT_EQ(out[t], 3 * (t ^ 5u));
      EXPECT_EQ(out[32 + t], 3 * (t % 8 < 6 ? t + 2 : t));
      EXPECT_EQ(out[64 + t], 3 * (t >= 3 ? t - 3 : t));
      EXPECT_EQ(out[96 + t], 51u);
      EXPECT_EQ(out[128 + t], ballot);
      EXPECT_EQ(out[160 + t], 496u);
      EXPECT_EQ(out[192 + t], 1u);
      EXPECT_EQ(out[224 + t], 7u);
    }
  });
}

}  // namespace
}  // namespace hetkv
