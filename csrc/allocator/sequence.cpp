#include "allocator/sequence.h"

#include <algorithm>
#include <bit>

#include "allocator/kv_allocator.h"
#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {

Sequence::Sequence(KvAllocator& allocator, Namespace* space, const NamespaceInstance* instance)
    : allocator_(allocator), space_(space), instance_(instance), block_size_(allocator.layout().block_size()),
      block_shift_(std::countr_zero(block_size_)), lease_(allocator.store()) {
  point_blocks_.fill(-1);
  live_blocks_.fill(-1);
}

Sequence::~Sequence() { free(false); }

void Sequence::fill_tables() {
  const CacheLayout& layout = allocator_.layout();
  const NodeStore& nodes = allocator_.store().nodes();
  const auto history = layout.history_groups();
  for (std::size_t slot = 0; slot < history.size(); ++slot) {
    GroupBlocks& mine = groups_[history[slot]];
    const std::size_t blocks = table_blocks(layout.group(history[slot]), num_computed_tokens());
    mine.offsets.reserve(table_blocks(layout.group(history[slot]), static_cast<std::int64_t>(tokens_.capacity())) + 1);
    for (const NodeId node : chain_) {
      const std::uint32_t ref = nodes.history_ref(node, static_cast<std::uint32_t>(slot));
      if (ref != kNoBlock) mine.offsets.push_back(static_cast<std::int32_t>(ref));
    }
    HETKV_CHECK(mine.offsets.size() == blocks, "a pinned chain lacks a history block");
    mine.held.assign(blocks, Held::kShared);
    mine.first_held = blocks;
  }
  for (const GroupId id : layout.point_groups()) {
    if (layout.group(id).spec.retention != Retention::kWindow) continue;
    GroupBlocks& mine = groups_[id];
    mine.offsets.assign(resume_depth_, static_cast<std::int32_t>(allocator_.scratch(id)));
    mine.held.assign(resume_depth_, Held::kNone);
    mine.first_held = resume_depth_ - layout.window_nodes(id, resume_depth_);
  }
  for (const PointPin& pin : lease_.points()) {
    const GroupId id = layout.point_groups()[pin.set];
    const std::uint32_t ref = nodes.point_ref(pin.node, pin.set);
    if (layout.group(id).spec.retention == Retention::kWindow) {
      groups_[id].offsets[pin.depth - 1] = static_cast<std::int32_t>(ref);
      groups_[id].held[pin.depth - 1] = Held::kShared;
    } else {
      point_blocks_[id] = ref;
    }
  }
}

void Sequence::take_live_blocks() {
  const CacheLayout& layout = allocator_.layout();
  for (const GroupId id : layout.point_groups()) {
    if (layout.group(id).spec.retention == Retention::kWindow) continue;
    live_blocks_[id] = take(charge_, layout.ring_pool(id).value_or(id)).offset;
  }
}

// --- steps ---

void Sequence::append(std::span<const std::int32_t> ids) { tokens_.insert(tokens_.end(), ids.begin(), ids.end()); }

std::size_t Sequence::table_blocks(const Group& group, std::int64_t tokens) const {
  return static_cast<std::size_t>(allocator_.table_blocks(group, tokens));
}

BlockCounts Sequence::growth(std::int64_t upto) const {
  BlockCounts need{};
  upto = whole_blocks(upto);
  for (const Group& group : allocator_.layout().groups()) {
    if (group.spec.retention != Retention::kHistory && group.spec.retention != Retention::kWindow) continue;
    const GroupBlocks& mine = groups_[group.id];
    const std::size_t wanted = table_blocks(group, upto);
    const std::size_t have = mine.offsets.size() + mine.spare.size() + charge_.left(group.id);
    if (wanted > have) need[group.id] = static_cast<std::uint32_t>(wanted - have);
  }
  return need;
}

