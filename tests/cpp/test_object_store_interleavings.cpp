// The interleavings of the object store that the protocol names, each forced by stopping a thread in the middle.
#include <gtest/gtest.h>

#include <vector>

#include "stop_thread.h"
#include "store_fixture.h"

namespace hetkv::testing {
namespace {

// A child counts in its parent's word until it is gone, so a parent can never be taken from under it.
TEST_F(StoreTest, TheParentStaysWhileItsChildIsBeingEvicted) {
  const auto text = tokens(70, 2);
  const auto nodes = publish_all(text);
  for (const char* point : {"evict: before the claim", "evict: claimed"}) {
    StoppedThread evictor(point, [&] { store.evict_node(nodes[1], gen(nodes[1])); });
    ASSERT_TRUE(evictor.stopped()) << point;
    EXPECT_FALSE(store.evict_node(nodes[0], gen(nodes[0]))) << point;
    EXPECT_TRUE(store.node_ok(nodes[0])) << point;
    evictor.finish();
    publish_all(text);
  }
  store.check_invariants();
}

// "Look for an equal node, else insert" is one step: with one publisher in it, another is told to come back.
TEST_F(StoreTest, OnlyOneOfTwoPublishersInserts) {
  const auto text = tokens(71, 1);
  const auto chain = keys(text);
  for (const char* point :
       {"publish: writer bit held", "publish: no equal node", "publish: before the seal", "publish: sealed, not inserted"}) {
    PublishStatus first{}, second{};
    NodeId a = 0, b = 0;
    StoppedThread publisher(point, [&] { first = publish(content(text, chain, 1, 0), &a); });
    ASSERT_TRUE(publisher.stopped()) << point;
    second = publish(content(text, chain, 1, 0), &b);
    EXPECT_EQ(second, PublishStatus::kBusy) << point;
    EXPECT_EQ(find(chain, 1).node, 0u) << "not visible before the slot is stored";
    publisher.finish();
    EXPECT_EQ(first, PublishStatus::kPublished);
    EXPECT_EQ(store.live_nodes(), 1u) << point;
    if (b != 0) store.unpin_node(b);
    store.unpin_node(a);
    store.evict_coldest_history(true);
    if (second == PublishStatus::kPublished) store.evict_coldest_history(true);
  }
}

// A quarantine that passes while the child is FILLING wins: its seal fails, and it undoes what it counted.
TEST_F(StoreTest, AQuarantineBeatsTheSealOfAChild) {
  for (const char* point : {"publish: no equal node", "publish: before the seal", "publish: sealed, not inserted"}) {
    const auto text = tokens(72, 2);
    const auto chain = keys(text);
    NodeId parent = 0, child = 0;
    ASSERT_EQ(publish(content(text, chain, 1, 0), &parent), PublishStatus::kPublished);
    PublishStatus status{};
    StoppedThread publisher(point, [&] { status = publish(content(text, chain, 2, parent), &child); });
    ASSERT_TRUE(publisher.stopped()) << point;
    EXPECT_GE(store.quarantine_node(parent, gen(parent), LossReason::kChecksum, 0), 1u);
    publisher.finish();
    if (child != 0) {  // sealed before the quarantine came: broken with its parent
      EXPECT_FALSE(store.node_ok(child)) << point;
      EXPECT_STREQ(point, "publish: sealed, not inserted");
      store.unpin_node(child);
    } else {
      EXPECT_EQ(status, PublishStatus::kParentBroken) << point;
    }
    EXPECT_EQ(find(chain, 2).node, 0u) << point;
    store.unpin_node(parent);
    EXPECT_EQ(store.live_nodes(), 0u) << point;
    store.check_invariants();
  }
}

TEST_F(StoreTest, BesideAnEvictionTheKeyIsBusyAndThenFree) {
  const auto text = tokens(73, 1);
  const auto chain = keys(text);
  const NodeId node = publish_all(text)[0];
  StoppedThread evictor("evict: claimed", [&] { store.evict_node(node, gen(node)); });
  ASSERT_TRUE(evictor.stopped());
  EXPECT_EQ(find(chain, 1).node, 0u) << "out of sight at the claim";
  NodeId again = 0;
  EXPECT_EQ(publish(content(text, chain, 1, 0), &again), PublishStatus::kBusy);
  evictor.finish();
  EXPECT_EQ(publish(content(text, chain, 1, 0), &again), PublishStatus::kPublished);
  store.unpin_node(again);
  store.check_invariants();
}

// Two may want to reap a broken node. The late one must not touch what its record serves by then.
TEST_F(StoreTest, ALateReaperLeavesTheRecycledRecordAlone) {
  const auto text = tokens(74, 2), other = tokens(75, 2);
  const auto chain = keys(text);
  const auto nodes = publish_all(text);
  ASSERT_TRUE(store.pin_node(find(chain, 2), chain[1], 0, instance(), 2));
  store.quarantine_node(nodes[1], gen(nodes[1]), LossReason::kChecksum, 0);
  StoppedThread reader("release: to reap", [&] { store.unpin_node(nodes[1]); });
  ASSERT_TRUE(reader.stopped());
  ASSERT_TRUE(store.evict_node(nodes[1], gen(nodes[1]))) << "the other reaper";
  const auto fresh = publish_all(other);
  ASSERT_EQ(fresh[0], nodes[1]) << "the record serves again";
  ASSERT_TRUE(store.evict_node(fresh[1], gen(fresh[1])));  // now a leaf that nobody pins
  reader.finish();
  EXPECT_NE(store.lookup(keys(other)[0], 0, instance()).node, 0u);
  store.check_invariants();
}

// The bytes of a point go back to the namespace that paid, even if the node's record serves another one meanwhile.
TEST_F(StoreTest, APointsBytesGoBackToItsOwnNamespace) {
  Namespace* other = spaces.intern({{"salt", "x"}});
  const NodeId node = publish_all(tokens(76, 1))[0];
  ASSERT_TRUE(add_point(node));
  StoppedThread evictor("evict: point claimed", [&] { store.evict_point(node, 0, point_gen(node)); });
  ASSERT_TRUE(evictor.stopped());
  ASSERT_TRUE(store.evict_node(node, gen(node)));
  ASSERT_EQ(publish_all(tokens(77, 1), other)[0], node);
  evictor.finish();
  EXPECT_EQ(space->used_bytes, 0);
  EXPECT_EQ(other->used_bytes, static_cast<std::int64_t>(layout.group(0).block_bytes));
  store.check_invariants();
}

// What lies in the shard of a thread that stopped there is found by looking at the nodes themselves.
TEST_F(StoreTest, AStoppedThreadHidesNoVictims) {
  for (std::uint64_t i = 0; i < 20; ++i) {
    const NodeId node = publish_all(tokens(80 + i, 1))[0];
    ASSERT_TRUE(add_point(node));
  }
  for (int kind = 0; kind < 2; ++kind) {
    StoppedThread evictor("queue: in a shard, popping",
                          [&] { kind == 0 ? store.evict_coldest_point(0, false) : store.evict_coldest_history(false); });
    ASSERT_TRUE(evictor.stopped());
    const int most = 20 - 1;  // the stopped one has one in hand
    int gone = 0;
    while (kind == 0 ? store.evict_coldest_point(0, true) : store.evict_coldest_history(true)) ++gone;
    EXPECT_GE(gone, most);
  }
}

}  // namespace
}  // namespace hetkv::testing
