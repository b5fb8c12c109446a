// DiskTier: a directory of bundles as a tier. Translates between objects of the allocator and bundles of disk/.
//
// Owns nothing but counters; directory, versions and namespaces must outlive it. What lies on disk names no namespace instance: the chain
// key begins at the namespace's root, which depends on the directory's secret and on how often the namespace was cleared.
#pragma once

#include "allocator/disk/bundle_directory.h"
#include "allocator/lower_tier.h"
#include "allocator/version_table.h"

namespace hetkv {

class DiskTier final : public LowerTier {
 public:
  DiskTier(BundleDirectory& directory, const VersionTable& versions, const NamespaceTable& spaces)
      : directory_(directory), versions_(versions), spaces_(spaces) {}

  std::string_view name() const override { return "disk"; }
  std::uint32_t parts(const Key128& key, VersionId version, std::uint32_t space) const override;
  std::uint32_t find_deepest(std::span<const Key128> keys, std::uint32_t limit, VersionId version,
                             std::uint32_t space) const override;
  StoreOutcome store(const ObjectName& name, const ObjectFacts& facts, std::span<const GroupBytes> bytes) override;
  LoadOutcome load(const ObjectName& name, std::span<const std::int32_t> tokens, std::span<const GroupBytes> targets,
                   ObjectFacts* facts) override;
  void touch(std::span<const Key128> chain, VersionId version, std::uint32_t space) override;
  bool parallel() const override { return true; }

 private:
  VersionPrints prints(VersionId version) const {
    const Version& v = versions_.at(version);
    return {v.layout, v.abi, v.model};
  }

  BundleId id_of(const ObjectName& name) const {
    return {name.key, prints(name.version), spaces_.tag_of_instance(name.space), name.part, name.depth};
  }

  BundleDirectory& directory_;
  const VersionTable& versions_;
  const NamespaceTable& spaces_;
};

}  // namespace hetkv
