// Eviction of many objects for one reservation: whole slabs, whole chains, exactly as many as are short; and what a refusal names.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <vector>

#include "base/test_point.h"
#include "shadow_engine.h"

namespace hetkv::testing {
namespace {

constexpr std::uint64_t kSlab = 2048;  // four blocks of full_kv

std::vector<std::int32_t> text(std::uint64_t seed, std::size_t tokens) {
  std::mt19937_64 random(seed);
  return random_tokens(random, tokens);
}

AllocatorConfig keep_none() {
  AllocatorConfig config;
  config.retention = RetentionPolicy::parse("none");
  config.arena.slab_bytes = kSlab;
  return config;
}

// full_kv, four blocks to a slab, beside a group of which one block fills a slab.
CacheLayout slab_sized(GroupSpec spec) {
  spec.fields = {FieldSpec{"v", DType::kFloat32, {spec.retention == Retention::kWindow ? 16U : 256U}, false}};
  return CacheLayout::build("slab_sized", 16, {make_group("full", ObjectKind::kFullKv, Retention::kHistory), spec});
}

std::int64_t hit(ShadowEngine& engine, const std::vector<std::int32_t>& tokens) {
  return engine.allocator().probe(tokens, engine.space()).num_history_tokens;
}

// Four chains of two blocks that lie across each other: all first blocks in slab 2, all second blocks in slab 3. Slab 0 has the
// scratch block, so it can never be drained, and three older texts; slab 1 is the states' scratch; slab 4 has one newer text.
class AcrossSlabs : public ::testing::Test {
 protected:
  AcrossSlabs()
      : engine(slab_sized(make_group("state", ObjectKind::kRecurrentState, Retention::kSnapshot)), 5 * kSlab, keep_none()) {
    EXPECT_EQ(engine.allocator().layout().group(0).block_bytes, kSlab / 4);
    EXPECT_EQ(engine.allocator().layout().group(1).block_bytes, kSlab);
    for (std::uint64_t seed = 100; seed < 103; ++seed) engine.turn(text(seed, 16));
    std::vector<AdmitResult> running;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      chains.push_back(text(seed, 32));
      running.push_back(engine.admit(chains.back()));
    }
    for (const std::int64_t end : {16, 32}) {
      for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(engine.run(*running[i].sequence, chains[i], end));
    }
    for (std::size_t i = 0; i < 4; ++i) {
      const auto table = running[i].sequence->block_table(0);
      EXPECT_EQ(static_cast<std::uint64_t>(table[0]) * kOffsetUnit / kSlab, 2U);
      EXPECT_EQ(static_cast<std::uint64_t>(table[1]) * kOffsetUnit / kSlab, 3U);
    }
    running.clear();
    engine.turn(text(200, 16));
  }
  // Needs a slab for its state, and finds none free.
  AdmitResult request_with_state() {
    AdmitOptions options;
    options.live_state = true;
    return engine.admit(text(300, 16), options);
  }

