// Sequence: checkpoints (staged, committed, due) and publication.
#include <algorithm>

#include "allocator/kv_allocator.h"
#include "allocator/sequence.h"
#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {

// --- checkpoints ---

std::uint32_t Sequence::staged_sets(std::uint32_t depth) const {
  std::uint32_t mask = 0;
  for (const GroupId id : allocator_.layout().point_groups()) {
    const Group& group = allocator_.layout().group(id);
    if (group.spec.retention != Retention::kWindow && allocator_.layout().point_needed(id, depth)) mask |= 1U << group.point_slot;
  }
  return mask;
}

bool Sequence::wants_point(std::int64_t position) const {
  if (!live_ || position <= 0 || position % block_size_ != 0 || allocator_.layout().point_groups().empty()) return false;
  const auto depth = static_cast<std::uint32_t>(position / block_size_);
  return depth > resume_depth_ && may_publish(position) && plan_.want(depth) != RetentionPlan::Want::kNo;
}

Sequence::PendingPoint* Sequence::find_pending(std::uint32_t depth) {
  for (PendingPoint& point : pending_) {
    if (point.depth == depth) return &point;
  }
  return nullptr;
}

// Boundaries that were just passed and need no staged state: their windows are checkpoints by themselves.
void Sequence::note_boundaries(std::int64_t from, std::int64_t to) {
  if (allocator_.layout().point_groups().empty() || !may_publish(0)) return;
  const auto last = static_cast<std::uint32_t>(to / block_size_);
  for (auto depth = static_cast<std::uint32_t>(from / block_size_) + 1; depth <= last; ++depth) {
    const RetentionPlan::Want want = plan_.want(depth);
    if (want == RetentionPlan::Want::kNo || depth <= resume_depth_ || !may_publish(std::int64_t{depth} * block_size_) ||
        find_pending(depth) != nullptr || staged_sets(depth) != 0)
      continue;
    PendingPoint point;
    point.depth = depth;
    point.want = want;
    point.blocks.fill(kNoBlock);
    pending_.push_back(point);
    if (want == RetentionPlan::Want::kRolling) trim_rolling(depth);
  }
}

void Sequence::trim_rolling(std::uint32_t newest) {
  const std::uint32_t low = plan_.turn_end_low(newest);
  for (std::size_t i = 0; i < pending_.size();) {
    PendingPoint& point = pending_[i];
    if (point.want == RetentionPlan::Want::kRolling && point.depth != newest && point.depth != low) {
      drop_pending(point);
      pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      ++i;
    }
  }
}

void Sequence::drop_points_beyond(std::int64_t position) {
  std::erase_if(pending_, [&](PendingPoint& point) {
    if (std::int64_t{point.depth} * block_size_ <= position) return false;
    drop_pending(point);
    return true;
  });
}

void Sequence::drop_pending(PendingPoint& point) {
  for (std::uint32_t set = 0; set < kMaxPointSets; ++set) {
    if (point.blocks[set] == kNoBlock) continue;
    give_up(Block{point.blocks[set], allocator_.layout().point_groups()[set]});
    point.blocks[set] = kNoBlock;
  }
}

std::vector<StagedBlock> Sequence::stage_point(std::int64_t position) {
  require_live();
  if (position % block_size_ != 0 || position <= num_computed_tokens() || position > num_tokens()) {
    throw ArgumentError("position", std::to_string(position),
                        "a multiple of block_size " + std::to_string(block_size_) + " in (" +
                            std::to_string(num_computed_tokens()) + ", " + std::to_string(num_tokens()) + "]");
  }
  const auto depth = static_cast<std::uint32_t>(position / block_size_);
  const auto groups = allocator_.layout().point_groups();
  PendingPoint* point = find_pending(depth);
  if (point == nullptr) {
    const RetentionPlan::Want want = plan_.want(depth);
    const std::uint32_t needed = staged_sets(depth);
    if (want == RetentionPlan::Want::kNo || needed == 0 || !may_publish(position)) return {};
    if (want == RetentionPlan::Want::kRolling) trim_rolling(depth);  // its blocks serve again
    BlockCounts need{};
    for (std::uint32_t set = 0; set < groups.size(); ++set) need[groups[set]] = needed >> set & 1;
    if (allocator_.reserve(need, ticket_, space_, charge_)) return {};
    held_bytes_ += static_cast<std::int64_t>(allocator_.bytes_of(need));
    PendingPoint fresh;
    fresh.depth = depth;
    fresh.want = want;
    fresh.needed_sets = needed;
    fresh.blocks.fill(kNoBlock);
    for (std::uint32_t set = 0; set < groups.size(); ++set) {
      if ((needed >> set & 1) != 0) fresh.blocks[set] = take(charge_, groups[set]).offset;
    }
    pending_.push_back(fresh);
    point = &pending_.back();
  }
  std::vector<StagedBlock> blocks;
  for (std::uint32_t set = 0; set < groups.size(); ++set) {
    if (point->blocks[set] != kNoBlock) blocks.push_back({groups[set], point->blocks[set]});
  }
  return blocks;
}

