// The folder of bundles by itself: every byte flipped, every length cut, faults of the system below, writers that are killed.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

#include "allocator/disk/bundle_directory.h"
#include "allocator/disk/section_codec.h"
#include "allocator/node_store.h"
#include "temporary_folder.h"

namespace hetkv::testing {
namespace {

// Fails as it is told, below everything that hetkv does.
class FaultyFiles final : public FileSystem {
 public:
  std::atomic<int> open_error{0}, read_error{0}, write_error{0}, sync_error{0}, publish_error{0};
  std::atomic<std::size_t> most_at_once{~std::size_t{0}};  // short reads and writes
  std::atomic<bool> interrupted{false};                    // every second call
  std::atomic<int> slow_ms{0};

  int open(const std::string& path, int flags, std::uint32_t mode) override {
    if (open_error != 0) return -open_error;
    return FileSystem::open(path, flags, mode);
  }
  std::int64_t pread(int file, std::byte* to, std::size_t bytes, std::uint64_t at) override {
    if (const std::int64_t code = before(read_error); code != 0) return code;
    return FileSystem::pread(file, to, std::min(bytes, most_at_once.load()), at);
  }
  std::int64_t pwrite(int file, const std::byte* from, std::size_t bytes, std::uint64_t at) override {
    if (const std::int64_t code = before(write_error); code != 0) return code;
    return FileSystem::pwrite(file, from, std::min(bytes, most_at_once.load()), at);
  }
  int sync_data(int file) override { return sync_error != 0 ? -sync_error : FileSystem::sync_data(file); }
  int publish(const std::string& temporary, const std::string& name) override {
    return publish_error != 0 ? -publish_error : FileSystem::publish(temporary, name);
  }

 private:
  std::int64_t before(int error) {
    if (slow_ms > 0) std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms));
    if (interrupted && calls_++ % 2 == 0) return -EINTR;
    return -error;
  }
  std::atomic<unsigned> calls_{0};
};

constexpr std::size_t kTokens = 16;

BundleId id_of(std::uint64_t n, std::uint32_t depth = 1, std::uint8_t part = kHistorySet) {
  BundleId id;
  id.key = {n * 0x9E3779B97F4A7C15u, n};
  id.version = {{11, 12}, {21, 22}, {31, 32}};
  id.space = 5;
  id.part = part;
  id.depth = depth;
  return id;
}

// A bundle whose content follows from its number.
struct Content {
  explicit Content(std::uint64_t n) : first(300), second(5000) {
    std::mt19937_64 random(n);
    for (auto* bytes : {&first, &second}) {
      for (std::byte& b : *bytes) b = static_cast<std::byte>(random() % 7);  // compresses
    }
    meta.parent = {n, n + 1};
    for (std::size_t i = 0; i < kTokens; ++i) meta.tokens.push_back(static_cast<std::int32_t>(n * 100 + i));
    meta.canonical = n % 2 == 0;
    meta.gap_tokens = static_cast<std::uint32_t>(n);
  }
  std::vector<SectionSource> sources() const { return {{0, first.data(), first.size()}, {3, second.data(), second.size()}}; }
  std::vector<std::byte> first, second;
  BundleMeta meta;
};

// Reads bundle n. On kDone everything must be right.
DiskOutcome read(BundleDirectory& directory, const BundleId& id, const Content& content) {
  std::vector<std::byte> first(content.first.size()), second(content.second.size());
  const std::vector<SectionTarget> targets{{0, first.data(), first.size()}, {3, second.data(), second.size()}};
  BundleMeta meta;
  const DiskOutcome outcome = directory.read(id, content.meta.tokens, targets, &meta);
  if (outcome == DiskOutcome::kDone) {
    EXPECT_EQ(first, content.first);
    EXPECT_EQ(second, content.second);
    EXPECT_EQ(meta.tokens, content.meta.tokens);
    EXPECT_EQ(meta.parent, content.meta.parent);
    EXPECT_EQ(meta.canonical, content.meta.canonical);
    EXPECT_EQ(meta.gap_tokens, content.meta.gap_tokens);
  }
  return outcome;
}

DiskConfig at(const TemporaryFolder& folder, FileSystem* files = nullptr) {
  DiskConfig config;
  config.path = folder.store();
  config.files = files;
  return config;
}

