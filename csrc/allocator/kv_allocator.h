// KvAllocator: the facade. probe -> admit -> (Sequence: append, schedule, settle, publish, free).
//
// Owns arena bookkeeping, index, versions, namespaces and counters; does not own the memory itself and knows no torch, no CUDA and no
// Python. All methods are thread-safe; request paths are lock-free. Sequences and pinned prefixes must be gone before it ends.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocator/arena.h"
#include "allocator/hit_report.h"
#include "allocator/layout.h"
#include "allocator/lower_tiers.h"
#include "allocator/memory_tier.h"
#include "allocator/namespace_table.h"
#include "allocator/object_store.h"
#include "allocator/retention.h"
#include "allocator/sequence.h"
#include "allocator/stats.h"
#include "allocator/version_table.h"

namespace hetkv {

struct AllocatorConfig {
  ArenaConfig arena;
  RetentionPolicy retention;
  bool verify_all_tokens = true;  // false: trust the keyed hash for ancestors, compare the deepest block only
  std::string model_version = "0";
  std::map<std::string, std::uint64_t> abi;  // kernel family -> integer
  std::uint64_t hash_seed = 0;               // 0: a random secret
  std::uint32_t max_nodes = 0;               // 0: from the arena
  std::uint64_t pin_prefix_cap_bytes = 0;    // 0: a quarter of the arena
  LowerTiers::Config lower;                  // with a disk tier the secret of the hash is the folder's
};

struct AdmitOptions {
  std::int64_t max_new_tokens = 0;               // history blocks for them are reserved at once
  std::int64_t chunk_tokens = 0;                 // largest step; 0: block_size
  bool live_state = false;                       // reserve the running rings and live snapshots
  std::shared_ptr<const HashedPrefix> previous;  // the conversation so far: not hashed again where equal
  bool restore = true;                           // whether lower tiers may be loaded from; then the sequence may be pending
};

struct AdmitResult {
  std::unique_ptr<Sequence> sequence;  // null on refusal; may be pending: see Sequence::pending
  HitReport report;                    // of a pending one: a forecast
  Refusal refusal;
};

// A prefix that stays until released, for system prompts. Move-only through unique_ptr; the allocator must outlive it.
class PinnedPrefix {
 public:
  ~PinnedPrefix();
  std::int64_t num_tokens() const { return tokens_; }
  std::uint64_t bytes() const { return bytes_; }
  void release();

 private:
  friend class KvAllocator;
  PinnedPrefix(KvAllocator& allocator, ObjectStore& store) : allocator_(allocator), lease_(store) {}
  KvAllocator& allocator_;
  Lease lease_;
  std::int64_t tokens_ = 0;
  std::uint64_t bytes_ = 0;
};

struct StepItem {
  Sequence* sequence = nullptr;
  std::int64_t num_tokens = 0;  // to schedule now
};

// Caller-owned arrays of one step. Padded rows and slots point at scratch blocks.
struct StepBuffers {
  struct GroupArrays {
    std::int32_t* block_table = nullptr;  // [padded_sequences, table_stride]
    std::size_t table_stride = 0;         // in entries
    std::int64_t* slots = nullptr;        // [padded_tokens]
  };
  std::array<GroupArrays, kMaxGroups> groups{};
  std::int32_t* cu_seqlens_q = nullptr;  // [padded_sequences + 1]
  std::int32_t* seqused_k = nullptr;     // [padded_sequences]
  std::size_t padded_sequences = 0, padded_tokens = 0;
};

class KvAllocator {
 public:
  // Throws LayoutError, ArgumentError, AdmissionError as Arena does; LayoutError for optional (draft) groups, which are not built yet.
  KvAllocator(CacheLayout layout, const AllocatorConfig& config);
  ~KvAllocator();
  KvAllocator(const KvAllocator&) = delete;
  KvAllocator& operator=(const KvAllocator&) = delete;

  const CacheLayout& layout() const { return layout_; }
  Arena& arena() { return arena_; }
  ObjectStore& store() { return store_; }
  VersionTable& versions() { return versions_; }
  const RetentionPolicy& retention() const { return retention_; }

  // --- identity ---
  Namespace* space(const std::vector<NamespaceField>& fields) { return spaces_.intern(fields); }
  void set_model_version(const std::string& name) { versions_.set_model(name); }
  void set_abi(const std::string& family, std::uint64_t value) { versions_.set_abi(family, value); }
  // A kernel family needs every group's blocks at this alignment (bytes, a power of two). LayoutError if blocks cannot have it.
  void declare_alignment(const std::string& family, std::uint64_t bytes);
  void set_quota(Namespace* space, std::uint64_t bytes) { space->quota_bytes.store(bytes, std::memory_order_relaxed); }
  // All entries of a namespace stop matching at once; unpinned memory is reclaimed. Returns nodes reclaimed. O(nodes).
  std::uint64_t clear(Namespace* space);

