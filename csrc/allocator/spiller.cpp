#include "allocator/spiller.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <latch>

#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

constexpr std::size_t kQueued = std::size_t{1} << 16;
constexpr std::size_t kBatch = 32;  // objects that are pinned, and in flight, at once

std::uint64_t id_of(NodeId node, std::uint8_t part) { return std::uint64_t{node} << 8 | part; }

}  // namespace

SpillPolicy SpillPolicy::parse(const std::string& write, const std::string& points) {
  SpillPolicy policy;
  if (write == "through") {
    policy.write = Write::kThrough;
  } else if (write == "evict") {
    policy.write = Write::kOnEviction;
  } else if (write == "none") {
    policy.write = Write::kNone;
  } else {
    throw ArgumentError("write", "'" + write + "'", "'through', 'evict' or 'none'");
  }
  constexpr std::string_view kEveryPrefix = "every(";
  if (points == "all") {
    policy.points = Points::kAll;
  } else if (points == "turn_ends") {
    policy.points = Points::kTurnEnds;
  } else if (points == "none") {
    policy.points = Points::kNone;
  } else {
    policy.points = Points::kEvery;
    const char* begin = points.data() + kEveryPrefix.size();
    const char* end = points.data() + points.size() - 1;
    const bool framed = points.starts_with(kEveryPrefix) && points.back() == ')' && begin < end;
    if (!framed || std::from_chars(begin, end, policy.every_blocks).ptr != end || policy.every_blocks == 0)
      throw ArgumentError("retention", "'" + points + "'", "'all', 'every(N)' with N blocks, 'turn_ends' or 'none'");
  }
  return policy;
}

Spiller::Spiller(const CacheLayout& layout, MemoryTier& source, LowerTier& sink, IoPool* pool, SpillPolicy policy, Spiller* below)
    : layout_(layout), source_(source), sink_(sink), pool_(pool), policy_(policy), below_(below), queue_(kQueued) {
  if (policy_.write == SpillPolicy::Write::kNone) return;
  source_.store().set_observer(this);
  thread_ = std::thread([this] { run(); });
}

Spiller::~Spiller() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  wake();
  thread_.join();
  source_.store().set_observer(nullptr);
}

void Spiller::published(NodeId node, std::uint8_t part, bool turn_end) noexcept {
  const NodeStore& nodes = source_.store().nodes();
  Note note;
  note.node = node;
  note.part = part;
  note.turn_end = turn_end;
  note.node_gen = nodes.history(node).load().gen();
  if (part != kHistorySet) note.point_gen = nodes.point(node, part).load().gen();
  tell(note);
}

void Spiller::used(NodeId node) noexcept {
  Note note;
  note.node = node;
  note.node_gen = source_.store().nodes().history(node).load().gen();
  note.climb = true;
  tell(note);
}

void Spiller::tell(const Note& note) noexcept {
  told_.fetch_add(1, std::memory_order_relaxed);
  if (!queue_.try_push(note)) {
    counters_.missed.fetch_add(1);
    missed_.store(true);
  }
  if (sleeping_.load()) wake();
}

void Spiller::wake() {
  {
    const std::lock_guard guard(mutex_);
    sleeping_.store(false);
  }
  wake_.notify_one();
}

void Spiller::flush() {
  if (!thread_.joinable()) return;
  std::unique_lock guard(mutex_);
  flush_upto_ = std::max(flush_upto_, told_.load());
  const std::uint64_t upto = flush_upto_;
  sleeping_.store(false);
  wake_.notify_one();
  // Notes that were missed count once a sweep has looked.
  done_.wait(guard, [&] { return !missed_.load() && handled_ + counters_.missed.load() >= upto; });
}

bool Spiller::tight() const {
  std::uint64_t used = 0;
  std::array<bool, kNumKinds> seen{};
  for (const Group& group : layout_.groups()) {
    if (!std::exchange(seen[static_cast<std::size_t>(group.spec.kind)], true))
      used += source_.arena().kind_bytes(group.spec.kind);
  }
  return used > source_.arena().bytes() / 4 * 3;
}

bool Spiller::next(Note& note) {
  if (policy_.write == SpillPolicy::Write::kThrough) return queue_.try_pop(note);
  while (queue_.try_pop(note)) deferred_.push_back(note);
  if (deferred_.empty()) return false;
  const bool flushing = [&] {
    const std::lock_guard guard(mutex_);
    return handled_ + counters_.missed.load() < flush_upto_;
  }();
  if (!flushing && !stopping_.load() && !tight()) return false;
  note = deferred_.front();
  deferred_.pop_front();
  return true;
}

