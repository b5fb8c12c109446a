#include "allocator/namespace_table.h"

#include <span>

#include "allocator/fingerprint.h"
#include "base/error.h"

namespace hetkv {

Namespace* NamespaceTable::intern(const std::vector<NamespaceField>& fields) {
  FingerprintBuilder builder("hetkv.namespace.1");
  for (const NamespaceField& field : fields) builder.add(field.tag, field.value);
  const std::lock_guard guard(change_);
  auto& slot = spaces_[builder.framed()];
  if (!slot) {
    slot = std::make_unique<Namespace>();
    slot->framed = builder.framed();
    if (generations_ != nullptr) slot->generation = generations_->generation(slot->framed);
    add_instance_locked(slot.get());
  }
  return slot.get();
}

void NamespaceTable::renew(Namespace* space) {
  const std::lock_guard guard(change_);
  space->generation = generations_ != nullptr ? generations_->raise_generation(space->framed) : space->generation + 1;
  add_instance_locked(space);
}

void NamespaceTable::add_instance_locked(Namespace* space) {
  const auto id = static_cast<std::uint32_t>(instances_.size());
  if (id >= kChunk * kMaxChunks) throw ArgumentError("namespace", std::to_string(id), "fewer than 4194304 namespaces and clears");
  if (id % kChunk == 0) {
    owner_chunks_.push_back(std::make_unique<Instance[]>(kChunk));
    owners_[id / kChunk].store(owner_chunks_.back().get(), std::memory_order_release);
  }
  const auto bytes = std::as_bytes(std::span(space->framed.data(), space->framed.size()));
  instances_.push_back(std::make_unique<NamespaceInstance>(NamespaceInstance{id, hasher_.root(bytes, space->generation)}));
  Instance& instance = owner_chunks_.back()[id % kChunk];
  instance.tag.store(static_cast<std::uint32_t>(instances_.back()->root.high), std::memory_order_release);
  instance.space.store(space, std::memory_order_release);
  space->instance.store(instances_.back().get(), std::memory_order_release);
}

}  // namespace hetkv
