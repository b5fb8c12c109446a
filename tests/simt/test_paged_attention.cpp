// csrc/kernels/cuda/paged_attention*.cu on the executor, against a plain loop in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/paged_attention.h"
#include "simt/kernel_test.h"

namespace hetkv {
namespace {

constexpr EntryFormat kF32 = EntryFormat::kFloat32, kF16 = EntryFormat::kFloat16, kB16 = EntryFormat::kBFloat16;
constexpr std::size_t kSmallestCard = 101376;  // bytes of shared memory that a block can have on sm_120

struct Sequence {
  std::int32_t tokens;         // of the step
  std::int32_t keys;           // seqused_k
  std::int32_t seed = 0;       // of its values; sequences of one seed have the same tokens
  std::int32_t absent = -1;    // column whose block is outside the arena
  std::int32_t poisoned = -1;  // key of which one value is infinite, or NaN, for every head
};

struct Shape {
  EntryFormat query = kB16;
  EntryFormat rows = kB16;
  std::int32_t dim = 64;
  std::int32_t kv_heads = 1;
  std::int32_t group = 4;
  std::int32_t window = 0;
  float softcap = 0.0f;
  bool sinks = false;
  bool shared = false;  // keys are the values
  std::int64_t block_shift = 4;
  std::int64_t key_offset = 32;  // bytes
  std::int64_t first_block = 0;  // the arena's pointer is biased, so that block offsets begin here
  std::int32_t columns = 0;      // of the table; 0: as many as the longest sequence needs
  std::vector<Sequence> sequences = {{1, 1}, {1, 37, 1}, {2, 65, 2}, {0, 0}, {3, 0, 3}, {1, 64, 4, 2}};
  std::int32_t padding_tokens = 2;
};

void PrintTo(const Shape& s, std::ostream* out) {
  *out << "formats " << static_cast<int>(s.query) << " " << static_cast<int>(s.rows) << ", dim " << s.dim << ", " << s.kv_heads
       << " x " << s.group << " heads, window " << s.window;
}

float round_to(EntryFormat format, float value) {
  if (format == kF32) return value;
  if (format == kB16) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  }
  const float kept = std::ldexp(std::nearbyint(std::ldexp(value, 8)), -8);  // a multiple of 1/256 below 8
  return std::clamp(kept, -7.0f, 7.0f);
}

void put(std::byte* to, EntryFormat format, float value) {  // of a value that round_to returned
  auto bits = std::bit_cast<std::uint32_t>(value);
  if (format == kB16) bits >>= 16;
  if (format == kF16 && value != 0.0f) bits = (bits >> 16 & 0x8000u) | (((bits & 0x7fffffffu) - 0x38000000u) >> 13);
  std::memcpy(to, &bits, format == kF32 ? 4u : 2u);
}

float get(const std::byte* from, EntryFormat format) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, from, format == kF32 ? 4u : 2u);
  if (format == kF32) return std::bit_cast<float>(bits);
  if (format == kB16) return std::bit_cast<float>(bits << 16);
  const float size = std::ldexp(static_cast<float>((bits & 0x3ffu) | ((bits & 0x7c00u) != 0 ? 0x400u : 0u)),
                                std::max(1, static_cast<int>(bits >> 10 & 0x1fu)) - 25);
  if ((bits & 0x7c00u) == 0x7c00u) return std::numeric_limits<float>::quiet_NaN();
  return (bits & 0x8000u) != 0 ? -size : size;
}

struct Result {
  std::vector<std::byte> out;
  std::vector<float> lse;
};

