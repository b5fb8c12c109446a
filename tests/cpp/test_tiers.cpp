// What goes down to host and disk comes back bit for bit, or not at all. Real files; every row that R(p) names is checked after every
// admission by the engine.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "fake_device.h"
#include "scenario_engine.h"
#include "temporary_folder.h"

namespace hetkv::testing {
namespace {

AllocatorConfig with_disk(const TemporaryFolder& folder, AllocatorConfig config = {}) {
  config.lower.disk.emplace();
  config.lower.disk->directory.path = folder.store();
  return config;
}

AllocatorConfig with_host(std::uint64_t bytes, AllocatorConfig config = {}) {
  config.lower.host.emplace();
  config.lower.host->arena.bytes = bytes;
  return config;
}

std::vector<std::filesystem::path> bundles(const TemporaryFolder& folder, const std::string& part) {
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.store())) {
    if (entry.path().filename().string().find("-" + part + "-") != std::string::npos) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  return found;
}

// The history bundle at a depth (in blocks).
std::filesystem::path history_at(const TemporaryFolder& folder, std::uint32_t depth) {
  std::ostringstream text;
  text << "-h-" << std::hex << depth << "-";
  for (const auto& path : bundles(folder, "h")) {
    if (path.filename().string().find(text.str()) != std::string::npos) return path;
  }
  ADD_FAILURE() << "no history bundle at depth " << depth;
  return {};
}

void flip(const std::filesystem::path& path, std::uint64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(at));
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

const std::vector<std::pair<std::string, CacheLayout (*)(std::uint32_t)>> kLayouts{
    {"full", [](std::uint32_t b) { return full_layout(b); }},
    {"window", [](std::uint32_t b) { return window_layout(b); }},
    {"v4", [](std::uint32_t b) { return v4_layout(b); }},
    {"snapshot", [](std::uint32_t b) { return snapshot_layout(b); }}};

class EveryLayout : public ::testing::TestWithParam<std::size_t> {
 protected:
  CacheLayout layout() const { return kLayouts[GetParam()].second(16); }
};
INSTANTIATE_TEST_SUITE_P(Layouts, EveryLayout, ::testing::Range<std::size_t>(0, kLayouts.size()),
                         [](const auto& of) { return kLayouts[of.param].first; });

TEST_P(EveryLayout, ARestartFindsWhatWasStored) {
  const TemporaryFolder folder;
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) prompts.push_back(text(seed, 200 + 37 * seed));
  std::vector<std::int64_t> resident;
  {
    ShadowEngine engine(layout(), 4 * kMiB, with_disk(folder, keep("all")));
    for (const auto& prompt : prompts) engine.turn(prompt);
    for (const auto& prompt : prompts) resident.push_back(probe(engine, prompt).num_recoverable_tokens);
    engine.allocator().flush();
  }
  ShadowEngine engine(layout(), 4 * kMiB, with_disk(folder, keep("all")));
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(probe(engine, prompts[i]).num_recoverable_tokens, resident[i]);
    EXPECT_EQ(probe(engine, prompts[i]).num_restored_tokens, resident[i]);
    AdmitResult result = engine.admit(prompts[i]);
    ASSERT_TRUE(result.sequence);
    EXPECT_EQ(result.report.num_recoverable_tokens, resident[i]) << result.report.to_string(engine.allocator().layout());
    EXPECT_EQ(result.report.num_restored_tokens, resident[i]);
    EXPECT_GT(result.report.restore_bytes, 0U);
    EXPECT_TRUE(engine.run(*result.sequence, prompts[i], static_cast<std::int64_t>(prompts[i].size())));
    result.sequence->free(true);
    EXPECT_EQ(engine.admit(prompts[i]).report.num_restored_tokens, 0) << "it is resident now";
  }
  engine.allocator().check_invariants();
}

