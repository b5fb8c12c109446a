#include "allocator/version_table.h"

#include <utility>

#include "base/error.h"

namespace hetkv {

VersionTable::VersionTable(Fingerprint layout, std::string model_name, std::map<std::string, std::uint64_t> abi)
    : layout_(layout), model_name_(std::move(model_name)), abi_(std::move(abi)) {
  switch_to_locked();
}

void VersionTable::switch_to_locked() {
  FingerprintBuilder abi("hetkv.abi.1");
  for (const auto& [family, value] : abi_) abi.add(family, value);
  Version wanted{layout_, abi.finish(), FingerprintBuilder("hetkv.model.1").add("version", model_name_).finish(), model_name_};
  const VersionId n = count_.load(std::memory_order_relaxed);
  for (VersionId id = 0; id < n; ++id) {
    if (versions_[id] == wanted) {
      current_.store(id, std::memory_order_release);
      return;
    }
  }
  if (n == kMaxVersions) throw ArgumentError("version", std::to_string(n + 1), "at most 4096 versions in one process");
  versions_[n] = std::move(wanted);
  count_.store(n + 1, std::memory_order_release);
  current_.store(n, std::memory_order_release);
}

void VersionTable::set_model(std::string name) {
  const std::lock_guard guard(change_);
  model_name_ = std::move(name);
  switch_to_locked();
}

void VersionTable::set_abi(const std::string& family, std::uint64_t value) {
  const std::lock_guard guard(change_);
  abi_[family] = value;
  switch_to_locked();
}

void VersionTable::set_layout(Fingerprint layout) {
  const std::lock_guard guard(change_);
  layout_ = layout;
  switch_to_locked();
}

std::map<std::string, std::uint64_t> VersionTable::abi() const {
  const std::lock_guard guard(change_);
  return abi_;
}

}  // namespace hetkv
