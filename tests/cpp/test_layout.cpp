// CacheLayout: the geometry of blocks, and R(p) against numbers worked out by hand.
#include "allocator/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "layout_groups.h"

namespace hetkv::test {
namespace {

GroupId id_of(const CacheLayout& layout, std::string_view name) {
  const Group* group = layout.find_group(name);
  EXPECT_NE(group, nullptr) << name;
  return group->id;
}

// ---- names of dtypes --------------------------------------------------------------------------------------------------------

TEST(Layout, DTypeNamesAreTorchs) {
  const std::vector<std::pair<std::string, std::uint32_t>> expected{{"float64", 8},  {"float32", 4},       {"float16", 2},
                                                                    {"bfloat16", 2}, {"float8_e4m3fn", 1}, {"uint8", 1},
                                                                    {"int8", 1},     {"int32", 4},         {"int64", 8}};
  for (const auto& [name, bytes] : expected) {
    EXPECT_EQ(dtype_name(dtype_from_name(name)), name);
    EXPECT_EQ(dtype_bytes(dtype_from_name(name)), bytes) << name;
  }
  EXPECT_THROW(dtype_from_name("float33"), ArgumentError);
}

// ---- R(p) -------------------------------------------------------------------------------------------------------------------

// For W = 128, m = 4 with 4 overlap rows, m = 128 without; the expected numbers are counted row by row, not by R(p)'s formulas.
class RowsNeeded : public testing::TestWithParam<std::uint32_t> {};

TEST_P(RowsNeeded, ForEveryPositionUpTo600) {
  const CacheLayout layout = build(v4_groups(), GetParam());
  const GroupId csa = id_of(layout, "csa_kv"), index = id_of(layout, "csa_index"), hca = id_of(layout, "hca_kv"),
                swa = id_of(layout, "swa"), csa_tail = id_of(layout, "csa_tail"), index_tail = id_of(layout, "csa_index_tail"),
                hca_tail = id_of(layout, "hca_tail");
  std::int64_t csa_entries = 0, hca_entries = 0, csa_open = 0, hca_open = 0;
  for (std::int64_t p = 0; p <= 600; ++p) {
    SCOPED_TRACE("p = " + std::to_string(p));
    for (const GroupId id : {csa, index}) {
      EXPECT_EQ(layout.need(id, p).begin, 0);
      EXPECT_EQ(layout.need(id, p).end, csa_entries);
    }
    EXPECT_EQ(layout.need(hca, p).begin, 0);
    EXPECT_EQ(layout.need(hca, p).end, hca_entries);

    // Token p sees keys j with p - 128 < j <= p; p itself is computed, the others must be there.
    std::int64_t visible = 0, first_visible = -1;
    for (std::int64_t j = p - 1; j >= 0 && j > p - 128; --j) ++visible, first_visible = j;
    const RowRange rows = layout.need(swa, p);
    EXPECT_EQ(rows.end - rows.begin, visible);
    if (visible > 0) {
      EXPECT_EQ(rows.begin, first_visible);
    }
    EXPECT_EQ(rows.end, p);

    for (const GroupId id : {csa_tail, index_tail}) {
      EXPECT_EQ(layout.need(id, p).end - layout.need(id, p).begin, csa_open);
      EXPECT_EQ(layout.need(id, p).overlap_rows, csa_entries > 0 ? 4u : 0u);
      EXPECT_EQ(layout.need(id, p).empty(), p == 0);
    }
    EXPECT_EQ(layout.need(hca_tail, p).end - layout.need(hca_tail, p).begin, hca_open);
    EXPECT_EQ(layout.need(hca_tail, p).overlap_rows, 0u);
    EXPECT_EQ(layout.need(hca_tail, p).empty(), hca_open == 0);

    if (++csa_open == 4) ++csa_entries, csa_open = 0;
    if (++hca_open == 128) ++hca_entries, hca_open = 0;
  }
}

INSTANTIATE_TEST_SUITE_P(BlockSize, RowsNeeded, testing::Values(64u, 128u));

TEST(Layout, RowsNeededAtChosenPositions) {
  const CacheLayout layout = build(v4_groups(), 128);
  const auto rows = [&](std::string_view name, std::int64_t p) {
    const RowRange range = layout.need(id_of(layout, name), p);
    return std::vector<std::int64_t>{range.begin, range.end, range.overlap_rows};
  };
  using Rows = std::vector<std::int64_t>;
  EXPECT_EQ(rows("csa_kv", 37), (Rows{0, 9, 0}));
  EXPECT_EQ(rows("hca_kv", 37), (Rows{0, 0, 0}));
  EXPECT_EQ(rows("swa", 37), (Rows{0, 37, 0}));  // below 127 tokens: all of them
  EXPECT_EQ(rows("swa", 126), (Rows{0, 126, 0}));
  EXPECT_EQ(rows("swa", 127), (Rows{0, 127, 0}));
  EXPECT_EQ(rows("swa", 128), (Rows{1, 128, 0}));
  EXPECT_EQ(rows("swa", 600), (Rows{473, 600, 0}));
  EXPECT_EQ(rows("csa_tail", 3), (Rows{0, 3, 0}));  // no window closed yet: no overlap
  EXPECT_EQ(rows("csa_tail", 4), (Rows{4, 4, 4}));
  EXPECT_EQ(rows("csa_tail", 37), (Rows{36, 37, 4}));
  EXPECT_EQ(rows("hca_tail", 37), (Rows{0, 37, 0}));
  EXPECT_EQ(rows("hca_tail", 255), (Rows{128, 255, 0}));
  EXPECT_EQ(rows("hca_tail", 256), (Rows{256, 256, 0}));
  EXPECT_EQ(rows("csa_kv", 1'000'003), (Rows{0, 250'000, 0}));
}

// Facts 6 and 7 of the model: an aligned position asks for no tail rows at all, only for the overlap of the ratio-4 groups.
TEST(Layout, AlignedPositionsAskForNoTail) {
  const CacheLayout layout = build(v4_groups(), 128);
  for (std::int64_t p = 128; p <= 1024; p += 128) {
    EXPECT_TRUE(layout.need(id_of(layout, "hca_tail"), p).empty()) << p;
    for (const auto* name : {"csa_tail", "csa_index_tail"}) {
      const RowRange range = layout.need(id_of(layout, name), p);
      EXPECT_EQ(range.begin, range.end) << name << " at " << p;
      EXPECT_EQ(range.overlap_rows, 4u) << name << " at " << p;
    }
    const RowRange swa = layout.need(id_of(layout, "swa"), p);
    EXPECT_EQ(swa.end - swa.begin, 127) << p;
  }
}

TEST(Layout, NothingIsNeededAtZeroAndSnapshotsOnlyAfter) {
  const CacheLayout layout = build(sound_groups());
  for (const Group& group : layout.groups()) {
    EXPECT_TRUE(layout.need(group.id, 0).empty()) << group.spec.name;
    EXPECT_TRUE(layout.need(group.id, -5).empty()) << group.spec.name;
    EXPECT_FALSE(layout.point_needed(group.id, 0)) << group.spec.name;
    EXPECT_EQ(layout.window_nodes(group.id, 0), 0u) << group.spec.name;
    EXPECT_FALSE(layout.history_block_at(group.id, 0)) << group.spec.name;
  }
  EXPECT_TRUE(layout.need(id_of(layout, "gdn"), 1).snapshot);
  EXPECT_TRUE(layout.point_needed(id_of(layout, "gdn"), 1));
}

TEST(Layout, WindowOfOneTokenNeedsNoRows) {
  const CacheLayout layout = build({history("kv", 1), window("swa", 1)});
  EXPECT_TRUE(layout.need(1, 64).empty());
  EXPECT_EQ(layout.window_nodes(1, 5), 0u);
  EXPECT_FALSE(layout.point_needed(1, 5));
}

// ---- nodes ------------------------------------------------------------------------------------------------------------------

TEST(Layout, EntriesLiveAtTheNodeWhereTheyClose) {
  const CacheLayout layout = build(v4_groups(), 64);
  const GroupId csa = id_of(layout, "csa_kv"), hca = id_of(layout, "hca_kv");
  EXPECT_EQ(layout.group(csa).entries_per_block, 16u);
  EXPECT_EQ(layout.group(hca).entries_per_block, 1u);
  for (std::uint32_t depth = 1; depth <= 8; ++depth) {
    EXPECT_TRUE(layout.history_block_at(csa, depth));
    EXPECT_EQ(layout.history_block_at(hca, depth), depth % 2 == 0) << depth;
    EXPECT_FALSE(layout.history_block_at(id_of(layout, "swa"), depth));
  }
  const CacheLayout wide = build(v4_groups(), 256);
  EXPECT_EQ(wide.find_group("hca_kv")->entries_per_block, 2u);
  EXPECT_TRUE(wide.history_block_at(id_of(wide, "hca_kv"), 1));
}

TEST(Layout, WindowNodes) {
  const auto nodes = [](std::uint32_t block_size, std::uint32_t tokens, std::uint32_t depth) {
    const CacheLayout layout = build({window("swa", tokens)}, block_size);
    return layout.window_nodes(0, depth);
  };
  EXPECT_EQ(nodes(64, 128, 1), 1u);
  EXPECT_EQ(nodes(64, 128, 2), 2u);
  EXPECT_EQ(nodes(64, 128, 9), 2u);  // 127 rows: 2 blocks of 64
  EXPECT_EQ(nodes(128, 128, 9), 1u);
  EXPECT_EQ(nodes(256, 128, 9), 1u);
  EXPECT_EQ(nodes(64, 129, 9), 2u);  // 128 rows
  EXPECT_EQ(nodes(64, 130, 9), 3u);
  EXPECT_EQ(nodes(64, 65, 9), 1u);
  EXPECT_EQ(nodes(64, 1024, 9), 9u);
  EXPECT_EQ(nodes(64, 1024, 100), 16u);
}

TEST(Layout, WhichPointsANodeStores) {
  const CacheLayout narrow = build(v4_groups(), 64);
  const CacheLayout even = build(v4_groups(), 128);
  for (std::uint32_t depth = 1; depth <= 8; ++depth) {
    for (const CacheLayout* layout : {&narrow, &even}) {
      EXPECT_TRUE(layout->point_needed(id_of(*layout, "csa_tail"), depth));
      EXPECT_TRUE(layout->point_needed(id_of(*layout, "csa_index_tail"), depth));
      EXPECT_TRUE(layout->point_needed(id_of(*layout, "swa"), depth));
      EXPECT_FALSE(layout->point_needed(id_of(*layout, "csa_kv"), depth));
    }
    EXPECT_EQ(narrow.point_needed(id_of(narrow, "hca_tail"), depth), depth % 2 == 1) << depth;
    EXPECT_FALSE(even.point_needed(id_of(even, "hca_tail"), depth)) << depth;
  }
  // A ratio above block_size, with overlap: rows at all nodes but the closing ones, the overlap once a window has closed.
  const CacheLayout coarse = build({history("kv", 128), tail("tail", 128, 4)}, 64);
  EXPECT_TRUE(coarse.point_needed(1, 1));
  EXPECT_EQ(coarse.need(1, 64).overlap_rows, 0u);
  EXPECT_TRUE(coarse.point_needed(1, 2));
  EXPECT_EQ(coarse.need(1, 128).overlap_rows, 4u);
}

TEST(Layout, OrderOfGroupsPointsAndPools) {
  GroupSpec draft = history("draft", 1, ObjectKind::kFullKv);
  draft.optional = true;
  const CacheLayout layout = build({snapshot("gdn"), tail("tail_a", 4, 4), draft, history("kv", 4), window("swa_a", 64),
                                    tail("tail_b", 128, 0), history("kv2", 128), window("swa_b", 128)});
  const auto names = [&](std::span<const GroupId> ids) {
    std::vector<std::string> result;
    for (const GroupId id : ids) result.push_back(layout.group(id).spec.name);
    return result;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(names(layout.point_groups()), (Names{"swa_a", "swa_b", "tail_a", "tail_b", "gdn"}));
  EXPECT_EQ(names(layout.history_groups()), (Names{"kv", "kv2"}));  // an optional group is no part of the history set
  EXPECT_EQ(layout.find_group("draft")->history_slot, -1);
  for (std::size_t slot = 0; slot < layout.point_groups().size(); ++slot)
    EXPECT_EQ(layout.group(layout.point_groups()[slot]).point_slot, static_cast<int>(slot));
  for (std::size_t slot = 0; slot < layout.history_groups().size(); ++slot)
    EXPECT_EQ(layout.group(layout.history_groups()[slot]).history_slot, static_cast<int>(slot));

  ASSERT_EQ(layout.pools().size(), 10u);
  for (std::size_t pool = 0; pool < 8; ++pool) {
    EXPECT_EQ(layout.pools()[pool].group, pool);
    EXPECT_FALSE(layout.pools()[pool].ring);
    EXPECT_EQ(layout.pools()[pool].name, layout.groups()[pool].spec.name);
    EXPECT_EQ(layout.pools()[pool].block_bytes, layout.groups()[pool].block_bytes);
  }
  EXPECT_EQ(layout.pools()[8].name, "tail_a.ring");
  EXPECT_EQ(layout.pools()[9].name, "tail_b.ring");
  EXPECT_TRUE(layout.pools()[8].ring);
  EXPECT_EQ(layout.pools()[9].kind, ObjectKind::kUncompressedTail);
  EXPECT_EQ(layout.pools()[9].block_bytes, layout.find_group("tail_b")->ring_block_bytes);
  EXPECT_EQ(layout.ring_pool(id_of(layout, "tail_a")), std::optional<PoolId>(8));
  EXPECT_EQ(layout.ring_pool(id_of(layout, "tail_b")), std::optional<PoolId>(9));
  EXPECT_EQ(layout.ring_pool(id_of(layout, "kv")), std::nullopt);
  EXPECT_EQ(layout.find_group("nowhere"), nullptr);
}

// Groups with ratios 128, 4096 and 32, a window and a small tail: the coarse group does not drag the others to its granularity.
TEST(Layout, EveryGroupKeepsItsOwnGranularity_B2_B10) {
  const CacheLayout layout =
      build({history("c128", 128), history("c4096", 4096), history("c32", 32), window("swa", 8), tail("tail", 2, 2)}, 128);
  EXPECT_EQ(layout.find_group("c128")->entries_per_block, 1u);
  EXPECT_EQ(layout.find_group("c4096")->entries_per_block, 1u);
  EXPECT_EQ(layout.find_group("c32")->entries_per_block, 4u);
  EXPECT_EQ(layout.find_group("swa")->entries_per_block, 128u);
  // A prefix of 2048 tokens: everything but the coarse group has rows, and the coarse group needs none.
  EXPECT_EQ(layout.need(id_of(layout, "c128"), 2048).end, 16);
  EXPECT_EQ(layout.need(id_of(layout, "c32"), 2048).end, 64);
  EXPECT_TRUE(layout.need(id_of(layout, "c4096"), 2048).empty());
  for (std::uint32_t depth = 1; depth <= 64; ++depth)
    EXPECT_EQ(layout.history_block_at(id_of(layout, "c4096"), depth), depth % 32 == 0) << depth;

  const CacheLayout ratios = build({history("c256", 256), history("c64", 64), history("c4", 4)}, 64);
  EXPECT_EQ(ratios.find_group("c256")->entries_per_block, 1u);
  EXPECT_EQ(ratios.find_group("c64")->entries_per_block, 1u);
  EXPECT_EQ(ratios.find_group("c4")->entries_per_block, 16u);
}

// ---- bytes ------------------------------------------------------------------------------------------------------------------

TEST(Layout, SectionsAndStridesOfAHistoryBlock) {
  GroupSpec g = history("kv", 4);
  g.fields = {{"a", DType::kUInt8, {5}, false}, {"scale", DType::kFloat32, {}, false}, {"b", DType::kBFloat16, {2, 3}, false}};
  g.owner_layers = {3, 7, 8};
  g.alignment = 64;
  const CacheLayout layout = build({g}, 32);
  const Group& group = layout.group(0);
  ASSERT_EQ(group.fields.size(), 3u);
  EXPECT_EQ(group.entries_per_block, 8u);
  EXPECT_EQ(group.fields[0].row_bytes, 5u);
  EXPECT_EQ(group.fields[0].section_offset, 0u);  // 8 rows of 5 bytes: 40
  EXPECT_EQ(group.fields[1].row_bytes, 4u);
  EXPECT_EQ(group.fields[1].section_offset, 64u);  // 8 rows of 4: 32
  EXPECT_EQ(group.fields[2].row_bytes, 12u);
  EXPECT_EQ(group.fields[2].section_offset, 128u);  // 8 rows of 12: 96
  EXPECT_EQ(group.layer_stride, 256u);              // 224 rounded up to 64
  EXPECT_EQ(group.block_bytes, 768u);
  EXPECT_EQ(group.ring_block_bytes, 0u);
  EXPECT_EQ(group.spec.reader_layers, g.owner_layers);
}

TEST(Layout, BlockBytesAreAMultipleOfTheUnitAndOfTheAlignment) {
  for (const std::uint32_t alignment : {4u, 16u, 64u, 256u, 512u, 4096u}) {
    GroupSpec g = history("kv", 4);
    g.alignment = alignment;
    g.owner_layers = layers(3);
    g.fields[0].shape = {5};
    const CacheLayout layout = build({g}, 16);
    const Group& group = layout.group(0);
    EXPECT_EQ(group.layer_stride, (80 + alignment - 1) / alignment * alignment) << alignment;
    EXPECT_EQ(group.block_bytes % kOffsetUnit, 0u) << alignment;
    EXPECT_EQ(group.block_bytes % alignment, 0u) << alignment;
    EXPECT_GE(group.block_bytes, 3 * group.layer_stride) << alignment;
    EXPECT_LT(group.block_bytes, 3 * group.layer_stride + std::max<std::uint64_t>(kOffsetUnit, alignment)) << alignment;
  }
}

TEST(Layout, TailBlocksHoldWhatANodeAsksFor) {
  const CacheLayout narrow = build(v4_groups(), 64);
  const Group& csa = *narrow.find_group("csa_tail");
  EXPECT_EQ(csa.entries_per_block, 1u);
  EXPECT_EQ(csa.fields[0].rows_per_block, 0u);  // 4 divides 64: no node ends inside a window
  EXPECT_EQ(csa.fields[1].rows_per_block, 0u);
  EXPECT_EQ(csa.fields[2].rows_per_block, 4u);
  EXPECT_EQ(csa.fields[3].rows_per_block, 4u);
  EXPECT_EQ(csa.fields[2].section_offset, 0u);
  EXPECT_EQ(csa.fields[3].section_offset, 4u * 512 * 4);
  EXPECT_EQ(csa.layer_stride, 2u * 4 * 512 * 4);
  EXPECT_EQ(csa.block_bytes, 2 * csa.layer_stride);
  EXPECT_EQ(csa.ring_entries, 8u);
  EXPECT_EQ(csa.fields[0].ring_rows, 8u);
  EXPECT_EQ(csa.fields[2].ring_rows, 0u);
  EXPECT_EQ(csa.fields[1].ring_section_offset, 8u * 1024 * 4);
  EXPECT_EQ(csa.ring_layer_stride, 8u * 8192);  // one fp32 row of 8192 bytes a token
  EXPECT_EQ(csa.ring_block_bytes, 2 * csa.ring_layer_stride);

  const Group& hca = *narrow.find_group("hca_tail");
  EXPECT_EQ(hca.entries_per_block, 64u);
  EXPECT_EQ(hca.fields[0].rows_per_block, 64u);
  EXPECT_EQ(hca.layer_stride, 64u * 4096);
  EXPECT_EQ(hca.ring_entries, 128u);
  EXPECT_EQ(hca.ring_layer_stride, 128u * 4096);

  const CacheLayout even = build(v4_groups(), 128);
  const Group& nothing = *even.find_group("hca_tail");
  EXPECT_EQ(nothing.fields[0].rows_per_block, 0u);
  EXPECT_EQ(nothing.entries_per_block, 1u);
  EXPECT_EQ(nothing.layer_stride, 0u);
  EXPECT_EQ(nothing.block_bytes, kOffsetUnit);
  EXPECT_EQ(nothing.ring_layer_stride, 128u * 4096);
}

TEST(Layout, OddRowCountsRoundUpToPowersOfTwo) {
  // Nodes of 64 tokens end up to 128 tokens into a window of 192; 3 overlap rows take a section of 4, the ring 2 * 192 -> 512.
  const CacheLayout layout = build({history("kv", 192), tail("tail", 192, 3)}, 64);
  const Group& group = *layout.find_group("tail");
  EXPECT_EQ(group.fields[0].rows_per_block, 128u);
  EXPECT_EQ(group.fields[2].rows_per_block, 4u);
  EXPECT_EQ(group.ring_entries, 512u);
  const CacheLayout longer = build({history("kv", 320), tail("tail", 320, 0)}, 64);
  EXPECT_EQ(longer.find_group("tail")->fields[0].rows_per_block, 256u);
  EXPECT_EQ(longer.find_group("tail")->entries_per_block, 256u);
}

// Byte numbers of DeepSeek-V4-Flash: 21 ratio-4 layers, 20 ratio-128 layers, 43 windows.
struct FlashFormat {
  std::string name;
  std::vector<FieldSpec> kv, key;
  std::uint64_t history_bytes_per_token;
};

TEST(Layout, BytesOfFlash) {
  // Main rows: 448 fp8 + 64 bf16 + 8 scale bytes = 584. Index rows: 128 fp8 + one fp32 scale = 132, or 64 + 4 = 68 in 4 bits.
  const std::vector<FieldSpec> main_fp8{
      {"nope", DType::kFloat8E4M3, {448}, false}, {"rope", DType::kBFloat16, {64}, false}, {"scale", DType::kUInt8, {8}, false}};
  const std::vector<FieldSpec> main_bf16{{"kv", DType::kBFloat16, {512}, false}};
  const std::vector<FieldSpec> index_fp8{{"key", DType::kFloat8E4M3, {128}, false}, {"scale", DType::kFloat32, {}, false}};
  const std::vector<FieldSpec> index_fp4{{"key", DType::kUInt8, {64}, false}, {"scale", DType::kUInt8, {4}, false}};
  const std::vector<FieldSpec> index_bf16{{"key", DType::kBFloat16, {128}, false}};
  for (const FlashFormat& format :
       {FlashFormat{"fp8 + fp4 index", main_fp8, index_fp4, 3514}, FlashFormat{"fp8 + fp8 index", main_fp8, index_fp8, 3850},
        FlashFormat{"bf16", main_bf16, index_bf16, 6880}}) {
    Groups groups = v4_groups();
    for (GroupSpec& g : groups) {
      const bool csa = g.name.starts_with("csa");
      g.owner_layers = g.name == "swa" ? layers(43) : csa ? layers(21, 2, 2) : layers(20, 3, 2);
      if (g.name == "csa_kv" || g.name == "hca_kv" || g.name == "swa") g.fields = format.kv;
      if (g.name == "csa_index") g.fields = format.key;
    }
    // Blocks of 8192 tokens leave no padding in any section, so bytes per token come out exactly.
    const CacheLayout layout = build(groups, 8192);
    std::uint64_t bytes = 0;
    for (const GroupId id : layout.history_groups()) bytes += layout.group(id).block_bytes;
    EXPECT_EQ(bytes / 8192, format.history_bytes_per_token) << format.name;
    if (format.kv.size() == 3) {
      EXPECT_EQ(layout.find_group("swa")->block_bytes / 8192, 43u * 584);  // a checkpoint of 127 rows: 3.19 MB
      EXPECT_EQ(127 * layout.find_group("swa")->block_bytes / 8192, 3'189'224u);
    }
    // Rings in engine form, and the overlap that an aligned position asks for.
    EXPECT_EQ(layout.find_group("csa_tail")->ring_layer_stride * 21, 1'376'256u);
    EXPECT_EQ(layout.find_group("csa_index_tail")->ring_layer_stride * 21, 344'064u);
    EXPECT_EQ(layout.find_group("hca_tail")->ring_layer_stride * 20, 10'485'760u);
    EXPECT_EQ((layout.find_group("csa_tail")->layer_stride + layout.find_group("csa_index_tail")->layer_stride) * 21, 430'080u);
  }
}

TEST(Layout, WithAlignmentChangesOneGroupOnly) {
  const CacheLayout layout = build(sound_groups());
  const CacheLayout aligned = layout.with_alignment("kv", 1024);
  EXPECT_EQ(aligned.find_group("kv")->spec.alignment, 1024u);
  EXPECT_EQ(aligned.find_group("kv")->layer_stride, 1024u);
  EXPECT_EQ(layout.find_group("kv")->layer_stride, 512u);
  EXPECT_EQ(aligned.find_group("swa")->block_bytes, layout.find_group("swa")->block_bytes);
  EXPECT_NE(aligned.fingerprint(), layout.fingerprint());
  EXPECT_EQ(aligned.with_alignment("kv", 16).fingerprint(), layout.fingerprint());
  EXPECT_EQ(aligned.model(), "test");
}

TEST(Layout, DescribeNamesEveryGroup) {
  const CacheLayout layout = build(v4_groups());
  const std::string text = layout.describe();
  EXPECT_NE(text.find(layout.fingerprint().hex()), std::string::npos);
  for (const Group& group : layout.groups()) EXPECT_NE(text.find("\n" + group.spec.name + " "), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2 + static_cast<std::ptrdiff_t>(layout.groups().size()));
}

}  // namespace
}  // namespace hetkv::test