TEST_P(EveryLayout, TheHostTierHoldsWhatTheDeviceLost) {
  ShadowEngine engine(layout(), kMiB, with_host(8 * kMiB, keep("all")));
  const auto prompt = text(1, 400);
  engine.turn(prompt);
  const std::int64_t before = probe(engine, prompt).num_recoverable_tokens;
  engine.allocator().flush();
  for (const Group& group : engine.allocator().layout().groups()) engine.allocator().evict(group.spec.kind, 1000);
  EXPECT_EQ(engine.allocator().store().live_nodes(), 0U);
  AdmitResult result = engine.admit(prompt);
  EXPECT_EQ(result.report.num_recoverable_tokens, before);
  EXPECT_EQ(result.report.num_restored_tokens, before);
  EXPECT_TRUE(engine.run(*result.sequence, prompt, 400));
  result.sequence->free(true);
  engine.allocator().check_invariants();
}

// Device, host and disk under pressure: small arenas, many conversations that come back. The engine checks every resume.
TEST_P(EveryLayout, ConversationsThatComeBackUnderPressure) {
  const TemporaryFolder folder;
  AllocatorConfig config = with_disk(folder, with_host(kMiB / 4, keep("adaptive")));
  config.lower.disk->directory.capacity_bytes = 64 * kMiB;
  ShadowEngine engine(layout(), kMiB / 8, config);
  std::mt19937_64 random(7);
  std::vector<std::vector<std::int32_t>> talks(24);
  std::int64_t restored = 0;
  for (int turn = 0; turn < 150; ++turn) {
    auto& talk = talks[random() % talks.size()];
    const auto more = random_tokens(random, 20 + random() % 120);
    if (talk.size() > 600) talk.clear();
    talk.insert(talk.end(), more.begin(), more.end());
    restored += engine.turn(talk, random() % 20).num_restored_tokens;
    if (turn % 10 == 0) engine.allocator().flush();
  }
  EXPECT_GT(restored, 0);
  engine.allocator().flush();
  engine.allocator().check_invariants();
  for (const Group& group : engine.allocator().layout().groups()) engine.allocator().evict(group.spec.kind, 100000);
  EXPECT_EQ(engine.allocator().store().live_nodes(), 0U);
  EXPECT_EQ(engine.space()->used_bytes.load(), 0) << "what was restored was charged once, and given back once";
}

// Several threads, each with its conversations, over one small device, one host arena and one folder.
TEST_P(EveryLayout, ThreadsShareTheTiers) {
  const TemporaryFolder folder;
  AllocatorConfig config = with_disk(folder, with_host(kMiB / 4, keep("adaptive")));
  config.lower.disk->directory.capacity_bytes = 16 * kMiB;
  ShadowEngine engine(layout(), kMiB / 4, config);
  std::atomic<std::int64_t> restored{0};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int turn = 0; turn < 60; ++turn) {
        // Prompts of a common pool: threads meet on prefixes, restores and evictions.
        auto prompt = text(random() % 8, 64 + random() % 300);
        bool refused = false;
        if (random() % 8 == 0) {
          AdmitResult aborted = engine.allocator().admit(prompt, engine.space());  // ended while its restore may run
          continue;
        }
        restored += engine.turn(prompt, 0, nullptr, &refused).num_restored_tokens;
        if (random() % 6 == 0) engine.allocator().evict(ObjectKind::kSwaWindow, 4);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  engine.allocator().flush();
  engine.allocator().check_invariants();
  EXPECT_GE(restored.load(), 0);
}

TEST(Tiers, OneFlippedByteCostsThePrefixFromThereOn) {
  const TemporaryFolder folder;
  const auto prompt = text(1, 200);
  {
    ShadowEngine engine(full_layout(), 4 * kMiB, with_disk(folder));
    engine.turn(prompt);
  }
  flip(history_at(folder, 6), kBundlePage + 17);
  ShadowEngine engine(full_layout(), 4 * kMiB, with_disk(folder));
  AdmitResult result = engine.admit(prompt);
  EXPECT_EQ(result.report.num_recoverable_tokens, 5 * 16);
  const auto stats = engine.allocator().lower()->directory()->stats();
  EXPECT_EQ(stats.reads[static_cast<std::size_t>(DiskOutcome::kChecksum)], 1U);
  // The bad bundle is gone; what the request computes takes its place.
  EXPECT_TRUE(engine.run(*result.sequence, prompt, 200));
  result.sequence->free(true);
  engine.allocator().flush();
  engine.allocator().evict(ObjectKind::kFullKv, 1000);
  EXPECT_EQ(engine.admit(prompt).report.num_recoverable_tokens, 12 * 16);
}

