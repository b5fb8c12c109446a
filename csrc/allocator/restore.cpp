#include "allocator/restore.h"

#include <algorithm>
#include <array>

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
  for (const RestoreWish& wish : request_.wishes) {
    for (const Block block : wish.blocks) {
      bytes += restorer_.layout_.pools()[block.pool].block_bytes;
      restorer_.device_.arena().drop(block);
    }
  }
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
  for (RestoreWish& wish : request_.wishes) {
    for (const Block block : wish.blocks) {
      bytes += restorer_.layout_.pools()[block.pool].block_bytes;
      charge.put_back(block);
    }
    wish.blocks.clear();
  }
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
  std::array<GroupBytes, kMaxGroups> targets;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < wish.blocks.size(); ++i) {
    const std::uint64_t size = restorer_.layout_.pools()[wish.blocks[i].pool].block_bytes;
    targets[i] = {wish.blocks[i].pool, restorer_.device_.address(wish.blocks[i]), size};
    bytes += size;
  }
  const ObjectName name{request_.keys[wish.depth - 1], request_.version, request_.space, wish.depth, wish.part};
  const std::size_t block = restorer_.layout_.block_size();
  const auto tokens = std::span<const std::int32_t>(request_.tokens).subspan((wish.depth - 1) * block, block);
  HETKV_TEST_POINT("restore: loading");
  outcomes_[index] =
      restorer_.tiers_[wish.tier]->load(name, tokens, std::span(targets.data(), wish.blocks.size()), &facts_[index]);
  restorer_.counters_.outcomes[static_cast<std::size_t>(outcomes_[index])].fetch_add(1, std::memory_order_relaxed);
  if (outcomes_[index] == LoadOutcome::kLoaded) {
    loaded_bytes_.fetch_add(bytes, std::memory_order_relaxed);
    restorer_.counters_.objects.fetch_add(1, std::memory_order_relaxed);
    restorer_.counters_.bytes.fetch_add(bytes, std::memory_order_relaxed);
  } else if (wish.part == kHistorySet) {
    std::uint32_t depth = failed_depth_.load(std::memory_order_relaxed);
    while (wish.depth < depth && !failed_depth_.compare_exchange_weak(depth, wish.depth, std::memory_order_relaxed)) {
    }
  }
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
      commit_point(wish);
    }
  }
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

void Restore::commit_point(RestoreWish& wish) {
  ObjectStore& store = restorer_.device_.store();
  const std::size_t index = static_cast<std::size_t>(&wish - request_.wishes.data());
  const NodeId node = request_.chain[wish.depth - 1];
  if (skipped_[index] == 0) {
    const Block block = wish.blocks[0];
    if (restorer_.device_.arena().must_clear(block)) restorer_.device_.arena().confirm_cleared(block);
    PointContent content;
    content.gap_tokens = facts_[index].gap_tokens;
    content.canonical = facts_[index].canonical;
    if (store.publish_point(node, wish.part, block.offset, content)) {
      wish.blocks.clear();
      published_bytes_ += restorer_.layout_.pools()[block.pool].block_bytes;
      request_.base.add_point({node, wish.part, wish.depth});
      return;
    }
  }
  if (store.pin_point(node, wish.part)) request_.base.add_point({node, wish.part, wish.depth});
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