void Sequence::commit_point(std::int64_t position, GroupId group, std::int64_t state_position) {
  require_live();
  const CacheLayout& layout = allocator_.layout();
  if (group >= layout.groups().size()) throw ArgumentError("group", std::to_string(group), "a group of the layout");
  const Group& g = layout.group(group);
  require_route(g.spec.kind, Operation::kPublishPoint);
#ifndef HETKV_PLANT_NO_POSITION_PROOF
  if (state_position != position) throw PositionError(g.spec.name, position, state_position);
#endif
  PendingPoint* point = position % block_size_ == 0 ? find_pending(static_cast<std::uint32_t>(position / block_size_)) : nullptr;
  const std::uint32_t bit = g.point_slot >= 0 ? 1U << g.point_slot : 0;
  if (point == nullptr || (point->needed_sets & bit) == 0) {
    throw ArgumentError("position", std::to_string(position), "a position staged by stage_point for group '" + g.spec.name + "'");
  }
  point->committed_sets |= bit;
}

// --- publication ---

void Sequence::extend_keys(std::uint32_t depth) {
  if (keys_.size() >= depth) return;
  const std::size_t have = keys_.size();
  const Key128 parent = have == 0 ? instance_->root : keys_.back();
  keys_.resize(depth);
  allocator_.hasher_.chain(parent, tokens_.data() + have * block_size_, block_size_, std::span(keys_).subspan(have));
}

bool Sequence::publish_history(std::uint32_t depth, PublishOutcome* outcome) {
  const CacheLayout& layout = allocator_.layout();
  ObjectStore& store = allocator_.store();
  std::array<std::uint32_t, kMaxGroups> refs;
  std::array<std::size_t, kMaxGroups> index;
  const auto history = layout.history_groups();
  for (std::size_t slot = 0; slot < history.size(); ++slot) {
    refs[slot] = kNoBlock;
    if (!layout.history_block_at(history[slot], depth)) continue;
    index[slot] = table_blocks(layout.group(history[slot]), std::int64_t{depth} * block_size_) - 1;
    refs[slot] = static_cast<std::uint32_t>(groups_[history[slot]].offsets[index[slot]]);
  }
  constexpr std::size_t kAhead = 4;
  if (depth - 1 + kAhead < keys_.size()) store.prefetch_publication(keys_[depth - 1 + kAhead]);
  NodeContent content;
  content.key = keys_[depth - 1];
  content.version = version_;
  content.space = instance_->id;
  content.parent = lease_.deepest();
  content.depth = depth;
  content.tokens = tokens_.data() + std::size_t{depth - 1} * block_size_;
  content.history_refs = std::span(refs.data(), history.size());
  content.canonical = depth <= canonical_depth_ && (content.parent == 0 || store.node_canonical(content.parent));
  NodeId node = 0;
#ifdef HETKV_PLANT_UNPINNED_PARENT
  lease_.move_to(0);
#endif
  PublishStatus status = store.publish_node(content, &node);
  if (status == PublishStatus::kNoNode && store.evict_coldest_history(false)) status = store.publish_node(content, &node);
  switch (status) {
    case PublishStatus::kPublished:
      for (std::size_t slot = 0; slot < history.size(); ++slot) {
        if (refs[slot] == kNoBlock) continue;
        groups_[history[slot]].held[index[slot]] = Held::kShared;
        held_bytes_ -= static_cast<std::int64_t>(layout.group(history[slot]).block_bytes);
      }
      break;
    case PublishStatus::kFoundEqual:  // our blocks stay private: tables are append-only
      store.touch_node(node, store.tick());
      break;
    case PublishStatus::kBusy:
      *outcome = PublishOutcome::kBusy;
      return false;
    case PublishStatus::kNoNode:
      *outcome = PublishOutcome::kNoNode;
      return false;
    case PublishStatus::kCollision:
    case PublishStatus::kParentBroken:
      publishable_ = false;
      *outcome = PublishOutcome::kUnpublishable;
      return false;
  }
  lease_.move_to(node);
  chain_.push_back(node);
  published_depth_ = depth;
  return true;
}

