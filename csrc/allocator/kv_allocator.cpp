#include "allocator/kv_allocator.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "allocator/recoverability.h"
#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

// The node pool: as many nodes as the arena's history could fill, and some for nodes that hold no block of their own.
std::uint32_t nodes_for(const CacheLayout& layout, const Arena& arena, std::uint32_t asked) {
  if (asked != 0) return asked;
  std::uint64_t per_node = 0;  // bytes
  for (const GroupId id : layout.history_groups()) {
    const Group& group = layout.group(id);
    per_node += group.block_bytes * layout.block_size() / std::max(layout.block_size(), group.spec.compress_ratio);
  }
  if (per_node == 0) {
    per_node = ~std::uint64_t{0};
    for (const Group& group : layout.groups()) per_node = std::min(per_node, group.block_bytes);
  }
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(arena.bytes() / per_node + arena.bytes() / per_node / 8 + 64, 64, 1U << 28));
}

void check_tokens(std::span<const std::int32_t> tokens) {
  if (tokens.empty()) throw ArgumentError("tokens", "[]", "at least one token");
}

}  // namespace

KvAllocator::KvAllocator(CacheLayout layout, const AllocatorConfig& config)
    : layout_(std::move(layout)), hasher_(config.hash_seed), spaces_(hasher_),
      versions_(layout_.fingerprint(), config.model_version, config.abi), arena_(layout_, config.arena),
      store_(layout_, arena_, spaces_, nodes_for(layout_, arena_, config.max_nodes)), retention_(config.retention),
      verify_all_tokens_(config.verify_all_tokens),
      pin_cap_bytes_(config.pin_prefix_cap_bytes != 0 ? config.pin_prefix_cap_bytes : arena_.bytes() / 4), tickets_(kTickets) {
  for (const Group& group : layout_.groups()) {
    require_route(group.spec.kind, Operation::kReserve);
    if (group.spec.optional) throw LayoutError(group.spec.name, "optional", "draft groups are not supported yet");
  }
  BlockCounts one_each{};
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) one_each[pool] = 1;
  Charge charge;
  const ReserveOutcome outcome = arena_.reserve(one_each, {}, charge);
  if (outcome.status != ReserveOutcome::Status::kReserved) {
    const PoolSpec& pool = layout_.pools()[outcome.pool];
    throw AdmissionError(std::string(kind_name(pool.kind)), bytes_of(one_each), arena_.bytes(), false,
                         "the arena of " + std::to_string(arena_.bytes()) +
                             " bytes cannot hold one block of every group (pool '" + pool.name + "' of " +
                             std::to_string(pool.block_bytes) + " bytes is the first that does not fit)");
  }
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) scratch_[pool] = charge.take(static_cast<PoolId>(pool));
}

KvAllocator::~KvAllocator() {
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) arena_.drop(scratch_[pool]);
}

// --- identity ---

Fingerprint KvAllocator::aligned_layout() const {
  FingerprintBuilder builder("hetkv.aligned_layout.1");
  builder.add("layout", layout_.fingerprint().hex());
  for (const auto& [family, bytes] : alignments_) builder.add(family, bytes);
  return builder.finish();
}

void KvAllocator::declare_alignment(const std::string& family, std::uint64_t bytes) {
  if (bytes == 0 || !std::has_single_bit(bytes)) throw ArgumentError("bytes", std::to_string(bytes), "a power of two");
  // Every block of a pool has the same alignment, so what is checked here holds for every hit under the new fingerprint.
  for (const PoolSpec& pool : layout_.pools()) {
    if (pool.block_bytes % bytes != 0 || arena_.slab_bytes() % bytes != 0 || arena_.base_address() % bytes != 0) {
      throw LayoutError(layout_.group(pool.group).spec.name, "alignment",
                        "kernel family '" + family + "' needs " + std::to_string(bytes) + " bytes; pool '" + pool.name +
                            "' has blocks of " + std::to_string(pool.block_bytes) + " bytes in slabs of " +
                            std::to_string(arena_.slab_bytes()));
    }
  }
  const std::lock_guard guard(alignments_mutex_);
  alignments_[family] = bytes;
  versions_.set_layout(aligned_layout());
}

std::uint64_t KvAllocator::clear(Namespace* space) {
  const std::uint32_t old = space->instance.load(std::memory_order_acquire)->id;
  spaces_.renew(space);
  return store_.evict_space(old, ~std::uint64_t{0});
}