  ShadowEngine engine;
  std::vector<std::vector<std::int32_t>> chains;
};

std::atomic<int> sweeps{0};

TEST_F(AcrossSlabs, ASlabIsDrainedWithOneSweep) {
  sweeps = 0;
  test_point_callback.store([](const char* name) {
    if (std::strcmp(name, "evict: looking for all that is below") == 0) ++sweeps;
  });
  const AdmitResult result = request_with_state();
  test_point_callback.store(nullptr);
  ASSERT_TRUE(result.sequence);
  EXPECT_EQ(sweeps, 1) << "its four blocks have four subtrees";
  for (const auto& chain : chains) EXPECT_EQ(hit(engine, chain), 0) << "what hangs on a drained block goes with it";
  EXPECT_EQ(hit(engine, text(100, 16)), 16);
  engine.allocator().check_invariants();
}

TEST_F(AcrossSlabs, ASlabThatCannotBeDrainedLosesNothing) {
  // Pins the second block of the last chain: the first has no pin of its own, and looks drainable.
  ObjectStore& store = engine.allocator().store();
  const auto keys = engine.admit(chains[3]).sequence->hashed_prefix()->keys;
  const std::uint32_t instance = engine.space()->instance.load()->id;
  const Found second = store.lookup(keys[1], 0, instance);
  ASSERT_TRUE(store.pin_node(second, keys[1], 0, instance, 2));
  request_with_state();
  for (const auto& chain : chains) EXPECT_EQ(hit(engine, chain), 32);
  store.unpin_node(second.node);
  engine.allocator().check_invariants();
}

// Nothing can be drained: slab 0 has the scratch block, slab 1 a private one. Slab 2 is empty, but promised to credits; without two
// idle objects of slab 0 the credits need it no more.
TEST(EvictionBatches, AsManyObjectsAsThePromisedSlabNeeds) {
  ShadowEngine engine(slab_sized(window_group(17)), 9 * kSlab, keep_none());
  KvAllocator& allocator = engine.allocator();
  ASSERT_EQ(allocator.layout().group(1).block_bytes, kSlab);
  const auto a = text(1, 64), idle = text(2, 16), idle_too = text(3, 16);
  AdmitResult oldest = engine.admit(std::span(a).first(16));
  ASSERT_TRUE(oldest.sequence);
  Sequence& s = *oldest.sequence;
  StepStamp stamp;
  ASSERT_FALSE(s.schedule(16, &stamp));
  engine.turn(idle);
  engine.turn(idle_too);
  const AdmitResult credits = engine.admit(text(4, 64));  // takes none of its blocks
  ASSERT_TRUE(credits.sequence);
  s.append(std::span(a).subspan(16));
  ASSERT_FALSE(s.schedule(32, &stamp));
  ASSERT_EQ(allocator.arena().free_slabs(), 0u);
  ASSERT_EQ(allocator.arena().usage(0).blocks_reserved, 9u);
  ASSERT_EQ(allocator.arena().usage(0).slabs_owned, 3u);
  ASSERT_EQ(hit(engine, idle) + hit(engine, idle_too), 32);
  EXPECT_FALSE(s.schedule(48, &stamp)) << "a window block, and with it a slab";
  EXPECT_EQ(hit(engine, idle) + hit(engine, idle_too), 0);
  allocator.check_invariants();
}

TEST(EvictionBatches, ColdestChainFirstAndNoMoreThanAsked) {
  ShadowEngine engine(full_layout(), 1 << 16);
  KvAllocator& allocator = engine.allocator();
  const auto a = text(1, 64), b = text(2, 64);
  auto branch = b;
  branch[40] ^= 1;  // leaves b after two blocks
  engine.turn(a);
  engine.turn(b);
  EXPECT_EQ(allocator.evict(ObjectKind::kFullKv, 3), 3u);
  EXPECT_EQ(hit(engine, a), 16);
  EXPECT_EQ(hit(engine, b), 64);
  engine.turn(branch);
  EXPECT_EQ(allocator.evict(ObjectKind::kFullKv, 2), 2u);
  EXPECT_EQ(hit(engine, a), 0);
  EXPECT_EQ(hit(engine, b), 48);
  EXPECT_EQ(allocator.evict(ObjectKind::kFullKv, 1), 1u);
  EXPECT_EQ(hit(engine, b), 32) << "shared with the branch from here on";
  EXPECT_EQ(hit(engine, branch), 64);
  EXPECT_EQ(allocator.evict(ObjectKind::kFullKv, 100), 4u);
  EXPECT_EQ(allocator.store().live_nodes(), 0u);
  allocator.check_invariants();
}

// --- refusals ---

TEST(Refusals, NameTheCapOfTheKindThatIsShort) {
  AllocatorConfig config = keep_none();
  const std::uint64_t block = window_layout().group(1).block_bytes;
  config.arena.limits[static_cast<std::size_t>(ObjectKind::kSwaWindow)].cap_bytes = 6 * block;
  for (const bool lock_free : {true, false}) {
    config.arena.lock_free = lock_free;
    ShadowEngine engine(window_layout(), 1 << 20, config);
    const AdmitResult first = engine.admit(text(1, 48));  // with the scratch block four of six
    ASSERT_TRUE(first.sequence);
    const AdmitResult second = engine.admit(text(2, 48));
    EXPECT_EQ(second.refusal.cause, Refusal::Cause::kNoRoom);
    EXPECT_EQ(second.refusal.pool, 1);
    EXPECT_EQ(second.refusal.need, 3 * block);
    EXPECT_EQ(second.refusal.cap, 6 * block);
    EXPECT_TRUE(second.refusal.retryable);
  }
}

TEST(Refusals, NameTheArenaWhereItIsShort) {
  AllocatorConfig config = keep_none();
  config.arena.limits[static_cast<std::size_t>(ObjectKind::kFullKv)].cap_bytes = 1 << 30;
  ShadowEngine engine(full_layout(), 4 * kSlab, config);
  const AdmitResult first = engine.admit(text(1, 10 * 16));
  ASSERT_TRUE(first.sequence);
  const AdmitResult second = engine.admit(text(2, 10 * 16));
  EXPECT_EQ(second.refusal.cause, Refusal::Cause::kNoRoom);
  EXPECT_EQ(second.refusal.need, 10 * kSlab / 4);
  EXPECT_EQ(second.refusal.cap, engine.allocator().arena().bytes());
}

}  // namespace
}  // namespace hetkv::testing
