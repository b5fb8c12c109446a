#include "allocator/lower_tiers.h"

#include <algorithm>
#include <utility>

namespace hetkv {
namespace {

constexpr std::chrono::seconds kRefresh{1};  // how often other processes' bundles are looked for, at most

}  // namespace

LowerTiers::LowerTiers(const CacheLayout& layout, MemoryTier& device, NamespaceTable& spaces, const VersionTable& versions,
                       const Config& config, BundleDirectory* directory)
    : spaces_(spaces), versions_(versions), directory_(directory),
      engine_(config.engine ? config.engine : std::make_shared<HostCopyEngine>()),
      loads_(std::make_unique<IoPool>(config.disk ? config.disk->load_threads : 1)),
      stores_(config.disk ? std::make_unique<IoPool>(config.disk->store_threads) : nullptr),
      restorer_(
          layout, device,
          [&] {
            if (config.host) host_.emplace(layout, config.host->arena, spaces, config.host->max_nodes, *engine_);
            if (config.disk) disk_.emplace(*directory, versions, spaces);
            if (host_) tiers_.push_back(&*host_);
            if (disk_) tiers_.push_back(&*disk_);
            return tiers_;
          }(),
          *loads_) {
  std::unique_ptr<Spiller> to_disk;
  if (disk_) {
    MemoryTier& above = host_ ? host_->memory() : device;
    to_disk = std::make_unique<Spiller>(layout, above, *disk_, stores_.get(), config.disk->spill, nullptr);
  }
  if (host_) spillers_.push_back(std::make_unique<Spiller>(layout, device, *host_, nullptr, config.host->spill, to_disk.get()));
  if (to_disk) spillers_.push_back(std::move(to_disk));
}

LowerTiers::~LowerTiers() {
  for (auto& spiller : spillers_) spiller.reset();  // highest first: what it copies down, the next copies on
  restorer_.wait_idle();
  loads_.reset();  // the last work of a restore may still hold it
  stores_.reset();
}

std::uint32_t LowerTiers::find_deepest(std::span<const Key128> keys, VersionId version, std::uint32_t space) const {
  std::uint32_t deepest = 0;
  for (const LowerTier* tier : tiers_)
    deepest = std::max(deepest, tier->find_deepest(keys, static_cast<std::uint32_t>(keys.size()), version, space));
  return deepest;
}

std::uint32_t LowerTiers::parts(const Key128& key, VersionId version, std::uint32_t space) const {
  std::uint32_t parts = 0;
  for (const LowerTier* tier : tiers_) parts |= tier->parts(key, version, space);
  return parts;
}

int LowerTiers::tier_of(const Key128& key, VersionId version, std::uint32_t space, std::uint32_t part_bit) const {
  for (std::size_t i = 0; i < tiers_.size(); ++i) {
    if ((tiers_[i]->parts(key, version, space) & part_bit) != 0) return static_cast<int>(i);
  }
  return -1;
}

OtherVersions LowerTiers::deepest_of_others(std::span<const Key128> keys, VersionId version) const {
  if (directory_ == nullptr) return {};
  const Version& v = versions_.at(version);
  return directory_->deepest_of_others(keys, static_cast<std::uint32_t>(keys.size()), {v.layout, v.abi, v.model});
}

void LowerTiers::touch(std::vector<Key128> chain, VersionId version, std::uint32_t space) {
  loads_->post([this, keys = std::move(chain), version, space] {
    for (LowerTier* tier : tiers_) tier->touch(keys, version, space);
    const std::int64_t now = std::chrono::steady_clock::now().time_since_epoch().count();
    std::int64_t last = refreshed_.load(std::memory_order_relaxed);
    if (directory_ != nullptr && now - last > std::chrono::nanoseconds(kRefresh).count() &&
        refreshed_.compare_exchange_strong(last, now))
      directory_->refresh();
  });
}

void LowerTiers::flush() {
  for (const auto& spiller : spillers_) spiller->flush();
}

std::uint64_t LowerTiers::clear(std::uint32_t space) {
  return directory_ == nullptr ? 0 : directory_->remove_space(spaces_.tag_of_instance(space));
}

}  // namespace hetkv
