// BundleDirectory: opening a folder, its small files, recency, and what was cleared.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "allocator/disk/bundle_directory.h"
#include "allocator/disk/section_codec.h"
#include "base/checksum.h"
#include "base/error.h"

namespace hetkv {
namespace {

constexpr std::uint32_t kFolderMode = 0700, kOthersMayWrite = 022;
constexpr std::string_view kSecretName = "secret", kRecencyName = "recency", kSpacesName = "spaces", kTemporaryPrefix = "tmp-";
constexpr std::uint64_t kRecencyMagic = 0x3165637275766b68;

std::uint64_t draw() {
  std::random_device device;
  for (;;) {
    const std::uint64_t value = std::uint64_t{device()} << 32 | device();
    if (value != 0) return value;
  }
}

std::string hex(std::uint64_t value) {
  std::array<char, 17> buffer;
  std::snprintf(buffer.data(), buffer.size(), "%016llx", static_cast<unsigned long long>(value));
  return buffer.data();
}

std::string error_text(int code) { return std::strerror(-code); }

}  // namespace

// --- opening ---

BundleDirectory::BundleDirectory(DiskConfig config)
    : config_(std::move(config)), files_(config_.files != nullptr ? *config_.files : FileSystem::system()), publisher_(draw()),
      owner_(::geteuid()), direct_(config_.direct) {
  if (config_.path.empty()) throw ArgumentError("path", "''", "a folder");
  if (config_.capacity_bytes < kBundlePage)
    throw ArgumentError("capacity", std::to_string(config_.capacity_bytes), "at least " + std::to_string(kBundlePage) + " bytes");
  if (config_.codec == Codec::kZstd && !zstd_available())
    throw ArgumentError("compression", "'zstd'", "None: this hetkv was built without libzstd");
  open_folder(config_.path);
  for (std::size_t shard = 0; shard < DiskIndex::kShards; ++shard) open_folder(shard_path(shard));
  open_folder(config_.path + "/" + std::string(kSpacesName));
  open_temporary();
  try {
    read_secret();
  } catch (...) {
    close();
    throw;
  }
  for (std::size_t shard = 0; shard < DiskIndex::kShards; ++shard) scan_shard(shard);
  load_recency();
}

BundleDirectory::~BundleDirectory() { close(); }

void BundleDirectory::open_folder(const std::string& path) {
  const int made = files_.make_directory(path, kFolderMode);
  if (made != 0 && made != -EEXIST)
    throw ArgumentError("path", "'" + path + "'", "a folder that can be made: " + error_text(made));
  FileFacts facts;
  if (const int code = files_.facts_of(path, &facts); code != 0)
    throw ArgumentError("path", "'" + path + "'", "a folder that can be read: " + error_text(code));
  if (!facts.directory) throw ArgumentError("path", "'" + path + "'", "a folder, not a link or a file");
  if (facts.owner != owner_)
    throw ArgumentError("path", "'" + path + "' of user " + std::to_string(facts.owner),
                        "a folder of this user, " + std::to_string(owner_));
  if ((facts.mode & kOthersMayWrite) != 0)
    throw ArgumentError("path", "'" + path + "', writable by others", "a folder that only its owner may write");
}

// Files under way lie in a folder of this process. Its lock goes with the process, so whoever gets another's may clear it away.
void BundleDirectory::open_temporary() {
  std::vector<std::string> others;
  files_.list(config_.path, [&](const char* name) {
    if (std::string_view(name).starts_with(kTemporaryPrefix)) others.emplace_back(name);
  });
  for (const std::string& name : others) {
    const std::string folder = config_.path + "/" + name;
    const OpenFile lock(files_, files_.open(folder + "/lock", O_RDWR | O_NOFOLLOW, 0));
    if (!lock || files_.lock(lock.number()) != 0) continue;
    std::vector<std::string> left;
    files_.list(folder, [&](const char* file) { left.emplace_back(file); });
    for (const std::string& file : left) files_.remove(folder + "/" + file);
    files_.remove_directory(folder);
  }
  // Between making the folder and taking the lock another opener may clear it away: then once more.
  for (int tries = 0; tries < 16; ++tries) {
    temporary_ = config_.path + "/" + std::string(kTemporaryPrefix) + hex(draw());
    const int made = files_.make_directory(temporary_, kFolderMode);
    if (made != 0) throw ArgumentError("path", "'" + config_.path + "'", "a folder that can be written: " + error_text(made));
    OpenFile lock(files_, files_.open(temporary_ + "/lock", O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, kFileMode));
    if (!lock) continue;
    if (files_.lock(lock.number()) != 0) continue;
    FileFacts facts;
    if (files_.facts_of(temporary_ + "/lock", &facts) != 0) continue;
    temporary_lock_ = lock.release();
    return;
  }
  throw ArgumentError("path", "'" + config_.path + "'", "a folder in which files can be locked");
}

void BundleDirectory::read_secret() {
  const std::string path = config_.path + "/" + std::string(kSecretName);
  for (int tries = 0; tries < 2; ++tries) {
    std::vector<std::byte> bytes;
    if (read_small(path, &bytes)) {
      // "hetkv 1 <16 digits>\n"
      const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      constexpr std::string_view kPrefix = "hetkv 1 ";
      if (text.size() == kPrefix.size() + 17 && text.starts_with(kPrefix) &&
          std::from_chars(text.data() + kPrefix.size(), text.data() + text.size() - 1, hash_seed_, 16).ptr ==
              text.data() + text.size() - 1 &&
          hash_seed_ != 0)
        return;
      throw ArgumentError("path", "'" + config_.path + "'", "a folder whose file 'secret' is of this version of hetkv");
    }
    const std::string text = "hetkv 1 " + hex(draw()) + "\n";
    const std::string temporary = temporary_name();
    const OpenFile file(files_, files_.open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, kFileMode));
    int code = file.error();
    if (code == 0) code = write_fully(files_, file.number(), reinterpret_cast<const std::byte*>(text.data()), text.size(), 0);
    if (code == 0) code = files_.sync(file.number());
    if (code == 0) code = files_.publish(temporary, path);  // another process may be first: then its secret counts
    if (code != 0) files_.remove(temporary);
    if (code != 0 && code != -EEXIST)
      throw ArgumentError("path", "'" + config_.path + "'", "a folder that can be written: " + error_text(code));
  }
  throw ArgumentError("path", "'" + config_.path + "'", "a folder whose file 'secret' can be read");
}

