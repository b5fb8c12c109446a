// Sequence: one running request. Block tables, counters, staged checkpoints, and the lease that keeps its prefix.
//
// Owns its private blocks, credits and pins; gives all of them back when freed. Made by KvAllocator::admit; the allocator must
// outlive it. Not thread-safe: one thread at a time uses a sequence (different sequences are independent). Counters of tokens:
// known >= scheduled >= settled (bytes written, fence passed); accepted (not open to rollback). Slide and publish look at
// min(accepted, settled).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "allocator/arena.h"
#include "allocator/hit_report.h"
#include "allocator/lease.h"
#include "allocator/namespace_table.h"
#include "allocator/refusal.h"
#include "allocator/retention.h"

namespace hetkv {

class KvAllocator;
class Restore;

// The hashed prefix of a conversation, shared between its turns so that no token is hashed twice. Immutable.
struct HashedPrefix {
  Key128 root;                       // of the namespace instance that the keys were chained from
  std::vector<std::int32_t> tokens;  // whole blocks only
  std::vector<Key128> keys;          // one per block
};

struct StepStamp {
  std::uint64_t epoch = 0;
  VersionId version = 0;
  std::int64_t begin = 0, end = 0;  // tokens of this step
};

enum class PublishOutcome : std::uint8_t {
  kDone,            // everything up to the asked position
  kBusy,            // another is at the same node: try at the next boundary
  kForeignVersion,  // rows from here on were written under other weights
  kUnpublishable,   // a collision, a cleared namespace or a broken parent: this sequence publishes no more
  kNoNode,          // the node pool is full of pinned nodes
};

struct PublishResult {
  std::int64_t published_tokens = 0;
  PublishOutcome outcome = PublishOutcome::kDone;
};

struct StagedBlock {
  GroupId group = 0;
  std::uint32_t offset = 0;  // of 256 bytes
};

class Sequence {
 public:
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  const HitReport& report() const { return report_; }
  std::int64_t num_computed_tokens() const { return std::int64_t{resume_depth_} * block_size_; }
  std::int64_t num_tokens() const { return static_cast<std::int64_t>(tokens_.size()); }
  std::int64_t scheduled() const { return scheduled_; }
  std::int64_t settled() const { return settled_; }
  std::int64_t accepted() const { return accepted_; }
  std::int64_t published_tokens() const { return std::int64_t{published_depth_} * block_size_; }
  VersionId version() const { return version_; }
  std::uint64_t epoch() const { return epoch_; }
  bool live() const { return live_; }
  // Admitted, but what it resumes from is still being loaded: only free, pending and restore may be called, until
  // KvAllocator::finish_restore.
  bool pending() const { return restore_ != nullptr; }
  const std::shared_ptr<Restore>& restore() const { return restore_; }
  // Whether everything it was admitted with is still good.
  bool ok() const { return lease_.ok(); }

  // Tokens become known. Amortised constant time per token.
  void append(std::span<const std::int32_t> ids);
  void append_one(std::int32_t id) { tokens_.push_back(id); }
  // Blocks for the rows of tokens [scheduled, upto), or a refusal that changes nothing. upto <= num_tokens().
  Refusal schedule(std::int64_t upto, StepStamp* stamp);
  // The step's bytes are written and its fence has passed. False: the stamp is of an old epoch and was dropped.
  // batch_invariant: the step computed this sequence as if it were alone; without that its rows are not canonical.
  bool settle(const StepStamp& stamp, bool batch_invariant = true);
  // From now on only accepted tokens count as safe from rollback; without it every settled token does.
  void hold_acceptance();
  void accept(std::int64_t upto);  // never lowers
  // A new epoch: results of steps scheduled before are dropped.
  void restart_from_settled();

  // --- checkpoints ---
  bool wants_point(std::int64_t position) const;
  // Blocks for every tail and snapshot group that R(position) asks for; empty if the policy does not want it, nothing is asked
  // for, or memory is short (a checkpoint is never worth a refusal). position: a multiple of block_size in (resume, known].
  std::vector<StagedBlock> stage_point(std::int64_t position);
  // Proof: the state in the staged block of `group` is the state at `state_position`. PositionError if that is not `position`.
  void commit_point(std::int64_t position, GroupId group, std::int64_t state_position);
  // Whole blocks up to min(upto, settled, accepted) become matchable, and the checkpoints that are due with them.
  PublishResult publish(std::int64_t upto);
  // Gives everything back, so only after the fence of its last scheduled step. turn_end: the staged checkpoints of the end of the turn are published first.
  void free(bool turn_end);

  // --- addresses ---
  // Offsets of 256 bytes, one per block of the group; slid or absent blocks are the scratch block. Valid until the next call.
  std::span<const std::int32_t> block_table(GroupId group) const { return groups_[group].offsets; }
  // Slots of the group's own rows [begin, end): entries of a history group, tokens of a window group.
  void slot_mapping(GroupId group, std::int64_t begin, std::int64_t end, std::int64_t* out) const;
  // One slot per token of [begin, end): where the row or entry that this token completes is stored; scratch where none is.
  void token_slots(GroupId group, std::int64_t begin, std::int64_t end, std::int64_t* out) const;
  // The tail or snapshot block restored at num_computed_tokens, or -1.
  std::int64_t point_block(GroupId group) const { return point_blocks_[group]; }
  // The running ring (tail groups) or live state (snapshot groups) of this sequence, or -1 without live_state.
  std::int64_t live_block(GroupId group) const { return live_blocks_[group]; }

