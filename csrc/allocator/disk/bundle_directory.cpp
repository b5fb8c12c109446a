#include "allocator/disk/bundle_directory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "allocator/disk/section_codec.h"
#include "allocator/node_store.h"
#include "base/checksum.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

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

}  // namespace

std::string_view disk_outcome_name(DiskOutcome outcome) {
  constexpr std::array<std::string_view, kNumDiskOutcomes> names{
      "done",     "already_there", "missing",    "truncated",   "foreign",    "newer_format", "header",
      "layout",   "abi",           "model",      "key",         "tokens",     "checksum",     "codec",
      "sections", "full",          "read_error", "write_error", "permission", "not_regular"};
  return names[static_cast<std::size_t>(outcome)];
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
