#include "allocator/kv_allocator.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/check.h"
#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {
KvAllocator::KvAllocator(CacheLayout layout, const AllocatorConfig& config)
    : layout_(std::move(layout)),
      directory_(config.lower.disk ? std::make_unique<BundleDirectory>(config.lower.disk->directory) : nullptr),
      hasher_(directory_ ? directory_->hash_seed() : config.hash_seed), spaces_(hasher_, directory_.get()),
      versions_(layout_.fingerprint(), config.model_version, config.abi),
      device_(layout_, config.arena, spaces_, config.max_nodes, true), arena_(device_.arena()), store_(device_.store()),
      retention_(config.retention), verify_all_tokens_(config.verify_all_tokens),
      pin_cap_bytes_(config.pin_prefix_cap_bytes != 0 ? config.pin_prefix_cap_bytes : arena_.bytes() / 4), tickets_(kTickets) {
  for (const Group& group : layout_.groups()) {
    require_route(group.spec.kind, Operation::kReserve);
    if (group.spec.optional) throw LayoutError(group.spec.name, "optional", "draft groups are not supported yet");
  }
  // The least that is of use: a scratch block of every pool, and one more for a sequence.
  BlockCounts one_each{}, two_each{};
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) {
    one_each[pool] = 1;
    two_each[pool] = 2;
  }
  if (const ReserveOutcome outcome = arena_.possible(two_each); outcome.status != ReserveOutcome::Status::kReserved) {
    const PoolSpec& pool = layout_.pools()[outcome.pool];
    throw AdmissionError(std::string(kind_name(pool.kind)), bytes_of(two_each), arena_.bytes(), false,
                         "the arena of " + std::to_string(arena_.bytes()) +
                             " bytes cannot hold two blocks of every group (pool '" + pool.name + "' of " +
                             std::to_string(pool.block_bytes) + " bytes is the first that does not fit)");
  }
  Charge charge;
  HETKV_CHECK(arena_.reserve(one_each, {}, charge).status == ReserveOutcome::Status::kReserved,
              "an empty arena refuses what is possible");
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) scratch_[pool] = charge.take(static_cast<PoolId>(pool));
  if (config.lower.host || config.lower.disk)
    lower_ = std::make_unique<LowerTiers>(layout_, device_, spaces_, versions_, config.lower, directory_.get());
}

KvAllocator::~KvAllocator() {
  lower_.reset();
  for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) arena_.drop(scratch_[pool]);
}

void KvAllocator::check_tokens(std::span<const std::int32_t> tokens) {
  if (tokens.empty()) throw ArgumentError("tokens", "[]", "at least one token");
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
  const std::uint64_t gone = store_.evict_space(space, old, ~std::uint64_t{0});
  if (lower_) {
    if (HostTier* host = lower_->host()) host->memory().store().evict_space(space, old, ~std::uint64_t{0});
    lower_->clear(old);
  }
  return gone;
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
  return ticket;
}

void KvAllocator::leave(std::uint32_t slot) {
  if (slot < kTickets) tickets_[slot].store(0, std::memory_order_release);
}

bool KvAllocator::older_than(std::uint64_t ticket) const {
  const std::uint32_t high = ticket_high_.load(std::memory_order_acquire);
  for (std::uint32_t i = 0; i < high; ++i) {
    const std::uint64_t other = tickets_[i].load(std::memory_order_acquire);
    if (other != 0 && other < ticket) return true;
  }
  return false;
}

void KvAllocator::check_invariants() const { device_.check_invariants(); }

}  // namespace hetkv