void Spiller::run() {
  std::vector<Note> notes;
  std::vector<Copy> copies;
  for (;;) {
    notes.clear();
    copies.clear();
    planned_.clear();
    std::uint64_t handled = 0;
    Note note;
    while (copies.size() < kBatch && notes.size() < kBatch && next(note)) {
      ++handled;
      if (stage(note, copies)) notes.push_back(note);
    }
#ifdef HETKV_PLANT_SPILL_UNPINNED
    for (const Note& pinned : notes) unpin(pinned);
    notes.clear();
#endif
    if (!copies.empty()) copy_all(copies);
    for (const Note& pinned : notes) unpin(pinned);
    if (handled == 0 && missed_.load()) {
      sweep();
      handled = 0;
    }
    std::unique_lock guard(mutex_);
    handled_ += handled;
    done_.notify_all();
    if (handled > 0 || missed_.load()) continue;
    if (stopping_.load()) return;
    sleeping_.store(true);
    guard.unlock();
    Note waiting;
    // A note that came between the last look and the flag would not wake us.
    const bool any = queue_.try_pop(waiting);
    if (any && policy_.write == SpillPolicy::Write::kThrough) {
      sleeping_.store(false);
      if (stage(waiting, copies)) {
        copy_all(copies);
        unpin(waiting);
      }
      guard.lock();
      ++handled_;
      done_.notify_all();
      continue;
    }
    if (any) deferred_.push_back(waiting);
    guard.lock();
    const auto awake = [&] { return !sleeping_.load() || stopping_.load() || missed_.load(); };
    if (policy_.write == SpillPolicy::Write::kThrough) {
      wake_.wait(guard, awake);
    } else {
      wake_.wait_for(guard, std::chrono::milliseconds(5), awake);
    }
    sleeping_.store(false);
  }
}

// Looks at every object, parents first: after notes that found no place.
void Spiller::sweep() {
  missed_.store(false);
  const NodeStore& nodes = source_.store().nodes();
  std::vector<std::pair<std::uint32_t, NodeId>> order;
  for (NodeId id = 1; id < nodes.high_water(); ++id) {
    if (nodes.history(id).load().state() == ObjectState::kSealed)
      order.emplace_back(nodes.header(id).depth.load(std::memory_order_relaxed), id);
  }
  std::sort(order.begin(), order.end());
  std::vector<Copy> copies;
  for (const auto& [depth, id] : order) {
    for (std::uint32_t part = 0; part <= nodes.point_sets(); ++part) {
      Note note;
      note.node = id;
      note.part = part == 0 ? kHistorySet : static_cast<std::uint8_t>(part - 1);
      note.node_gen = nodes.history(id).load().gen();
      if (part > 0) note.point_gen = nodes.point(id, part - 1).load().gen();
      copies.clear();
      planned_.clear();
      if (!stage(note, copies)) continue;
      copy_all(copies);
      unpin(note);
    }
  }
}

bool Spiller::wanted(const Note& note) const {
  if (note.part == kHistorySet) return true;
  const GroupId group = layout_.point_groups()[note.part];
  switch (policy_.points) {
    case SpillPolicy::Points::kAll:
      return true;
    case SpillPolicy::Points::kNone:
      return false;
    case SpillPolicy::Points::kTurnEnds:
      return note.turn_end;
    case SpillPolicy::Points::kEvery: {
      // A window block serves the checkpoints at its own depth and just below it.
      const std::uint32_t depth = source_.store().nodes().header(note.node).depth.load(std::memory_order_relaxed);
      const std::uint32_t next = (depth + policy_.every_blocks - 1) / policy_.every_blocks * policy_.every_blocks;
      const std::uint32_t span =
          layout_.group(group).spec.retention == Retention::kWindow ? layout_.window_nodes(group, next) : 1;
      return next - depth < span;
    }
  }
  return false;
}

