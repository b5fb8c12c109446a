#include "allocator/disk/disk_index.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <unordered_set>

#include "allocator/node_store.h"

namespace hetkv {
namespace {

std::uint32_t tag(const Fingerprint& f) { return static_cast<std::uint32_t>(f.high >> 32); }

template <class T>
bool parse_hex(std::string_view text, T* out) {
  if (text.empty()) return false;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out, 16);
  return error == std::errc() && end == text.data() + text.size();
}

bool same_version(const BundleName& name, const VersionPrints& version) {
  return name.layout == tag(version.layout) && name.abi == tag(version.abi) && name.model == tag(version.model);
}

}  // namespace

BundleName BundleName::of(const BundleId& id, std::uint64_t bytes) {
  return {id.key, id.space, tag(id.version.layout), tag(id.version.abi), tag(id.version.model), id.part, id.depth, bytes};
}

std::string BundleName::text() const {
  std::array<char, 8> which{'h', '\0'};
  if (part != kHistorySet) std::snprintf(which.data(), which.size(), "p%u", unsigned{part});
  std::array<char, 128> buffer;
  const int n = std::snprintf(buffer.data(), buffer.size(), "%016llx%016llx%08x%08x%08x%08x-%s-%x-%llx",
                              static_cast<unsigned long long>(key.high), static_cast<unsigned long long>(key.low), space, layout,
                              abi, model, which.data(), depth, static_cast<unsigned long long>(bytes));
  return {buffer.data(), static_cast<std::size_t>(n)};
}

std::optional<BundleName> BundleName::parse(std::string_view text) {
  constexpr std::size_t kDigits = 64;
  BundleName name;
  if (text.size() < kDigits + 6 || text[kDigits] != '-') return std::nullopt;
  if (!parse_hex(text.substr(0, 16), &name.key.high) || !parse_hex(text.substr(16, 16), &name.key.low) ||
      !parse_hex(text.substr(32, 8), &name.space) || !parse_hex(text.substr(40, 8), &name.layout) ||
      !parse_hex(text.substr(48, 8), &name.abi) || !parse_hex(text.substr(56, 8), &name.model))
    return std::nullopt;
  text.remove_prefix(kDigits + 1);
  const std::size_t first = text.find('-');
  const std::size_t second = first == std::string_view::npos ? first : text.find('-', first + 1);
  if (second == std::string_view::npos) return std::nullopt;
  const std::string_view part = text.substr(0, first);
  if (part == "h") {
    name.part = kHistorySet;
  } else if (part.size() == 2 && part[0] == 'p' && part[1] >= '0' && part[1] < static_cast<char>('0' + kMaxPointSets)) {
    name.part = static_cast<std::uint8_t>(part[1] - '0');
  } else {
    return std::nullopt;
  }
  if (!parse_hex(text.substr(first + 1, second - first - 1), &name.depth) || !parse_hex(text.substr(second + 1), &name.bytes))
    return std::nullopt;
  return name;
}

