// ObjectStore: quarantine, and the record of what is broken.
#include "allocator/object_store.h"
#include "base/test_point.h"

namespace hetkv {

std::uint64_t ObjectStore::quarantine_node(NodeId node, std::uint32_t gen, LossReason reason, std::int32_t group) {
  auto take = [&](NodeId id, std::uint32_t g) {
    const Key128 key = key_of(id);
    const VersionId version = store_.header(id).version.load(std::memory_order_relaxed);
    if (store_.history(id).break_object(g) != Transition::kDone) return false;
    index_.remove(key, id);
    remember_broken(key, {version, reason, group});
    counters_.broken.fetch_add(1, std::memory_order_relaxed);
    return true;
  };
  if (!take(node, gen)) return 0;
  HETKV_TEST_POINT("quarantine: marked");
  std::uint64_t marked = 1;
  // Broken parents take no children, so this ends.
  for (bool more = true; more;) {
    more = false;
    for (NodeId id = 1; id < store_.high_water(); ++id) {
      const ObjectWord w = store_.history(id).load();
      if (w.state() != ObjectState::kSealed && w.state() != ObjectState::kFilling) continue;
      const NodeId parent = store_.header(id).parent.load(std::memory_order_relaxed);
      if (parent == 0 || store_.history(parent).load().state() != ObjectState::kBroken) continue;
      if (take(id, w.gen())) {
        ++marked;
        more = true;
      }
    }
  }
  const std::vector<NodeId> nodes = live_by_depth();
  for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) {
    const ObjectWord w = store_.history(*it).load();
    if (w.state() == ObjectState::kBroken) evict_node(*it, w.gen());
  }
  return marked;
}

bool ObjectStore::quarantine_point(NodeId node, std::uint32_t set, LossReason reason) {
  ObjectControl control = store_.point(node, set);
  const std::uint32_t gen = control.load().gen();
  if (control.break_object(gen, static_cast<std::uint32_t>(reason) << kReasonShift) != Transition::kDone) return false;
  counters_.broken.fetch_add(1, std::memory_order_relaxed);
  refresh_flags(node);
  evict_point(node, set, gen);  // now, unless a lease still reads it: then its unpin does
  return true;
}

std::optional<LossReason> ObjectStore::broken_point(NodeId node, std::uint32_t set) const {
  const std::uint32_t reason = store_.point(node, set).load().flags() >> kReasonShift;
  return reason == 0 ? std::nullopt : std::optional(static_cast<LossReason>(reason));
}

void ObjectStore::remember_broken(const Key128& key, const BrokenRecord& record) {
  constexpr std::size_t kRemembered = std::size_t{1} << 16;
  const std::lock_guard guard(broken_mutex_);
  if (broken_.size() >= kRemembered) broken_.erase(broken_.begin());
  broken_[key.low] = record;
  broken_count_.store(broken_.size(), std::memory_order_release);
}

void ObjectStore::forget_broken(const Key128& key) {
  const std::lock_guard guard(broken_mutex_);
  broken_.erase(key.low);
  broken_count_.store(broken_.size(), std::memory_order_release);
}

std::optional<BrokenRecord> ObjectStore::broken(const Key128& key) const {
  const std::lock_guard guard(broken_mutex_);
  const auto it = broken_.find(key.low);
  return it == broken_.end() ? std::nullopt : std::optional(it->second);
}

}  // namespace hetkv