std::filesystem::path file_of(const TemporaryFolder& folder, const std::string& part = "-h-") {
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.store())) {
    if (entry.path().filename().string().find(part) != std::string::npos) return entry.path();
  }
  ADD_FAILURE() << "no bundle";
  return {};
}

std::vector<char> bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void put(const std::filesystem::path& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

TEST(Disk, ABundleComesBackAsItWas) {
  for (const Codec codec : {Codec::kNone, Codec::kZstd}) {
    if (codec == Codec::kZstd && !zstd_available()) continue;
    for (const auto sync : {DiskConfig::Sync::kNone, DiskConfig::Sync::kData, DiskConfig::Sync::kDataAndDirectory}) {
      for (const bool direct : {true, false}) {
        const TemporaryFolder folder;
        DiskConfig config = at(folder);
        config.codec = codec;
        config.sync = sync;
        config.direct = direct;
        std::uint64_t seed = 0;
        {
          BundleDirectory directory(config);
          seed = directory.hash_seed();
          EXPECT_EQ(directory.write(id_of(7), Content(7).meta, Content(7).sources()), DiskOutcome::kDone);
          EXPECT_EQ(directory.write(id_of(7), Content(7).meta, Content(7).sources()), DiskOutcome::kAlreadyThere);
          EXPECT_EQ(read(directory, id_of(7), Content(7)), DiskOutcome::kDone);
        }
        BundleDirectory directory(config);
        EXPECT_EQ(directory.hash_seed(), seed);
        EXPECT_EQ(directory.bundles(), 1U);
        EXPECT_EQ(directory.parts(id_of(7).key, id_of(7).version), DiskIndex::kHistoryPart);
        EXPECT_EQ(read(directory, id_of(7), Content(7)), DiskOutcome::kDone);
        EXPECT_EQ(read(directory, id_of(8), Content(8)), DiskOutcome::kMissing);
      }
    }
  }
}

// Every byte that means something is covered; what is not covered are the zeros that fill the last page of a section.
TEST(Disk, EveryFlippedByteIsFound) {
  const TemporaryFolder folder;
  DiskConfig config = at(folder);
  config.direct = false;
  BundleDirectory directory(config);
  const Content content(7);
  ASSERT_EQ(directory.write(id_of(7), content.meta, content.sources()), DiskOutcome::kDone);
  const auto path = file_of(folder);
  const std::vector<char> good = bytes_of(path);
  ASSERT_EQ(good.size(), 4096U + 4096U + 8192U);
  std::size_t found = 0, filling = 0;
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::vector<char> bad = good;
    bad[i] = static_cast<char>(bad[i] ^ (1 << i % 8));
    put(path, bad);
    const DiskOutcome outcome = read(directory, id_of(7), content);
    const bool fills = (i >= 4096 + 300 && i < 8192) || i >= 8192 + 5000;
    EXPECT_EQ(outcome == DiskOutcome::kDone, fills) << "byte " << i << ": " << disk_outcome_name(outcome);
    ++(outcome == DiskOutcome::kDone ? filling : found);
    put(path, good);
    if (outcome != DiskOutcome::kDone) {
      ASSERT_EQ(directory.write(id_of(7), content.meta, content.sources()), DiskOutcome::kAlreadyThere);
    }
  }
  EXPECT_EQ(found, 4096U + 300U + 5000U);
  EXPECT_EQ(read(directory, id_of(7), content), DiskOutcome::kDone);
}

TEST(Disk, EveryTruncationIsFound) {
  const TemporaryFolder folder;
  BundleDirectory directory(at(folder));
  const Content content(7);
  ASSERT_EQ(directory.write(id_of(7), content.meta, content.sources()), DiskOutcome::kDone);
  const auto path = file_of(folder);
  const std::vector<char> good = bytes_of(path);
  for (std::size_t length = 0; length < good.size(); length += 61) {
    put(path, {good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length)});
    EXPECT_EQ(read(directory, id_of(7), content), DiskOutcome::kTruncated) << length;
    ASSERT_EQ(directory.write(id_of(7), content.meta, content.sources()), DiskOutcome::kDone) << "the short one was removed";
  }
}

