// KvAllocator: hashing, reports, probe, admit and pin_prefix.
#include <algorithm>
#include <cstring>
#include <utility>

#include "allocator/kv_allocator.h"
#include "allocator/recoverability.h"
#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {

// --- hashing and reports ---

void KvAllocator::hash_blocks(std::span<const std::int32_t> tokens, const NamespaceInstance& instance,
                              const HashedPrefix* previous, std::vector<Key128>& keys) const {
  const std::size_t b = layout_.block_size();
  const std::size_t blocks = tokens.size() / b;
  keys.resize(blocks);
  std::size_t known = 0;
  if (previous != nullptr && previous->root == instance.root) {
    // Comparing is a fraction of hashing, and tells exactly how far the conversation so far is this prompt's prefix.
    const std::size_t most = std::min(blocks, previous->keys.size());
    while (known < most &&
           std::memcmp(tokens.data() + known * b, previous->tokens.data() + known * b, b * sizeof(std::int32_t)) == 0)
      ++known;
    std::copy_n(previous->keys.begin(), known, keys.begin());
  }
  hasher_.chain(known == 0 ? instance.root : keys[known - 1], tokens.data() + known * b, layout_.block_size(),
                std::span(keys).subspan(known));
}

void KvAllocator::explain_identity(std::span<const Key128> keys, VersionId version, std::uint32_t space, std::uint32_t own,
                                   std::uint32_t lower, HitReport& report) const {
  const std::int64_t b = layout_.block_size();
  const auto full = static_cast<std::uint32_t>(keys.size());
  report.lose(LossReason::kGranularity, -1, report.num_prompt_tokens - full * b);
  std::uint32_t any = own, same_layout = own, same_abi = own, same_model = own;
  BrokenRecord broken;
  lower = std::max(lower, own);
  any = same_layout = same_abi = same_model = lower;
  if (lower < full) {
    const Version& mine = versions_.at(version);
    auto see = [&](VersionId other, std::uint32_t depth) {
      const Version& theirs = versions_.at(other);
      any = std::max(any, depth);
      if (theirs.layout != mine.layout) return;
      same_layout = std::max(same_layout, depth);
      if (theirs.abi != mine.abi) return;
      same_abi = std::max(same_abi, depth);
    };
    for (VersionId other = 0; other < versions_.count(); ++other) {
      if (other == version || store_.live_nodes(other) == 0) continue;
      std::uint32_t depth = 0;
      store_.find_deepest(keys, full, other, space, &depth);
      see(other, depth);
    }
    if (lower_) {
      const OtherVersions others = lower_->deepest_of_others(keys, version);
      any = std::max(any, others.any);
      same_layout = std::max(same_layout, others.same_layout);
      same_abi = std::max(same_abi, others.same_abi);
    }
    if (store_.any_broken()) {
      for (std::uint32_t depth = full; depth > lower; --depth) {
        const auto record = store_.broken(keys[depth - 1]);
        if (!record) continue;
        see(record->version, depth);
        if (record->version == version) {
          same_model = std::max(same_model, depth);
          broken = *record;
        }
        break;
      }
    }
  }
  report.num_hash_hit_tokens = any * b;
  report.num_history_tokens = own * b;
  const bool evicted = any < full && store_.recently_evicted(keys[any]);
  report.lose(evicted ? LossReason::kEvicted : LossReason::kNotFound, -1, (full - any) * b);
  report.lose(LossReason::kLayout, -1, (any - same_layout) * b);
  report.lose(LossReason::kAbi, -1, (same_layout - same_abi) * b);
  report.lose(LossReason::kModelVersion, -1, (same_abi - same_model) * b);
  report.lose(broken.reason, broken.group, (same_model - lower) * b);
  report.lose(LossReason::kNotRestored, -1, (lower - own) * b);
}

void KvAllocator::count_report(const HitReport& report, bool admitted) {
  counters_.add(admitted ? Counters::kAdmissions : Counters::kProbes);
  if (!admitted) return;
  counters_.add(Counters::kPromptTokens, static_cast<std::uint64_t>(report.num_prompt_tokens));
  counters_.add(Counters::kHashHitTokens, static_cast<std::uint64_t>(report.num_hash_hit_tokens));
  counters_.add(Counters::kRecoverableTokens, static_cast<std::uint64_t>(report.num_recoverable_tokens));
  for (const Loss& loss : report.losses()) counters_.add_loss(loss.reason, static_cast<std::uint64_t>(loss.tokens));
}