// H5: a file deleted behind the index is a miss.
TEST(Tiers, ABundleThatVanishedIsAMiss) {
  const TemporaryFolder folder;
  const auto prompt = text(1, 200);
  {
    ShadowEngine engine(full_layout(), 4 * kMiB, with_disk(folder));
    engine.turn(prompt);
  }
  ShadowEngine engine(full_layout(), 4 * kMiB, with_disk(folder));
  std::filesystem::remove(history_at(folder, 4));
  EXPECT_EQ(engine.admit(prompt).report.num_recoverable_tokens, 3 * 16);
}

// G3, G4: other weights do not match what lies on disk, and the report says so.
TEST(Tiers, OtherWeightsDoNotMatchOnDisk) {
  const TemporaryFolder folder;
  const auto prompt = text(1, 200);
  AllocatorConfig config = with_disk(folder);
  config.model_version = "w0";
  {
    ShadowEngine engine(full_layout(), 4 * kMiB, config);
    engine.turn(prompt);
  }
  config.model_version = "w1";
  {
    ShadowEngine engine(full_layout(), 4 * kMiB, config);
    const HitReport report = probe(engine, prompt);
    EXPECT_EQ(report.num_recoverable_tokens, 0);
    EXPECT_EQ(report.num_hash_hit_tokens, 192);
    ASSERT_NE(loss_of(report, LossReason::kModelVersion), nullptr);
    EXPECT_EQ(loss_of(report, LossReason::kModelVersion)->tokens, 192);
    engine.allocator().set_model_version("w0");
    EXPECT_EQ(engine.admit(prompt).report.num_restored_tokens, 192);
  }
  config.model_version = "w0";
  config.abi = {{"window_attention", 2}};
  ShadowEngine engine(full_layout(), 4 * kMiB, config);
  EXPECT_NE(loss_of(probe(engine, prompt), LossReason::kAbi), nullptr);
}

TEST(Tiers, AClearedNamespaceStaysClearedAfterARestart) {
  const TemporaryFolder folder;
  const auto prompt = text(1, 200);
  {
    ShadowEngine engine(full_layout(), 4 * kMiB, with_disk(folder));
    engine.turn(prompt);
    Namespace* other = engine.allocator().space({{"salt", "x"}});
    engine.turn(prompt, 0, other);
    engine.allocator().flush();
    engine.allocator().clear(engine.space());
    EXPECT_EQ(probe(engine, prompt).num_recoverable_tokens, 0);
    EXPECT_EQ(engine.allocator().lower()->directory()->bundles(), 12U) << "those of the other namespace";
  }
  ShadowEngine engine(full_layout(), 4 * kMiB, with_disk(folder));
  EXPECT_EQ(probe(engine, prompt).num_recoverable_tokens, 0);
  EXPECT_EQ(engine.admit(prompt, {}, engine.allocator().space({{"salt", "x"}})).report.num_recoverable_tokens, 192);
}

// A3, A6: history without the state that belongs to it is no hit.
TEST(Tiers, HistoryWithoutItsPointsIsNotRestored) {
  const TemporaryFolder folder;
  const auto prompt = text(1, 200);
  AllocatorConfig config = with_disk(folder, keep("all"));
  config.lower.disk->spill.points = SpillPolicy::Points::kNone;
  {
    ShadowEngine engine(v4_layout(), 4 * kMiB, config);
    engine.turn(prompt);
  }
  ShadowEngine engine(v4_layout(), 4 * kMiB, config);
  const HitReport report = engine.admit(prompt).report;
  EXPECT_EQ(report.num_hash_hit_tokens, 192);
  EXPECT_EQ(report.num_recoverable_tokens, 0);
}