TEST(Disk, EachFingerprintIsComparedInFull) {
  const TemporaryFolder folder;
  BundleDirectory directory(at(folder));
  const Content content(7);
  const std::vector<std::pair<DiskOutcome, Fingerprint VersionPrints::*>> prints{{DiskOutcome::kLayout, &VersionPrints::layout},
                                                                                 {DiskOutcome::kAbi, &VersionPrints::abi},
                                                                                 {DiskOutcome::kModel, &VersionPrints::model}};
  for (const auto& [outcome, field] : prints) {
    ASSERT_EQ(directory.write(id_of(7), content.meta, content.sources()), DiskOutcome::kDone);
    BundleId other = id_of(7);
    (other.version.*field).low ^= 1;  // the name shows other bits
    EXPECT_EQ(read(directory, other, content), outcome);
  }
}

TEST(Disk, ABundleUnderAnotherNameIsNotTaken) {
  const TemporaryFolder folder;
  const Content content(7);
  {
    BundleDirectory directory(at(folder));
    ASSERT_EQ(directory.write(id_of(7, 1), content.meta, content.sources()), DiskOutcome::kDone);
  }
  const auto path = file_of(folder);
  std::string name = path.filename().string();
  name.replace(name.find("-h-1-"), 5, "-h-2-");
  std::filesystem::rename(path, path.parent_path() / name);
  BundleDirectory directory(at(folder));
  EXPECT_EQ(read(directory, id_of(7, 2), content), DiskOutcome::kKey);
}

TEST(Disk, OtherTokensUnderTheSameKeyAreNotTaken) {
  const TemporaryFolder folder;
  BundleDirectory directory(at(folder));
  Content content(7);
  ASSERT_EQ(directory.write(id_of(7), content.meta, content.sources()), DiskOutcome::kDone);
  content.meta.tokens[3] ^= 1;
  EXPECT_EQ(read(directory, id_of(7), content), DiskOutcome::kTokens);
}

TEST(Disk, FaultsOfTheSystemAreOutcomes) {
  const TemporaryFolder folder;
  FaultyFiles files;
  DiskConfig config = at(folder, &files);
  config.sync = DiskConfig::Sync::kData;
  BundleDirectory directory(config);
  auto write = [&](std::uint64_t n) { return directory.write(id_of(n), Content(n).meta, Content(n).sources()); };
  files.write_error = ENOSPC;
  EXPECT_EQ(write(1), DiskOutcome::kFull);
  files.write_error = EIO;
  EXPECT_EQ(write(1), DiskOutcome::kWriteError);
  files.write_error = 0;
  files.sync_error = EIO;
  EXPECT_EQ(write(1), DiskOutcome::kWriteError);
  files.sync_error = 0;
  files.publish_error = EDQUOT;
  EXPECT_EQ(write(1), DiskOutcome::kFull);
  files.publish_error = 0;
  files.open_error = EACCES;
  EXPECT_EQ(write(1), DiskOutcome::kPermission);
  files.open_error = EMFILE;
  EXPECT_EQ(write(1), DiskOutcome::kWriteError);
  files.open_error = 0;
  EXPECT_EQ(directory.bundles(), 0U);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.store())) {
    EXPECT_EQ(entry.path().string().find("-h-"), std::string::npos);
    const bool temporary = entry.path().parent_path().filename().string().starts_with("tmp-");
    EXPECT_TRUE(!temporary || entry.path().filename() == "lock") << entry.path();
  }
  EXPECT_EQ(write(1), DiskOutcome::kDone) << "and it goes on";
  files.read_error = EIO;
  EXPECT_EQ(read(directory, id_of(1), Content(1)), DiskOutcome::kReadError);
  files.read_error = 0;
  files.open_error = EMFILE;
  EXPECT_EQ(read(directory, id_of(1), Content(1)), DiskOutcome::kReadError);
  files.open_error = 0;
  EXPECT_EQ(read(directory, id_of(1), Content(1)), DiskOutcome::kDone) << "a disk that failed to read has lost nothing";
  files.open_error = EACCES;
  EXPECT_EQ(read(directory, id_of(1), Content(1)), DiskOutcome::kPermission);
  files.open_error = 0;
  EXPECT_EQ(directory.stats().reads[static_cast<std::size_t>(DiskOutcome::kReadError)], 2U);
}