void BundleDirectory::scan_shard(std::size_t shard) {
  FileFacts facts;
  // The time is taken first: what comes in while we read is seen the next time.
  if (files_.facts_of(shard_path(shard), &facts) == 0) modified_[shard] = facts.modified_ns;
  std::vector<BundleName> names;
  files_.list(shard_path(shard), [&](const char* text) {
    if (const auto name = BundleName::parse(text); name && DiskIndex::shard_of(name->key) == shard) names.push_back(*name);
  });
  index_.reconcile(shard, names);
}

void BundleDirectory::refresh() {
  const std::lock_guard guard(refresh_mutex_);
  for (std::size_t shard = 0; shard < DiskIndex::kShards; ++shard) {
    FileFacts facts;
    if (files_.facts_of(shard_path(shard), &facts) == 0 && facts.modified_ns != modified_[shard]) scan_shard(shard);
  }
}

// --- recency ---

void BundleDirectory::close() {
  if (temporary_lock_ < 0) return;
  std::vector<std::byte> bytes(24);
  index_.for_each([&](const BundleName& name, std::uint64_t use) {
    if (use == 0) return;
    const std::string text = name.text();
    const std::size_t at = bytes.size();
    bytes.resize(at + 9 + text.size());
    std::memcpy(bytes.data() + at, &use, 8);
    bytes[at + 8] = static_cast<std::byte>(text.size());
    std::memcpy(bytes.data() + at + 9, text.data(), text.size());
  });
  const std::uint64_t size = bytes.size() - 24, sum = checksum(bytes.data() + 24, size);
  std::memcpy(bytes.data(), &kRecencyMagic, 8);
  std::memcpy(bytes.data() + 8, &size, 8);
  std::memcpy(bytes.data() + 16, &sum, 8);
  write_small(config_.path + "/" + std::string(kRecencyName), bytes);
  files_.remove(temporary_ + "/lock");
  files_.remove_directory(temporary_);
  files_.close(std::exchange(temporary_lock_, -1));
}

