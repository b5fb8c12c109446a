#include "allocator/disk/bundle_directory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "allocator/disk/section_codec.h"
#include "allocator/node_store.h"
#include "base/checksum.h"
#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

constexpr std::uint32_t kFolderMode = 0700, kFileMode = 0600, kOthersMayWrite = 022;
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

// Bytes on page boundaries, which O_DIRECT needs; one for reading and one for writing per thread, so that neither waits for the other.
class PageBuffer {
  static constexpr std::size_t kHuge = std::size_t{2} << 20;

 public:
  ~PageBuffer() { std::free(data_); }
  std::span<std::byte> at_least(std::size_t bytes) {
    if (bytes > bytes_) {
      std::free(data_);
      bytes_ = (bytes + kHuge - 1) / kHuge * kHuge;
      data_ = static_cast<std::byte*>(std::aligned_alloc(kHuge, bytes_));
      if (data_ == nullptr) {
        bytes_ = 0;
      } else {
        ::madvise(data_, bytes_, MADV_HUGEPAGE);  // the system pins fewer pages per transfer; a hint
      }
    }
    return {data_, data_ == nullptr ? 0 : bytes};
  }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Counts a bundle as under way for one scope.
class UnderWay {
 public:
  UnderWay(std::atomic<std::uint64_t>& total, std::uint64_t bytes) : total_(total), bytes_(bytes) { total_ += bytes_; }
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
  ~UnderWay() { total_ -= bytes_; }

 private:
  std::atomic<std::uint64_t>& total_;
  const std::uint64_t bytes_;
};

std::string error_text(int code) { return std::strerror(-code); }

}  // namespace

std::string_view disk_outcome_name(DiskOutcome outcome) {
  constexpr std::array<std::string_view, kNumDiskOutcomes> names{
      "done",     "already_there", "missing",    "truncated",   "foreign",    "newer_format", "header",
      "layout",   "abi",           "model",      "key",         "tokens",     "checksum",     "codec",
      "sections", "full",          "read_error", "write_error", "permission", "not_regular"};
  return names[static_cast<std::size_t>(outcome)];
}

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

// --- writing ---

DiskOutcome BundleDirectory::of_error(int code, bool writing) {
  switch (-code) {
    case 0:
      return DiskOutcome::kDone;
    case ENOENT:
    case ESTALE:
      return DiskOutcome::kMissing;
    case EEXIST:
      return DiskOutcome::kAlreadyThere;
    case ENODATA:
      return DiskOutcome::kTruncated;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return DiskOutcome::kFull;
    case EACCES:
    case EPERM:
    case EROFS:
      return DiskOutcome::kPermission;
    case ELOOP:
    case ENOTDIR:
    case EISDIR:
      return DiskOutcome::kNotRegular;
    default:
      return writing ? DiskOutcome::kWriteError : DiskOutcome::kReadError;
  }
}

DiskOutcome BundleDirectory::write(const BundleId& id, const BundleMeta& meta, std::span<const SectionSource> sections) {
  const DiskOutcome outcome = index_.find(id) ? DiskOutcome::kAlreadyThere : write_bundle(id, meta, sections);
  writes_[static_cast<std::size_t>(outcome)].fetch_add(1, std::memory_order_relaxed);
  return outcome;
}

DiskOutcome BundleDirectory::write_bundle(const BundleId& id, const BundleMeta& meta, std::span<const SectionSource> sections) {
  BundleHeader header;
  header.id = id;
  header.meta = meta;
  header.publisher = publisher_;
  std::vector<std::vector<std::byte>> packed(sections.size());
  std::uint64_t end = header_bytes(meta.tokens.size(), sections.size());
  for (std::size_t i = 0; i < sections.size(); ++i) {
    BundleSection s;
    s.group = sections[i].group;
    s.raw_bytes = s.stored_bytes = sections[i].bytes;
    if (config_.codec == Codec::kZstd && zstd_compress({sections[i].data, sections[i].bytes}, packed[i])) {
      s.codec = Codec::kZstd;
      s.stored_bytes = packed[i].size();
    }
    s.offset = end;
    end += whole_pages(s.stored_bytes);
    header.sections.push_back(s);
  }
  header.file_bytes = end;
  // A point object depends on its node, a history set on its parent. If room was made by taking that away, this one is of no use.
  BundleId above = id;
  above.part = kHistorySet;
  if (id.part == kHistorySet) {
    above.key = meta.parent;
    --above.depth;
  }
  const bool has_above = index_.find(above).has_value();
  const UnderWay mine(under_way_, end);
  if (!make_room() || (has_above && !index_.find(above))) return DiskOutcome::kFull;
  thread_local PageBuffer buffer;
  const std::span<std::byte> bytes = buffer.at_least(end);
  if (bytes.empty()) return DiskOutcome::kFull;
  for (std::size_t i = 0; i < sections.size(); ++i) {
    BundleSection& section = header.sections[i];
    const bool plain = section.codec == Codec::kNone;
    std::byte* to = bytes.data() + section.offset;
    section.stored_checksum = checksum_copy(to, plain ? sections[i].data : packed[i].data(), section.stored_bytes);
    section.raw_checksum = plain ? section.stored_checksum : checksum(sections[i].data, sections[i].bytes);
    std::memset(to + section.stored_bytes, 0, whole_pages(section.stored_bytes) - section.stored_bytes);
  }
  encode_header(header, bytes.data());
  const BundleName name = BundleName::of(id, end);
  const DiskOutcome outcome = write_file(name, bytes);
  if (outcome == DiskOutcome::kDone || outcome == DiskOutcome::kAlreadyThere) {
    index_.add(name, has_above ? std::optional(above.key) : std::nullopt);
  }
  if (outcome == DiskOutcome::kDone) written_bytes_.fetch_add(end, std::memory_order_relaxed);
  return outcome;
}