Block Sequence::take(Charge& charge, PoolId pool) {
  // Room first: nothing may fail once the block is ours.
  if (uncleared_.size() == uncleared_.capacity()) {
    uncleared_.reserve(2 * uncleared_.size() + 8);
    to_clear_.reserve(uncleared_.capacity());
  }
  const Block block = charge.take(pool);
  Arena& arena = allocator_.arena();
  arena.set_owner(block, 0);
  if (arena.must_clear(block)) {
    uncleared_.push_back(block);
    to_clear_.push_back(arena.range(block));
  }
  return block;
}

void Sequence::grow(std::int64_t upto, Charge& extra) {
  upto = whole_blocks(upto);
  for (const Group& group : allocator_.layout().groups()) {
    if (group.spec.retention != Retention::kHistory && group.spec.retention != Retention::kWindow) continue;
    GroupBlocks& mine = groups_[group.id];
    const std::size_t wanted = table_blocks(group, upto);
    if (wanted > mine.held.capacity()) {
      mine.held.reserve(std::max(wanted, 2 * mine.held.capacity()));
      mine.offsets.reserve(mine.held.capacity());
    }
    while (mine.offsets.size() < wanted) {
      Block block;
      if (!mine.spare.empty()) {
        block = mine.spare.back();
        mine.spare.pop_back();
      } else {
        block = take(charge_.left(group.id) > 0 ? charge_ : extra, group.id);
      }
      mine.offsets.push_back(static_cast<std::int32_t>(block.offset));
      mine.held.push_back(Held::kPrivate);
    }
  }
  covered_ = std::max(covered_, upto);
}

StepStamp Sequence::stamp_step(std::int64_t upto) noexcept {
  const StepStamp stamp{epoch_, allocator_.versions().current(), scheduled_, upto};
  scheduled_ = upto;
  return stamp;
}

void Sequence::require_live() const {
  if (!live_) throw ArgumentError("sequence", "freed", "a live sequence");
}

void Sequence::require_schedulable(std::int64_t upto) const {
  require_live();
  if (upto < scheduled_ || upto > num_tokens()) {
    throw ArgumentError(
        "upto", std::to_string(upto),
        "a position in [" + std::to_string(scheduled_) + ", " + std::to_string(num_tokens()) + "] (scheduled .. known tokens)");
  }
}

Refusal Sequence::schedule(std::int64_t upto, StepStamp* stamp) {
  require_schedulable(upto);
  // Most decode steps stay inside their blocks: nothing to take.
  if (upto > covered_) {
    const BlockCounts need = growth(upto);
    if (const Refusal refusal = allocator_.reserve(need, ticket_, space_, charge_)) return refusal;
    held_bytes_ += static_cast<std::int64_t>(allocator_.bytes_of(need));
    grow(upto, charge_);
  }
  *stamp = stamp_step(upto);
  return {};
}

bool Sequence::settle(const StepStamp& stamp, bool batch_invariant) {
  require_live();
  if (stamp.epoch != epoch_) {
    allocator_.counters_.add(Counters::kStaleSteps);
    return false;
  }
  if (stamp.begin > settled_ || stamp.end > scheduled_) {
    throw ArgumentError("stamp", "[" + std::to_string(stamp.begin) + ", " + std::to_string(stamp.end) + ")",
                        "the next unsettled step of this sequence (settled " + std::to_string(settled_) + ", scheduled " +
                            std::to_string(scheduled_) + ")");
  }
  if (stamp.version != version_ && stamp.begin < foreign_from_) {
    foreign_from_ = stamp.begin;
    drop_points_beyond(foreign_from_);
    allocator_.counters_.add(Counters::kForeignSteps);
  }
  const std::int64_t next_block = std::int64_t{canonical_depth_} * block_size_;
  if (batch_invariant && stamp.begin == next_block && stamp.end == next_block + block_size_) ++canonical_depth_;
  const std::int64_t before = safe_upto();
  settled_ = std::max(settled_, stamp.end);
  advance_from(before);
  return true;
}

void Sequence::hold_acceptance() {
  if (acceptance_held_) return;
  acceptance_held_ = true;
  accepted_ = settled_;
}

