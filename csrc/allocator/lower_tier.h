// LowerTier: a tier below the device: what is there, storing an object there, loading it back.
//
// An object has one name on every tier. Presence is a forecast: only a load that answers kLoaded proves anything. Implementations:
// HostTier (a second arena) and DiskTier (a directory of bundles). All methods are thread-safe; store and load block, so they run on
// the threads of spillers and restores, never on a request's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "allocator/layout.h"
#include "allocator/loss.h"
#include "allocator/node_store.h"
#include "allocator/version_table.h"
#include "base/hash.h"

namespace hetkv {

struct ObjectName {
  Key128 key;  // of the prefix that ends with its block
  VersionId version = 0;
  std::uint32_t space = 0;          // namespace instance
  std::uint32_t depth = 0;          // in blocks, >= 1
  std::uint8_t part = kHistorySet;  // kHistorySet, or a point set
};

struct ObjectFacts {
  Key128 parent;                     // its parent's key; zeros at depth 1
  std::vector<std::int32_t> tokens;  // of its block
  bool canonical = false;
  std::uint32_t gap_tokens = 0;  // points: to the next shallower checkpoint
};

// The bytes of one group of an object: a whole block.
struct GroupBytes {
  GroupId group = 0;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

enum class StoreOutcome : std::uint8_t {
  kStored,
  kAlreadyThere,
  kNoParent,  // the tier lacks what it depends on
  kNoRoom,
  kFailed,
};

enum class LoadOutcome : std::uint8_t {
  kLoaded,
  kMissing,   // gone since, or never there
  kRefused,   // there, but of another version, prefix or tokens
  kChecksum,  // its bytes are not those that were stored
  kFailed,    // could not be read
};

class LowerTier {
 public:
  static constexpr std::uint32_t kHistoryPart = std::uint32_t{1} << 31;  // in parts()

  virtual ~LowerTier() = default;
  virtual std::string_view name() const = 0;
  // What it seems to have of one block's prefix: bit s: point set s, kHistoryPart: the history set.
  virtual std::uint32_t parts(const Key128& key, VersionId version, std::uint32_t space) const = 0;
  // Deepest of keys[0..limit) whose history it seems to have.
  virtual std::uint32_t find_deepest(std::span<const Key128> keys, std::uint32_t limit, VersionId version,
                                     std::uint32_t space) const = 0;
  // The bytes are read until it returns.
  virtual StoreOutcome store(const ObjectName& name, const ObjectFacts& facts, std::span<const GroupBytes> bytes) = 0;
  // Compares `tokens` (a block of them). On anything but kLoaded the targets hold garbage.
  virtual LoadOutcome load(const ObjectName& name, std::span<const std::int32_t> tokens, std::span<const GroupBytes> targets,
                           ObjectFacts* facts) = 0;
  // An admission used this chain.
  virtual void touch(std::span<const Key128> chain, VersionId version, std::uint32_t space) = 0;
  // Whether several stores at once are faster than one after the other.
  virtual bool parallel() const = 0;
};

}  // namespace hetkv