HitReport KvAllocator::probe(std::span<const std::int32_t> tokens, const Namespace* space, const HashedPrefix* previous) const {
  check_tokens(tokens);
  const NamespaceInstance& instance = *space->instance.load(std::memory_order_acquire);
  const VersionId version = versions_.current();
  thread_local std::vector<Key128> keys;
  hash_blocks(tokens, instance, previous, keys);
  HitReport report;
  report.num_prompt_tokens = static_cast<std::int64_t>(tokens.size());
  std::uint32_t depth = 0;
  store_.find_deepest(keys, static_cast<std::uint32_t>(keys.size()), version, instance.id, &depth);
  const HitReport asked = report;
  explain_identity(keys, version, instance.id, depth, depth, report);
  scan_endpoints(keys, version, instance.id, depth, 0, report);
  if (lower_) {
    const std::uint32_t below = lower_->find_deepest(keys, version, instance.id);
    HitReport with_lower = asked;
    if (forecast(keys, version, instance, std::max(depth, below), depth, nullptr, with_lower) *
            std::int64_t{layout_.block_size()} >
        report.num_recoverable_tokens) {
      with_lower.num_restored_tokens = with_lower.num_recoverable_tokens - report.num_recoverable_tokens;
      report = with_lower;
    }
  }
  counters_.add(Counters::kProbes);
  return report;
}

// The largest endpoint at or above `depth`, by loads alone. `lower`: whether what lies on the tiers below counts as there.
std::uint32_t KvAllocator::scan_endpoints(std::span<const Key128> keys, VersionId version, std::uint32_t space,
                                          std::uint32_t depth, bool lower, HitReport& report) const {
  const auto sets = static_cast<std::uint8_t>((1U << layout_.point_groups().size()) - 1);
  return EndpointScan(layout_).run(
      depth, report,
      [&](std::uint32_t d) -> std::uint8_t {
        std::uint8_t flags = store_.lookup(keys[d - 1], version, space).flags;
        if (lower && flags != sets) flags |= static_cast<std::uint8_t>(lower_->parts(keys[d - 1], version, space) & sets);
        return flags;
      },
      [&](std::uint32_t d) -> std::uint8_t {
        const NodeId node = store_.lookup(keys[d - 1], version, space).node;
        return node == 0 ? std::uint8_t{0} : store_.nodes().header(node).ever_published.load(std::memory_order_relaxed);
      },
      [&](std::uint32_t d, std::uint32_t set) -> std::optional<LossReason> {
        const NodeId node = store_.lookup(keys[d - 1], version, space).node;
        return node == 0 ? std::nullopt : store_.broken_point(node, set);
      });
}

// --- admission ---

bool KvAllocator::pin_points(std::uint32_t depth, PinnedChain& chain, Lease& lease) {
  const auto points = layout_.point_groups();
  for (std::uint32_t set = 0; set < points.size(); ++set) {
    const Group& group = layout_.group(points[set]);
    std::uint32_t span = layout_.point_needed(group.id, depth) ? 1 : 0;
    if (group.spec.retention == Retention::kWindow) span = layout_.window_nodes(group.id, depth);
    for (std::uint32_t j = depth; j > depth - span; --j) {
      if (!store_.pin_point(chain.nodes[j - 1], set)) {
#ifdef HETKV_PLANT_POINTS_UNCHECKED
        continue;
#endif
        chain.flags[j - 1] &= static_cast<std::uint8_t>(~(1U << set));
        lease.drop_points();
        return false;
      }
      lease.add_point({chain.nodes[j - 1], set, j});
    }
  }
  return true;
}

std::uint32_t KvAllocator::pin_recoverable(std::span<const std::int32_t> tokens, std::span<const Key128> keys, VersionId version,
                                           const NamespaceInstance& instance, std::uint32_t lower_depth, Lease& lease,
                                           PinnedChain& chain, HitReport& report) {
  // A node with 65535 pins cannot take another: the prefix above it still can.
  auto limit = static_cast<std::uint32_t>(keys.size());
  for (;;) {
    HitReport attempt = report;
    const std::uint32_t depth = pin_history(tokens, keys, limit, version, instance, lease, chain);
    explain_identity(keys, version, instance.id, depth, lower_depth, attempt);
    const std::uint32_t end = pin_endpoint(depth, chain, lease, attempt);
    if (end == depth || end == 0 || store_.pin_node_again(chain.nodes[end - 1])) {
      if (end < depth) lease.move_to(end > 0 ? chain.nodes[end - 1] : 0);
      report = attempt;
      report.canonical = end == 0 || store_.node_canonical(chain.nodes[end - 1]);
      for (const PointPin& pin : lease.points()) report.canonical = report.canonical && store_.point_canonical(pin.node, pin.set);
      return end;
    }
    lease.release();
    limit = end - 1;
  }
}