void Sequence::accept(std::int64_t upto) {
  require_live();
  if (upto > num_tokens())
    throw ArgumentError("upto", std::to_string(upto), "at most the " + std::to_string(num_tokens()) + " known tokens");
  const std::int64_t before = safe_upto();
  accepted_ = std::max(accepted_, upto);
  advance_from(before);
}

void Sequence::advance_from(std::int64_t before) {
  const std::int64_t now = safe_upto();
  if (now >> block_shift_ == before >> block_shift_) return;
  note_boundaries(before, now);
  slide();
}

void Sequence::restart_from_settled() {
  require_live();
  ++epoch_;
  scheduled_ = settled_;
  drop_points_beyond(settled_);  // their proofs belong to the old epoch
}

// --- windows ---

bool Sequence::window_needs(const Group& group, std::size_t index) const {
  const auto end = static_cast<std::int64_t>(index + 1) * block_size_;
  const std::int64_t rows = std::int64_t{group.spec.window} - 1;
#ifdef HETKV_PLANT_SLIDE_ON_SCHEDULED
  if (end > scheduled_ - rows) return true;
  if (true) return false;
#endif
  if (end > safe_upto() - rows) return true;
  for (const PendingPoint& point : pending_) {
    const std::int64_t p = std::int64_t{point.depth} * block_size_;
    if (end <= p && end > p - rows) return true;
  }
  return false;
}

// Drops window blocks that neither the next query nor a checkpoint still to be published can read.
void Sequence::slide() {
  for (const GroupId id : allocator_.layout().point_groups()) {
    const Group& group = allocator_.layout().group(id);
    if (group.spec.retention != Retention::kWindow) continue;
    GroupBlocks& mine = groups_[id];
    const auto set = static_cast<std::uint32_t>(group.point_slot);
    const auto scratch = static_cast<std::int32_t>(allocator_.scratch(id));
    bool leading = true;
    for (std::size_t i = mine.first_held; i < mine.offsets.size(); ++i) {
      if (mine.held[i] != Held::kNone && !window_needs(group, i)) {
        if (mine.held[i] == Held::kPrivate) {
          mine.spare.push_back(Block{static_cast<std::uint32_t>(mine.offsets[i]), id});
        } else {
          lease_.drop_point(set, static_cast<std::uint32_t>(i + 1));
        }
        mine.offsets[i] = scratch;
        mine.held[i] = Held::kNone;
      }
      if (mine.held[i] != Held::kNone) leading = false;
      if (leading) mine.first_held = i + 1;
      if (static_cast<std::int64_t>(i + 1) * block_size_ > safe_upto()) break;
    }
    // What the steady state cannot use again goes back.
    const std::size_t steady = (group.spec.window - 1) / block_size_ + 2;
    while (mine.spare.size() > steady) {
      give_up(mine.spare.back());
      mine.spare.pop_back();
    }
  }
}

void Sequence::give_up(Block block) {
  // Not cleared yet: that is now the next owner's to do.
  if (const auto at = std::find(uncleared_.begin(), uncleared_.end(), block); at != uncleared_.end()) {
    to_clear_.erase(to_clear_.begin() + (at - uncleared_.begin()));
    uncleared_.erase(at);
  }
  allocator_.arena().drop(block);
  const auto bytes = static_cast<std::int64_t>(allocator_.layout().pools()[block.pool].block_bytes);
  held_bytes_ -= bytes;
  space_->used_bytes.fetch_sub(bytes, std::memory_order_relaxed);
}

// --- the end ---

void Sequence::confirm_cleared() {
  for (const Block block : uncleared_) allocator_.arena().confirm_cleared(block);
  uncleared_.clear();
  to_clear_.clear();
}

