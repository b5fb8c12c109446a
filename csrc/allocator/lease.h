// Lease: the pins of one request. Nothing it covers can be taken away while it lives.
//
// Owns one pin on the deepest history node (which keeps the whole chain) and one on each point object that is still read. Points
// are unpinned before the history pin (protocol.md invariant 4). Move-only. The store must outlive it. Not thread-safe itself.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "allocator/object_store.h"

namespace hetkv {

struct PointPin {
  NodeId node = 0;
  std::uint32_t set = 0;
  std::uint32_t depth = 0;
};

class Lease {
 public:
  explicit Lease(ObjectStore& store) : store_(&store) {}
  Lease(Lease&& other) noexcept
      : store_(other.store_), deepest_(std::exchange(other.deepest_, 0)), points_(std::exchange(other.points_, {})) {}
  Lease& operator=(Lease&&) = delete;
  // Drops what it has and takes over the other's.
  void take_over(Lease&& other) {
    release();
    deepest_ = std::exchange(other.deepest_, 0);
    points_ = std::exchange(other.points_, {});
  }
  ~Lease() { release(); }

  NodeId deepest() const { return deepest_; }
  // In blocks, of the deepest node; 0 without one.
  std::uint32_t depth() const {
    return deepest_ == 0 ? 0 : store_->nodes().header(deepest_).depth.load(std::memory_order_relaxed);
  }
  // Takes over the caller's pin on `node`, a descendant of the present one, and drops the present one.
  void move_to(NodeId node) {
    if (deepest_ != 0) store_->unpin_node(deepest_);
    deepest_ = node;
  }
  void add_point(PointPin pin) { points_.push_back(pin); }  // takes over the caller's pin
  void drop_point(std::uint32_t set, std::uint32_t depth) {
    for (std::size_t i = 0; i < points_.size(); ++i) {
      if (points_[i].set != set || points_[i].depth != depth) continue;
      store_->unpin_point(points_[i].node, set);
      points_[i] = points_.back();
      points_.pop_back();
      return;
    }
  }
  void drop_points() {
    for (const PointPin& pin : points_) store_->unpin_point(pin.node, pin.set);
    points_.clear();
  }
  const std::vector<PointPin>& points() const { return points_; }
  // Whether everything it covers is still good: false after a quarantine took some of it.
  bool ok() const {
    if (deepest_ != 0 && !store_->node_ok(deepest_)) return false;
    for (const PointPin& pin : points_) {
      if (!store_->point_ok(pin.node, pin.set)) return false;
    }
    return true;
  }
  void release() {
    drop_points();
    move_to(0);
  }

 private:
  ObjectStore* store_;
  NodeId deepest_ = 0;
  std::vector<PointPin> points_;
};

}  // namespace hetkv