// Pins the deepest node of the running version at or above `limit`, and compares the whole chain under the pin.
std::uint32_t KvAllocator::pin_history(std::span<const std::int32_t> tokens, std::span<const Key128> keys, std::uint32_t limit,
                                       VersionId version, const NamespaceInstance& instance, Lease& lease, PinnedChain& chain) {
  for (int lost_races = 0;;) {
    std::uint32_t depth = 0;
    chain.clear();
    const Found found = store_.find_deepest(keys, limit, version, instance.id, &depth);
    if (depth == 0) return 0;
    HETKV_TEST_POINT("admit: found, not pinned");
    if (!store_.pin_node(found, keys[depth - 1], version, instance.id, depth)) {
      // Another thread's eviction or recycling won. A node that cannot be pinned at all (65535 pins) is passed by.
      if (++lost_races > 64) limit = depth - 1;
      continue;
    }
    lease.move_to(found.node);
    HETKV_TEST_POINT("admit: pinned, not gathered");
    const std::uint32_t differs = store_.gather(found.node, keys.first(depth), tokens.data(), verify_all_tokens_,
                                                [&](std::uint32_t, NodeId node, std::uint8_t f) {
                                                  chain.nodes.push_back(node);
#ifdef HETKV_PLANT_POINTS_UNCHECKED
                                                  f = 0xFF;
#endif
                                                  chain.flags.push_back(f);
                                                });
    if (differs == 0) return depth;
    const bool broken = !store_.node_ok(found.node);
    lease.move_to(0);
    if (broken) continue;  // a quarantine took it: it is not found again, but another like it may have been published
    counters_.add(Counters::kVerifyMismatches);
    limit = differs - 1;
  }
}

// Pins the point objects of the largest endpoint at or above `depth`; adds its losses.
std::uint32_t KvAllocator::pin_endpoint(std::uint32_t depth, PinnedChain& chain, Lease& lease, HitReport& report) {
  for (;;) {
    HitReport attempt = report;
    const std::uint32_t end = EndpointScan(layout_).run(
        depth, attempt, [&](std::uint32_t d) { return chain.flags[d - 1]; },
        [&](std::uint32_t d) { return store_.nodes().header(chain.nodes[d - 1]).ever_published.load(std::memory_order_relaxed); },
        [&](std::uint32_t d, std::uint32_t set) { return store_.broken_point(chain.nodes[d - 1], set); });
    if (!pin_points(end, chain, lease)) continue;  // each failure clears a flag, so this ends
    report = attempt;
    return end;
  }
}

std::int64_t KvAllocator::table_blocks(const Group& group, std::int64_t tokens) const {
  const std::int64_t b = layout_.block_size(), m = group.spec.compress_ratio;
  if (group.spec.retention == Retention::kHistory && m > b) return tokens / m;
  return (tokens + b - 1) / b;
}

BlockCounts KvAllocator::need_between(std::int64_t resume, std::int64_t total, std::int64_t chunk, bool live_state) const {
  BlockCounts need{};
  const std::int64_t b = layout_.block_size();
  const bool turn_ends =
      retention_.mode == RetentionPolicy::Mode::kTurnEnds || retention_.mode == RetentionPolicy::Mode::kAdaptive;
  for (const Group& group : layout_.groups()) {
    const std::int64_t all = table_blocks(group, (total + b - 1) / b * b) - table_blocks(group, resume);
    std::int64_t blocks = 0;
    switch (group.spec.retention) {
      case Retention::kHistory:
        blocks = all;
        break;
      case Retention::kWindow: {
        // The window before a step, the step, and the checkpoint a little below the end of the turn.
        const std::int64_t window = (std::int64_t{group.spec.window} - 1 + b - 1) / b;
        blocks = std::min(all, (std::int64_t{group.spec.window} - 1 + chunk + b - 1) / b + 1 + (turn_ends ? window : 0));
        break;
      }
      case Retention::kTail:
        if (live_state) need[*layout_.ring_pool(group.id)] = 1;
        break;
      case Retention::kSnapshot:
        blocks = live_state ? 1 : 0;
        break;
    }
    need[group.id] = static_cast<std::uint32_t>(std::clamp<std::int64_t>(blocks, 0, 0x7FFFFFFF));
  }
  return need;
}