// D8: an admission that is aborted while its restore runs: the blocks stay the restore's until it ends, and it seals.
TEST(Tiers, AnAbortedRestoreRunsOnAndSeals) {
  const auto device = std::make_shared<FakeDevice>();
  AllocatorConfig config = with_host(4 * kMiB);
  config.lower.engine = device;
  ShadowEngine engine(full_layout(), kMiB, config);
  device->run();
  const auto prompt = text(1, 100);
  engine.turn(prompt);
  engine.allocator().flush();
  engine.allocator().evict(ObjectKind::kFullKv, 1000);

  const auto held = std::make_shared<FakeDevice>();
  ShadowEngine second(full_layout(), kMiB, [&] {
    AllocatorConfig c = with_host(4 * kMiB);
    c.lower.engine = held;
    return c;
  }());
  std::thread([&] {
    second.turn(prompt);
    held->wait_for(1);
    held->run();
    second.allocator().flush();
  }).join();
  EXPECT_EQ(engine.admit(prompt).report.num_restored_tokens, 96);
}

// D11, H3: while a copy is under way its source cannot go, its target is not visible, and neither is reused.
TEST(Tiers, NothingIsReadOrReusedBeforeItsFence) {
  const auto device = std::make_shared<FakeDevice>();
  AllocatorConfig config = with_host(4 * kMiB);
  config.lower.engine = device;
  ShadowEngine engine(full_layout(), kMiB, config);
  const auto prompt = text(1, 64);
  engine.turn(prompt);
  device->wait_for(1);
  // Spilling: the copy of the first block hangs; the device may not evict it.
  engine.allocator().evict(ObjectKind::kFullKv, 1000);
  EXPECT_GE(engine.allocator().store().live_nodes(), 1U);
  EXPECT_EQ(engine.allocator().lower()->host()->memory().store().live_nodes(), 0U) << "not visible before its fence";
  device->run();
  engine.turn(prompt);
  engine.allocator().flush();
  EXPECT_EQ(engine.allocator().lower()->host()->memory().store().live_nodes(), 4U);
  engine.allocator().evict(ObjectKind::kFullKv, 1000);
  EXPECT_EQ(engine.allocator().store().live_nodes(), 0U);
  device->hold();
  const std::size_t before = device->submitted();

  // Restoring: the copies hang; the host may not evict the source, and the device shows nothing of them.
  auto more = prompt;
  more.resize(80, 7);
  AdmitResult pending = engine.allocator().admit(more, engine.space());
  ASSERT_TRUE(pending.sequence->pending());
  device->wait_for(before + 1);
  EXPECT_EQ(engine.allocator().store().live_nodes(), 0U);
  MemoryTier& host = engine.allocator().lower()->host()->memory();
  host.evict(ObjectKind::kFullKv, 1000);
  EXPECT_GE(host.store().live_nodes(), 1U);
  EXPECT_GT(probe(engine, more).num_recoverable_tokens, 0) << "a forecast";
  const std::uint64_t reserved = live(engine, 0);
  // Aborted: the blocks under way stay out of reach.
  pending.sequence.reset();
  EXPECT_EQ(live(engine, 0), reserved - 1) << "only the block that nothing was loaded into came back";
  device->run();
  AdmitResult again = engine.admit(more);
  EXPECT_GE(again.report.num_recoverable_tokens, 16);
  engine.allocator().flush();
}

