#include "allocator/node_store.h"

namespace hetkv {

NodeStore::NodeStore(std::uint32_t max_nodes, std::uint32_t block_size, std::uint32_t point_sets, std::uint32_t history_groups)
    : max_nodes_(max_nodes), block_size_(block_size), point_sets_(point_sets), history_groups_(history_groups),
      stride_((sizeof(NodeHeader) + std::size_t{point_sets} * 16 + (std::size_t{point_sets} + history_groups) * 4 + 7) / 8 * 8),
      records_((std::size_t{max_nodes} + 1) * stride_), tokens_((std::size_t{max_nodes} + 1) * block_size) {}

NodeId NodeStore::allocate() {
  std::uint64_t head = free_head_.load(std::memory_order_acquire);
  while (static_cast<NodeId>(head) != 0) {
    const auto id = static_cast<NodeId>(head);
    const std::uint64_t next = header(id).next_free.load(std::memory_order_relaxed);
    const std::uint64_t wanted = ((head >> 32) + 1) << 32 | next;  // the tag moves: a recycled head cannot pass
    if (free_head_.compare_exchange_weak(head, wanted, std::memory_order_acq_rel, std::memory_order_acquire)) {
      prefetch(static_cast<NodeId>(next));  // publication takes one after the other
      return id;
    }
  }
  NodeId id = bump_.load(std::memory_order_relaxed);
  while (id <= max_nodes_) {
    if (bump_.compare_exchange_weak(id, id + 1, std::memory_order_acq_rel, std::memory_order_relaxed)) return id;
  }
  return 0;
}

void NodeStore::release(NodeId id) {
  header(id).parent.store(0, std::memory_order_relaxed);  // its next filler is nobody's child before it says so
  std::uint64_t head = free_head_.load(std::memory_order_relaxed);
  for (;;) {
    header(id).next_free.store(static_cast<NodeId>(head), std::memory_order_relaxed);
    const std::uint64_t wanted = ((head >> 32) + 1) << 32 | id;
    if (free_head_.compare_exchange_weak(head, wanted, std::memory_order_acq_rel, std::memory_order_relaxed)) return;
  }
}

}  // namespace hetkv
