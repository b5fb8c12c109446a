#include "allocator/disk_tier.h"

#include <array>

namespace hetkv {

std::uint32_t DiskTier::parts(const Key128& key, VersionId version, std::uint32_t) const {
  return directory_.parts(key, prints(version));
}

std::uint32_t DiskTier::find_deepest(std::span<const Key128> keys, std::uint32_t limit, VersionId version, std::uint32_t) const {
  return directory_.find_deepest(keys, limit, prints(version));
}

StoreOutcome DiskTier::store(const ObjectName& name, const ObjectFacts& facts, std::span<const GroupBytes> bytes) {
  std::array<SectionSource, kMaxGroups> sections;
  for (std::size_t i = 0; i < bytes.size(); ++i) sections[i] = {bytes[i].group, bytes[i].data, bytes[i].bytes};
  BundleMeta meta;
  meta.parent = facts.parent;
  meta.tokens = facts.tokens;
  meta.canonical = facts.canonical;
  meta.gap_tokens = facts.gap_tokens;
  switch (directory_.write(id_of(name), meta, std::span(sections.data(), bytes.size()))) {
    case DiskOutcome::kDone:
      return StoreOutcome::kStored;
    case DiskOutcome::kAlreadyThere:
      return StoreOutcome::kAlreadyThere;
    case DiskOutcome::kFull:
      return StoreOutcome::kNoRoom;
    default:
      return StoreOutcome::kFailed;
  }
}

LoadOutcome DiskTier::load(const ObjectName& name, std::span<const std::int32_t> tokens, std::span<const GroupBytes> targets,
                           ObjectFacts* facts) {
  std::array<SectionTarget, kMaxGroups> sections;
  for (std::size_t i = 0; i < targets.size(); ++i) sections[i] = {targets[i].group, targets[i].data, targets[i].bytes};
  BundleMeta meta;
  const DiskOutcome outcome = directory_.read(id_of(name), tokens, std::span(sections.data(), targets.size()), &meta);
  switch (outcome) {
    case DiskOutcome::kDone:
      facts->parent = meta.parent;
      facts->tokens = std::move(meta.tokens);
      facts->canonical = meta.canonical;
      facts->gap_tokens = meta.gap_tokens;
      return LoadOutcome::kLoaded;
    case DiskOutcome::kMissing:
      return LoadOutcome::kMissing;
    case DiskOutcome::kChecksum:
    case DiskOutcome::kHeader:
    case DiskOutcome::kTruncated:
      return LoadOutcome::kChecksum;
    case DiskOutcome::kReadError:
    case DiskOutcome::kPermission:
      return LoadOutcome::kFailed;
    default:
      return LoadOutcome::kRefused;
  }
}

void DiskTier::touch(std::span<const Key128> chain, VersionId version, std::uint32_t) {
  directory_.touch(chain, prints(version));
}

}  // namespace hetkv