// A step: its tensors, and an arena in which every byte that counts is written and every other one is NaN.
class World {
 public:
  explicit World(Shape shape) : shape_(std::move(shape)) {
    const Shape& s = shape_;
    std::int64_t reach = 1;
    std::int32_t tokens = 0;
    cu_seqlens_.push_back(0);
    for (const Sequence& sequence : s.sequences) {
      tokens += sequence.tokens;
      cu_seqlens_.push_back(tokens);
      seqused_.push_back(sequence.keys);
      reach = std::max<std::int64_t>(reach, sequence.keys);
    }
    params_.num_tokens = tokens + s.padding_tokens;
    params_.num_sequences = static_cast<std::int64_t>(s.sequences.size());
    params_.kv_heads = s.kv_heads;
    params_.heads = s.kv_heads * s.group;
    params_.dim = s.dim;
    params_.window = s.window;
    params_.scale = 1.0f / std::sqrt(static_cast<float>(s.dim));
    params_.softcap = s.softcap;
    params_.query_format = s.query;
    PagedRows& keys = params_.keys;
    keys.format = s.rows;
    keys.width = s.dim;
    keys.data_bytes = s.kv_heads * entry_data_bytes(s.rows, s.dim);
    keys.block_shift = static_cast<std::int32_t>(s.block_shift);
    keys.data_offset = s.key_offset;
    params_.values = keys;
    if (!s.shared) params_.values.data_offset = s.key_offset + (keys.data_bytes << s.block_shift);
    const std::int64_t units = (params_.values.data_offset + (keys.data_bytes << s.block_shift) + 255) / 256;
    columns_ = std::max<std::int64_t>(s.columns, ((reach - 1) >> s.block_shift) + 1);

    std::int64_t blocks = 0;
    for (const Sequence& sequence : s.sequences) blocks += blocks_of(sequence);
    std::vector<std::int32_t> free;
    for (std::int64_t i = 0; i < blocks; ++i) free.push_back(static_cast<std::int32_t>(s.first_block + i * units));
    std::mt19937 random(5);
    std::shuffle(free.begin(), free.end(), random);
    arena_.assign(static_cast<std::size_t>(blocks * units * 256 + 128), std::byte{0xff});
    params_.keys.arena = params_.values.arena = arena() - (s.first_block << kBlockOffsetShift);
    params_.keys.arena_bytes = params_.values.arena_bytes = (s.first_block + blocks * units) << kBlockOffsetShift;
    table_.assign(static_cast<std::size_t>(params_.num_sequences * columns_), -1);
    for (std::size_t b = 0; b < s.sequences.size(); ++b) {
      const Sequence& sequence = s.sequences[b];
      std::int32_t* const row = table_.data() + static_cast<std::int64_t>(b) * columns_;
      for (std::int64_t c = 0; c < columns_; ++c) {
        if (c < blocks_of(sequence)) {
          row[c] = free.back();
          free.pop_back();
        } else {
          row[c] = c % 2 == 0 ? std::numeric_limits<std::int32_t>::max() : -9;  // never read, or treated as absent
        }
      }
      std::mt19937 values(static_cast<unsigned>(100 + sequence.seed));
      std::normal_distribution<float> normal;
      for (std::int32_t key = 0; key < sequence.keys; ++key) {
        for (const PagedRows* rows : {&params_.keys, &params_.values}) {
          std::byte* const to = address(*rows, row, key);
          for (std::int32_t i = 0; i < s.kv_heads * s.dim; ++i) {
            put(to + i * entry_data_bytes(s.rows, 1), s.rows, round_to(s.rows, normal(values)));
          }
        }
      }
      if (sequence.poisoned >= 0) {
        for (std::int32_t h = 0; h < s.kv_heads; ++h) {
          std::byte* const to = address(params_.values, row, sequence.poisoned) + entry_data_bytes(s.rows, h * s.dim + 3 + 9 * h);
          const std::uint32_t bits = s.rows == kB16 ? (h == 0 ? 0xff80u : 0x7fc1u) : s.rows == kF16 ? 0xfe00u : 0x7f800000u;
          std::memcpy(to, &bits, s.rows == kF32 ? 4u : 2u);
        }
      }
      if (sequence.absent >= 0 && sequence.absent < columns_) {  // begins inside, ends outside; or far outside
        row[sequence.absent] = b % 2 == 0 ? -5 : static_cast<std::int32_t>((params_.keys.arena_bytes >> kBlockOffsetShift) - 1);
      }
    }

    query_.assign(static_cast<std::size_t>(params_.num_tokens * params_.heads * entry_data_bytes(s.query, s.dim)) + 16,
                  std::byte{0xff});
    std::normal_distribution<float> normal;
    for (std::size_t b = 0; b < s.sequences.size(); ++b) {
      const Sequence& sequence = s.sequences[b];
      for (std::int32_t i = 0; i < sequence.tokens; ++i) {  // by position, so that it is the same for every cut of a prompt
        std::mt19937 values(static_cast<unsigned>(sequence.seed * 10007 + sequence.keys - sequence.tokens + i));
        normal.reset();
        const std::int64_t token = cu_seqlens_[b] + i;
        for (std::int64_t j = 0; j < std::int64_t{params_.heads} * s.dim; ++j) {
          const std::int64_t at = (token * params_.heads * s.dim + j) * entry_data_bytes(s.query, 1);
          put(query() + at, s.query, round_to(s.query, 2.0f * normal(values)));
        }
      }
    }
    for (std::int32_t h = 0; h < params_.heads; ++h) {
      sinks_.push_back(h == 1 ? -std::numeric_limits<float>::infinity() : 0.5f * static_cast<float>(h % 7) - 1.0f);
    }
    params_.query = query();
    params_.cu_seqlens_q = cu_seqlens_.data();
    params_.seqused_k = seqused_.data();
    params_.sinks = s.sinks ? sinks_.data() : nullptr;
    params_.table = {table_.data(), columns_, static_cast<std::int32_t>(columns_)};
  }

  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::int64_t first_token(std::size_t sequence) const { return cu_seqlens_[sequence]; }
  const PagedAttentionParams& params() const { return params_; }