// Publishes one checkpoint, or gives it up. `growing`: the sequence goes on, so that a window block that moves to the index must be
// replaced first: a checkpoint never costs a running sequence its next step.
void Sequence::publish_pending(PendingPoint& point, bool growing) {
  const CacheLayout& layout = allocator_.layout();
  ObjectStore& store = allocator_.store();
  const auto groups = layout.point_groups();
  bool complete = point.complete();
  BlockCounts moved{};
  for (std::uint32_t set = 0; set < groups.size() && complete; ++set) {
    if (layout.group(groups[set]).spec.retention != Retention::kWindow) continue;
    const std::uint32_t span = layout.window_nodes(groups[set], point.depth);
    for (std::uint32_t j = point.depth; j > point.depth - span; --j) {
      if (store.point_ok(chain_[j - 1], set)) continue;
      if (groups_[groups[set]].held[j - 1] != Held::kPrivate) complete = false;
      ++moved[groups[set]];
    }
  }
  if (complete && growing) {
    complete = !allocator_.reserve(moved, ticket_, space_, charge_);
    if (complete) held_bytes_ += static_cast<std::int64_t>(allocator_.bytes_of(moved));
  }
  if (!complete) {
    drop_pending(point);
    return;
  }
  PointContent content;
  content.gap_tokens = (point.depth - std::min(point.depth, last_point_depth_)) * block_size_;
  content.probation = point.want == RetentionPlan::Want::kProbation;
  for (std::uint32_t set = 0; set < groups.size(); ++set) {
    const Group& group = layout.group(groups[set]);
    if (group.spec.retention == Retention::kWindow) {
      GroupBlocks& mine = groups_[groups[set]];
      const std::uint32_t span = layout.window_nodes(groups[set], point.depth);
      for (std::uint32_t j = point.depth; j > point.depth - span; --j) {
        if (mine.held[j - 1] != Held::kPrivate) continue;
        content.canonical = j <= canonical_depth_;
        if (!store.publish_point(chain_[j - 1], set, static_cast<std::uint32_t>(mine.offsets[j - 1]), content)) continue;
        mine.held[j - 1] = Held::kShared;
        held_bytes_ -= static_cast<std::int64_t>(group.block_bytes);
        lease_.add_point({chain_[j - 1], set, j});
      }
    } else if (point.blocks[set] != kNoBlock) {
      content.canonical = point.depth <= canonical_depth_;
      if (store.publish_point(chain_[point.depth - 1], set, point.blocks[set], content)) {
        held_bytes_ -= static_cast<std::int64_t>(group.block_bytes);
        point.blocks[set] = kNoBlock;
        store.unpin_point(chain_[point.depth - 1], set);
      }
    }
  }
  drop_pending(point);  // what another had published already
  last_point_depth_ = std::max(last_point_depth_, point.depth);
}

void Sequence::publish_due(bool turn_end) {
  std::sort(pending_.begin(), pending_.end(), [](const PendingPoint& a, const PendingPoint& b) { return a.depth < b.depth; });
  for (std::size_t i = 0; i < pending_.size();) {
    const bool due = pending_[i].want != RetentionPlan::Want::kRolling || turn_end;
    if (!due || pending_[i].depth > published_depth_) {
      ++i;
      continue;
    }
    publish_pending(pending_[i], !turn_end);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void Sequence::note_turn_end() {
  const CacheLayout& layout = allocator_.layout();
  ObjectStore& store = allocator_.store();
  if (!store.observed()) return;
  const auto groups = layout.point_groups();
  for (const std::uint32_t depth : plan_.turn_end_depths(published_depth_)) {
    if (depth == 0 || depth > published_depth_) continue;
    for (std::uint32_t set = 0; set < groups.size(); ++set) {
      std::uint32_t span = layout.point_needed(groups[set], depth) ? 1 : 0;
      if (layout.group(groups[set]).spec.retention == Retention::kWindow) span = layout.window_nodes(groups[set], depth);
      for (std::uint32_t j = depth; j > depth - span; --j) {
        if (store.point_ok(chain_[j - 1], set)) store.note_turn_end(chain_[j - 1], set);
      }
    }
  }
}

PublishResult Sequence::publish(std::int64_t upto) {
  require_live();
  if (!to_clear_.empty()) throw NotClearedError(to_clear_.size());
  PublishResult result;
  if (space_->instance.load(std::memory_order_acquire) != instance_) publishable_ = false;  // cleared under us
  if (!publishable_) {
    result.outcome = PublishOutcome::kUnpublishable;
  } else {
    const std::int64_t safe = std::min({upto, safe_upto(), foreign_from_});
    const auto last = static_cast<std::uint32_t>(std::max<std::int64_t>(safe, 0) / block_size_);
    if (upto > foreign_from_) result.outcome = PublishOutcome::kForeignVersion;
    if (last > published_depth_) {
      extend_keys(last);
      while (published_depth_ < last && publish_history(published_depth_ + 1, &result.outcome)) {
      }
    }
    if (!pending_.empty()) {
      publish_due(false);
      slide();
    }
  }
  if (!publishable_ && !pending_.empty()) {
    drop_points_beyond(0);
    slide();
  }
  result.published_tokens = published_tokens();
  return result;
}

}  // namespace hetkv