// --- hashing and reports ---

void KvAllocator::hash_blocks(std::span<const std::int32_t> tokens, const NamespaceInstance& instance,
                              const HashedPrefix* previous, std::vector<Key128>& keys) const {
  const std::size_t b = layout_.block_size();
  const std::size_t blocks = tokens.size() / b;
  keys.resize(blocks);
  std::size_t known = 0;
  if (previous != nullptr && previous->space == instance.id) {
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
                                   HitReport& report) const {
  const std::int64_t b = layout_.block_size();
  const auto full = static_cast<std::uint32_t>(keys.size());
  report.lose(LossReason::kGranularity, -1, report.num_prompt_tokens - full * b);
  std::uint32_t any = own, same_layout = own, same_abi = own, same_model = own;
  BrokenRecord broken;
  if (own < full) {
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
    if (store_.any_broken()) {
      for (std::uint32_t depth = full; depth > own; --depth) {
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
  report.lose(broken.reason, broken.group, (same_model - own) * b);
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
  explain_identity(keys, version, instance.id, depth, report);
  EndpointScan(layout_).run(
      depth, report, [&](std::uint32_t d) { return store_.lookup(keys[d - 1], version, instance.id).flags; },
      [&](std::uint32_t d) -> std::uint8_t {
        const NodeId node = store_.lookup(keys[d - 1], version, instance.id).node;
        return node == 0 ? std::uint8_t{0} : store_.nodes().header(node).ever_published.load(std::memory_order_relaxed);
      });
  counters_.add(Counters::kProbes);
  return report;
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
                                           const NamespaceInstance& instance, Lease& lease, PinnedChain& chain,
                                           HitReport& report) {
  // A node with 65535 pins cannot take another: the prefix above it still can.
  auto limit = static_cast<std::uint32_t>(keys.size());
  for (;;) {
    HitReport attempt = report;
    const std::uint32_t depth = pin_history(tokens, keys, limit, version, instance, lease, chain);
    explain_identity(keys, version, instance.id, depth, attempt);
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
    const std::uint32_t differs = store_.gather(keys.first(depth), tokens.data(), version, instance.id, verify_all_tokens_,
                                                [&](std::uint32_t, NodeId node, std::uint8_t f) {
                                                  chain.nodes.push_back(node);
#ifdef HETKV_PLANT_POINTS_UNCHECKED
                                                  f = 0xFF;
#endif
                                                  chain.flags.push_back(f);
                                                });
    if (differs == 0 && chain.nodes.back() == found.node) return depth;
    lease.move_to(0);
    if (differs == 0) continue;  // a quarantine took the pinned chain, and another like it was published
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
        [&](std::uint32_t d) {
          return store_.nodes().header(chain.nodes[d - 1]).ever_published.load(std::memory_order_relaxed);
        });
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

std::uint64_t KvAllocator::bytes_of(const BlockCounts& counts) const {
  std::uint64_t bytes = 0;
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool)
    bytes += std::uint64_t{counts[pool]} * layout_.pools()[pool].block_bytes;
  return bytes;
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
  const NamespaceInstance* instance = space->instance.load(std::memory_order_acquire);
  const std::unique_ptr<Sequence>& sequence = result.sequence = std::unique_ptr<Sequence>(new Sequence(*this, space, instance));
  Sequence& s = *sequence;
  s.version_ = versions_.current();
  s.tokens_.reserve(static_cast<std::size_t>(total));
  s.tokens_.assign(tokens.begin(), tokens.end());
  hash_blocks(tokens, *instance, options.previous.get(), s.keys_);

  thread_local PinnedChain chain;
  // Pins come before the reservation, so that eviction made by the reservation cannot take them.
  const std::uint32_t depth = pin_recoverable(tokens, s.keys_, s.version_, *instance, s.lease_, chain, result.report);
  const auto known_depth = static_cast<std::uint32_t>(result.report.num_history_tokens / layout_.block_size());
  const std::int64_t resume = std::int64_t{depth} * layout_.block_size();
  const BlockCounts need = need_between(resume, total, chunk, options.live_state);
  HETKV_TEST_POINT("admit: pinned, not reserved");
#ifdef HETKV_PLANT_UNPINNED_RESERVATION
  s.lease_.release();
#endif
  s.ticket_ = enter(&s.ticket_slot_);
  if (const Refusal refusal = reserve(need, s.ticket_, space, s.charge_)) {
    result.refusal = refusal;
    result.sequence.reset();
    return result;
  }
  s.held_bytes_ = static_cast<std::int64_t>(bytes_of(need));
  s.report_ = result.report;
  s.resume_depth_ = s.published_depth_ = s.last_point_depth_ = depth;
  s.chain_.assign(chain.nodes.begin(), chain.nodes.begin() + depth);
  s.canonical_depth_ = result.report.canonical ? depth : 0;
  s.scheduled_ = s.settled_ = s.accepted_ = s.covered_ = resume;
  s.plan_ = RetentionPlan(retention_, layout_, prompt, depth, known_depth);
  s.fill_tables();
  if (options.live_state) s.take_live_blocks();

  if (depth > 0) {
    store_.touch_node(s.chain_[depth - 1], store_.tick());
    for (const PointPin& pin : s.lease_.points()) store_.touch_point(pin.node, pin.set);
  }
  count_report(result.report, true);
  return result;
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
  const std::uint32_t depth = pin_recoverable(tokens, keys, versions_.current(), instance, pinned->lease_, chain, report);
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

// --- the batch step ---

Refusal KvAllocator::prepare_step(std::span<const StepItem> items, const StepBuffers& buffers, StepStamp* stamps) {
  // Everything that can fail comes before the first change.
  const std::uint64_t mark = next_mark_.fetch_add(1, std::memory_order_relaxed);
  BlockCounts need{};
  std::size_t total = 0;
  for (const StepItem& item : items) {
    if (item.num_tokens < 0) throw ArgumentError("num_tokens", std::to_string(item.num_tokens), "0 or more");
    item.sequence->require_schedulable(item.sequence->scheduled() + item.num_tokens);
    if (std::exchange(item.sequence->step_mark_, mark) == mark)
      throw ArgumentError("items", "a sequence twice", "each sequence once");
    total += static_cast<std::size_t>(item.num_tokens);
  }
  if (items.size() > buffers.padded_sequences) {
    throw ArgumentError("padded_sequences", std::to_string(buffers.padded_sequences),
                        "at least the " + std::to_string(items.size()) + " sequences of the step");
  }
  if (total > buffers.padded_tokens) {
    throw ArgumentError("padded_tokens", std::to_string(buffers.padded_tokens),
                        "at least the " + std::to_string(total) + " tokens of the step");
  }
  std::vector<BlockCounts> each(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    Sequence& s = *items[i].sequence;
    const std::int64_t upto = s.scheduled() + items[i].num_tokens;
    if (upto > s.covered_) each[i] = s.growth(upto);
    for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) need[pool] += each[i][pool];
    for (const Group& group : layout_.groups()) {
      const StepBuffers::GroupArrays& out = buffers.groups[group.id];
      const std::size_t blocks =
          std::max(s.groups_[group.id].offsets.size(), static_cast<std::size_t>(table_blocks(group, s.whole_blocks(upto))));
      if (out.block_table != nullptr && group.spec.retention != Retention::kTail &&
          group.spec.retention != Retention::kSnapshot && blocks > out.table_stride) {
        throw ArgumentError("table_stride", std::to_string(out.table_stride),
                            "at least " + std::to_string(blocks) + " blocks of group '" + group.spec.name + "'");
      }
    }
  }
  Charge charge;
  std::uint64_t ticket = 0;
  if (items.size() == 1) ticket = items[0].sequence->ticket_;
  for (const StepItem& item : items) {
    if (item.sequence->ticket_ == oldest_.load(std::memory_order_acquire)) ticket = item.sequence->ticket_;
  }
  if (bytes_of(need) != 0) {
    Refusal refusal;
    std::size_t charged = 0;
    while (charged < items.size() && !(refusal = charge_quota(bytes_of(each[charged]), items[charged].sequence->space_)))
      ++charged;
    if (!refusal) refusal = reserve_blocks(need, ticket, charge);
    if (refusal) {
      while (charged-- > 0) return_quota(bytes_of(each[charged]), items[charged].sequence->space_);
      return refusal;
    }
  }

  std::size_t row = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    Sequence& s = *items[i].sequence;
    const std::int64_t begin = s.scheduled(), upto = begin + items[i].num_tokens;
    s.held_bytes_ += static_cast<std::int64_t>(bytes_of(each[i]));
    if (upto > s.covered_) s.grow(upto, charge);
    stamps[i] = s.stamp_step(upto);
    buffers.cu_seqlens_q[i] = static_cast<std::int32_t>(row);
    buffers.seqused_k[i] = static_cast<std::int32_t>(upto);
    for (const Group& group : layout_.groups()) {
      const StepBuffers::GroupArrays& out = buffers.groups[group.id];
      if (out.slots != nullptr) s.token_slots(group.id, begin, upto, out.slots + row);
      if (out.block_table == nullptr) continue;
      std::int32_t* table = out.block_table + i * out.table_stride;
      std::size_t filled = 0;
      if (group.spec.retention == Retention::kTail || group.spec.retention == Retention::kSnapshot) {
        const std::int64_t live = s.live_block(group.id);
        const PoolId pool = layout_.ring_pool(group.id).value_or(group.id);
        if (out.table_stride > 0) table[filled++] = static_cast<std::int32_t>(live >= 0 ? live : std::int64_t{scratch(pool)});
      } else {
        const auto blocks = s.block_table(group.id);
        std::copy(blocks.begin(), blocks.end(), table);
        filled = blocks.size();
      }
      const PoolId pool = layout_.ring_pool(group.id).value_or(group.id);
      std::fill(table + filled, table + out.table_stride, static_cast<std::int32_t>(scratch(pool)));
    }
    row += static_cast<std::size_t>(items[i].num_tokens);
  }
  // Padding: rows of no sequence have no tokens and write to scratch.
  for (std::size_t i = items.size(); i < buffers.padded_sequences; ++i) {
    buffers.cu_seqlens_q[i] = static_cast<std::int32_t>(row);
    buffers.seqused_k[i] = 0;
  }
  buffers.cu_seqlens_q[buffers.padded_sequences] = static_cast<std::int32_t>(row);
  for (const Group& group : layout_.groups()) {
    const StepBuffers::GroupArrays& out = buffers.groups[group.id];
    const PoolId pool = layout_.ring_pool(group.id).value_or(group.id);
    const std::int64_t rows = layout_.ring_pool(group.id) ? group.ring_entries : group.entries_per_block;
    const std::int64_t slot = std::int64_t{scratch(pool)} * rows;
    if (out.slots != nullptr) std::fill(out.slots + row, out.slots + buffers.padded_tokens, slot);
    if (out.block_table != nullptr) {
      std::fill(out.block_table + items.size() * out.table_stride, out.block_table + buffers.padded_sequences * out.table_stride,
                static_cast<std::int32_t>(scratch(pool)));
    }
  }
  return {};
}

// --- memory ---

Refusal KvAllocator::charge_quota(std::uint64_t bytes, Namespace* space) {
  const auto more = static_cast<std::int64_t>(bytes);
  std::int64_t used = space->used_bytes.load(std::memory_order_relaxed);
  for (;;) {
    const std::uint64_t quota = space->quota_bytes.load(std::memory_order_relaxed);
    if (static_cast<std::uint64_t>(std::max<std::int64_t>(0, used + more)) <= quota) {
      if (space->used_bytes.compare_exchange_weak(used, used + more, std::memory_order_relaxed)) return {};
      continue;
    }
    // Its own prefixes, never another's.
    if (store_.evict_space(space->instance.load(std::memory_order_acquire)->id, 16) == 0) {
      counters_.add(Counters::kRefusedQuota);
      return {Refusal::Cause::kQuota, 0, static_cast<std::uint64_t>(std::max<std::int64_t>(0, used + more)), quota};
    }
    used = space->used_bytes.load(std::memory_order_relaxed);
  }
}

Refusal KvAllocator::reserve(const BlockCounts& need, std::uint64_t ticket, Namespace* space, Charge& charge) {
  const std::uint64_t bytes = bytes_of(need);
  if (bytes == 0) return {};
  if (const Refusal refusal = charge_quota(bytes, space)) return refusal;
  const Refusal refusal = reserve_blocks(need, ticket, charge);
  if (refusal) return_quota(bytes, space);
  return refusal;
}

Refusal KvAllocator::reserve_blocks(const BlockCounts& need, std::uint64_t ticket, Charge& charge) {
  BlockCounts headroom{};
  const std::uint64_t oldest = oldest_.load(std::memory_order_acquire);
  if (oldest != 0 && oldest != ticket) {
    // The oldest sequence can always take one more step.
    for (const Group& group : layout_.groups()) {
      const Retention r = group.spec.retention;
      headroom[group.id] = r == Retention::kHistory || r == Retention::kWindow ? 1 : 0;
    }
  }
  bool thinned = false;
  for (;;) {
    const ReserveOutcome outcome = arena_.reserve(need, headroom, charge);
    switch (outcome.status) {
      case ReserveOutcome::Status::kReserved:
        return {};
      case ReserveOutcome::Status::kImpossible:
        counters_.add(Counters::kRefusedImpossible);
        return {Refusal::Cause::kImpossible, outcome.pool, outcome.need, outcome.cap};
      case ReserveOutcome::Status::kShort:
        break;
    }
    const std::uint32_t batch = std::clamp<std::uint32_t>(need[outcome.pool], 1, 16);
    if (make_room(outcome.pool, batch, false)) continue;
    store_.sweep_into_queues();
    if (make_room(outcome.pool, batch, true)) continue;
    if (!std::exchange(thinned, true) && thin_out(outcome.pool)) continue;
    counters_.add(Counters::kRefusedNoRoom);
    return {Refusal::Cause::kNoRoom, outcome.pool, bytes_of(need), arena_.bytes()};
  }
}

// Evicts something that helps `pool`: its own kind first, then a whole slab of another pool.
bool KvAllocator::make_room(PoolId pool, std::uint32_t blocks, bool after_sweep) {
  const PoolSpec& spec = layout_.pools()[pool];
  const Group& group = layout_.group(spec.group);
  std::uint32_t evicted = 0;
  if (!spec.ring && group.history_slot >= 0) {
    while (evicted < blocks && store_.evict_coldest_history(after_sweep)) ++evicted;
  } else if (!spec.ring && group.point_slot >= 0) {
    while (evicted < blocks && store_.evict_coldest_point(static_cast<std::uint32_t>(group.point_slot), after_sweep)) ++evicted;
  }
  return evicted > 0 || reclaim_slab(pool);
}

// No slab can be emptied at once: thins out a pool that may give one, coldest first.
bool KvAllocator::thin_out(PoolId pool) {
  for (const GroupId id : layout_.point_groups()) {
    if (id != pool && arena_.may_steal(id, pool) &&
        store_.evict_coldest_point(static_cast<std::uint32_t>(layout_.group(id).point_slot), false))
      return true;
  }
  for (const GroupId id : layout_.history_groups()) {
    if (id != pool && arena_.may_steal(id, pool) && store_.evict_coldest_history(false)) return true;
  }
  return false;
}

// Evicts every object of one slab. False if a block of it is private or pinned.
bool KvAllocator::drain_slab(std::uint32_t slab) {
  std::vector<Block> blocks;
  arena_.live_blocks(slab, blocks);
  for (const Block block : blocks) {
    const NodeId node = arena_.owner(block);
    if (node == 0 || layout_.pools()[block.pool].ring) return false;
  }
  for (const Block block : blocks) {
    const NodeId node = arena_.owner(block);
    const Group& group = layout_.group(layout_.pools()[block.pool].group);
    if (node == 0) continue;
    if (group.point_slot >= 0) {
      const auto set = static_cast<std::uint32_t>(group.point_slot);
      if (!store_.evict_point(node, set, store_.nodes().point(node, set).load().gen())) return false;
    } else if (store_.nodes().history(node).load().state() == ObjectState::kSealed && !store_.evict_subtree(node)) {
      return false;
    }
  }
  return arena_.slab_used(slab) == 0;
}

bool KvAllocator::reclaim_slab(PoolId to) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> candidates;  // used, slab
  for (std::uint32_t slab = 0; slab < arena_.num_slabs(); ++slab) {
    const auto from = arena_.slab_owner(slab);
    if (!from || *from == to || !arena_.may_steal(*from, to)) continue;
    // An empty one that the reservation did not take is promised to its pool. Only what is evicted here counts as progress.
    if (const std::uint32_t used = arena_.slab_used(slab); used > 0) candidates.emplace_back(used, slab);
  }
  std::sort(candidates.begin(), candidates.end());
  constexpr std::size_t kTried = 8;
  for (std::size_t i = 0; i < std::min(candidates.size(), kTried); ++i) {
    if (drain_slab(candidates[i].second)) {
      counters_.add(Counters::kSlabsReclaimed);
      return true;
    }
  }
  return false;
}

std::uint64_t KvAllocator::evict(ObjectKind kind, std::uint64_t blocks) {
  require_route(kind, Operation::kEvict);
  std::uint64_t gone = 0;
  bool history_done = false;
  for (const Group& group : layout_.groups()) {
#ifndef HETKV_PLANT_EVICT_ANY_KIND
    if (group.spec.kind != kind) continue;
#endif
    if (group.point_slot >= 0) {
      const auto set = static_cast<std::uint32_t>(group.point_slot);
      while (gone < blocks && store_.evict_coldest_point(set, false)) ++gone;
    } else if (!std::exchange(history_done, true)) {
      while (gone < blocks && store_.evict_coldest_history(false)) ++gone;
    }
  }
  return gone;
}

bool KvAllocator::evict_object(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position,
                               GroupId group) {
  const Found found = object_at(tokens, space, position, group);
  if (found.node == 0) return false;
  const Group& g = layout_.group(group);
  require_route(g.spec.kind, Operation::kEvict);
  if (g.point_slot < 0) return store_.evict_node(found.node, found.gen);
  const auto set = static_cast<std::uint32_t>(g.point_slot);
  return store_.evict_point(found.node, set, store_.nodes().point(found.node, set).load().gen());
}

std::uint64_t KvAllocator::quarantine(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position,
                                      GroupId group, LossReason reason) {
  const Found found = object_at(tokens, space, position, group);
  if (found.node == 0) return 0;
  const Group& g = layout_.group(group);
  if (g.point_slot < 0) return store_.quarantine_node(found.node, found.gen, reason, group);
  return store_.quarantine_point(found.node, static_cast<std::uint32_t>(g.point_slot)) ? 1 : 0;
}

Found KvAllocator::object_at(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position,
                             GroupId group) const {
  check_tokens(tokens);
  const std::int64_t b = layout_.block_size();
  if (group >= layout_.groups().size()) throw ArgumentError("group", std::to_string(group), "a group of the layout");
  if (position <= 0 || position % b != 0 || position > static_cast<std::int64_t>(tokens.size())) {
    throw ArgumentError("position", std::to_string(position),
                        "a multiple of block_size " + std::to_string(b) + " in (0, " + std::to_string(tokens.size()) + "]");
  }
  const NamespaceInstance& instance = *space->instance.load(std::memory_order_acquire);
  std::vector<Key128> keys;
  hash_blocks(tokens.first(static_cast<std::size_t>(position)), instance, nullptr, keys);
  return store_.lookup(keys.back(), versions_.current(), instance.id);
}

// --- order of admission ---

std::uint64_t KvAllocator::enter(std::uint32_t* slot) {
  const std::uint64_t ticket = next_ticket_.fetch_add(1, std::memory_order_relaxed);
  *slot = kTickets;
  for (std::uint32_t i = 0; i < kTickets; ++i) {
    std::uint64_t empty = 0;
    if (tickets_[i].load(std::memory_order_relaxed) != 0 ||
        !tickets_[i].compare_exchange_strong(empty, ticket, std::memory_order_acq_rel))
      continue;
    *slot = i;
    std::uint32_t high = ticket_high_.load(std::memory_order_relaxed);
    while (high < i + 1 && !ticket_high_.compare_exchange_weak(high, i + 1, std::memory_order_acq_rel)) {
    }
    break;
  }
  std::uint64_t nobody = 0;
  oldest_.compare_exchange_strong(nobody, ticket, std::memory_order_acq_rel);
  return ticket;
}

void KvAllocator::leave(std::uint64_t ticket, std::uint32_t slot) {
  if (ticket == 0) return;
  if (slot < kTickets) tickets_[slot].store(0, std::memory_order_release);
  std::uint64_t mine = ticket;
  if (oldest_.load(std::memory_order_acquire) != ticket) return;
  std::uint64_t next = 0;
  for (std::uint32_t i = 0; i < ticket_high_.load(std::memory_order_acquire); ++i) {
    const std::uint64_t other = tickets_[i].load(std::memory_order_acquire);
    if (other != 0 && (next == 0 || other < next)) next = other;
  }
  oldest_.compare_exchange_strong(mine, next, std::memory_order_acq_rel);
}

void KvAllocator::check_invariants() const {
  arena_.check_invariants();
  store_.check_invariants();
}

}  // namespace hetkv