DiskOutcome BundleDirectory::write_file(const BundleName& name, std::span<const std::byte> bytes) {
  const std::string temporary = temporary_name(), path = path_of(name);
  int code = 0;
  {
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW;
    int number = direct_.load(std::memory_order_relaxed) ? files_.open(temporary, flags | O_DIRECT, kFileMode) : -EINVAL;
    if (number == -EINVAL) {
      direct_.store(false, std::memory_order_relaxed);
      files_.remove(temporary);  // some systems make the file before they refuse the flag
      number = files_.open(temporary, flags, kFileMode);
    }
    const OpenFile file(files_, number);
    code = file.error();
    if (code == 0) code = write_fully(files_, file.number(), bytes.data(), bytes.size(), 0);
    if (code == 0 && config_.sync != DiskConfig::Sync::kNone) code = files_.sync_data(file.number());
  }
  HETKV_TEST_POINT("disk: written, not published");
  if (code == 0) code = files_.publish(temporary, path);
  if (code != 0) files_.remove(temporary);
  if (code == 0 && config_.sync == DiskConfig::Sync::kDataAndDirectory) {
    const OpenFile folder(files_, files_.open(shard_path(DiskIndex::shard_of(name.key)), O_RDONLY | O_DIRECTORY, 0));
    code = folder ? files_.sync(folder.number()) : folder.error();
  }
  return code == -ENOENT ? DiskOutcome::kWriteError : of_error(code, true);  // our folders are gone
}

// --- reading ---

DiskOutcome BundleDirectory::read(const BundleId& id, std::span<const std::int32_t> tokens,
                                  std::span<const SectionTarget> sections, BundleMeta* meta) {
  const std::optional<BundleName> name = index_.find(id);
  DiskOutcome outcome = DiskOutcome::kMissing;
  if (name) outcome = read_bundle(id, *name, tokens, sections, meta);
  switch (outcome) {
    case DiskOutcome::kDone:
      read_bytes_.fetch_add(name->bytes, std::memory_order_relaxed);
      break;
    case DiskOutcome::kMissing:
    case DiskOutcome::kNotRegular:
    case DiskOutcome::kPermission:
    case DiskOutcome::kNewerFormat:
    case DiskOutcome::kCodec:
    case DiskOutcome::kForeign:
      if (name) index_.remove(*name);  // not ours to delete, and of no use to us
      break;
    case DiskOutcome::kTokens:
    case DiskOutcome::kSections:
    case DiskOutcome::kReadError:
      break;
    default:
      take_away(*name);
      break;
  }
  reads_[static_cast<std::size_t>(outcome)].fetch_add(1, std::memory_order_relaxed);
  return outcome;
}

