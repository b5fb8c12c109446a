#include "allocator/restore.h"

#include <algorithm>
#include <array>
#include <unordered_map>

#include "allocator/recoverability.h"
#include "base/check.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

constexpr std::size_t kLoaders = 8;  // loads of one restore that are under way at once, at most

}  // namespace

Restore::Restore(Restorer& restorer, RestoreRequest&& request)
    : restorer_(restorer), request_(std::move(request)), outcomes_(request_.wishes.size(), LoadOutcome::kMissing),
      facts_(request_.wishes.size()), skipped_(request_.wishes.size(), 0) {}

Restore::~Restore() {
  // An aborted admission left its blocks here.
  std::uint64_t bytes = 0;
  auto drop = [&](const std::vector<Block>& blocks) {
    for (const Block block : blocks) {
      bytes += restorer_.layout_.pools()[block.pool].block_bytes;
      restorer_.device_.arena().drop(block);
    }
  };
  for (const RestoreWish& wish : request_.wishes) drop(wish.blocks);
  drop(request_.spare);
  request_.charged->used_bytes.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
}

void Restore::wait() {
  std::unique_lock guard(mutex_);
  ended_.wait(guard, [&] { return done(); });
}

void Restore::when_done(std::function<void()> callback) {
  {
    const std::lock_guard guard(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

std::uint64_t Restore::return_blocks(Charge& charge) {
  std::uint64_t bytes = 0;
  auto put_back = [&](std::vector<Block>& blocks) {
    for (const Block block : blocks) {
      bytes += restorer_.layout_.pools()[block.pool].block_bytes;
      charge.put_back(block);
    }
    blocks.clear();
  };
  for (RestoreWish& wish : request_.wishes) put_back(wish.blocks);
  put_back(request_.spare);
  return bytes;
}

// --- loading ---

void Restore::wait_for(std::vector<std::shared_ptr<Restore>> earlier) {
  waiting_for_.store(earlier.size() + 1);
  for (const auto& other : earlier) other->when_done([self = shared_from_this()] { self->one_dependency_less(); });
  one_dependency_less();
}

void Restore::one_dependency_less() {
  if (waiting_for_.fetch_sub(1, std::memory_order_acq_rel) == 1) start();
}

void Restore::start() {
  const std::size_t loaders = std::min({request_.wishes.size(), restorer_.pool_.threads(), kLoaders});
  left_.store(loaders);
  for (std::size_t i = 0; i < loaders; ++i) restorer_.pool_.post([self = shared_from_this()] { self->load_next(); });
}

void Restore::load_next() {
  for (std::size_t i = next_.fetch_add(1); i < request_.wishes.size(); i = next_.fetch_add(1)) load(i);
  if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) commit();
}

bool Restore::resident(const RestoreWish& wish) const {
  const Found found = restorer_.device_.store().lookup(request_.keys[wish.depth - 1], request_.version, request_.space);
  return found.node != 0 && (wish.part == kHistorySet || (found.flags >> wish.part & 1) != 0);
}

void Restore::load(std::size_t index) {
  const RestoreWish& wish = request_.wishes[index];
  if (wish.depth >= failed_depth_.load(std::memory_order_relaxed)) return;
  if (resident(wish)) {
    skipped_[index] = 1;
    outcomes_[index] = LoadOutcome::kLoaded;
    return;
  }
  // What the highest tier lost meanwhile, a lower one may still have.
  for (std::size_t tier = wish.tier; tier < restorer_.tiers_.size() && outcomes_[index] != LoadOutcome::kLoaded; ++tier) {
    const LoadOutcome outcome = load_object(wish.depth, wish.part, *restorer_.tiers_[tier], wish.blocks, &facts_[index]);
    if (tier == wish.tier || outcome != LoadOutcome::kMissing) outcomes_[index] = outcome;
  }
  if (outcomes_[index] == LoadOutcome::kLoaded || wish.part != kHistorySet) return;
  std::uint32_t depth = failed_depth_.load(std::memory_order_relaxed);
  while (wish.depth < depth && !failed_depth_.compare_exchange_weak(depth, wish.depth, std::memory_order_relaxed)) {
  }
}

LoadOutcome Restore::load_object(std::uint32_t depth, std::uint8_t part, LowerTier& tier, std::span<const Block> blocks,
                                 ObjectFacts* facts) {
  std::array<GroupBytes, kMaxGroups> targets;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const std::uint64_t size = restorer_.layout_.pools()[blocks[i].pool].block_bytes;
    targets[i] = {blocks[i].pool, restorer_.device_.address(blocks[i]), size};
    bytes += size;
  }
  const ObjectName name{request_.keys[depth - 1], request_.version, request_.space, depth, part};
  const std::size_t block = restorer_.layout_.block_size();
  const auto tokens = std::span<const std::int32_t>(request_.tokens).subspan((depth - 1) * block, block);
  HETKV_TEST_POINT("restore: loading");
  const LoadOutcome outcome = tier.load(name, tokens, std::span(targets.data(), blocks.size()), facts);
  restorer_.counters_.outcomes[static_cast<std::size_t>(outcome)].fetch_add(1, std::memory_order_relaxed);
  if (outcome == LoadOutcome::kLoaded) {
    loaded_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    restorer_.counters_.objects.fetch_add(1, std::memory_order_relaxed);
    restorer_.counters_.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  return outcome;
}

// --- publication ---

void Restore::commit() {
  HETKV_TEST_POINT("restore: loaded, not published");
  bool gap = false;
  for (std::size_t i = 0; i < request_.wishes.size(); ++i) {
    RestoreWish& wish = request_.wishes[i];
    const bool history = wish.part == kHistorySet;
    if (history && gap) continue;
    if (outcomes_[i] != LoadOutcome::kLoaded) {
      // Below a failed block nothing was tried: the failure itself is the reason.
      if (history || wish.depth < failed_depth_.load(std::memory_order_relaxed))
        failures_.push_back({wish.depth, wish.part, outcomes_[i]});
      gap = gap || history;
      continue;
    }
    if (history) {
      gap = !commit_history(wish);
    } else if (wish.depth <= request_.chain.size()) {
      commit_point(wish.depth, wish.part, wish.blocks, skipped_[i] != 0 ? nullptr : &facts_[i]);
    }
  }
  if (!failures_.empty()) fall_back();
  finish();
}

// The chain grows by one node, which is pinned in place of its parent.
bool Restore::commit_history(const RestoreWish& wish) {
  const CacheLayout& layout = restorer_.layout_;
  ObjectStore& store = restorer_.device_.store();
  const std::size_t index = static_cast<std::size_t>(&wish - request_.wishes.data());
  HETKV_CHECK(wish.depth == request_.chain.size() + 1, "a restore that leaves out a block");
  const Key128 key = request_.keys[wish.depth - 1];
  if (skipped_[index] != 0) {
    const Found found = store.lookup(key, request_.version, request_.space);
    if (found.node == 0 || !store.pin_node(found, key, request_.version, request_.space, wish.depth)) return false;
    if (store.nodes().header(found.node).parent.load(std::memory_order_relaxed) != request_.base.deepest()) {
      store.unpin_node(found.node);  // a quarantine is sweeping
      return false;
    }
    request_.base.move_to(found.node);
    request_.chain.push_back(found.node);
    return true;
  }
  std::array<std::uint32_t, kMaxGroups> refs;
  refs.fill(kNoBlock);
  std::uint64_t bytes = 0;
  for (const Block block : wish.blocks) {
    refs[static_cast<std::size_t>(layout.group(block.pool).history_slot)] = block.offset;
    bytes += layout.group(block.pool).block_bytes;
    if (restorer_.device_.arena().must_clear(block)) restorer_.device_.arena().confirm_cleared(block);
  }
  NodeContent content;
  content.key = key;
  content.version = request_.version;
  content.space = request_.space;
  content.parent = request_.base.deepest();
  content.depth = wish.depth;
  content.tokens = request_.tokens.data() + std::size_t{wish.depth - 1} * layout.block_size();
  content.history_refs = std::span(refs.data(), layout.history_groups().size());
  content.canonical = facts_[index].canonical && (content.parent == 0 || store.node_canonical(content.parent));
  NodeId node = 0;
  PublishStatus status = store.publish_node(content, &node);
  if (status == PublishStatus::kNoNode && store.evict_coldest_history(false)) status = store.publish_node(content, &node);
  if (status != PublishStatus::kPublished && status != PublishStatus::kFoundEqual) return false;
  if (status == PublishStatus::kPublished) {
    request_.wishes[index].blocks.clear();
    published_bytes_ += bytes;
  }
  request_.base.move_to(node);
  request_.chain.push_back(node);
  return true;
}

// Without facts: it was resident when its turn came.
void Restore::commit_point(std::uint32_t depth, std::uint8_t part, std::vector<Block>& blocks, const ObjectFacts* facts) {
  ObjectStore& store = restorer_.device_.store();
  const NodeId node = request_.chain[depth - 1];
  if (facts != nullptr) {
    const Block block = blocks[0];
    if (restorer_.device_.arena().must_clear(block)) restorer_.device_.arena().confirm_cleared(block);
    PointContent content;
    content.gap_tokens = facts->gap_tokens;
    content.canonical = facts->canonical;
    if (store.publish_point(node, part, block.offset, content)) {
      blocks.clear();
      published_bytes_ += restorer_.layout_.pools()[block.pool].block_bytes;
      request_.base.add_point({node, part, depth});
      return;
    }
  }
  if (store.pin_point(node, part)) request_.base.add_point({node, part, depth});
}

// The endpoint that was aimed at cannot be had. The largest one that can, on the chain as far as it came.
void Restore::fall_back() {
  const CacheLayout& layout = restorer_.layout_;
  const auto sets = static_cast<std::uint32_t>(layout.point_groups().size());
  std::unordered_map<std::uint32_t, std::uint8_t> lost;  // depth -> sets that could not be loaded
  for (const RestoreFailure& failure : failures_) {
    if (failure.part != kHistorySet) lost[failure.depth] |= static_cast<std::uint8_t>(1U << failure.part);
  }
  auto resident = [&](std::uint32_t d) {
    return restorer_.device_.store().lookup(request_.keys[d - 1], request_.version, request_.space).flags;
  };
  auto there = [&](std::uint32_t d) -> std::uint8_t {
    std::uint32_t parts = 0;
    for (const LowerTier* tier : restorer_.tiers_) parts |= tier->parts(request_.keys[d - 1], request_.version, request_.space);
    const auto at = lost.find(d);
    return static_cast<std::uint8_t>(resident(d) | (parts & ~(at == lost.end() ? 0U : at->second)));
  };
  const EndpointScan scan(layout);
  for (;;) {
    const std::uint32_t end = scan.largest(static_cast<std::uint32_t>(request_.chain.size()), sets, there);
    if (end == 0) return;
    bool complete = true;
    for (std::uint32_t set = 0; set < sets; ++set) {
      const GroupId group = layout.point_groups()[set];
      std::uint32_t span = layout.point_needed(group, end) ? 1 : 0;
      if (layout.group(group).spec.retention == Retention::kWindow) span = layout.window_nodes(group, end);
      for (std::uint32_t d = end; d > end - span && complete; --d) {
        if ((resident(d) >> set & 1) != 0) {
          std::vector<Block> none;
          commit_point(d, static_cast<std::uint8_t>(set), none, nullptr);
        } else if (!load_point(d, static_cast<std::uint8_t>(set))) {
          lost[d] |= static_cast<std::uint8_t>(1U << set);
          complete = false;
        }
      }
    }
    if (complete) return;
  }
}

bool Restore::load_point(std::uint32_t depth, std::uint8_t part) {
  const GroupId group = restorer_.layout_.point_groups()[part];
  const auto spare = std::find_if(request_.spare.begin(), request_.spare.end(), [&](Block block) { return block.pool == group; });
  if (spare == request_.spare.end()) return false;
  for (LowerTier* tier : restorer_.tiers_) {
    ObjectFacts facts;
    if (load_object(depth, part, *tier, std::span(&*spare, 1), &facts) != LoadOutcome::kLoaded) continue;
    std::vector<Block> block{*spare};
    request_.spare.erase(spare);
    commit_point(depth, part, block, &facts);
    request_.spare.insert(request_.spare.end(), block.begin(), block.end());
    return true;
  }
  return false;
}

void Restore::finish() {
  restorer_.forget(*this);
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard guard(mutex_);
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
  }
  ended_.notify_all();
  for (const auto& callback : callbacks) callback();
}

// --- the restorer ---

Restorer::Restorer(const CacheLayout& layout, MemoryTier& device, std::vector<LowerTier*> tiers, IoPool& pool)
    : layout_(layout), device_(device), tiers_(std::move(tiers)), pool_(pool) {}

Restorer::~Restorer() { wait_idle(); }

void Restorer::wait_idle() {
  std::unique_lock guard(mutex_);
  idle_.wait(guard, [&] { return running_ == 0; });
}

std::shared_ptr<Restore> Restorer::start(RestoreRequest&& request) {
  auto restore = std::make_shared<Restore>(*this, std::move(request));
  std::vector<std::shared_ptr<Restore>> earlier;
  {
    const std::lock_guard guard(mutex_);
    ++running_;
    for (const RestoreWish& wish : restore->request_.wishes) {
      std::weak_ptr<Restore>& loading =
          loading_[{restore->request_.keys[wish.depth - 1], restore->request_.version, restore->request_.space, wish.part}];
      if (auto other = loading.lock()) {
        counters_.shared.fetch_add(1, std::memory_order_relaxed);
        if (std::find(earlier.begin(), earlier.end(), other) == earlier.end()) earlier.push_back(std::move(other));
      } else {
        loading = restore;
      }
    }
  }
  counters_.restores.fetch_add(1, std::memory_order_relaxed);
  restore->wait_for(std::move(earlier));
  return restore;
}

void Restorer::forget(const Restore& restore) {
  const std::lock_guard guard(mutex_);
  for (const RestoreWish& wish : restore.request_.wishes) {
    const auto at =
        loading_.find({restore.request_.keys[wish.depth - 1], restore.request_.version, restore.request_.space, wish.part});
    if (at == loading_.end()) continue;
    const auto owner = at->second.lock();
    if (owner == nullptr || owner.get() == &restore) loading_.erase(at);
  }
  if (--running_ == 0) idle_.notify_all();
}

}  // namespace hetkv