BlockCounts KvAllocator::blocks_for(std::int64_t tokens, std::int64_t chunk, bool live_state) const {
  if (tokens < 1) throw ArgumentError("tokens", std::to_string(tokens), "at least 1");
  if (chunk < 0) throw ArgumentError("chunk_tokens", std::to_string(chunk), "0 (block_size) or more");
  return need_between(0, tokens, chunk != 0 ? chunk : layout_.block_size(), live_state);
}

std::uint64_t KvAllocator::bytes_for(std::int64_t tokens, std::int64_t chunk, bool live_state) const {
  return bytes_of(blocks_for(tokens, chunk, live_state));
}

AdmitResult KvAllocator::admit(std::span<const std::int32_t> tokens, Namespace* space, const AdmitOptions& options) {
  check_tokens(tokens);
  if (options.max_new_tokens < 0) throw ArgumentError("max_new_tokens", std::to_string(options.max_new_tokens), "0 or more");
  if (options.chunk_tokens < 0)
    throw ArgumentError("chunk_tokens", std::to_string(options.chunk_tokens), "0 (block_size) or more");
  const std::int64_t chunk = options.chunk_tokens != 0 ? options.chunk_tokens : layout_.block_size();
  const auto prompt = static_cast<std::int64_t>(tokens.size());
  constexpr std::int64_t kMostTokens = 0x7FFFFFFF;
  if (prompt > kMostTokens - options.max_new_tokens) {
    throw ArgumentError("max_new_tokens", std::to_string(options.max_new_tokens), "at most 2^31 - 1 tokens with the prompt");
  }
  if (chunk > kMostTokens) throw ArgumentError("chunk_tokens", std::to_string(chunk), "at most 2^31 - 1");
  const std::int64_t total = prompt + options.max_new_tokens;

  AdmitResult result;
  result.report.num_prompt_tokens = prompt;
  // What cannot fit in an empty arena, beside the scratch blocks, is refused before anything is looked at.
  BlockCounts most = blocks_for(total, chunk, options.live_state);
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) ++most[pool];
  if (const ReserveOutcome outcome = arena_.possible(most); outcome.status == ReserveOutcome::Status::kImpossible) {
    counters_.add(Counters::kRefusedImpossible);
    result.refusal = {Refusal::Cause::kImpossible, outcome.pool, outcome.need, outcome.cap};
    return result;
  }
  if (const std::uint64_t bytes = bytes_for(total, chunk, options.live_state),
      quota = space->quota_bytes.load(std::memory_order_relaxed);
      bytes > quota) {
    counters_.add(Counters::kRefusedQuota);
    result.refusal = {Refusal::Cause::kQuota, 0, bytes, quota};
    return result;
  }
  const NamespaceInstance* instance = space->instance.load(std::memory_order_acquire);
  const std::unique_ptr<Sequence>& sequence = result.sequence = std::unique_ptr<Sequence>(new Sequence(*this, space, instance));
  Sequence& s = *sequence;
  s.version_ = versions_.current();
  s.tokens_.reserve(static_cast<std::size_t>(total));
  s.tokens_.assign(tokens.begin(), tokens.end());
  hash_blocks(tokens, *instance, options.previous.get(), s.keys_);

  s.prompt_tokens_ = prompt;
  s.total_tokens_ = total;
  s.chunk_tokens_ = chunk;
  s.live_state_ = options.live_state;

  thread_local PinnedChain chain;
  const HitReport asked = result.report;
  const std::uint32_t below = lower_ ? lower_->find_deepest(s.keys_, s.version_, instance->id) : 0;
  // Pins come before the reservation, so that eviction made by the reservation cannot take them.
  const std::uint32_t depth = pin_recoverable(tokens, s.keys_, s.version_, *instance, below, s.lease_, chain, result.report);
  RestoreBase base(store_);
  HitReport with_lower = asked;
  std::uint32_t restored = 0;
  if (lower_ && options.restore && depth < static_cast<std::uint32_t>((prompt - 1) / layout_.block_size())) {
    const std::uint32_t resident =
        pin_history(tokens, s.keys_, static_cast<std::uint32_t>(s.keys_.size()), s.version_, *instance, base.lease, base.chain);
    restored = forecast(s.keys_, s.version_, *instance, std::max(resident, below), resident, &base, with_lower);
    if (restored <= depth || base.wishes.empty()) {
      restored = 0;
      base.lease.release();
    }
  }
  HETKV_TEST_POINT("admit: pinned, not reserved");
#ifdef HETKV_PLANT_UNPINNED_RESERVATION
  s.lease_.release();
