// Versions: (layout, kernel ABI, model) fingerprints, interned to 32-bit ids, and the one that is running now.
//
// Owns the table; ids are never reused. A node belongs to one version; going back to an earlier version makes its entries match
// again, because equal fingerprints get the same id.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "allocator/fingerprint.h"

namespace hetkv {

using VersionId = std::uint32_t;

struct Version {
  Fingerprint layout, abi, model;
  std::string model_name;
  friend bool operator==(const Version& a, const Version& b) {
    return a.layout == b.layout && a.abi == b.abi && a.model == b.model;
  }
};

class VersionTable {
 public:
  static constexpr VersionId kMaxVersions = 4096;

  VersionTable(Fingerprint layout, std::string model_name, std::map<std::string, std::uint64_t> abi);

  // Thread-safe, no allocation, lock-free.
  VersionId current() const { return current_.load(std::memory_order_acquire); }
  VersionId count() const { return count_.load(std::memory_order_acquire); }
  const Version& at(VersionId id) const { return versions_[id]; }

  // Each switches the running version in one store. Thread-safe; allocate; serialised by a mutex that no request path takes.
  void set_model(std::string name);
  void set_abi(const std::string& family, std::uint64_t value);
  void set_layout(Fingerprint layout);
  std::map<std::string, std::uint64_t> abi() const;

 private:
  void switch_to_locked();

  mutable std::mutex change_;
  Fingerprint layout_;
  std::string model_name_;
  std::map<std::string, std::uint64_t> abi_;
  std::array<Version, kMaxVersions> versions_;  // entry i is constant once count_ > i
  std::atomic<VersionId> count_{0};
  std::atomic<VersionId> current_{0};
};

}  // namespace hetkv