  Result run(simt::Device& device) {
    const auto vectors = static_cast<std::size_t>(params_.num_tokens * params_.heads);
    Result result;
    result.out.resize(vectors * static_cast<std::size_t>(entry_data_bytes(shape_.query, shape_.dim)) + 16, std::byte{0x7f});
    result.lse.resize(vectors, 77.0f);
    std::vector<float> workspace(static_cast<std::size_t>(attention_workspace_floats(params_)) + 4);
    PagedAttentionParams params = params_;
    params.out = aligned(result.out.data(), 16);
    params.lse = result.lse.data();
    float* const scratch = reinterpret_cast<float*>(aligned(reinterpret_cast<std::byte*>(workspace.data()), 16));
    device.allow("query", query(), query_.size() - 16, simt::Rights::kRead);
    device.allow("arena", arena(), arena_.size() - 128, simt::Rights::kRead);
    device.reads("block_table", table_);
    device.reads("cu_seqlens_q", cu_seqlens_);
    device.reads("seqused_k", seqused_);
    if (shape_.sinks) device.reads("sinks", sinks_);
    device.allow("out", params.out, result.out.size() - 16, simt::Rights::kWrite);
    device.writes("lse", result.lse);
    device.allow("workspace", scratch, 4 * static_cast<std::size_t>(attention_workspace_floats(params_)),
                 simt::Rights::kWorkspace);
    paged_attention_cuda(params, scratch, nullptr);
    std::vector<std::byte> out(params.out, params.out + (result.out.size() - 16));
    result.out = std::move(out);
    return result;
  }

  // A token's rows of out and its lse, as bytes.
  std::vector<std::byte> bits(const Result& result, std::int64_t token) const {
    const auto bytes = static_cast<std::int64_t>(result.out.size()) / params_.num_tokens;
    std::vector<std::byte> all(result.out.begin() + token * bytes, result.out.begin() + (token + 1) * bytes);
    const auto* const lse = reinterpret_cast<const std::byte*>(result.lse.data() + token * params_.heads);
    all.insert(all.end(), lse, lse + 4 * params_.heads);
    return all;
  }

  void check(const Result& result) const {
    const float tolerance = shape_.query == kB16 ? 1.2e-2f : shape_.query == kF16 ? 2.5e-3f : 2e-5f;
    for (std::int64_t token = 0; token < params_.num_tokens; ++token) {
      std::int64_t sequence = 0;
      while (sequence < params_.num_sequences && cu_seqlens_[static_cast<std::size_t>(sequence) + 1] <= token) ++sequence;
      for (std::int32_t head = 0; head < params_.heads; ++head) {
        std::vector<double> wanted(static_cast<std::size_t>(shape_.dim));
        const double lse = reference(sequence, token, head, wanted);
        const std::int64_t vector = token * params_.heads + head;
        const double seen = result.lse[static_cast<std::size_t>(vector)];
        ASSERT_TRUE(lse == seen || std::fabs(lse - seen) < 2e-4)
            << lse << " and " << seen << ", token " << token << " of sequence " << sequence << ", head " << head;
        for (std::int32_t d = 0; d < shape_.dim; ++d) {
          const std::byte* const at = result.out.data() + (vector * shape_.dim + d) * entry_data_bytes(shape_.query, 1);
          const double value = wanted[static_cast<std::size_t>(d)], seen_value = get(at, shape_.query);
          ASSERT_TRUE(std::isfinite(value) ? std::fabs(value - seen_value) < tolerance : !std::isfinite(seen_value))
              << value << " and " << seen_value << ", "
              << "token " << token << " of sequence " << sequence << ", head " << head << ", column " << d;
        }
      }
    }
  }

