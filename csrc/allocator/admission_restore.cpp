// KvAllocator: admissions that load from lower tiers: what could be had, the restore, and the end of a pending admission.
#include <algorithm>
#include <utility>

#include "allocator/kv_allocator.h"
#include "base/check.h"

namespace hetkv {

std::uint32_t KvAllocator::forecast(std::span<const Key128> keys, VersionId version, const NamespaceInstance& instance,
                                    std::uint32_t depth, std::uint32_t resident, RestoreBase* base, HitReport& report) const {
  explain_identity(keys, version, instance.id, depth, depth, report);
  const std::uint32_t end = scan_endpoints(keys, version, instance.id, depth, true, report);
  auto want = [&](std::uint32_t d, std::uint8_t part, std::uint32_t bit) {
    const int tier = lower_->tier_of(keys[d - 1], version, instance.id, bit);
    RestoreWish wish{d, part, static_cast<std::uint8_t>(std::max(tier, 0)), {}};
    BlockCounts counts{};
    add_blocks(wish, counts);
    report.restore_bytes += bytes_of(counts);
    if (base != nullptr) base->wishes.push_back(std::move(wish));
  };
  for (std::uint32_t d = resident + 1; d <= end; ++d) want(d, kHistorySet, LowerTier::kHistoryPart);
  const auto points = layout_.point_groups();
  for (std::uint32_t set = 0; set < points.size(); ++set) {
    std::uint32_t span = layout_.point_needed(points[set], end) ? 1 : 0;
    if (layout_.group(points[set]).spec.retention == Retention::kWindow) span = layout_.window_nodes(points[set], end);
    for (std::uint32_t d = end - span + 1; d <= end; ++d) {
      bool there = (store_.lookup(keys[d - 1], version, instance.id).flags >> set & 1) != 0;
      if (there && base != nullptr) {
        there = d <= base->chain.nodes.size() && store_.pin_point(base->chain.nodes[d - 1], set);
        if (there) base->lease.add_point({base->chain.nodes[d - 1], set, d});
      }
      if (!there) want(d, static_cast<std::uint8_t>(set), 1U << set);
    }
  }
  return end;
}

// The blocks of an object, one per group of it.
void KvAllocator::add_blocks(const RestoreWish& wish, BlockCounts& counts) const {
  if (wish.part != kHistorySet) {
    ++counts[layout_.point_groups()[wish.part]];
    return;
  }
  for (const GroupId id : layout_.history_groups()) counts[id] += layout_.history_block_at(id, wish.depth) ? 1U : 0U;
}

// Blocks of the points of one endpoint at or below `depth`, whichever it turns out to be.
BlockCounts KvAllocator::endpoint_blocks(std::uint32_t depth) const {
  BlockCounts counts{};
  for (const GroupId id : layout_.point_groups())
    counts[id] = layout_.group(id).spec.retention == Retention::kWindow ? layout_.window_nodes(id, depth) : 1;
  return counts;
}

void KvAllocator::begin_restore(Sequence& s, std::uint32_t depth, RestoreBase&& base) {
  RestoreRequest request{std::move(base.lease)};
  request.keys.assign(s.keys_.begin(), s.keys_.begin() + depth);
  const auto tokens = static_cast<std::ptrdiff_t>(std::size_t{depth} * layout_.block_size());
  request.tokens.assign(s.tokens_.begin(), s.tokens_.begin() + tokens);
  request.version = s.version_;
  request.space = s.instance_->id;
  request.charged = s.space_;
  request.chain = std::move(base.chain.nodes);
  auto take = [&](const BlockCounts& counts, std::vector<Block>& blocks) {
    for (const Group& group : layout_.groups()) {
      for (std::uint32_t i = 0; i < counts[group.id]; ++i) {
        const Block block = s.charge_.take(group.id);
        arena_.set_owner(block, 0);
        blocks.push_back(block);
        s.held_bytes_ -= static_cast<std::int64_t>(group.block_bytes);
      }
    }
  };
  take(endpoint_blocks(depth), request.spare);
  for (RestoreWish& wish : base.wishes) {
    BlockCounts counts{};
    add_blocks(wish, counts);
    take(counts, wish.blocks);
  }
  request.wishes = std::move(base.wishes);
  s.restore_ = lower_->start(std::move(request));
}

Refusal KvAllocator::finish_restore(Sequence& s) {
  HETKV_CHECK(s.restore_ != nullptr && s.restore_->done(), "a restore finished before it is done");
  const std::shared_ptr<Restore> restore = std::move(s.restore_);
  s.restore_.reset();
  const auto returned = static_cast<std::int64_t>(restore->return_blocks(s.charge_));
  s.held_bytes_ += returned;
  // The restore's own lease keeps what it published until we have looked.
  thread_local PinnedChain chain;
  Lease lease(store_);
  HitReport report;
  report.num_prompt_tokens = s.prompt_tokens_;
  const auto prompt = std::span<const std::int32_t>(s.tokens_).first(static_cast<std::size_t>(s.prompt_tokens_));
  const std::uint32_t below = lower_->find_deepest(s.keys_, s.version_, s.instance_->id);
  const std::uint32_t depth = pin_recoverable(prompt, s.keys_, s.version_, *s.instance_, below, lease, chain, report);
  const auto resident_before = static_cast<std::int64_t>(s.lease_.depth());
  s.lease_.take_over(std::move(lease));
  restore->release_pins();
  report.restore_bytes = restore->loaded_bytes();
  report.num_restored_tokens = std::max<std::int64_t>(0, std::int64_t{depth} - resident_before) * layout_.block_size();
  // What could not be loaded is computed: blocks for that too.
  const BlockCounts need =
      need_between(std::int64_t{depth} * layout_.block_size(), s.total_tokens_, s.chunk_tokens_, s.live_state_);
  BlockCounts more{};
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) {
    const std::uint32_t have = s.charge_.left(static_cast<PoolId>(pool));
    more[pool] = need[pool] > have ? need[pool] - have : 0;
  }
  if (const Refusal refusal = reserve(more, s.ticket_, s.space_, s.charge_)) {
    s.free(false);
    return refusal;
  }
  s.held_bytes_ += static_cast<std::int64_t>(bytes_of(more));
  begin(s, depth, chain, report);
  return {};
}

}  // namespace hetkv