#endif
  s.ticket_ = enter(&s.ticket_slot_);
  const std::int64_t b = layout_.block_size();
  if (restored > 0) {
    BlockCounts need = need_between(restored * b, total, chunk, options.live_state);
    for (const RestoreWish& wish : base.wishes) add_blocks(wish, need);
    const BlockCounts spare = endpoint_blocks(restored);
    for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) need[pool] += spare[pool];
    if (!reserve(need, s.ticket_, space, s.charge_)) {
      s.held_bytes_ = static_cast<std::int64_t>(bytes_of(need));
      with_lower.num_restored_tokens = (restored - depth) * b;
      result.report = with_lower;
      begin_restore(s, restored, std::move(base));
      return result;
    }
    // No room for what would be loaded: what is resident has to do, and the rest is computed.
    base.lease.release();
  }
  const BlockCounts need = need_between(depth * b, total, chunk, options.live_state);
  if (const Refusal refusal = reserve(need, s.ticket_, space, s.charge_)) {
    result.refusal = refusal;
    result.sequence.reset();
    return result;
  }
  s.held_bytes_ = static_cast<std::int64_t>(bytes_of(need));
  begin(s, depth, chain, result.report);
  return result;
}

void KvAllocator::begin(Sequence& s, std::uint32_t depth, const PinnedChain& chain, const HitReport& report) {
  const auto known_depth = static_cast<std::uint32_t>(report.num_history_tokens / layout_.block_size());
  s.report_ = report;
  s.resume_depth_ = s.published_depth_ = s.last_point_depth_ = depth;
  s.chain_.assign(chain.nodes.begin(), chain.nodes.begin() + depth);
  s.canonical_depth_ = report.canonical ? depth : 0;
  s.scheduled_ = s.settled_ = s.accepted_ = s.covered_ = std::int64_t{depth} * layout_.block_size();
  s.plan_ = RetentionPlan(retention_, layout_, s.prompt_tokens_, depth, known_depth);
  s.fill_tables();
  if (s.live_state_) s.take_live_blocks();

  if (depth > 0) {
    store_.touch_node(s.chain_[depth - 1], store_.tick());
    store_.note_use(s.chain_[depth - 1]);
    for (const PointPin& pin : s.lease_.points()) store_.touch_point(pin.node, pin.set);
    if (lower_) lower_->touch({s.keys_.begin(), s.keys_.begin() + depth}, s.version_, s.instance_->id);
  }
  count_report(report, true);
}

std::unique_ptr<PinnedPrefix> KvAllocator::pin_prefix(std::span<const std::int32_t> tokens, Namespace* space) {
  check_tokens(tokens);
  const NamespaceInstance& instance = *space->instance.load(std::memory_order_acquire);
  std::vector<Key128> keys;
  PinnedChain chain;
  hash_blocks(tokens, instance, nullptr, keys);
  auto pinned = std::unique_ptr<PinnedPrefix>(new PinnedPrefix(*this, store_));
  HitReport report;
  // The pinned prefix is for longer prompts, so the last-token rule does not apply to it.
  report.num_prompt_tokens = static_cast<std::int64_t>(tokens.size()) + 1;
  const std::uint32_t depth = pin_recoverable(tokens, keys, versions_.current(), instance, 0, pinned->lease_, chain, report);
  std::uint64_t bytes = 0;
  for (const GroupId id : layout_.history_groups()) {
    bytes += layout_.group(id).block_bytes *
             static_cast<std::uint64_t>(table_blocks(layout_.group(id), std::int64_t{depth} * layout_.block_size()));
  }
  for (const PointPin& pin : pinned->lease_.points()) bytes += layout_.group(layout_.point_groups()[pin.set]).block_bytes;
  std::uint64_t used = pinned_bytes_.load(std::memory_order_relaxed);
  do {
    if (used + bytes > pin_cap_bytes_) {
      throw AdmissionError("pin_prefix", used + bytes, pin_cap_bytes_, true,
                           "pinning " + std::to_string(bytes) + " bytes would exceed the cap of " +
                               std::to_string(pin_cap_bytes_) + " bytes for pinned prefixes (" + std::to_string(used) +
                               " in use)");
    }
  } while (!pinned_bytes_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  pinned->tokens_ = std::int64_t{depth} * layout_.block_size();
  pinned->bytes_ = bytes;
  return pinned;
}

PinnedPrefix::~PinnedPrefix() { release(); }

void PinnedPrefix::release() {
  lease_.release();
  allocator_.pinned_bytes_.fetch_sub(std::exchange(bytes_, 0), std::memory_order_relaxed);
  tokens_ = 0;
}

}  // namespace hetkv