  // Ranges of blocks that changed hands and must be zeroed before use; confirm when done. publish() refuses until then.
  const std::vector<ClearRange>& ranges_to_clear() const { return to_clear_; }
  void confirm_cleared();

  // The keys of its whole blocks, for the conversation's next turn. Allocates.
  std::shared_ptr<const HashedPrefix> hashed_prefix();
  const Namespace& space() const { return *space_; }

 private:
  friend class KvAllocator;
  Sequence(KvAllocator& allocator, Namespace* space, const NamespaceInstance* instance);

  enum class Held : std::uint8_t { kNone, kPrivate, kShared };
  struct GroupBlocks {
    std::vector<std::int32_t> offsets;
    std::vector<Held> held;
    std::vector<Block> spare;    // window groups: slid private blocks, used again
    std::size_t first_held = 0;  // window groups: everything before is kNone
  };
  struct PendingPoint {
    std::uint32_t depth = 0;
    RetentionPlan::Want want = RetentionPlan::Want::kNo;
    std::uint32_t needed_sets = 0, committed_sets = 0;  // tail and snapshot sets
    std::array<std::uint32_t, kMaxPointSets> blocks{};  // kNoBlock = none
    bool complete() const { return needed_sets == committed_sets; }
  };

  void fill_tables();  // from the pinned chain, at admission
  void take_live_blocks();
  void require_live() const;
  void require_schedulable(std::int64_t upto) const;
  // Below this no rollback and no unfinished step can reach.
  // Whether a checkpoint at `position` could still be published.
  bool may_publish(std::int64_t position) const {
    return publishable_ && position <= foreign_from_ && space_->instance.load(std::memory_order_acquire) == instance_;
  }
  void drop_points_beyond(std::int64_t position);  // those that can never be published
  std::int64_t safe_upto() const { return acceptance_held_ ? std::min(accepted_, settled_) : settled_; }
  std::int64_t whole_blocks(std::int64_t tokens) const { return (tokens + block_size_ - 1) >> block_shift_ << block_shift_; }
  void advance_from(std::int64_t before);  // after safe_upto() moved
  std::size_t table_blocks(const Group& group, std::int64_t tokens) const;
  BlockCounts growth(std::int64_t upto) const;  // blocks to take that neither spares nor credits cover
  void grow(std::int64_t upto, Charge& extra);  // takes them, own credits first
  StepStamp stamp_step(std::int64_t upto) noexcept;
  Block take(Charge& charge, PoolId pool);
  void give_up(Block block);  // a private block goes back to the arena
  void slide();
  bool window_needs(const Group& group, std::size_t index) const;
  void note_boundaries(std::int64_t from, std::int64_t to);
  PendingPoint* find_pending(std::uint32_t depth);
  void trim_rolling(std::uint32_t newest);
  void drop_pending(PendingPoint& point);
  bool publish_history(std::uint32_t depth, PublishOutcome* outcome);
  void publish_pending(PendingPoint& point, bool growing);
  void publish_due(bool turn_end);
  void note_turn_end();  // to whoever keeps only those
  void extend_keys(std::uint32_t depth);
  std::uint32_t staged_sets(std::uint32_t depth) const;  // tail and snapshot sets that R asks for, as bits

  KvAllocator& allocator_;
  std::shared_ptr<Restore> restore_;                                      // until it is finished
  std::int64_t prompt_tokens_ = 0, total_tokens_ = 0, chunk_tokens_ = 0;  // as admitted
  bool live_state_ = false;
  Namespace* space_;
  const NamespaceInstance* instance_;
  const std::uint32_t block_size_;
  const int block_shift_;  // block_size_ is a power of two
  Lease lease_;
  Charge charge_;
  HitReport report_;
  RetentionPlan plan_;
  VersionId version_ = 0;
  std::uint64_t epoch_ = 1;
  std::uint64_t ticket_ = 0;  // order of admission
  std::uint32_t ticket_slot_ = ~std::uint32_t{0};
  bool live_ = true, publishable_ = true, acceptance_held_ = false;

  std::vector<std::int32_t> tokens_;
  std::vector<Key128> keys_;   // of whole blocks, as far as hashed
  std::vector<NodeId> chain_;  // node at depth i+1, for i < published_depth_
  std::int64_t scheduled_ = 0, settled_ = 0, accepted_ = 0;
  std::int64_t covered_ = 0;           // blocks exist for all rows below
  std::uint32_t canonical_depth_ = 0;  // our rows up to here were computed in whole-block chunks, on a canonical prefix
  std::uint64_t step_mark_ = 0;        // of the batch that last planned it
  std::int64_t foreign_from_ = std::numeric_limits<std::int64_t>::max();
  std::uint32_t resume_depth_ = 0, published_depth_ = 0, last_point_depth_ = 0;
  std::int64_t held_bytes_ = 0;  // charged to the namespace by this sequence, not by objects

  std::array<GroupBlocks, kMaxGroups> groups_;
  std::array<std::int64_t, kMaxGroups> point_blocks_, live_blocks_;
  std::vector<PendingPoint> pending_;
  std::vector<Block> uncleared_;
  std::vector<ClearRange> to_clear_;
};

}  // namespace hetkv
