// CacheLayout: every layout that is refused, and that the error names the group and the field.
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "allocator/layout.h"
#include "layout_groups.h"

namespace hetkv::test {
namespace {

struct Refusal {
  std::string what;
  std::function<void(Groups&, std::uint32_t& block_size)> spoil;
  std::string group, field;
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.what; }

class LayoutRefusesToBuild : public testing::TestWithParam<Refusal> {};

TEST_P(LayoutRefusesToBuild, NamingGroupAndField) {
  Groups groups = sound_groups();
  std::uint32_t block_size = 64;
  ASSERT_NO_THROW(build(groups, block_size));
  GetParam().spoil(groups, block_size);
  try {
    build(groups, block_size);
    FAIL() << "was accepted";
  } catch (const LayoutError& error) {
    EXPECT_EQ(error.group, GetParam().group) << error.what();
    EXPECT_EQ(error.field, GetParam().field) << error.what();
  }
}

const std::vector<Refusal>& refusals() {
  static const std::vector<Refusal> all{
      {"block_size_zero", [](Groups&, auto& b) { b = 0; }, "", "block_size"},
      {"block_size_not_a_power_of_two", [](Groups&, auto& b) { b = 96; }, "", "block_size"},
      {"block_size_huge", [](Groups&, auto& b) { b = 1u << 21; }, "", "block_size"},
      {"no_groups", [](Groups& g, auto&) { g.clear(); }, "", "groups"},
      {"too_many_groups",
       [](Groups& g, auto&) {
         g.clear();
         for (int i = 0; i < 17; ++i) g.push_back(history("g" + std::to_string(i), 4));
       },
       "", "groups"},
      {"too_many_point_sets",
       [](Groups& g, auto&) {
         g.clear();
         for (int i = 0; i < 9; ++i) g.push_back(window("w" + std::to_string(i), 8));
       },
       "", "groups"},
      {"all_optional",
       [](Groups& g, auto&) {
         for (auto& s : g) s.optional = true;
       },
       "", "groups"},
      {"no_name",
       [](Groups& g, auto&) {
         g[0].name = "";
         g[4].indexes = "";
       },
       "", "name"},
      {"same_name", [](Groups& g, auto&) { g[1].name = "kv"; }, "kv", "name"},
      {"ratio_zero", [](Groups& g, auto&) { g[0].compress_ratio = 0; }, "kv", "compress_ratio"},
      {"ratio_huge", [](Groups& g, auto&) { g[0].compress_ratio = 1u << 31; }, "kv", "compress_ratio"},
      {"ratio_not_a_divisor", [](Groups& g, auto&) { g[0].compress_ratio = 6; }, "kv", "compress_ratio"},
      {"ratio_not_a_multiple", [](Groups& g, auto&) { g[0].compress_ratio = 96; }, "kv", "compress_ratio"},
      {"tail_ratio_not_a_multiple", [](Groups& g, auto&) { g[2].compress_ratio = 96; }, "tail", "compress_ratio"},
      {"tail_ratio_one", [](Groups& g, auto&) { g[2] = tail("tail", 1, 0); }, "tail", "compress_ratio"},
      {"window_with_ratio", [](Groups& g, auto&) { g[1].compress_ratio = 4; }, "swa", "compress_ratio"},
      {"snapshot_with_ratio", [](Groups& g, auto&) { g[3].compress_ratio = 4; }, "gdn", "compress_ratio"},
      {"window_kept_as_history",
       [](Groups& g, auto&) {
         g[1].retention = Retention::kHistory;
         g[1].window = 0;
       },
       "swa", "retention"},
      {"history_kept_as_window", [](Groups& g, auto&) { g[0].retention = Retention::kWindow; }, "kv", "retention"},
      {"history_kept_as_snapshot", [](Groups& g, auto&) { g[0].retention = Retention::kSnapshot; }, "kv", "retention"},
      {"window_kept_as_tail", [](Groups& g, auto&) { g[1].retention = Retention::kTail; }, "swa", "retention"},
      {"tail_kept_as_history", [](Groups& g, auto&) { g[2].retention = Retention::kHistory; }, "tail", "retention"},
      {"recurrent_kept_as_window", [](Groups& g, auto&) { g[3].retention = Retention::kWindow; }, "gdn", "retention"},
      {"disk_copy_as_group", [](Groups& g, auto&) { g[0].kind = ObjectKind::kDiskPrefix; }, "kv", "retention"},
      {"window_zero", [](Groups& g, auto&) { g[1].window = 0; }, "swa", "window"},
      {"history_with_window", [](Groups& g, auto&) { g[0].window = 8; }, "kv", "window"},
      {"history_with_overlap", [](Groups& g, auto&) { g[0].overlap_rows = 1; }, "kv", "overlap_rows"},
      {"overlap_longer_than_window", [](Groups& g, auto&) { g[2].overlap_rows = 5; }, "tail", "overlap_rows"},
      {"overlap_without_field", [](Groups& g, auto&) { g[2].fields.resize(2); }, "tail", "overlap_rows"},
      {"overlap_field_without_rows", [](Groups& g, auto&) { g[2].overlap_rows = 0; }, "tail", "overlap_kv"},
      {"overlap_fields_only", [](Groups& g, auto&) { g[2].fields.erase(g[2].fields.begin(), g[2].fields.begin() + 2); }, "tail",
       "fields"},
      {"no_owner", [](Groups& g, auto&) { g[0].owner_layers.clear(); }, "kv", "owner_layers"},
      {"owner_twice", [](Groups& g, auto&) { g[0].owner_layers = {1, 1}; }, "kv", "owner_layers"},
      {"owners_descending", [](Groups& g, auto&) { g[0].owner_layers = {1, 0}; }, "kv", "owner_layers"},
      {"readers_descending", [](Groups& g, auto&) { g[0].reader_layers = {1, 0}; }, "kv", "reader_layers"},
      {"windows_of_some_layers", [](Groups& g, auto&) { g[1].layer_windows = {128}; }, "swa", "layer_windows"},
      {"mixed_windows", [](Groups& g, auto&) { g[1].layer_windows = {128, 256}; }, "swa", "layer_windows"},
      {"no_fields", [](Groups& g, auto&) { g[0].fields.clear(); }, "kv", "fields"},
      {"field_without_name", [](Groups& g, auto&) { g[0].fields[0].name = ""; }, "kv", "fields"},
      {"field_twice", [](Groups& g, auto&) { g[0].fields.push_back(g[0].fields[0]); }, "kv", "kv"},
      {"field_of_no_dtype", [](Groups& g, auto&) { g[0].fields[0].dtype = static_cast<DType>(99); }, "kv", "kv"},
      {"field_of_no_width", [](Groups& g, auto&) { g[0].fields[0].shape = {8, 0}; }, "kv", "kv"},
      {"row_of_4_gib", [](Groups& g, auto&) { g[0].fields[0].shape = {1u << 15, 1u << 15}; }, "kv", "kv"},
      {"block_above_512_gib",
       [](Groups& g, auto& b) {
         b = 1u << 20;
         g[0].fields[0].shape = {1u << 20};
       },
       "kv", "kv"},
      {"all_layers_above_512_gib",
       [](Groups& g, auto& b) {
         b = 1u << 20;
         g[0].fields[0].shape = {1u << 17};
         g[0].owner_layers = layers(5);
       },
       "kv", "fields"},
      {"alignment_zero", [](Groups& g, auto&) { g[0].alignment = 0; }, "kv", "alignment"},
      {"alignment_not_a_power_of_two", [](Groups& g, auto&) { g[0].alignment = 48; }, "kv", "alignment"},
      {"alignment_huge", [](Groups& g, auto&) { g[0].alignment = 1u << 21; }, "kv", "alignment"},
      {"alignment_below_element", [](Groups& g, auto&) { g[0].alignment = 2; }, "kv", "alignment"},
      {"unknown_kind", [](Groups& g, auto&) { g[0].kind = static_cast<ObjectKind>(42); }, "kv", "kind"},
      {"indexes_nothing", [](Groups& g, auto&) { g[4].indexes = "nowhere"; }, "index", "indexes"},
      {"indexes_itself", [](Groups& g, auto&) { g[4].indexes = "index"; }, "index", "indexes"},
      {"content_that_indexes", [](Groups& g, auto&) { g[0].indexes = "index"; }, "kv", "indexes"},
  };
  return all;
}

INSTANTIATE_TEST_SUITE_P(Each, LayoutRefusesToBuild, testing::ValuesIn(refusals()),
                         [](const testing::TestParamInfo<Refusal>& each) { return each.param.what; });

TEST(LayoutRefuses, WithAlignmentRefusesWhatBuildRefuses) {
  const CacheLayout layout = build(sound_groups());
  EXPECT_THROW(layout.with_alignment("nowhere", 64), LayoutError);
  EXPECT_THROW(layout.with_alignment("kv", 2), LayoutError);
  EXPECT_THROW(layout.with_alignment("kv", 24), LayoutError);
}

TEST(LayoutRefuses, LayersWithDifferentWindowsNeedGroupsOfTheirOwn_C14) {
  GroupSpec mixed = window("kv", 1024);
  mixed.layer_windows = {1024, 0};  // one windowed layer, one global one
  EXPECT_THROW(build({mixed}), LayoutError);
  GroupSpec global = history("kv", 1, ObjectKind::kFullKv);
  global.layer_windows = {0, 1024};
  EXPECT_THROW(build({global}), LayoutError);
  mixed.layer_windows = {1024, 1024};
  EXPECT_NO_THROW(build({mixed}));
}

}  // namespace
}  // namespace hetkv::test
