// HostTier: the tier in host memory: a second arena with typed slabs, floors and caps like the device's.
//
// Owns arena bookkeeping and index, not the memory. Blocks move in and out by a CopyEngine; the device's block is pinned by the
// caller, the host's by this class, until the fence of the copy. Namespaces are not charged for what lies here.
#pragma once

#include <memory>

#include "allocator/copy_engine.h"
#include "allocator/lower_tier.h"
#include "allocator/memory_tier.h"

namespace hetkv {

class HostTier final : public LowerTier {
 public:
  // Throws as Arena does. The engine, the layout and the namespaces must outlive it.
  HostTier(const CacheLayout& layout, const ArenaConfig& arena, NamespaceTable& spaces, std::uint32_t max_nodes,
           CopyEngine& engine);

  MemoryTier& memory() { return memory_; }
  const MemoryTier& memory() const { return memory_; }

  std::string_view name() const override { return "host"; }
  std::uint32_t parts(const Key128& key, VersionId version, std::uint32_t space) const override;
  std::uint32_t find_deepest(std::span<const Key128> keys, std::uint32_t limit, VersionId version,
                             std::uint32_t space) const override;
  StoreOutcome store(const ObjectName& name, const ObjectFacts& facts, std::span<const GroupBytes> bytes) override;
  LoadOutcome load(const ObjectName& name, std::span<const std::int32_t> tokens, std::span<const GroupBytes> targets,
                   ObjectFacts* facts) override;
  void touch(std::span<const Key128> chain, VersionId version, std::uint32_t space) override;
  bool parallel() const override { return false; }

 private:
  // The node of this name, pinned; 0 if it is not here.
  NodeId pin(const Key128& key, const ObjectName& name, std::uint32_t depth);
  StoreOutcome publish(const ObjectName& name, const ObjectFacts& facts, NodeId beside, std::span<const Block> blocks,
                       std::span<const GroupBytes> bytes);

  const CacheLayout& layout_;
  CopyEngine& engine_;
  MemoryTier memory_;
};

}  // namespace hetkv