// A load that fails: its fence does, so what is below it goes, and the request computes it.
TEST(Tiers, AFailedFenceCutsThePrefix) {
  const auto device = std::make_shared<FakeDevice>();
  AllocatorConfig config = with_host(4 * kMiB);
  config.lower.engine = device;
  ShadowEngine engine(full_layout(), kMiB, config);
  const auto prompt = text(1, 70);
  std::thread complete([&] {
    for (std::size_t i = 0; i < 4; ++i) {
      device->wait_for(i + 1);
      device->complete(i);
    }
  });
  engine.turn(prompt);
  complete.join();
  engine.allocator().flush();
  engine.allocator().evict(ObjectKind::kFullKv, 1000);
  AdmitResult result = engine.allocator().admit(prompt, engine.space());
  ASSERT_TRUE(result.sequence->pending());
  std::thread loads([&] {
    for (std::size_t i = 4; i < 6; ++i) {
      device->wait_for(i + 1);
      device->complete(i);
    }
    device->wait_for(7);
    device->complete(6, FenceStatus::kFailed);
  });
  engine.finish(result);
  loads.join();
  device->run();
  ASSERT_TRUE(result.sequence);
  engine.check_resume(*result.sequence, prompt);
  EXPECT_EQ(result.report.num_recoverable_tokens, 32);
  ASSERT_NE(loss_of(result.report, LossReason::kNotRestored), nullptr);
  EXPECT_TRUE(engine.run(*result.sequence, prompt, 70));
  result.sequence->free(true);
  engine.allocator().flush();
  engine.allocator().check_invariants();
}

// Two requests for one prefix: it is loaded once.
TEST(Tiers, RequestsForTheSamePrefixShareItsRestore) {
  const TemporaryFolder folder;
  const auto prompt = text(1, 400);
  {
    ShadowEngine engine(v4_layout(), 4 * kMiB, with_disk(folder, keep("all")));
    engine.turn(prompt);
  }
  ShadowEngine engine(v4_layout(), 4 * kMiB, with_disk(folder, keep("all")));
  std::vector<AdmitResult> results;
  for (int i = 0; i < 4; ++i) results.push_back(engine.allocator().admit(prompt, engine.space()));
  std::uint64_t bytes = 0;
  for (AdmitResult& result : results) {
    engine.finish(result);
    engine.check_resume(*result.sequence, prompt);
    EXPECT_EQ(result.report.num_recoverable_tokens, 384);
    bytes += result.report.restore_bytes;
  }
  const auto& counters = engine.allocator().lower()->restorer().counters();
  EXPECT_EQ(bytes, counters.bytes.load());
  EXPECT_EQ(counters.outcomes[static_cast<std::size_t>(LoadOutcome::kLoaded)].load(), counters.objects.load());
  EXPECT_LT(counters.objects.load(), 2U * engine.allocator().lower()->directory()->bundles()) << "not once per request";
  results.clear();
  engine.allocator().check_invariants();
}

// What is loaded needs room like anything else; without it the request computes.
TEST(Tiers, ARestoreThatDoesNotFitIsNotMade) {
  const TemporaryFolder folder;
  const auto prompt = text(1, 200);
  {
    ShadowEngine engine(full_layout(), 4 * kMiB, with_disk(folder));
    engine.turn(prompt);
  }
  AllocatorConfig config = with_disk(folder, keep("all", 512));
  ShadowEngine engine(full_layout(), 512 * 18, config);
  AdmitResult a = engine.admit(text(2, 100));
  ASSERT_TRUE(a.sequence);
  const AdmitResult b = engine.allocator().admit(prompt, engine.space());
  EXPECT_EQ(b.refusal.cause, Refusal::Cause::kNoRoom);
  a.sequence.reset();
  EXPECT_EQ(engine.admit(prompt).report.num_restored_tokens, 192);
}