void Sequence::free(bool turn_end) {
  if (!live_) return;
  if (turn_end && to_clear_.empty() && !pending()) {
    publish(safe_upto());
    if (publishable_) publish_due(true);
    note_turn_end();
  }
  live_ = false;
  for (PendingPoint& point : pending_) drop_pending(point);
  pending_.clear();
  for (const Group& group : allocator_.layout().groups()) {
    GroupBlocks& mine = groups_[group.id];
    for (std::size_t i = mine.first_held; i < mine.offsets.size(); ++i) {
      if (mine.held[i] == Held::kPrivate) give_up(Block{static_cast<std::uint32_t>(mine.offsets[i]), group.id});
    }
    for (const Block block : mine.spare) give_up(block);
    mine = GroupBlocks{};
    if (live_blocks_[group.id] >= 0) {
      const PoolId pool = allocator_.layout().ring_pool(group.id).value_or(group.id);
      give_up(Block{static_cast<std::uint32_t>(live_blocks_[group.id]), pool});
    }
  }
  point_blocks_.fill(-1);
  live_blocks_.fill(-1);
  restore_.reset();  // it runs on, and keeps its own pins and blocks
  HETKV_TEST_POINT("free: blocks returned, pins held");
  lease_.release();
  charge_.release();
  space_->used_bytes.fetch_sub(held_bytes_, std::memory_order_relaxed);  // the credits
  held_bytes_ = 0;
  allocator_.leave(ticket_slot_);
}

// --- addresses ---

void Sequence::slot_mapping(GroupId id, std::int64_t begin, std::int64_t end, std::int64_t* out) const {
  const Group& group = allocator_.layout().group(id);
  const auto& table = groups_[id].offsets;
  const auto rows = std::int64_t{group.entries_per_block};
  if (begin < 0 || begin > end || end > static_cast<std::int64_t>(table.size()) * rows) {
    throw ArgumentError("range", "[" + std::to_string(begin) + ", " + std::to_string(end) + ")",
                        "rows of group '" + group.spec.name + "' that have blocks: [0, " +
                            std::to_string(static_cast<std::int64_t>(table.size()) * rows) + ")");
  }
  const int shift = std::countr_zero(group.entries_per_block);
  for (std::int64_t row = begin; row < end; ++row) {
    out[row - begin] = (std::int64_t{table[static_cast<std::size_t>(row >> shift)]} << shift) | (row & (rows - 1));
  }
}

void Sequence::token_slots(GroupId id, std::int64_t begin, std::int64_t end, std::int64_t* out) const {
  const CacheLayout& layout = allocator_.layout();
  const Group& group = layout.group(id);
  const auto& table = groups_[id].offsets;
  switch (group.spec.retention) {
    case Retention::kHistory: {
      const auto m = std::int64_t{group.spec.compress_ratio};
      const int shift = std::countr_zero(group.entries_per_block);
      const std::int64_t scratch = std::int64_t{allocator_.scratch(id)} << shift;
      for (std::int64_t t = begin; t < end; ++t) {
        const std::int64_t row = (t + 1) / m - 1;  // the entry that token t closes, if it does
        out[t - begin] = (t + 1) % m != 0 ? scratch
                                          : (std::int64_t{table[static_cast<std::size_t>(row >> shift)]} << shift) |
                                                (row & (std::int64_t{group.entries_per_block} - 1));
      }
      return;
    }
    case Retention::kWindow:
      slot_mapping(id, begin, end, out);
      return;
    case Retention::kTail: {
      const auto rows = std::int64_t{group.ring_entries};
      const bool live = live_blocks_[id] >= 0;
      const std::int64_t base = (live ? live_blocks_[id] : std::int64_t{allocator_.scratch(*layout.ring_pool(id))}) * rows;
      for (std::int64_t t = begin; t < end; ++t) out[t - begin] = live ? base + t % rows : base;
      return;
    }
    case Retention::kSnapshot:
      std::fill(out, out + (end - begin), live_blocks_[id] >= 0 ? live_blocks_[id] : std::int64_t{allocator_.scratch(id)});
      return;
  }
}

std::shared_ptr<const HashedPrefix> Sequence::hashed_prefix() {
  const auto depth = static_cast<std::uint32_t>(num_tokens() / block_size_);
  extend_keys(depth);
  auto prefix = std::make_shared<HashedPrefix>();
  prefix->root = instance_->root;
  prefix->tokens.assign(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(std::size_t{depth} * block_size_));
  prefix->keys = keys_;
  return prefix;
}

}  // namespace hetkv