bool DiskIndex::add_locked(Shard& shard, const BundleName& name, std::uint64_t use) {
  std::vector<Entry>& entries = shard.entries[name.key];
  for (const Entry& entry : entries) {
    if (entry.name == name) return false;
  }
  entries.push_back({name, use});
  bytes_.fetch_add(name.bytes, std::memory_order_relaxed);
  bundles_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

bool DiskIndex::add(const BundleName& name, const std::optional<Key128>& above) {
  std::uint64_t use = clock_.load(std::memory_order_relaxed);
  if (above) {
    const Shard& shard = shards_[shard_of(*above)];
    const std::lock_guard guard(shard.mutex);
    if (const auto at = shard.entries.find(*above); at != shard.entries.end()) {
      for (const Entry& entry : at->second) {
        if (entry.name.part == kHistorySet && entry.name.layout == name.layout && entry.name.abi == name.abi &&
            entry.name.model == name.model)
          use = std::min(use, entry.last_use);
      }
    }
  }
  Shard& shard = shards_[shard_of(name.key)];
  const std::lock_guard guard(shard.mutex);
  return add_locked(shard, name, use);
}

bool DiskIndex::remove(const BundleName& name) {
  Shard& shard = shards_[shard_of(name.key)];
  const std::lock_guard guard(shard.mutex);
  const auto at = shard.entries.find(name.key);
  if (at == shard.entries.end()) return false;
  const auto entry = std::find_if(at->second.begin(), at->second.end(), [&](const Entry& e) { return e.name == name; });
  if (entry == at->second.end()) return false;
  at->second.erase(entry);
  if (at->second.empty()) shard.entries.erase(at);
  bytes_.fetch_sub(name.bytes, std::memory_order_relaxed);
  bundles_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

std::optional<BundleName> DiskIndex::find(const BundleId& id) const {
  const Shard& shard = shards_[shard_of(id.key)];
  const std::lock_guard guard(shard.mutex);
  const auto at = shard.entries.find(id.key);
  if (at == shard.entries.end()) return std::nullopt;
  for (const Entry& entry : at->second) {
    if (entry.name.part == id.part && entry.name.depth == id.depth && same_version(entry.name, id.version)) return entry.name;
  }
  return std::nullopt;
}

std::uint32_t DiskIndex::parts(const Key128& key, const VersionPrints& version) const {
  const Shard& shard = shards_[shard_of(key)];
  const std::lock_guard guard(shard.mutex);
  const auto at = shard.entries.find(key);
  if (at == shard.entries.end()) return 0;
  std::uint32_t parts = 0;
  for (const Entry& entry : at->second) {
    if (same_version(entry.name, version)) parts |= entry.name.part == kHistorySet ? kHistoryPart : 1U << entry.name.part;
  }
  return parts;
}

std::uint32_t DiskIndex::find_deepest(std::span<const Key128> keys, std::uint32_t limit, const VersionPrints& version) const {
  auto has = [&](std::uint32_t depth) { return (parts(keys[depth - 1], version) & kHistoryPart) != 0; };
  if (limit == 0 || bundles() == 0 || !has(1)) return 0;
  if (has(limit)) return limit;
  std::uint32_t low = 1, high = limit;  // low is present, high is not
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (has(middle) ? low : high) = middle;
  }
  return low;
}

OtherVersions DiskIndex::deepest_of_others(std::span<const Key128> keys, std::uint32_t limit,
                                           const VersionPrints& version) const {
  // By search for each class of match: within a class the prefixes of one version are closed, and the deepest of them answers.
  OtherVersions deepest;
  auto search = [&](auto&& matches) {
    auto has = [&](std::uint32_t depth) {
      const Shard& shard = shards_[shard_of(keys[depth - 1])];
      const std::lock_guard guard(shard.mutex);
      const auto at = shard.entries.find(keys[depth - 1]);
      return at != shard.entries.end() && std::any_of(at->second.begin(), at->second.end(), [&](const Entry& e) {
               return e.name.part == kHistorySet && !same_version(e.name, version) && matches(e.name);
             });
    };
    if (limit == 0 || !has(1)) return std::uint32_t{0};
    std::uint32_t low = 1, high = limit + 1;
    while (high - low > 1) {
      const std::uint32_t middle = low + (high - low) / 2;
      (has(middle) ? low : high) = middle;
    }
    return low;
  };
  deepest.any = search([](const BundleName&) { return true; });
  if (deepest.any == 0) return deepest;
  deepest.same_layout = search([&](const BundleName& name) { return name.layout == tag(version.layout); });
  deepest.same_abi =
      search([&](const BundleName& name) { return name.layout == tag(version.layout) && name.abi == tag(version.abi); });
  return deepest;
}

void DiskIndex::touch(std::span<const Key128> chain, const VersionPrints& version) {
  const std::uint64_t now = clock_.fetch_add(1, std::memory_order_relaxed) + 1;
  for (const Key128& key : chain) {
    Shard& shard = shards_[shard_of(key)];
    const std::lock_guard guard(shard.mutex);
    const auto at = shard.entries.find(key);
    if (at == shard.entries.end()) continue;
    for (Entry& entry : at->second) {
      if (same_version(entry.name, version)) entry.last_use = now;
    }
  }
}

void DiskIndex::set_use(const BundleName& name, std::uint64_t use) {
  Shard& shard = shards_[shard_of(name.key)];
  const std::lock_guard guard(shard.mutex);
  const auto at = shard.entries.find(name.key);
  if (at == shard.entries.end()) return;
  for (Entry& entry : at->second) {
    if (entry.name == name) entry.last_use = use;
  }
  std::uint64_t clock = clock_.load(std::memory_order_relaxed);
  while (clock <= use && !clock_.compare_exchange_weak(clock, use + 1, std::memory_order_relaxed)) {
  }
}

std::vector<BundleName> DiskIndex::coldest(std::uint64_t bytes) const {
  std::vector<Entry> all;
  all.reserve(bundles());
  for (const Shard& shard : shards_) {
    const std::lock_guard guard(shard.mutex);
    for (const auto& [key, entries] : shard.entries) all.insert(all.end(), entries.begin(), entries.end());
  }
  // A node's points go before its history.
  std::sort(all.begin(), all.end(), [](const Entry& a, const Entry& b) {
    if (a.last_use != b.last_use) return a.last_use < b.last_use;
    if (a.name.depth != b.name.depth) return a.name.depth > b.name.depth;
    return a.name.part < b.name.part;
  });
  std::vector<BundleName> names;
  std::uint64_t covered = 0;
  for (const Entry& entry : all) {
    if (covered >= bytes) break;
    names.push_back(entry.name);
    covered += entry.name.bytes;
  }
  return names;
}

void DiskIndex::reconcile(std::size_t which, const std::vector<BundleName>& names) {
  std::unordered_set<std::string> there;
  for (const BundleName& name : names) there.insert(name.text());
  Shard& shard = shards_[which];
  const std::lock_guard guard(shard.mutex);
  for (auto at = shard.entries.begin(); at != shard.entries.end();) {
    std::erase_if(at->second, [&](const Entry& entry) {
      if (there.contains(entry.name.text())) return false;
      bytes_.fetch_sub(entry.name.bytes, std::memory_order_relaxed);
      bundles_.fetch_sub(1, std::memory_order_relaxed);
      return true;
    });
    at = at->second.empty() ? shard.entries.erase(at) : std::next(at);
  }
  for (const BundleName& name : names) add_locked(shard, name, clock_.load(std::memory_order_relaxed));
}

}  // namespace hetkv