 private:
  static std::byte* aligned(std::byte* pointer, std::uintptr_t alignment) {
    return pointer + (alignment - reinterpret_cast<std::uintptr_t>(pointer) % alignment) % alignment;
  }
  std::byte* arena() { return aligned(arena_.data(), 128); }
  std::byte* query() { return aligned(query_.data(), 16); }
  std::int64_t blocks_of(const Sequence& sequence) const {
    return (sequence.keys + (std::int64_t{1} << shape_.block_shift) - 1) >> shape_.block_shift;
  }
  static std::byte* address(const PagedRows& rows, const std::int32_t* table_row, std::int64_t key) {
    return row_in_block(rows, table_row[key >> rows.block_shift], key & ((std::int64_t{1} << rows.block_shift) - 1)).data;
  }

  double reference(std::int64_t sequence, std::int64_t token, std::int32_t head, std::vector<double>& out) const {
    const double nothing = -std::numeric_limits<double>::infinity();
    if (sequence == params_.num_sequences) return nothing;
    const auto b = static_cast<std::size_t>(sequence);
    if (seqused_[b] == 0) return nothing;
    const std::int64_t position = seqused_[b] - (cu_seqlens_[b + 1] - cu_seqlens_[b]) + token - cu_seqlens_[b];
    const std::int64_t value_bytes = entry_data_bytes(shape_.rows, 1), query_bytes = entry_data_bytes(shape_.query, 1);
    const std::byte* const q = params_.query + (token * params_.heads + head) * shape_.dim * query_bytes;
    const std::int64_t head_bytes = head / shape_.group * shape_.dim * value_bytes;
    std::vector<double> scores;
    std::vector<std::int64_t> keys;
    const std::int32_t* const row = table_.data() + sequence * columns_;
    for (std::int64_t key = first_key(params_, position); key <= position; ++key) {
      if (!block_inside(params_.values, row[key >> shape_.block_shift])) continue;
      const std::byte* const k = address(params_.keys, row, key) + head_bytes;
      double score = 0.0;
      for (std::int32_t d = 0; d < shape_.dim; ++d) {
        score += double{get(q + d * query_bytes, shape_.query)} * double{get(k + d * value_bytes, shape_.rows)};
      }
      score *= double{params_.scale};
      if (shape_.softcap > 0.0f) score = double{shape_.softcap} * std::tanh(score / double{shape_.softcap});
      scores.push_back(score);
      keys.push_back(key);
    }
    if (keys.empty()) return nothing;
    const double largest = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const double weight = std::exp(scores[i] - largest);
      sum += weight;
      const std::byte* const v = address(params_.values, row, keys[i]) + head_bytes;
      for (std::int32_t d = 0; d < shape_.dim; ++d) {
        out[static_cast<std::size_t>(d)] += weight * double{get(v + d * value_bytes, shape_.rows)};
      }
    }
    const double with = sum + (shape_.sinks ? std::exp(double{sinks_[static_cast<std::size_t>(head)]} - largest) : 0.0);
    for (double& value : out) value /= with;
    return largest + std::log(sum);
  }

  Shape shape_;
  PagedAttentionParams params_;
  std::int64_t columns_ = 0;
  std::vector<std::byte> arena_, query_;
  std::vector<std::int32_t> cu_seqlens_, seqused_, table_;
  std::vector<float> sinks_;
};

class PagedAttention : public testing::TestWithParam<Shape> {};

TEST_P(PagedAttention, AgainstDouble) {
  World world(GetParam());
  simt::for_every_schedule(
      [&](simt::Device& device) {
        world.check(world.run(device));
        EXPECT_EQ(0u, device.counts().bank_conflicts);
      },
      kSmallestCard);
}

