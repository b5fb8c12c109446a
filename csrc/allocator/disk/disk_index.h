// DiskIndex: which bundles a directory seems to have, in memory, made from their names alone.
//
// Owns nothing on disk and is never trusted about it: a bundle may be gone, or another process may have added one. Sharded by key;
// each shard has a mutex that is held for a few loads. Only requests that miss on the device come here.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "allocator/disk/bundle_format.h"

namespace hetkv {

// What a file name says. Fingerprints in 32 bits: enough to know which one differs; the bundle has them in full.
struct BundleName {
  Key128 key;
  std::uint32_t space = 0, layout = 0, abi = 0, model = 0;
  std::uint8_t part = 0xFF;
  std::uint32_t depth = 0;
  std::uint64_t bytes = 0;  // of the file
  friend bool operator==(const BundleName&, const BundleName&) = default;

  static BundleName of(const BundleId& id, std::uint64_t bytes);
  // 32 digits of the key, 8 of the namespace and of each fingerprint, then part ("h" or "p<set>"), depth and size:
  // "<64 digits>-h-1f-1b000".
  std::string text() const;
  static std::optional<BundleName> parse(std::string_view text);
};

// Depths of the deepest prefix in other versions: any, those with our layout, those with our layout and kernel ABI.
struct OtherVersions {
  std::uint32_t any = 0, same_layout = 0, same_abi = 0;
};

class DiskIndex {
 public:
  static constexpr std::size_t kShards = 256;  // a shard is a folder
  static constexpr std::uint32_t kHistoryPart = std::uint32_t{1} << 31;
  static std::size_t shard_of(const Key128& key) { return key.high >> 56; }

  // All thread-safe. A bundle that is there already is not added again: false. It gets the stamp of the history set `above` that it
  // depends on, if that is there, so that it never outlives it in the order of eviction.
  bool add(const BundleName& name, const std::optional<Key128>& above = std::nullopt);
  bool remove(const BundleName& name);
  std::optional<BundleName> find(const BundleId& id) const;
  // bit s: point set s; kHistoryPart: history.
  std::uint32_t parts(const Key128& key, const VersionPrints& version) const;
  std::uint32_t find_deepest(std::span<const Key128> keys, std::uint32_t limit, const VersionPrints& version) const;
  OtherVersions deepest_of_others(std::span<const Key128> keys, std::uint32_t limit, const VersionPrints& version) const;
  // One stamp for a whole chain, ancestors included, so that "oldest, then deepest first" never takes a parent before its child.
  void touch(std::span<const Key128> chain, const VersionPrints& version);
  void set_use(const BundleName& name, std::uint64_t use);
  // Names in the order in which they should go, until `bytes` are covered. O(bundles).
  std::vector<BundleName> coldest(std::uint64_t bytes) const;
  // Replaces what a shard holds by what was just read of its folder; keeps the recency of what stays.
  void reconcile(std::size_t shard, const std::vector<BundleName>& names);
  template <class Each>
  void for_each(Each&& each) const {  // (name, last use)
    for (const Shard& shard : shards_) {
      const std::lock_guard guard(shard.mutex);
      for (const auto& [key, entries] : shard.entries) {
        for (const Entry& entry : entries) each(entry.name, entry.last_use);
      }
    }
  }

  std::uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  std::uint64_t bundles() const { return bundles_.load(std::memory_order_relaxed); }

 private:
  struct Entry {
    BundleName name;
    std::uint64_t last_use = 0;
  };
  struct KeyHash {
    std::size_t operator()(const Key128& key) const { return key.low; }
  };
  struct Shard {
    mutable std::mutex mutex;
    std::unordered_map<Key128, std::vector<Entry>, KeyHash> entries;
  };
  bool add_locked(Shard& shard, const BundleName& name, std::uint64_t use);

  std::array<Shard, kShards> shards_;
  std::atomic<std::uint64_t> bytes_{0}, bundles_{0}, clock_{1};
};

}  // namespace hetkv
