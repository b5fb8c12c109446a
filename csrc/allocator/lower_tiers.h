// LowerTiers: what lies below the device: host memory, a folder on disk, the threads that move objects, and what they move.
//
// Owns the tiers, their spillers and pools, and the restores under way. The device tier, versions, namespaces and the directory must
// outlive it. Its destructor lets every copy and every restore end first. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "allocator/copy_engine.h"
#include "allocator/disk/bundle_directory.h"
#include "allocator/disk/io_pool.h"
#include "allocator/disk_tier.h"
#include "allocator/host_tier.h"
#include "allocator/memory_tier.h"
#include "allocator/restore.h"
#include "allocator/spiller.h"

namespace hetkv {

struct HostTierConfig {
  ArenaConfig arena;            // base_address: of memory that lives as long as the allocator
  std::uint32_t max_nodes = 0;  // 0: from the arena
  SpillPolicy spill;            // what goes down from the device
};

struct DiskTierConfig {
  DiskConfig directory;
  SpillPolicy spill;  // what goes down from the tier above it
  std::size_t load_threads = 4, store_threads = 4;
};

class LowerTiers {
 public:
  struct Config {
    std::optional<HostTierConfig> host;
    std::optional<DiskTierConfig> disk;
    std::shared_ptr<CopyEngine> engine;  // null: both memories are the process's own
  };

  // directory: null without a disk tier. Throws as Arena does.
  LowerTiers(const CacheLayout& layout, MemoryTier& device, NamespaceTable& spaces, const VersionTable& versions,
             const Config& config, BundleDirectory* directory);
  ~LowerTiers();
  LowerTiers(const LowerTiers&) = delete;
  LowerTiers& operator=(const LowerTiers&) = delete;

  // Forecasts: what some tier seems to have.
  std::uint32_t find_deepest(std::span<const Key128> keys, VersionId version, std::uint32_t space) const;
  std::uint32_t parts(const Key128& key, VersionId version, std::uint32_t space) const;
  // Index of the highest tier that seems to have this part (a bit of parts()); -1 if none.
  int tier_of(const Key128& key, VersionId version, std::uint32_t space, std::uint32_t part_bit) const;
  OtherVersions deepest_of_others(std::span<const Key128> keys, VersionId version) const;

  std::shared_ptr<Restore> start(RestoreRequest&& request) { return restorer_.start(std::move(request)); }
  // An admission used this chain. Posts; does not wait.
  void touch(std::vector<Key128> chain, VersionId version, std::uint32_t space);
  // Waits until what was published is copied as far down as the policies send it.
  void flush();
  // Takes all of a namespace instance off the disk. Returns how many bundles went.
  std::uint64_t clear(std::uint32_t space);

  HostTier* host() { return host_ ? &*host_ : nullptr; }
  BundleDirectory* directory() { return directory_; }
  const Spiller* spiller(std::size_t tier) const { return spillers_[tier].get(); }
  std::span<LowerTier* const> tiers() const { return tiers_; }
  const Restorer& restorer() const { return restorer_; }

 private:
  NamespaceTable& spaces_;
  const VersionTable& versions_;
  BundleDirectory* const directory_;
  std::shared_ptr<CopyEngine> engine_;
  std::optional<HostTier> host_;
  std::optional<DiskTier> disk_;
  std::vector<LowerTier*> tiers_;  // highest first
  std::unique_ptr<IoPool> loads_, stores_;
  Restorer restorer_;
  std::vector<std::unique_ptr<Spiller>> spillers_;  // [i]: into tiers_[i]
  std::atomic<std::int64_t> refreshed_{0};          // steady clock, nanoseconds
};

}  // namespace hetkv