  // --- requests ---
  // Read-only forecast; refreshes nothing.
  HitReport probe(std::span<const std::int32_t> tokens, const Namespace* space, const HashedPrefix* previous = nullptr) const;
  // Pins, then reserves, in one step. A refusal pins and reserves nothing; one that is final evicts nothing either. ArgumentError
  // on empty or negative input, and beyond 2^31 - 1 tokens.
  AdmitResult admit(std::span<const std::int32_t> tokens, Namespace* space, const AdmitOptions& options = {});
  // Ends the admission of a pending sequence, whose restore is done: what it can resume from is looked for anew. On a refusal the
  // sequence is freed.
  Refusal finish_restore(Sequence& sequence);
  // Schedules num_tokens of every item, or none, and fills the buffers. On a refusal nothing changed.
  Refusal prepare_step(std::span<const StepItem> items, const StepBuffers& buffers, StepStamp* stamps);
  // Pins the longest recoverable prefix of tokens. AdmissionError over the cap.
  std::unique_ptr<PinnedPrefix> pin_prefix(std::span<const std::int32_t> tokens, Namespace* space);

  // --- memory ---
  // Blocks that a request of `tokens` tokens in steps of `chunk` holds at its peak: the sizing function and the gate are one.
  BlockCounts blocks_for(std::int64_t tokens, std::int64_t chunk, bool live_state) const;
  std::uint64_t bytes_for(std::int64_t tokens, std::int64_t chunk, bool live_state) const;
  // Evicts up to `blocks` of the coldest objects of a kind. RouteError if the kind cannot be evicted. Returns how many went.
  std::uint64_t evict(ObjectKind kind, std::uint64_t blocks) { return device_.evict(kind, blocks); }
  // Evicts one object: a point group's at `position`, or the history set there if it is a leaf. False if absent or in use.
  bool evict_object(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position, GroupId group);
  // Takes the object of `group` at `position` of this prefix (and what depends on it) out of sight. Returns objects marked.
  std::uint64_t quarantine(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position, GroupId group,
                           LossReason reason);

  // Offset of the scratch block of a pool.
  std::uint32_t scratch(PoolId pool) const { return scratch_[pool].offset; }

  // The tiers below, or null. flush waits until what was published is copied down.
  LowerTiers* lower() { return lower_.get(); }
  void flush() {
    if (lower_) lower_->flush();
  }

  const Counters& counters() const { return counters_; }
  std::size_t metadata_bytes() const { return device_.metadata_bytes(); }
  std::uint64_t slabs_reclaimed() const { return device_.slabs_reclaimed(); }
  void check_invariants() const;  // at quiescent moments: aborts with the rule

 private:
  friend class Sequence;
  friend class PinnedPrefix;

  void hash_blocks(std::span<const std::int32_t> tokens, const NamespaceInstance& instance, const HashedPrefix* previous,
                   std::vector<Key128>& keys) const;
  // Stages 1..: granularity to model version. `own_depth`: sealed depth of the running version. Fills the report's first numbers.
  // `lower_depth`: of the running version on the tiers below, as far as they could tell.
  void explain_identity(std::span<const Key128> keys, VersionId version, std::uint32_t space, std::uint32_t own_depth,
                        std::uint32_t lower_depth, HitReport& report) const;
  // All groups or none; evicts as needed. `ticket`: of the asking sequence, for the oldest one's right to a step.
  Refusal reserve_blocks(const BlockCounts& need, std::uint64_t ticket, Charge& charge);
  // The same within the namespace's quota, and charged to it.
  Refusal reserve(const BlockCounts& need, std::uint64_t ticket, Namespace* space, Charge& charge);
  // Charges bytes to a namespace within its quota; a namespace over it gives up its own coldest prefixes first.
  Refusal charge_quota(std::uint64_t bytes, Namespace* space);
  static void return_quota(std::uint64_t bytes, Namespace* space) {
    space->used_bytes.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
  }
  std::uint64_t bytes_of(const BlockCounts& counts) const { return device_.bytes_of(counts); }
  // Blocks of a history or window group's table for the first `tokens` tokens.
  std::int64_t table_blocks(const Group& group, std::int64_t tokens) const;
  // What a sequence resumed at `resume` reserves at admission.
  BlockCounts need_between(std::int64_t resume, std::int64_t total, std::int64_t chunk, bool live_state) const;

