// PrefixIndex: key -> node, a fixed hash table of 64-byte buckets.
//
// Owns the buckets only. A slot is one atomic word: tag 24 | point flags 8 | node id 32; 0 = empty. Readers take nothing and write
// nothing. An inserter holds the writer bit of the key's home bucket, which makes "look for an equal node, else insert" one step;
// removal and flag updates are single CASes on the slot and need no bit. What a slot says is a hint: whoever acts on it pins the
// node and compares key, version and namespace under the pin.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include "allocator/node_store.h"
#include "base/hash.h"
#include "base/lazy_array.h"

namespace hetkv {

class PrefixIndex {
 public:
  PrefixIndex(std::uint32_t max_nodes);

  struct Entry {
    NodeId node = 0;
    std::uint8_t flags = 0;
  };

  // Calls visit(Entry) for every slot whose tag fits `key`, until it returns true; returns whether it did. Lock-free, no writes.
  template <class Visit>
  bool visit(const Key128& key, Visit&& visit) const {
    const std::uint64_t tag = tag_of(key);
    std::size_t at = home(key);
    for (std::size_t step = 0; step < buckets_.size(); ++step) {
      const Bucket& bucket = buckets_[at];
      for (const auto& slot : bucket.slots) {
        const std::uint64_t value = slot.load(std::memory_order_acquire);
        if ((value >> 40) == tag && value != 0 &&
            visit(Entry{static_cast<NodeId>(value), static_cast<std::uint8_t>(value >> 32)}))
          return true;
      }
      if (bucket.overflow.load(std::memory_order_acquire) == 0) return false;
      at = at + 1 == buckets_.size() ? 0 : at + 1;
    }
    return false;
  }
  void prefetch(const Key128& key) const { __builtin_prefetch(&buckets_[home(key)]); }
  void prefetch_for_write(const Key128& key) const { __builtin_prefetch(&buckets_[home(key)], 1); }

  // The writer bit of a key's home bucket, or nothing if another inserter holds it: never waits.
  class Writer {
   public:
    Writer(Writer&& other) noexcept : bit_(std::exchange(other.bit_, nullptr)) {}
    Writer& operator=(Writer&&) = delete;
    ~Writer() {
      if (bit_ != nullptr) bit_->store(0, std::memory_order_release);
    }

   private:
    friend class PrefixIndex;
    explicit Writer(std::atomic<std::uint32_t>* bit) : bit_(bit) {}
    std::atomic<std::uint32_t>* bit_;
  };
  std::optional<Writer> try_write(const Key128& key);

  // Inserts under the writer bit: the store is the linearisation point of a publication. False if the table is full.
  bool insert(const Writer& writer, const Key128& key, NodeId node, std::uint8_t flags);
  // Removes the slot that names `node`, if it is there. Lock-free.
  void remove(const Key128& key, NodeId node);
  // Replaces the flags of the slot that names `node` by flags_now(), until they agree after the store. Lock-free.
  template <class FlagsNow>
  void refresh_flags(const Key128& key, NodeId node, FlagsNow&& flags_now) {
    std::atomic<std::uint64_t>* slot = find_slot(key, node);
    if (slot == nullptr) return;
    std::uint64_t value = slot->load(std::memory_order_acquire);
    for (;;) {
      if (static_cast<NodeId>(value) != node) return;
      const std::uint64_t wanted = (value & ~(std::uint64_t{0xFF} << 32)) | (std::uint64_t{flags_now()} << 32);
      if (wanted == value) return;
      slot->compare_exchange_weak(value, wanted, std::memory_order_acq_rel, std::memory_order_acquire);
      if (static_cast<NodeId>(value) == node) value = slot->load(std::memory_order_acquire);
    }
  }

  std::size_t bytes() const { return buckets_.size() * sizeof(Bucket); }

 private:
  static constexpr std::size_t kSlots = 7;
  struct alignas(64) Bucket {
    std::array<std::atomic<std::uint64_t>, kSlots> slots;
    std::atomic<std::uint32_t> writer;
    std::atomic<std::uint32_t> overflow;  // entries whose home is this bucket or an earlier one, stored in a later one
  };
  static_assert(sizeof(Bucket) == 64);

  static std::uint64_t tag_of(const Key128& key) { return key.high >> 40; }
  std::size_t home(const Key128& key) const {
    return static_cast<std::size_t>((static_cast<unsigned __int128>(key.low) * buckets_.size()) >> 64);
  }
  std::atomic<std::uint64_t>* find_slot(const Key128& key, NodeId node) const;

  LazyArray<Bucket> buckets_;
};

}  // namespace hetkv