// Few tokens a sequence: every dtype and dim; a window; a group that does not divide 16, and one that needs two tiles.
INSTANTIATE_TEST_SUITE_P(Decode, PagedAttention,
                         testing::Values(Shape{}, Shape{.query = kF16, .rows = kF16},
                                         Shape{.dim = 128, .kv_heads = 2, .group = 8},
                                         Shape{.query = kF16, .rows = kF16, .dim = 128, .group = 16, .sinks = true},
                                         Shape{.dim = 256, .group = 1, .softcap = 3.0f},
                                         Shape{.query = kF16, .rows = kF16, .dim = 256, .kv_heads = 2, .group = 3},
                                         Shape{.dim = 48, .group = 5, .sinks = true},
                                         Shape{.dim = 80, .group = 8, .shared = true}, Shape{.dim = 192, .group = 4},
                                         Shape{.group = 40, .sinks = true}, Shape{.group = 64},
                                         Shape{.group = 8, .block_shift = 0}, Shape{.group = 8, .block_shift = 8},
                                         Shape{.kv_heads = 2, .first_block = std::int64_t{1} << 24}));

// Many tokens of some sequences, one or two of others, all of them ragged.
std::vector<Sequence> prompts() {
  return {{1, 70}, {41, 41, 1}, {2, 33, 2}, {70, 131, 3}, {0, 0}, {9, 0, 4}, {35, 67, 5, 1}, {1, 1, 6}};
}
INSTANTIATE_TEST_SUITE_P(
    Prefill, PagedAttention,
    testing::Values(Shape{.sequences = prompts()}, Shape{.query = kF16, .rows = kF16, .group = 1, .sequences = prompts()},
                    Shape{.dim = 128, .group = 8, .sinks = true, .sequences = prompts()},
                    Shape{.query = kF16, .rows = kF16, .dim = 128, .kv_heads = 2, .group = 3, .sequences = prompts()},
                    Shape{.dim = 256, .group = 2, .softcap = 3.0f, .sequences = {{40, 70}, {1, 40, 1}}},
                    Shape{.query = kF16, .rows = kF16, .dim = 256, .group = 4, .shared = true, .sequences = {{33, 33}}},
                    Shape{.dim = 80, .group = 16, .window = 20, .sequences = {{30, 90}, {12, 12, 1}}},
                    Shape{.group = 64, .sequences = {{5, 60}}}, Shape{.window = 9, .sequences = prompts(), .padding_tokens = 0},
                    Shape{.group = 2, .block_shift = 2, .first_block = std::int64_t{1} << 24, .sequences = prompts()}));

// What tensor cores do not serve.
INSTANTIATE_TEST_SUITE_P(Plain, PagedAttention,
                         testing::Values(Shape{.query = kF32, .rows = kF32, .sinks = true},
                                         Shape{.query = kF32, .rows = kB16, .dim = 7},
                                         Shape{.query = kB16, .rows = kF32, .dim = 512, .group = 2, .softcap = 2.0f},
                                         Shape{.query = kF16, .rows = kB16, .dim = 96, .window = 5},
                                         Shape{.dim = 72, .kv_heads = 2, .sequences = {{5, 70}, {9, 9, 1}, {3, 0, 2}}},
                                         Shape{.shared = true, .key_offset = 34}));

// Windows around the length, and around where tiles of keys begin.
TEST(PagedAttentionWindow, OffByOne) {
  for (const EntryFormat format : {kB16, kF32}) {
    for (const std::int32_t window : {1, 15, 16, 17, 63, 64, 65}) {
      World decode(
          Shape{.query = format,
                .rows = format,
                .group = 8,
                .window = window,
                .sequences = {{1, window - 1 > 0 ? window - 1 : 1, 1}, {1, window, 2}, {1, window + 1, 3}, {2, 130, 4}}});
      World prefill(Shape{.query = format, .rows = format, .window = window, .sequences = {{67, 67, 5}, {20, 84, 6}}});
      for (World* world : {&decode, &prefill}) {
        simt::Device device;
        world->check(world->run(device));
        EXPECT_EQ("", device.report()) << "window " << window;
      }
    }
  }
}

