// Fingerprints: framing, stability, and that a layout's covers every byte-relevant fact.
#include "allocator/fingerprint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/layout.h"
#include "layout_groups.h"

namespace hetkv::test {
namespace {

TEST(LayoutFingerprint, EveryByteRelevantFactChangesIt) {
  using Change = std::pair<std::string, std::function<void(Groups&)>>;
  const std::vector<Change> changes{
      {"group name", [](Groups& g) { g[1].name = "swa2"; }},
      {"group order", [](Groups& g) { std::swap(g[1], g[2]); }},
      {"a group more", [](Groups& g) { g.push_back(window("swa2", 128)); }},
      {"a group less", [](Groups& g) { g.pop_back(); }},
      {"kind", [](Groups& g) { g[0].kind = ObjectKind::kFullKv; }},
      {"retention",
       [](Groups& g) {
         g[4] = history("index", 1, ObjectKind::kIndexerState);
         g[4].indexes = "kv";
         g[4].retention = Retention::kSnapshot;
       }},
      {"ratio", [](Groups& g) { g[0].compress_ratio = 8; }},
      {"tail ratio", [](Groups& g) { g[2].compress_ratio = 8; }},
      {"window", [](Groups& g) { g[1].window = 127; }},
      {"overlap rows", [](Groups& g) { g[2].overlap_rows = 3; }},  // same bytes: 3 rows take a section of 4
      {"owner layers", [](Groups& g) { g[0].owner_layers = {0, 2}; }},
      {"one layer more", [](Groups& g) { g[0].owner_layers = {0, 1, 2}; }},
      {"alignment without effect on strides", [](Groups& g) { g[0].alignment = 32; }},
      {"alignment", [](Groups& g) { g[0].alignment = 4096; }},
      {"indexes", [](Groups& g) { g[4].indexes = "swa"; }},
      {"indexes nothing", [](Groups& g) { g[4].indexes = ""; }},
      {"field name", [](Groups& g) { g[0].fields[0].name = "v"; }},
      {"field dtype of the same size", [](Groups& g) { g[0].fields[0].dtype = DType::kInt32; }},
      {"field dtype", [](Groups& g) { g[0].fields[0].dtype = DType::kBFloat16; }},
      {"field shape", [](Groups& g) { g[0].fields[0].shape = {9}; }},
      {"field shape of the same size", [](Groups& g) { g[0].fields[0].shape = {2, 4}; }},
      {"field order", [](Groups& g) { std::swap(g[3].fields[0], g[3].fields[1]); }},
      {"a field more", [](Groups& g) { g[0].fields.push_back({"scale", DType::kFloat32, {}, false}); }},
      {"which field overlaps", [](Groups& g) { g[2].fields[1].overlap = true; }},
  };
  const CacheLayout original = build(sound_groups());
  std::vector<Fingerprint> seen{original.fingerprint(), build(sound_groups(), 128).fingerprint()};
  EXPECT_NE(seen[0], seen[1]) << "block_size";
  for (const auto& [what, change] : changes) {
    Groups groups = sound_groups();
    change(groups);
    const Fingerprint changed = build(groups).fingerprint();
    EXPECT_EQ(std::count(seen.begin(), seen.end(), changed), 0) << what;
    seen.push_back(changed);
  }
}

TEST(LayoutFingerprint, IgnoresWhatDoesNotTouchBytes) {
  const Fingerprint original = build(sound_groups()).fingerprint();
  EXPECT_EQ(build(sound_groups()).fingerprint(), original);
  EXPECT_EQ(CacheLayout::build("another model", 64, sound_groups()).fingerprint(), original);
  Groups groups = sound_groups();
  groups[0].reader_layers = {0, 1, 5};
  groups[1].layer_windows = {128, 128};
  groups[3].optional = true;
  EXPECT_EQ(build(groups).fingerprint(), original);
}

TEST(FingerprintBuilder, FramedFieldsCannotCollide) {
  const auto framed = [](std::vector<std::pair<std::string, std::string>> facts) {
    FingerprintBuilder builder("test");
    for (const auto& [tag, value] : facts) builder.add(tag, value);
    return builder.framed();
  };
  std::vector<std::string> all{
      framed({}),
      framed({{"salt", "x"}}),
      framed({{"adapter", "x"}}),
      framed({{"a", "bc"}}),
      framed({{"ab", "c"}}),
      framed({{"abc", ""}}),
      framed({{"", "abc"}}),
      framed({{"a", "b"}, {"c", ""}}),
      framed({{"a", ""}, {"b", "c"}}),
      framed({{"a", "b"}, {"a", "b"}}),
      FingerprintBuilder("test").add("a", std::uint64_t{7}).framed(),
      FingerprintBuilder("test").add("a", std::string_view("\7\0\0\0\0\0\0\0", 8)).framed(),  // the number's own bytes
      FingerprintBuilder("test2").framed(),
      FingerprintBuilder("").add("", "test").framed(),
  };
  // A value that contains the frames of two fields is still one field.
  const std::string inner = framed({{"a", "b"}}).substr(framed({}).size());
  all.push_back(framed({{"a", "b" + inner}}));
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
}

TEST(FingerprintBuilder, IsStableAndPrintsAs32Digits) {
  EXPECT_EQ((Fingerprint{0x0123456789abcdefULL, 0xfedcba9876543210ULL}.hex()), "0123456789abcdeffedcba9876543210");
  EXPECT_EQ(Fingerprint{}.hex(), std::string(32, '0'));
  const Fingerprint first = FingerprintBuilder("d").add("tag", "value").add("n", std::uint64_t{3}).finish();
  EXPECT_EQ(first, FingerprintBuilder("d").add("tag", "value").add("n", std::uint64_t{3}).finish());
  // Persisted entries carry fingerprints, so the value itself must never drift.
  EXPECT_EQ(first.hex(), "844f97926d8ca8af572bfe1ddfbac2b9");
}

}  // namespace
}  // namespace hetkv::test