TEST(Disk, ShortAndInterruptedTransfersAreFinished) {
  for (const bool direct : {true, false}) {
    const TemporaryFolder folder;
    FaultyFiles files;
    files.most_at_once = 777;
    files.interrupted = true;
    DiskConfig config = at(folder, &files);
    config.direct = direct;
    BundleDirectory directory(config);
    for (std::uint64_t n = 1; n < 10; ++n) {
      EXPECT_EQ(directory.write(id_of(n), Content(n).meta, Content(n).sources()), DiskOutcome::kDone);
      EXPECT_EQ(read(directory, id_of(n), Content(n)), DiskOutcome::kDone);
    }
  }
}

// The order of eviction never takes a block before what depends on it.
TEST(Disk, EvictionKeepsPrefixesClosed) {
  const TemporaryFolder folder;
  DiskConfig config = at(folder);
  config.capacity_bytes = 60 * 16384;
  BundleDirectory directory(config);
  std::mt19937_64 random(3);
  std::vector<std::vector<Key128>> chains(12);
  int written = 0;
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t c = random() % chains.size();
    auto& chain = chains[c];
    // A chain grows by one block, from its deepest block that is still there.
    const std::uint32_t have = directory.find_deepest(chain, static_cast<std::uint32_t>(chain.size()), id_of(1).version);
    chain.resize(have);
    const std::uint32_t depth = have + 1;
    const std::uint64_t n = c * 1000 + depth;
    Content content(n);
    content.meta.parent = have > 0 ? chain.back() : Key128{};
    if (random() % 3 == 0) directory.touch(chain, id_of(1).version);
    if (directory.write(id_of(n, depth), content.meta, content.sources()) == DiskOutcome::kFull)
      continue;  // its prefix went for it
    written += 1;
    if (random() % 2 == 0) directory.write(id_of(n, depth, 0), content.meta, content.sources());
    chain.push_back(id_of(n).key);
    EXPECT_LE(directory.used_bytes(), config.capacity_bytes);
    for (std::uint64_t k = 0; k < chains.size(); ++k) {
      bool gap = false;
      for (std::uint32_t d = 1; d < 60; ++d) {
        const std::uint32_t parts = directory.parts(id_of(k * 1000 + d).key, id_of(1).version);
        EXPECT_FALSE(gap && parts != 0) << "chain " << k << " at " << d;
        gap = gap || (parts & DiskIndex::kHistoryPart) == 0;
        EXPECT_FALSE((parts & DiskIndex::kHistoryPart) == 0 && parts != 0) << "a point without its node";
      }
    }
  }
  EXPECT_GT(directory.stats().evicted, 0U);
  EXPECT_GT(written, 200);
}

TEST(Disk, RecencyOutlivesTheProcessAndABadFileOfItIsIgnored) {
  const TemporaryFolder folder;
  DiskConfig config = at(folder);
  auto write = [](BundleDirectory& directory, std::uint64_t n) {
    ASSERT_EQ(directory.write(id_of(n), Content(n).meta, Content(n).sources()), DiskOutcome::kDone);
  };
  {
    BundleDirectory directory(config);
    for (std::uint64_t n = 1; n <= 10; ++n) write(directory, n);
    const Key128 used = id_of(1).key;
    directory.touch(std::span(&used, 1), id_of(1).version);
  }
  config.capacity_bytes = 10 * 16384;
  {
    BundleDirectory directory(config);
    write(directory, 11);
    EXPECT_NE(directory.parts(id_of(1).key, id_of(1).version), 0U) << "used last";
  }
  put(folder.store() + "/recency", std::vector<char>(1000, 'x'));
  BundleDirectory directory(config);
  EXPECT_EQ(directory.bundles(), 10U);
}

TEST(Disk, AnotherProcessIsSeenAfterARefresh) {
  const TemporaryFolder folder;
  BundleDirectory ours(at(folder)), theirs(at(folder));
  EXPECT_EQ(ours.hash_seed(), theirs.hash_seed());
  ASSERT_EQ(theirs.write(id_of(1), Content(1).meta, Content(1).sources()), DiskOutcome::kDone);
  EXPECT_EQ(ours.bundles(), 0U);
  ours.refresh();
  EXPECT_EQ(read(ours, id_of(1), Content(1)), DiskOutcome::kDone);
  EXPECT_EQ(ours.write(id_of(1), Content(1).meta, Content(1).sources()), DiskOutcome::kAlreadyThere);
  ASSERT_TRUE(theirs.remove(id_of(1)));
  EXPECT_EQ(read(ours, id_of(1), Content(1)), DiskOutcome::kMissing);
  EXPECT_EQ(ours.bundles(), 0U);
  EXPECT_EQ(ours.used_bytes(), 0U);
}

