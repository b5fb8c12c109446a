#include "allocator/prefix_index.h"

#include <algorithm>

namespace hetkv {

// Five nodes to a bucket of seven on average: overflow is rare, and a bucket is a cache line.
PrefixIndex::PrefixIndex(std::uint32_t max_nodes) : buckets_(std::max<std::size_t>(8, std::size_t{max_nodes} / 5 + 1)) {}

std::optional<PrefixIndex::Writer> PrefixIndex::try_write(const Key128& key) {
  std::atomic<std::uint32_t>& bit = buckets_[home(key)].writer;
  std::uint32_t clear = 0;
#ifdef HETKV_PLANT_NO_WRITER_BIT
  return Writer(&bit);
#endif
  if (!bit.compare_exchange_strong(clear, 1, std::memory_order_acquire, std::memory_order_relaxed)) return std::nullopt;
  return Writer(&bit);
}

bool PrefixIndex::insert(const Writer&, const Key128& key, NodeId node, std::uint8_t flags) {
  const std::uint64_t value = tag_of(key) << 40 | std::uint64_t{flags} << 32 | node;
  std::size_t at = home(key);
  for (std::size_t step = 0; step < buckets_.size(); ++step) {
    Bucket& bucket = buckets_[at];
    for (auto& slot : bucket.slots) {
      std::uint64_t empty = 0;
      if (slot.load(std::memory_order_relaxed) == 0 &&
          slot.compare_exchange_strong(empty, value, std::memory_order_acq_rel, std::memory_order_relaxed)) {
        return true;
      }
    }
    // Readers must go on past this bucket before the entry lies behind it.
    bucket.overflow.fetch_add(1, std::memory_order_acq_rel);
    at = at + 1 == buckets_.size() ? 0 : at + 1;
  }
  for (std::size_t i = 0; i < buckets_.size(); ++i) buckets_[i].overflow.fetch_sub(1, std::memory_order_acq_rel);
  return false;
}

std::atomic<std::uint64_t>* PrefixIndex::find_slot(const Key128& key, NodeId node) const {
  std::size_t at = home(key);
  for (std::size_t step = 0; step < buckets_.size(); ++step) {
    Bucket& bucket = buckets_[at];
    for (auto& slot : bucket.slots) {
      const std::uint64_t value = slot.load(std::memory_order_acquire);
      if (value != 0 && static_cast<NodeId>(value) == node) return &slot;
    }
    if (bucket.overflow.load(std::memory_order_acquire) == 0) return nullptr;
    at = at + 1 == buckets_.size() ? 0 : at + 1;
  }
  return nullptr;
}

void PrefixIndex::remove(const Key128& key, NodeId node) {
  std::atomic<std::uint64_t>* slot = find_slot(key, node);
  if (slot == nullptr) return;
  std::uint64_t value = slot->load(std::memory_order_acquire);
  while (value != 0 && static_cast<NodeId>(value) == node) {
    if (!slot->compare_exchange_weak(value, 0, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    const auto* target = reinterpret_cast<const std::byte*>(slot);
    const auto stored = static_cast<std::size_t>(target - reinterpret_cast<const std::byte*>(buckets_.data())) / sizeof(Bucket);
    for (std::size_t at = home(key); at != stored; at = at + 1 == buckets_.size() ? 0 : at + 1) {
      buckets_[at].overflow.fetch_sub(1, std::memory_order_acq_rel);
    }
    return;
  }
}

}  // namespace hetkv
