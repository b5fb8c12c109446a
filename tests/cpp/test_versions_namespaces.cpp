// Who may share with whom: interned versions and namespaces.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "allocator/namespace_table.h"
#include "allocator/version_table.h"
#include "base/error.h"

namespace hetkv {
namespace {

Fingerprint print(const std::string& text) { return FingerprintBuilder("test").add("text", text).finish(); }

TEST(VersionTable, EqualFingerprintsAreOneVersion) {
  VersionTable table(print("layout"), "w0", {{"attention", 1}, {"compress", 2}});
  const VersionId first = table.current();
  table.set_model("w1");
  const VersionId second = table.current();
  EXPECT_NE(first, second);
  EXPECT_EQ(table.at(second).model_name, "w1");
  EXPECT_EQ(table.at(first).layout, table.at(second).layout);
  EXPECT_EQ(table.at(first).abi, table.at(second).abi);
  EXPECT_NE(table.at(first).model, table.at(second).model);
  table.set_model("w0");
  EXPECT_EQ(table.current(), first) << "going back gives the same id, so its entries match again";
  EXPECT_EQ(table.count(), 2u);
}

TEST(VersionTable, EachPartMakesAVersionAndIsToldApart) {
  VersionTable table(print("layout"), "w0", {{"attention", 1}});
  const VersionId first = table.current();
  table.set_abi("attention", 2);
  const VersionId abi = table.current();
  EXPECT_NE(table.at(abi).abi, table.at(first).abi);
  EXPECT_EQ(table.at(abi).model, table.at(first).model);
  EXPECT_EQ(table.abi().at("attention"), 2u);
  table.set_abi("attention", 1);
  EXPECT_EQ(table.current(), first);
  table.set_abi("new_family", 0);  // even a zero is a fact that was not declared before
  EXPECT_NE(table.current(), first);
  table.set_layout(print("other"));
  EXPECT_NE(table.at(table.current()).layout, table.at(first).layout);
  std::set<VersionId> ids;
  for (VersionId id = 0; id < table.count(); ++id) {
    for (VersionId other = 0; other < id; ++other) EXPECT_FALSE(table.at(id) == table.at(other));
  }
}

TEST(VersionTable, TheTableHasALimitAndKeepsTheRunningVersionThere) {
  VersionTable table(print("layout"), "0", {});
  for (VersionId i = 1; i < VersionTable::kMaxVersions; ++i) table.set_model(std::to_string(i));
  const VersionId last = table.current();
  EXPECT_THROW(table.set_model("one too many"), ArgumentError);
  EXPECT_EQ(table.current(), last);
  table.set_model("17");
  EXPECT_EQ(table.current(), 17u);
}

TEST(VersionTable, ReadersSeeWholeVersionsWhileItChanges) {
  VersionTable table(print("layout"), "0", {});
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      const VersionId id = table.current();
      ASSERT_LT(id, table.count());
      ASSERT_EQ(table.at(id).model_name, std::to_string(id));
    }
  });
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 200; ++i) table.set_model(std::to_string(i));
  }
  stop = true;
  reader.join();
  EXPECT_EQ(table.count(), 200u);
}

TEST(NamespaceTable, FieldsAreTaggedAndFramed) {
  const ChainHasher hasher(1);
  NamespaceTable table(hasher);
  const std::vector<std::vector<NamespaceField>> all = {
      {},
      {{"salt", ""}},
      {{"salt", "x"}},
      {{"adapter", "x"}},
      {{"salt", "xa"}, {"adapter", "b"}},
      {{"salt", "x"}, {"adapter", "ab"}},
      {{"salt", "x"}, {"salt", "x"}},
      {{"salt", "xsaltx"}},
      {{"salt", "x"}, {"digest:0", "1"}},
      {{"salt", "x"}, {"digest:1", "1"}},
      {{"salt", std::string("x\0y", 3)}},
  };
  std::set<Namespace*> spaces;
  std::set<std::pair<std::uint64_t, std::uint64_t>> roots;
  for (const auto& fields : all) {
    Namespace* space = table.intern(fields);
    EXPECT_TRUE(spaces.insert(space).second);
    const Key128 root = space->instance.load()->root;
    EXPECT_TRUE(roots.emplace(root.high, root.low).second);
    EXPECT_EQ(table.intern(fields), space);
    EXPECT_EQ(table.of_instance(space->instance.load()->id), space);
  }
}

TEST(NamespaceTable, RenewingGivesAnotherRootAndIdAndTheOwnerStays) {
  const ChainHasher hasher(1);
  NamespaceTable table(hasher);
  Namespace* space = table.intern({{"salt", "x"}});
  std::set<std::uint32_t> ids;
  std::set<std::pair<std::uint64_t, std::uint64_t>> roots;
  for (int i = 0; i < 3000; ++i) {  // over several chunks of the owners' table
    const NamespaceInstance* instance = space->instance.load();
    EXPECT_TRUE(ids.insert(instance->id).second);
    EXPECT_TRUE(roots.emplace(instance->root.high, instance->root.low).second);
    table.renew(space);
  }
  for (const std::uint32_t id : ids) EXPECT_EQ(table.of_instance(id), space);
}

TEST(NamespaceTable, ThreadsInternOneRecord) {
  const ChainHasher hasher(1);
  NamespaceTable table(hasher);
  std::vector<std::vector<Namespace*>> seen(4);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 300; ++i) {
        seen[t].push_back(table.intern({{"salt", std::to_string(i)}}));
        const NamespaceInstance* instance = seen[t].back()->instance.load();
        ASSERT_EQ(table.of_instance(instance->id), seen[t].back());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (std::size_t t = 1; t < 4; ++t) EXPECT_EQ(seen[t], seen[0]);
}

}  // namespace
}  // namespace hetkv
