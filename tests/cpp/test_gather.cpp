// The walk over a pinned chain reads the bodies of pinned nodes only.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <vector>

#include "shadow_engine.h"

namespace hetkv::testing {
namespace {

// A quarantine takes the pinned chain, and another publishes its first blocks anew. That node has the same key and the same parent, but
// nobody here pins it: its record may serve another at any moment. Its tokens lie on a page of their own, which cannot be read.
TEST(Gather, DoesNotReadAnEqualNodeThatIsNotPinned) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const auto block = static_cast<std::uint32_t>(page / sizeof(std::int32_t));
  ShadowEngine engine(full_layout(block), std::uint64_t{1} << 22);
  ObjectStore& store = engine.allocator().store();
  std::mt19937_64 random(7);
  const auto tokens = random_tokens(random, 3 * block + 1);
  const std::vector<std::int32_t> two(tokens.begin(), tokens.begin() + 2 * block);
  engine.turn(tokens);
  const AdmitResult reader = engine.admit(tokens);
  ASSERT_EQ(reader.report.num_history_tokens, 3 * block);
  const auto keys = reader.sequence->hashed_prefix()->keys;
  const std::uint32_t instance = engine.space()->instance.load()->id;
  std::vector<NodeId> pinned;
  for (const Key128& key : keys) pinned.push_back(store.lookup(key, 0, instance).node);
  ASSERT_EQ(engine.allocator().quarantine(tokens, engine.space(), 2 * block, 0, LossReason::kChecksum), 2u);
  engine.turn(two);
  const NodeId equal = store.lookup(keys[1], 0, instance).node;
  ASSERT_NE(equal, 0u);
  ASSERT_NE(equal, pinned[1]);

  void* const body = store.nodes().tokens(equal).data();
  ASSERT_EQ(reinterpret_cast<std::uintptr_t>(body) % page, 0u);
  ASSERT_EQ(mprotect(body, page, PROT_NONE), 0);
  for (const bool compare_all : {true, false}) {
    std::vector<NodeId> seen;
    EXPECT_EQ(store.gather(pinned[2], keys, tokens.data(), compare_all,
                           [&](std::uint32_t, NodeId node, std::uint8_t) { seen.push_back(node); }),
              2u)
        << "the quarantine has taken it from there on";
    EXPECT_EQ(seen, std::vector<NodeId>{pinned[0]});
  }
  ASSERT_EQ(mprotect(body, page, PROT_READ | PROT_WRITE), 0);
  engine.allocator().check_invariants();
}

}  // namespace
}  // namespace hetkv::testing