// A writer is killed at a random moment. What it had finished is there, and everything that is there is right.
// HETKV_KILL_RUNS sets how often.
TEST(Disk, AKilledWriterLeavesOnlyWholeBundles) {
  const char* asked = std::getenv("HETKV_KILL_RUNS");
  const int runs = asked != nullptr ? std::atoi(asked) : 15;
  const TemporaryFolder folder;
  std::mt19937_64 random(std::random_device{}());
  std::uint64_t next = 1, checked = 0;
  for (int run = 0; run < runs; ++run) {
    int pipe[2];
    ASSERT_EQ(::pipe(pipe), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(pipe[0]);
      BundleDirectory directory(at(folder));
      for (std::uint64_t n = next;; ++n) {
        if (directory.write(id_of(n), Content(n).meta, Content(n).sources()) != DiskOutcome::kDone) ::_exit(1);
        if (::write(pipe[1], &n, sizeof n) != sizeof n) ::_exit(2);
      }
    }
    ::close(pipe[1]);
    std::uint64_t done = 0;
    ASSERT_EQ(::read(pipe[0], &done, sizeof done), static_cast<ssize_t>(sizeof done));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 20000));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status)) << "the writer failed by itself";
    for (std::uint64_t n = 0; ::read(pipe[0], &n, sizeof n) == static_cast<ssize_t>(sizeof n);) done = n;
    ::close(pipe[0]);
    BundleDirectory directory(at(folder));
    for (std::uint64_t n = next; n <= done; ++n) {
      EXPECT_EQ(read(directory, id_of(n), Content(n)), DiskOutcome::kDone) << "finished, and lost";
      ++checked;
    }
    // One more may have its name already; if so it is right too.
    const DiskOutcome last = read(directory, id_of(done + 1), Content(done + 1));
    EXPECT_TRUE(last == DiskOutcome::kDone || last == DiskOutcome::kMissing) << disk_outcome_name(last);
    EXPECT_EQ(directory.bundles(), last == DiskOutcome::kDone ? done + 1 : done);
    next = done + 2;
    if (last == DiskOutcome::kMissing) next = done + 1;
    std::size_t temporary = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.store()))
      temporary += entry.path().filename().string().starts_with("tmp-") ? 1U : 0U;
    EXPECT_EQ(temporary, 1U) << "ours; the killed one's was cleared away";
  }
  RecordProperty("bundles", static_cast<int>(checked));
}

TEST(Disk, NamesRoundTripAndForeignOnesDoNotParse) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 1000; ++i) {
    BundleName name;
    name.key = {random(), random()};
    name.space = static_cast<std::uint32_t>(random());
    name.layout = static_cast<std::uint32_t>(random());
    name.abi = static_cast<std::uint32_t>(random());
    name.model = static_cast<std::uint32_t>(random());
    name.part = i % 2 == 0 ? kHistorySet : static_cast<std::uint8_t>(random() % kMaxPointSets);
    name.depth = static_cast<std::uint32_t>(random());
    name.bytes = random() >> i % 40;
    EXPECT_EQ(BundleName::parse(name.text()), name);
    std::string other = name.text();
    other[random() % 64] = 'g';
    EXPECT_EQ(BundleName::parse(other), std::nullopt);
  }
  for (const char* text : {"", "lock", "-h-1-1000", "x-h-1-1000"}) EXPECT_EQ(BundleName::parse(text), std::nullopt);
  const std::string digits(64, '0');
  for (const char* rest : {"-h-1", "-p8-1-1000", "-q-1-1000", "-h--1000", "-h-1-", "-h-1-1000x", "-h-111111111-1000"})
    EXPECT_EQ(BundleName::parse(digits + rest), std::nullopt) << rest;
}

}  // namespace
}  // namespace hetkv::testing
