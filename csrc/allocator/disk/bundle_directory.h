// BundleDirectory: a folder of bundles: opening, publishing, reading, the capacity, and what several processes do to it at once.
//
// The files are the truth; the index in memory is made from their names. Owns the index and a folder for temporary files, whose lock
// tells other processes that it lives. A bundle is written under a temporary name, synced by policy, and then given its name, never in
// place of another: a torn one is never visible. Faults are outcomes, counted by name; only the constructor and
// raise_generation throw.
// All methods are thread-safe; write, read, remove, refresh and close block.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/disk/bundle_format.h"
#include "allocator/disk/disk_index.h"
#include "allocator/disk/file_system.h"
#include "allocator/namespace_table.h"

namespace hetkv {

enum class DiskOutcome : std::uint8_t {
  kDone,
  kAlreadyThere,
  kMissing,      // no such bundle, or gone since
  kTruncated,    // shorter than its name or its header says
  kForeign,      // no bundle of hetkv
  kNewerFormat,  // of a later version of hetkv
  kHeader,       // its header does not verify
  kLayout,       // made for another layout,
  kAbi,          // kernel ABI,
  kModel,        // or weights than its name says
  kKey,          // of another prefix, part or depth
  kTokens,       // same key, other tokens
  kChecksum,     // a section does not verify
  kCodec,        // compressed in a way that was not built in
  kSections,     // not the groups, or not the sizes, that were asked for
  kFull,         // no space: the disk's or the capacity
  kReadError,
  kWriteError,
  kPermission,
  kNotRegular,  // a link, a folder, or someone else's file in its place
};
inline constexpr std::size_t kNumDiskOutcomes = 20;
std::string_view disk_outcome_name(DiskOutcome outcome);  // "done", "already_there", ...

struct SectionSource {
  GroupId group = 0;
  const std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};
struct SectionTarget {
  GroupId group = 0;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

struct DiskConfig {
  enum class Sync : std::uint8_t {
    kNone,              // survives the process; a lost power supply may tear what is recent, which reading notices
    kData,              // a bundle that has its name has its bytes, also after lost power; the name may be lost
    kDataAndDirectory,  // what was published stays published
  };
  std::string path;
  std::uint64_t capacity_bytes = ~std::uint64_t{0};
  Sync sync = Sync::kNone;
  Codec codec = Codec::kNone;
  bool direct = true;           // O_DIRECT where the file system has it
  FileSystem* files = nullptr;  // null: the system's
};

class BundleDirectory final : public NamespaceGenerations {
 public:
  // Makes the folder, private to the user, or opens it. ArgumentError naming `path`, what is there and what was expected: not a folder,
  // a link, someone else's, writable by others, not writable; naming `compression` for a codec that was not built in.
  explicit BundleDirectory(DiskConfig config);
  ~BundleDirectory() override;

  // Of the prefix hash: equal for everyone who uses this folder, so that their keys are. Never 0.
  std::uint64_t hash_seed() const { return hash_seed_; }
  const std::string& path() const { return config_.path; }

  // --- what seems to be there: memory only ---
  std::uint32_t parts(const Key128& key, const VersionPrints& version) const { return index_.parts(key, version); }
  std::uint32_t find_deepest(std::span<const Key128> keys, std::uint32_t limit, const VersionPrints& version) const {
    return index_.find_deepest(keys, limit, version);
  }
  OtherVersions deepest_of_others(std::span<const Key128> keys, std::uint32_t limit, const VersionPrints& version) const {
    return index_.deepest_of_others(keys, limit, version);
  }
  void touch(std::span<const Key128> chain, const VersionPrints& version) { index_.touch(chain, version); }
  std::uint64_t used_bytes() const { return index_.bytes(); }
  std::uint64_t bundles() const { return index_.bundles(); }
  const DiskIndex& index() const { return index_; }

  // --- bundles ---
  // The sources are read until it returns. Makes room for it first, by taking away the coldest.
  DiskOutcome write(const BundleId& id, const BundleMeta& meta, std::span<const SectionSource> sections);
  // kDone: every byte of the targets verified, for this id and these tokens. Else they hold garbage. A bundle that is damaged or not
  // what its name says is removed.
  DiskOutcome read(const BundleId& id, std::span<const std::int32_t> tokens, std::span<const SectionTarget> sections,
                   BundleMeta* meta);
  bool remove(const BundleId& id);
  // All bundles of one namespace instance. Returns how many. O(bundles).
  std::uint64_t remove_space(std::uint32_t space);
  // Sees what other processes added and took away. Reads only folders that changed.
  void refresh();
  // Writes down what was used when, for the next opening. Also the destructor's.
  void close();

  // --- namespaces ---
  std::uint32_t generation(std::string_view framed) override;
  // std::runtime_error, and nothing changed, if it cannot be written down.
  std::uint32_t raise_generation(std::string_view framed) override;

  struct Stats {
    std::array<std::uint64_t, kNumDiskOutcomes> writes{}, reads{};  // by outcome
    std::uint64_t written_bytes = 0, read_bytes = 0, evicted = 0, evicted_bytes = 0;
  };
  Stats stats() const;

 private:
  static constexpr std::uint32_t kFileMode = 0600;

  void open_folder(const std::string& path);
  void open_temporary();
  void read_secret();
  void load_recency();
  void scan_shard(std::size_t shard);
  std::string shard_path(std::size_t shard) const;
  std::string path_of(const BundleName& name) const;
  std::string temporary_name();
  std::string space_path(std::string_view framed) const;
  DiskOutcome write_bundle(const BundleId& id, const BundleMeta& meta, std::span<const SectionSource> sections);
  DiskOutcome write_file(const BundleName& name, std::span<const std::byte> bytes);
  DiskOutcome read_bundle(const BundleId& id, const BundleName& name, std::span<const std::int32_t> tokens,
                          std::span<const SectionTarget> sections, BundleMeta* meta);
  int write_small(const std::string& path, std::span<const std::byte> bytes);
  bool read_small(const std::string& path, std::vector<std::byte>* bytes);
  bool make_room();
  bool take_away(const BundleName& name);
  static DiskOutcome of_error(int code, bool writing);

  DiskConfig config_;
  FileSystem& files_;
  std::uint64_t hash_seed_ = 0, publisher_ = 0;
  std::uint32_t owner_ = 0;
  DiskIndex index_;
  std::string temporary_;  // folder
  int temporary_lock_ = -1;
  std::atomic<std::uint64_t> next_temporary_{0};
  std::atomic<bool> direct_;
  std::atomic<std::uint64_t> under_way_{0};  // bytes of bundles that are being written: they count for the capacity
  std::mutex room_mutex_;                    // one eviction at a time
  std::mutex refresh_mutex_;                 // guards modified_
  std::mutex spaces_mutex_;
  std::array<std::int64_t, DiskIndex::kShards> modified_{};
  std::array<std::atomic<std::uint64_t>, kNumDiskOutcomes> writes_{}, reads_{};
  std::atomic<std::uint64_t> written_bytes_{0}, read_bytes_{0}, evicted_{0}, evicted_bytes_{0};
};

}  // namespace hetkv