// Never trusted for more than an order: a bad one only makes us forget what was used when.
void BundleDirectory::load_recency() {
  std::vector<std::byte> bytes;
  if (!read_small(config_.path + "/" + std::string(kRecencyName), &bytes) || bytes.size() < 24) return;
  std::uint64_t magic = 0, size = 0, sum = 0;
  std::memcpy(&magic, bytes.data(), 8);
  std::memcpy(&size, bytes.data() + 8, 8);
  std::memcpy(&sum, bytes.data() + 16, 8);
  if (magic != kRecencyMagic || size != bytes.size() - 24 || sum != checksum(bytes.data() + 24, size)) return;
  for (std::size_t at = 24; at + 9 <= bytes.size();) {
    std::uint64_t use = 0;
    std::memcpy(&use, bytes.data() + at, 8);
    const auto length = std::to_integer<std::size_t>(bytes[at + 8]);
    if (at + 9 + length > bytes.size()) return;
    if (const auto name = BundleName::parse({reinterpret_cast<const char*>(bytes.data() + at + 9), length}))
      index_.set_use(*name, use);
    at += 9 + length;
  }
}

// --- names and small files ---

std::string BundleDirectory::shard_path(std::size_t shard) const {
  constexpr std::string_view kDigits = "0123456789abcdef";
  return config_.path + "/" + kDigits[shard / 16] + kDigits[shard % 16];
}

std::string BundleDirectory::path_of(const BundleName& name) const {
  return shard_path(DiskIndex::shard_of(name.key)) + "/" + name.text();
}

std::string BundleDirectory::temporary_name() {
  return temporary_ + "/" + hex(next_temporary_.fetch_add(1, std::memory_order_relaxed));
}

int BundleDirectory::write_small(const std::string& path, std::span<const std::byte> bytes) {
  const std::string temporary = temporary_name();
  int code = 0;
  {
    const OpenFile file(files_, files_.open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, kFileMode));
    code = file.error();
    if (code == 0) code = write_fully(files_, file.number(), bytes.data(), bytes.size(), 0);
    if (code == 0) code = files_.sync_data(file.number());
  }
  if (code == 0) code = files_.replace(temporary, path);
  if (code != 0) files_.remove(temporary);
  return code;
}

bool BundleDirectory::read_small(const std::string& path, std::vector<std::byte>* bytes) {
  const OpenFile file(files_, files_.open(path, O_RDONLY | O_NOFOLLOW, 0));
  FileFacts facts;
  if (!file || files_.facts(file.number(), &facts) != 0 || !facts.regular || facts.owner != owner_) return false;
  bytes->resize(facts.bytes);
  return read_fully(files_, file.number(), bytes->data(), bytes->size(), 0) == 0;
}

std::string BundleDirectory::space_path(std::string_view framed) const {
  FingerprintBuilder builder("hetkv.space.1");
  builder.add("secret", hash_seed_).add("namespace", framed);
  return config_.path + "/" + std::string(kSpacesName) + "/" + builder.finish().hex();
}

std::uint32_t BundleDirectory::generation(std::string_view framed) {
  std::vector<std::byte> bytes;
  std::uint32_t generation = 0;
  const std::lock_guard guard(spaces_mutex_);
  if (!read_small(space_path(framed), &bytes)) return 0;
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::from_chars(text.data(), text.data() + text.size(), generation);
  return generation;
}

std::uint32_t BundleDirectory::raise_generation(std::string_view framed) {
  const std::uint32_t next = generation(framed) + 1;
  const std::string text = std::to_string(next) + "\n";
  const std::lock_guard guard(spaces_mutex_);
  if (const int code = write_small(space_path(framed), std::as_bytes(std::span(text.data(), text.size()))); code != 0)
    throw std::runtime_error("clearing a namespace cannot be recorded in '" + config_.path + "': " + error_text(code));
  return next;
}

}  // namespace hetkv