TEST(Tiers, ACapacityKeepsWhatWasUsedLast) {
  const TemporaryFolder folder;
  AllocatorConfig config = with_disk(folder);
  const std::uint64_t bundle = 2 * kBundlePage;
  config.lower.disk->directory.capacity_bytes = 40 * bundle;
  ShadowEngine engine(full_layout(), 4 * kMiB, config);
  const auto kept = text(1, 16 * 10 + 1);
  engine.turn(kept);
  engine.allocator().flush();
  for (std::uint64_t seed = 2; seed < 12; ++seed) {
    engine.turn(text(seed, 16 * 10 + 1));
    engine.turn(kept);
    engine.allocator().flush();
    EXPECT_LE(engine.allocator().lower()->directory()->used_bytes(), 40 * bundle);
  }
  engine.allocator().evict(ObjectKind::kFullKv, 10000);
  EXPECT_EQ(engine.admit(kept).report.num_recoverable_tokens, 160);
  EXPECT_EQ(engine.admit(text(2, 161)).report.num_recoverable_tokens, 0);
}

// A disk that does not answer a write: requests go on, and what lies there can still be loaded.
TEST(Tiers, AStalledStoreHoldsUpNeitherRequestsNorLoads) {
  class Stalled final : public FileSystem {
   public:
    std::int64_t pwrite(int file, const std::byte* from, std::size_t bytes, std::uint64_t at) override {
      if (stalled) {
        ++waiting;
        stalled.wait(true);
      }
      return FileSystem::pwrite(file, from, bytes, at);
    }
    std::atomic<bool> stalled{false};
    std::atomic<int> waiting{0};
  };
  const TemporaryFolder folder;
  Stalled files;
  AllocatorConfig config = with_disk(folder);
  config.lower.disk->directory.files = &files;
  ShadowEngine engine(full_layout(), 64 * 1024, config);
  const auto stored = text(1, 200);
  engine.turn(stored);
  engine.allocator().flush();
  files.stalled = true;
  for (std::uint64_t seed = 2; seed < 40; ++seed) {
    bool refused = false;
    engine.turn(text(seed, 200), 0, nullptr, &refused);
    EXPECT_FALSE(refused) << seed;
  }
  while (files.waiting == 0) std::this_thread::yield();
  engine.allocator().evict(ObjectKind::kFullKv, 100000);
  EXPECT_EQ(engine.admit(stored).report.num_restored_tokens, 192);
  files.stalled = false;
  files.stalled.notify_all();
  engine.allocator().flush();
}

// A full disk, one that fails, one that may not be written: requests never notice.
TEST(Tiers, ADiskThatCannotBeWrittenIsNoTier) {
  class Failing final : public FileSystem {
   public:
    std::int64_t pwrite(int, const std::byte*, std::size_t, std::uint64_t) override { return -error.load(); }
    std::atomic<int> error{0};
  };
  for (const int error : {28 /* ENOSPC */, 5 /* EIO */, 13 /* EACCES */}) {
    const TemporaryFolder folder;
    {
      ShadowEngine makes_the_folder(full_layout(), kMiB, with_disk(folder));
    }
    Failing files;
    files.error = error;
    AllocatorConfig config = with_disk(folder);
    config.lower.disk->directory.files = &files;
    ShadowEngine engine(full_layout(), kMiB, config);
    engine.turn(text(1, 200));
    engine.allocator().flush();
    EXPECT_EQ(engine.allocator().lower()->directory()->bundles(), 0U);
    const Spiller::Counters& counters = engine.allocator().lower()->spiller(0)->counters();
    EXPECT_EQ(counters.failed + counters.no_room + counters.no_parent, 12U) << "each was tried once";
    EXPECT_EQ(engine.admit(text(1, 200)).report.num_recoverable_tokens, 192);
  }
}

TEST(Tiers, WritingOnEvictionRunsAhead) {
  const TemporaryFolder folder;
  AllocatorConfig config = with_disk(folder);
  config.lower.disk->spill.write = SpillPolicy::Write::kOnEviction;
  ShadowEngine engine(full_layout(), kMiB, config);
  engine.turn(text(1, 160));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(engine.allocator().lower()->directory()->bundles(), 0U) << "there is room";
  engine.allocator().flush();
  EXPECT_EQ(engine.allocator().lower()->directory()->bundles(), 10U);
}

}  // namespace
}  // namespace hetkv::testing
