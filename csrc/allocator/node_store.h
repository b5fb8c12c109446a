// NodeStore: the type-stable pool of prefix-index nodes.
//
// Owns node records and token ids. A record is one run of memory: header, point words, point recency, block references. Records
// never move and are never given back to the system, so an unpinned reader may look at a recycled node; it then notices by state,
// generation and key. Does not own blocks (the arena does) or decide about states (ObjectControl does).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "allocator/object_control.h"
#include "base/hash.h"
#include "base/lazy_array.h"

namespace hetkv {

using NodeId = std::uint32_t;  // 0 = none, the root of every namespace
inline constexpr std::uint32_t kNoBlock = ~std::uint32_t{0};
inline constexpr std::uint8_t kHistorySet = 0xFF;  // names the history set where a point set's index is meant

// Written before the node can be found, constant until ABSENT. Atomics because unpinned readers look at them.
struct NodeHeader {
  std::atomic<std::uint64_t> word;  // of the history set
  std::atomic<std::uint64_t> key_high, key_low;
  std::atomic<std::uint32_t> version, space, parent, depth;
  std::atomic<std::uint64_t> last_use;
  std::atomic<std::uint32_t> uses;           // admissions that hit it, saturating
  std::atomic<std::uint16_t> queued;         // bit 15: history entry in an eviction queue; bit s: point set s
  std::atomic<std::uint8_t> ever_published;  // point sets that were ever sealed in this life of the node
  std::atomic<std::uint8_t> probation;       // point sets published on probation (branch points) and not used since
  std::atomic<std::uint32_t> next_free;
  std::atomic<std::uint32_t> gap;  // tokens to the next shallower checkpoint when its points were published
};
static_assert(sizeof(NodeHeader) == 64);

class NodeStore {
 public:
  NodeStore(std::uint32_t max_nodes, std::uint32_t block_size, std::uint32_t point_sets, std::uint32_t history_groups);

  NodeHeader& header(NodeId id) const { return *reinterpret_cast<NodeHeader*>(record(id)); }
  ObjectControl history(NodeId id) const { return ObjectControl(header(id).word); }
  ObjectControl point(NodeId id, std::uint32_t set) const { return ObjectControl(point_words(id)[set]); }
  std::atomic<std::uint64_t>& point_use(NodeId id, std::uint32_t set) const { return point_words(id)[point_sets_ + set]; }
  // Block references, kNoBlock = none. Plain memory: written by the filler, read only under a pin or by the evictor.
  std::uint32_t& history_ref(NodeId id, std::uint32_t slot) const { return refs(id)[slot]; }
  std::uint32_t& point_ref(NodeId id, std::uint32_t set) const { return refs(id)[history_groups_ + set]; }
  std::span<std::int32_t> tokens(NodeId id) const { return {tokens_.data() + std::size_t{id} * block_size_, block_size_}; }
  void prefetch_record(NodeId id) const {
    __builtin_prefetch(record(id));
    __builtin_prefetch(record(id) + 64);
  }
  void prefetch(NodeId id) const {
    prefetch_record(id);
    const auto* t = reinterpret_cast<const std::byte*>(tokens_.data() + std::size_t{id} * block_size_);
    for (std::size_t at = 0; at < block_size_ * sizeof(std::int32_t) && at < 1024; at += 64) __builtin_prefetch(t + at);
  }

  // A free record, or 0 if all are in use. Thread-safe, lock-free, no allocation.
  NodeId allocate();
  void release(NodeId id);

  std::uint32_t point_sets() const { return point_sets_; }
  std::uint32_t history_groups() const { return history_groups_; }
  std::uint32_t block_size() const { return block_size_; }
  std::uint32_t max_nodes() const { return max_nodes_; }
  NodeId high_water() const { return bump_.load(std::memory_order_acquire); }  // ids [1, high_water) were used at least once
  std::size_t record_bytes() const { return stride_; }

 private:
  std::byte* record(NodeId id) const { return records_.data() + std::size_t{id} * stride_; }
  std::atomic<std::uint64_t>* point_words(NodeId id) const {
    return reinterpret_cast<std::atomic<std::uint64_t>*>(record(id) + sizeof(NodeHeader));
  }
  std::uint32_t* refs(NodeId id) const {
    return reinterpret_cast<std::uint32_t*>(record(id) + sizeof(NodeHeader) + std::size_t{point_sets_} * 16);
  }

  std::uint32_t max_nodes_, block_size_, point_sets_, history_groups_;
  std::size_t stride_;
  LazyArray<std::byte> records_;
  LazyArray<std::int32_t> tokens_;
  std::atomic<NodeId> bump_{1};
  std::atomic<std::uint64_t> free_head_{0};  // tag 32 | id 32
};

}  // namespace hetkv