DiskOutcome BundleDirectory::read_bundle(const BundleId& id, const BundleName& name, std::span<const std::int32_t> tokens,
                                         std::span<const SectionTarget> sections, BundleMeta* meta) {
  const std::string path = path_of(name);
  const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK;  // a pipe in its place must not make us wait
  int number = direct_.load(std::memory_order_relaxed) ? files_.open(path, flags | O_DIRECT, 0) : -EINVAL;
  if (number == -EINVAL) number = files_.open(path, flags, 0);
  const OpenFile file(files_, number);
  if (!file) return of_error(file.error(), false);
  FileFacts facts;
  if (const int code = files_.facts(file.number(), &facts); code != 0) return of_error(code, false);
  if (!facts.regular || facts.owner != owner_) return DiskOutcome::kNotRegular;
  if (facts.bytes != name.bytes || name.bytes > std::uint64_t{1} << 40) return DiskOutcome::kTruncated;
  thread_local PageBuffer buffer;
  const std::span<std::byte> bytes = buffer.at_least(name.bytes);
  if (bytes.empty()) return DiskOutcome::kReadError;
  if (const int code = read_fully(files_, file.number(), bytes.data(), bytes.size(), 0); code != 0) return of_error(code, false);

  BundleHeader header;
  switch (decode_header(bytes, name.bytes, &header)) {
    case HeaderFault::kNone:
      break;
    case HeaderFault::kTooShort:
      return DiskOutcome::kTruncated;
    case HeaderFault::kForeign:
      return DiskOutcome::kForeign;
    case HeaderFault::kNewer:
      return DiskOutcome::kNewerFormat;
    case HeaderFault::kDamaged:
      return DiskOutcome::kHeader;
  }
  if (header.id.version.layout != id.version.layout) return DiskOutcome::kLayout;
  if (header.id.version.abi != id.version.abi) return DiskOutcome::kAbi;
  if (header.id.version.model != id.version.model) return DiskOutcome::kModel;
  if (header.id.key != id.key || header.id.part != id.part || header.id.depth != id.depth) return DiskOutcome::kKey;
#ifndef HETKV_PLANT_BUNDLE_TOKENS_UNREAD
  if (!std::equal(tokens.begin(), tokens.end(), header.meta.tokens.begin(), header.meta.tokens.end()))
    return DiskOutcome::kTokens;
#endif
  if (header.sections.size() != sections.size()) return DiskOutcome::kSections;
  for (std::size_t i = 0; i < sections.size(); ++i) {
    const BundleSection& s = header.sections[i];
    if (s.group != sections[i].group || s.raw_bytes != sections[i].bytes) return DiskOutcome::kSections;
    const std::span<const std::byte> stored = bytes.subspan(s.offset, s.stored_bytes);
    if (s.codec == Codec::kNone) {
      if (s.stored_bytes != s.raw_bytes || s.raw_checksum != s.stored_checksum) return DiskOutcome::kHeader;
      const std::uint64_t sum = checksum_copy(sections[i].data, stored.data(), stored.size());
#ifndef HETKV_PLANT_BUNDLE_UNVERIFIED
      if (sum != s.stored_checksum) return DiskOutcome::kChecksum;
#else
      static_cast<void>(sum);
#endif
      continue;
    }
    if (checksum(stored.data(), stored.size()) != s.stored_checksum) return DiskOutcome::kChecksum;
    if (!zstd_available()) return DiskOutcome::kCodec;
    if (!zstd_decompress(stored, {sections[i].data, sections[i].bytes}) ||
        checksum(sections[i].data, sections[i].bytes) != s.raw_checksum)
      return DiskOutcome::kChecksum;
  }
  *meta = std::move(header.meta);
  return DiskOutcome::kDone;
}

// --- capacity ---

bool BundleDirectory::take_away(const BundleName& name) {
  const int code = files_.remove(path_of(name));
  return (code == 0 || code == -ENOENT) && index_.remove(name);
}

bool BundleDirectory::remove(const BundleId& id) {
  const std::optional<BundleName> name = index_.find(id);
  return name && take_away(*name);
}

std::uint64_t BundleDirectory::remove_space(std::uint32_t space) {
  std::vector<BundleName> names;
  index_.for_each([&](const BundleName& name, std::uint64_t) {
    if (name.space == space) names.push_back(name);
  });
  std::sort(names.begin(), names.end(), [](const BundleName& a, const BundleName& b) { return a.depth > b.depth; });
  return static_cast<std::uint64_t>(
      std::count_if(names.begin(), names.end(), [&](const BundleName& name) { return take_away(name); }));
}

// Whether what is there and what is under way fit the capacity, the coldest taken away if need be.
bool BundleDirectory::make_room() {
  auto total = [&] { return index_.bytes() + under_way_.load(std::memory_order_relaxed); };
  if (under_way_.load(std::memory_order_relaxed) > config_.capacity_bytes) return false;
  if (total() <= config_.capacity_bytes) return true;
  const std::lock_guard guard(room_mutex_);
  if (total() <= config_.capacity_bytes) return true;
  // A little more than is needed, since finding the coldest looks at all.
  const std::uint64_t enough = std::max(total() - config_.capacity_bytes, config_.capacity_bytes / 32);
  for (const BundleName& name : index_.coldest(enough)) {
    if (!take_away(name)) continue;
    evicted_.fetch_add(1, std::memory_order_relaxed);
    evicted_bytes_.fetch_add(name.bytes, std::memory_order_relaxed);
  }
  return total() <= config_.capacity_bytes;
}

BundleDirectory::Stats BundleDirectory::stats() const {
  Stats stats;
  for (std::size_t i = 0; i < kNumDiskOutcomes; ++i) {
    stats.writes[i] = writes_[i].load(std::memory_order_relaxed);
    stats.reads[i] = reads_[i].load(std::memory_order_relaxed);
  }
  stats.written_bytes = written_bytes_.load(std::memory_order_relaxed);
  stats.read_bytes = read_bytes_.load(std::memory_order_relaxed);
  stats.evicted = evicted_.load(std::memory_order_relaxed);
  stats.evicted_bytes = evicted_bytes_.load(std::memory_order_relaxed);
  return stats;
}

}  // namespace hetkv