// A value that is not finite reaches those who see it, in its column, and nobody else.
TEST(PagedAttentionPoison, ReachesWhoSeesIt) {
  const std::vector<Sequence> few = {{3, 70, 1, -1, 69}, {4, 40, 2, -1, 37}, {2, 90, 3, -1, 57}, {1, 33, 4, -1, 3}};
  const std::vector<Sequence> many = {{40, 70, 1, -1, 50}, {1, 40, 2, -1, 39}, {70, 70, 3, -1, 5}};
  for (const EntryFormat format : {kB16, kF16}) {
    for (const std::int32_t window : {0, 32}) {
      for (const std::vector<Sequence>& sequences : {few, many}) {
        World world(Shape{
            .query = format, .rows = format, .dim = 128, .kv_heads = 2, .group = 4, .window = window, .sequences = sequences});
        simt::Device device;
        world.check(world.run(device));
        EXPECT_EQ("", device.report());
      }
    }
  }
}

TEST(PagedAttentionSplits, Boundaries) {
  World world(Shape{.group = 8,
                    .sinks = true,
                    .block_shift = 6,
                    .sequences = {{1, 1023}, {1, 1024, 1}, {2, 1025, 2}, {1, 2049, 3}, {1, 5, 4}}});
  simt::Device device;
  world.check(world.run(device));
  EXPECT_EQ("", device.report());
  EXPECT_EQ(2u, device.counts().launches);
}

// Splits of a group that needs several tiles, and of the short sequences of a step with a long one.
TEST(PagedAttentionSplits, HeadTilesAndMixedSteps) {
  World groups(Shape{.group = 40, .block_shift = 8, .sequences = {{1, 1500}, {0, 0}, {1, 3}}, .padding_tokens = 0});
  World mixed(Shape{.query = kF16,
                    .rows = kF16,
                    .dim = 96,
                    .kv_heads = 2,
                    .group = 8,
                    .sinks = true,
                    .block_shift = 5,
                    .sequences = {{3, 1030}, {20, 30, 1}, {2, 0, 2}, {4, 1100, 3, 2}, {1, 1024, 4}, {0, 0}}});
  for (World* world : {&groups, &mixed}) {
    simt::Device device;
    world->check(world->run(device));
    EXPECT_EQ("", device.report());
    EXPECT_EQ(world == &groups ? 2u : 3u, device.counts().launches);
  }
}

TEST(PagedAttentionSplits, AWindowBoundsThem) {
  // 3000 columns of 16 keys, but a window of 40 keys touches two splits at most.
  World world(Shape{.group = 8, .window = 40, .columns = 3000, .sequences = {{1, 1030}, {1, 1024, 1}, {1, 1025, 2}, {1, 7, 3}}});
  EXPECT_EQ(2 * (4 + 2) * 8 * (64 + 2), attention_workspace_floats(world.params()));
  simt::Device device;
  world.check(world.run(device));
  EXPECT_EQ("", device.report());
}

// The bits of a token do not depend on what the step holds beside it: alone, among others, and where a block takes all splits in turn
// because there are many.
TEST(PagedAttentionBits, AloneAndInABatch) {
  const Sequence probe{1, 1100, 9};
  std::vector<std::byte> alone;
  const std::vector<Sequence> others[] = {{}, {{1, 40, 1}, {2, 90, 2}}, std::vector<Sequence>(1100, Sequence{0, 0})};
  for (const std::vector<Sequence>& before : others) {
    Shape shape{.dim = 128, .group = 8, .sinks = true, .block_shift = 6, .sequences = before};
    shape.sequences.push_back(probe);
    World world(shape);
    simt::Device device;
    const Result result = world.run(device);
    EXPECT_EQ("", device.report());
    EXPECT_EQ(before.size() == 1100 ? 1u : 2u, device.counts().launches);
    const std::vector<std::byte> bits = world.bits(result, world.first_token(before.size()));
    if (alone.empty()) alone = bits;
    EXPECT_TRUE(alone == bits) << before.size() << " others";
  }
}