  // Nodes of a pinned prefix by depth, and what their slots said of their point sets.
  struct PinnedChain {
    std::vector<NodeId> nodes;
    std::vector<std::uint8_t> flags;
    void clear() {
      nodes.clear();
      flags.clear();
    }
  };
  // Finds, pins and compares the prefix, then pins the point objects of the largest endpoint. Returns its depth; fills the report.
  // `lower_depth` as for explain_identity.
  std::uint32_t pin_recoverable(std::span<const std::int32_t> tokens, std::span<const Key128> keys, VersionId version,
                                const NamespaceInstance& instance, std::uint32_t lower_depth, Lease& lease, PinnedChain& chain,
                                HitReport& report);
  std::uint32_t pin_history(std::span<const std::int32_t> tokens, std::span<const Key128> keys, std::uint32_t limit,
                            VersionId version, const NamespaceInstance& instance, Lease& lease, PinnedChain& chain);
  std::uint32_t pin_endpoint(std::uint32_t depth, PinnedChain& chain, Lease& lease, HitReport& report);
  std::uint32_t scan_endpoints(std::span<const Key128> keys, VersionId version, std::uint32_t space, std::uint32_t depth,
                               bool lower, HitReport& report) const;
  void add_blocks(const RestoreWish& wish, BlockCounts& counts) const;
  BlockCounts endpoint_blocks(std::uint32_t depth) const;
  // A prefix whose resident part is pinned, for a restore on top of it.
  struct RestoreBase {
    explicit RestoreBase(ObjectStore& store) : lease(store) {}
    Lease lease;
    PinnedChain chain;
    std::vector<RestoreWish> wishes;
  };
  // What device and lower tiers have together: the largest endpoint, with history to `depth` on some tier and to `resident` on the
  // device. With a base: pins the resident points of that endpoint and lists what has to be loaded. `report` becomes the forecast.
  std::uint32_t forecast(std::span<const Key128> keys, VersionId version, const NamespaceInstance& instance, std::uint32_t depth,
                         std::uint32_t resident, RestoreBase* base, HitReport& report) const;
  // Begins a restore to endpoint `depth` with blocks from the sequence's charge.
  void begin_restore(Sequence& sequence, std::uint32_t depth, RestoreBase&& base);
  // The sequence resumes at `depth` of the pinned chain.
  void begin(Sequence& sequence, std::uint32_t depth, const PinnedChain& chain, const HitReport& report);
  bool pin_points(std::uint32_t depth, PinnedChain& chain, Lease& lease);
  Fingerprint aligned_layout() const;
  static void check_tokens(std::span<const std::int32_t> tokens);

  std::size_t check_step(std::span<const StepItem> items, const StepBuffers& buffers);
  Refusal reserve_step(std::span<const StepItem> items, Charge& charge);
  void fill_step(const Sequence& s, std::int64_t begin, std::int64_t upto, std::size_t index, std::size_t row,
                 const StepBuffers& buffers) const;
  void pad_step(std::size_t sequences, std::size_t tokens, const StepBuffers& buffers) const;
  // The pool of what a running sequence writes: the ring of a tail group, the group's own otherwise.
  PoolId running_pool(GroupId group) const { return layout_.ring_pool(group).value_or(group); }
  Found object_at(std::span<const std::int32_t> tokens, const Namespace* space, std::int64_t position, GroupId group) const;

  std::uint64_t enter(std::uint32_t* slot);  // a ticket for a new sequence
  void leave(std::uint32_t slot);
  bool older_than(std::uint64_t ticket) const;  // whether a sequence admitted before it is still running
  void count_report(const HitReport& report, bool admitted);

  CacheLayout layout_;
  std::unique_ptr<BundleDirectory> directory_;  // null without a disk tier
  ChainHasher hasher_;
  NamespaceTable spaces_;
  VersionTable versions_;
  MemoryTier device_;
  Arena& arena_;
  ObjectStore& store_;
  RetentionPolicy retention_;
  const bool verify_all_tokens_;
  std::array<Block, kMaxPools> scratch_{};
  std::map<std::string, std::uint64_t> alignments_;
  mutable std::mutex alignments_mutex_;
  std::uint64_t pin_cap_bytes_;
  std::atomic<std::uint64_t> pinned_bytes_{0};

  static constexpr std::uint32_t kTickets = 1U << 16;
  std::atomic<std::uint64_t> next_mark_{1};
  LazyArray<std::atomic<std::uint64_t>> tickets_;  // 0 = free
  std::atomic<std::uint64_t> next_ticket_{1};
  std::atomic<std::uint32_t> ticket_high_{0};
  mutable Counters counters_;
  std::unique_ptr<LowerTiers> lower_;  // last: its threads use all of the above
};

}  // namespace hetkv