bool Spiller::stage(const Note& note, std::vector<Copy>& copies) {
  ObjectStore& store = source_.store();
  const NodeStore& nodes = store.nodes();
  if (!store.pin_node_by_generation(note.node, note.node_gen)) {
    counters_.gone.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  if (!wanted(note)) {
    store.unpin_node(note.node);
    return false;
  }
  if (note.part != kHistorySet) {
    if (nodes.point(note.node, note.part).load().gen() != note.point_gen || !store.pin_point(note.node, note.part)) {
      counters_.gone.fetch_add(1, std::memory_order_relaxed);
      store.unpin_node(note.node);
      return false;
    }
  }
  if (list_missing(note, copies)) return true;
  unpin(note);
  return false;
}

// The pin keeps all ancestors, so those that the sink lacks can be copied with it.
bool Spiller::list_missing(const Note& note, std::vector<Copy>& copies) {
  const NodeStore& nodes = source_.store().nodes();
  const std::size_t first = copies.size();
  // Memory may have evicted a parent since; a disk that lacks one has failed, or is too small for the chain.
  const std::size_t most = note.climb ? ~std::size_t{0} : sink_.parallel() ? 0 : kBatch;
  std::size_t climbed = 0;
  for (NodeId node = note.node; node != 0; node = nodes.header(node).parent.load(std::memory_order_relaxed)) {
    const NodeHeader& h = nodes.header(node);
    const Key128 key{h.key_high.load(std::memory_order_relaxed), h.key_low.load(std::memory_order_relaxed)};
    const std::uint32_t there =
        sink_.parts(key, h.version.load(std::memory_order_relaxed), h.space.load(std::memory_order_relaxed));
    const bool own = node == note.node, point = note.part != kHistorySet;
    if (own && point) {
      if ((there >> note.part & 1) != 0) {
        counters_.already_there.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
      if (!planned_.insert(id_of(node, note.part)).second) return false;
      copies.push_back({node, note.part});
    }
    if ((there & LowerTier::kHistoryPart) != 0) {
      if (own && !point && !note.climb) counters_.already_there.fetch_add(1, std::memory_order_relaxed);
      break;
    }
    if (planned_.contains(id_of(node, kHistorySet))) break;  // it and its ancestors are in this batch
    if ((!own || point) && climbed++ >= most) {
      counters_.no_parent.fetch_add(1, std::memory_order_relaxed);
      copies.resize(first);
      return false;
    }
    planned_.insert(id_of(node, kHistorySet));
    copies.push_back({node, kHistorySet});
  }
  std::reverse(copies.begin() + static_cast<std::ptrdiff_t>(first), copies.end());
  return copies.size() > first;
}

void Spiller::unpin(const Note& note) {
  if (note.part != kHistorySet) source_.store().unpin_point(note.node, note.part);
  source_.store().unpin_node(note.node);
}

void Spiller::copy_all(const std::vector<Copy>& copies) {
  // What a nearly full sink evicts should have its own copy below by then: this thread waits for that, never a request.
  if (below_ != nullptr && below_->tight()) below_->flush();
  if (pool_ == nullptr || !sink_.parallel() || copies.size() == 1) {
    for (const Copy& copy : copies) copy_one(copy);
    return;
  }
  for (std::size_t begin = 0; begin < copies.size(); begin += kBatch) {
    const std::size_t end = std::min(copies.size(), begin + kBatch);
    std::latch left(static_cast<std::ptrdiff_t>(end - begin));
    for (std::size_t i = begin; i < end; ++i) {
      pool_->post([this, &left, copy = copies[i]] {
        copy_one(copy);
        left.count_down();
      });
    }
    left.wait();
  }
}

// The object is pinned: its body may be read.
void Spiller::copy_one(const Copy& copy) {
  const ObjectStore& store = source_.store();
  const NodeStore& nodes = store.nodes();
  const NodeHeader& h = nodes.header(copy.node);
  ObjectName name;
  name.key = {h.key_high.load(std::memory_order_relaxed), h.key_low.load(std::memory_order_relaxed)};
  name.version = h.version.load(std::memory_order_relaxed);
  name.space = h.space.load(std::memory_order_relaxed);
  name.depth = h.depth.load(std::memory_order_relaxed);
  name.part = copy.part;
  ObjectFacts facts;
  if (const NodeId parent = h.parent.load(std::memory_order_relaxed); parent != 0) {
    const NodeHeader& p = nodes.header(parent);
    facts.parent = {p.key_high.load(std::memory_order_relaxed), p.key_low.load(std::memory_order_relaxed)};
  }
  const std::span<const std::int32_t> tokens = nodes.tokens(copy.node);
  facts.tokens.assign(tokens.begin(), tokens.end());
  std::array<GroupBytes, kMaxGroups> bytes;
  std::size_t groups = 0;
  std::uint64_t total = 0;
  auto add = [&](GroupId group, std::uint32_t ref) {
    if (ref == kNoBlock) return;
    bytes[groups++] = {group, source_.address(Block{ref, group}), layout_.group(group).block_bytes};
    total += layout_.group(group).block_bytes;
  };
  if (copy.part == kHistorySet) {
    facts.canonical = store.node_canonical(copy.node);
    const auto history = layout_.history_groups();
    for (std::uint32_t slot = 0; slot < history.size(); ++slot) add(history[slot], nodes.history_ref(copy.node, slot));
  } else {
    facts.canonical = store.point_canonical(copy.node, copy.part);
    facts.gap_tokens = h.gap.load(std::memory_order_relaxed);
    add(layout_.point_groups()[copy.part], nodes.point_ref(copy.node, copy.part));
  }
  HETKV_TEST_POINT("spill: copying");
  switch (sink_.store(name, facts, std::span(bytes.data(), groups))) {
    case StoreOutcome::kStored:
      counters_.stored.fetch_add(1, std::memory_order_relaxed);
      counters_.stored_bytes.fetch_add(total, std::memory_order_relaxed);
      break;
    case StoreOutcome::kAlreadyThere:
      counters_.already_there.fetch_add(1, std::memory_order_relaxed);
      break;
    case StoreOutcome::kNoRoom:
      counters_.no_room.fetch_add(1, std::memory_order_relaxed);
      break;
    case StoreOutcome::kNoParent:
    case StoreOutcome::kFailed:
      counters_.failed.fetch_add(1, std::memory_order_relaxed);
      break;
  }
}

}  // namespace hetkv