TEST(PagedAttentionBits, APromptAloneAndInABatch) {
  const Sequence probe{40, 90, 9};
  std::vector<std::byte> alone;
  for (const std::vector<Sequence>& before : {std::vector<Sequence>{}, {{1, 40, 1}, {50, 50, 2}, {0, 0}}}) {
    Shape shape{.dim = 256, .group = 2, .sequences = before};
    shape.sequences.push_back(probe);
    World world(shape);
    simt::Device device;
    const Result result = world.run(device);
    EXPECT_EQ("", device.report());
    std::vector<std::byte> bits;
    for (std::int32_t i = 0; i < probe.tokens; ++i) {
      const std::vector<std::byte> one = world.bits(result, world.first_token(before.size()) + i);
      bits.insert(bits.end(), one.begin(), one.end());
    }
    if (alone.empty()) alone = bits;
    EXPECT_TRUE(alone == bits);
  }
}

// ... nor on how its prompt was cut, for one kernel.
TEST(PagedAttentionBits, Chunks) {
  for (const std::int32_t window : {0, 50}) {
    const auto at = [&](std::int32_t tokens, std::int32_t keys) {
      World world(Shape{.dim = 128, .group = 4, .window = window, .sequences = {{tokens, keys, 3}}, .padding_tokens = 0});
      simt::Device device;
      const Result result = world.run(device);
      EXPECT_EQ("", device.report());
      std::vector<std::vector<std::byte>> rows;
      for (std::int32_t i = 0; i < tokens; ++i) rows.push_back(world.bits(result, i));
      return rows;
    };
    const auto whole = at(100, 100);
    for (const std::int32_t cut : {15, 37, 64}) {
      const auto first = at(cut, cut), second = at(100 - cut, 100);
      for (std::int32_t i = 0; i < 100; ++i) {
        EXPECT_TRUE(whole[static_cast<std::size_t>(i)] ==
                    (i < cut ? first[static_cast<std::size_t>(i)] : second[static_cast<std::size_t>(i - cut)]))
            << "token " << i << ", cut at " << cut << ", window " << window;
      }
    }
    const auto two = at(2, 100), one = at(1, 100), before = at(1, 99);  // the decode kernel
    EXPECT_TRUE(two[0] == before[0] && two[1] == one[0]);
  }
}

TEST(PagedAttentionEdges, NoSequences) {
  for (const EntryFormat format : {kB16, kF32}) {
    World world(Shape{.query = format, .rows = format, .sequences = {}, .padding_tokens = 3});
    simt::Device device;
    world.check(world.run(device));
    EXPECT_EQ("", device.report());
  }
}

TEST(PagedAttentionEdges, NothingToDo) {
  World world(Shape{.sequences = {{0, 0}}, .padding_tokens = 0});
  simt::Device device;
  world.run(device);
  EXPECT_EQ("", device.report());
}

// More tokens than grid.y or grid.z can count.
TEST(PagedAttentionEdges, ManyTokens) {
  World world(Shape{.dim = 16, .group = 1, .sequences = {{70000, 0}}, .padding_tokens = 0});
  simt::Device device;
  const Result result = world.run(device);
  EXPECT_EQ("", device.report());
  EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_TRUE(std::all_of(result.lse.begin(), result.lse.end(), [](float x) { return x == -INFINITY; }));
}

// The design: each key and value is read once per KV head, by tensor cores, without a barrier among the keys of a warp.
TEST(PagedAttentionDesign, Decode) {
  World world(Shape{.dim = 128, .group = 8, .sequences = {{2, 512}}, .padding_tokens = 0});
  simt::Device device;
  world.check(world.run(device));
  const simt::Counts counts = device.counts();
  EXPECT_EQ(0u, counts.bank_conflicts);
  EXPECT_EQ(32u * (8 + 8) * 2u, counts.matrix_products);  // 16-key steps x 16-column steps x two of 8
  EXPECT_EQ(512u * 2 * 16 + 16 * 8, counts.copies);       // of 16 bytes: keys, values, half of the queries
}

TEST(PagedAttentionDesign, Prefill) {
  World world(Shape{.dim = 128, .group = 8, .sequences = {{16, 512}}, .padding_tokens = 0});
  simt::Device device;
  world.check(world.run(device));
  EXPECT_EQ(0u, device.counts().bank_conflicts);
  EXPECT_EQ(512u * 2 * 16 + 128 * 16, device.counts().copies);  // keys, values, queries
}

}  // namespace
}  // namespace hetkv
