// Arena: equal slabs that move between pools, blocks inside them, credits and holds.
//
// Owns: slab words and bitmaps, hold counts, clear-before-use marks, the reservation. Does not own the memory itself (a torch
// tensor does; the arena deals in offsets), objects, or the decision what to evict. Must outlive every Charge and every block.
// All methods are thread-safe, lock-free unless said, and never block. See protocol.md section 6 for the rules.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "allocator/layout.h"
#include "allocator/object_kind.h"
#include "allocator/reservation_rules.h"  // BlockCounts, KindLimits, ReserveOutcome

namespace hetkv {

struct ArenaConfig {
  std::uint64_t bytes = 0;         // whole arena; rounded down to slabs
  std::uint64_t slab_bytes = 0;    // multiple of kOffsetUnit; 0 = chosen from the pools' block sizes
  std::uint64_t base_address = 0;  // of the memory, for alignment checks only
  std::array<KindLimits, kNumKinds> limits{};
  bool lock_free = true;  // false: the locked twin of the reservation
};

// A block of memory, typed at run time by its pool (and so by its kind). Offset in units of kOffsetUnit from the arena's start.
struct Block {
  std::uint32_t offset = 0;
  PoolId pool = 0;
  friend bool operator==(const Block&, const Block&) = default;
};

// A block whose kind is part of its type: a compressed block cannot be passed where a plain one is meant.
template <ObjectKind K>
struct TypedBlock {
  static constexpr ObjectKind kind = K;
  std::uint32_t offset = 0;
  PoolId pool = 0;
};

struct ClearRange {
  std::uint64_t offset = 0, bytes = 0;  // bytes from the arena's start
};

struct PoolUsage {
  std::uint64_t blocks_reserved = 0;  // live blocks and credits
  std::uint64_t blocks_live = 0;
  std::uint64_t slabs_owned = 0;
  std::uint64_t block_bytes = 0, blocks_per_slab = 0;
};

class Arena;

// Credits over all pools: the right to take that many blocks without failing. Move-only; what is left returns on destruction.
class Charge {
 public:
  Charge() = default;
  Charge(Charge&& other) noexcept;
  Charge& operator=(Charge&& other) noexcept;
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  ~Charge();
  std::uint32_t left(PoolId pool) const { return counts_[pool]; }
  // Adds another charge of the same arena to this one.
  void merge(Charge&& other) noexcept;
  // Takes one block with a credit, hold count 1. A missing credit is a broken invariant. Lowest slab first.
  Block take(PoolId pool) noexcept;
  // Returns `count` credits of a pool early.
  void give_back(PoolId pool, std::uint32_t count) noexcept;
  // Frees a block that only the caller holds, and keeps the right to take one in its place.
  void put_back(Block block) noexcept;
  void release() noexcept;  // all

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  BlockCounts counts_{};
};

class Arena {
 public:
  // Throws LayoutError (a block larger than a slab, too many pools), ArgumentError (sizes), AdmissionError (floors of all kinds
  // exceed the arena: names the kind, need and cap).
  Arena(const CacheLayout& layout, const ArenaConfig& config);
  ~Arena();  // checks that no credit is out and that no block is held
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Reserves need[p] blocks of every pool p in one atomic act, or nothing. `headroom[p]` more blocks must remain reservable
  // afterwards (the step that the oldest sequence may always take); pass {} for none. Takes free slabs and empty slabs of other
  // pools as the rules allow; never evicts. On kReserved `charge` gains the credits.
  ReserveOutcome reserve(const BlockCounts& need, const BlockCounts& headroom, Charge& charge);

  // Whether `need` could ever fit in an empty arena with these floors and caps: the same test that reserve refuses with.
  ReserveOutcome possible(const BlockCounts& need) const;

  // Holds. A block is freed once, when the last hold goes.
  void hold(Block block) noexcept;  // one more
  bool drop(Block block) noexcept;  // one less; true if that freed it
  std::uint32_t holds(Block block) const noexcept;

  // The node or sequence a block belongs to, for eviction by slab: one relaxed word per block, 0 = none.
  void set_owner(Block block, std::uint32_t owner) noexcept;
  std::uint32_t owner(Block block) const noexcept;

  // Clear before use: blocks of a slab that changed hands, on first use after it. must_clear is true until confirmed.
  bool must_clear(Block block) const noexcept;
  void confirm_cleared(Block block) noexcept;
  ClearRange range(Block block) const noexcept;

  // Slabs, for eviction by slab. Live blocks of slab s, if pool p owns it.
  std::uint32_t num_slabs() const noexcept;
  std::uint32_t free_slabs() const noexcept;  // owned by nobody
  std::optional<PoolId> slab_owner(std::uint32_t slab) const noexcept;
  std::uint32_t slab_used(std::uint32_t slab) const noexcept;
  void live_blocks(std::uint32_t slab, std::vector<Block>& out) const;  // allocates; a snapshot

  // Whether `from` could give a slab to `to` if it drained one: it is over its floor, and the cap of `to`'s kind leaves room for
  // `blocks` more blocks (where the cap is what is short, no slab helps).
  bool may_steal(PoolId from, PoolId to, std::uint32_t blocks = 1) const noexcept;

  PoolUsage usage(PoolId pool) const noexcept;
  std::uint64_t kind_bytes(ObjectKind kind) const noexcept;  // live blocks and credits
  std::uint64_t stranded_bytes()
      const noexcept;  // in owned slabs, usable by no block of the owner (remainders), and free blocks of owned slabs
  std::uint64_t slab_bytes() const noexcept;
  std::uint64_t bytes() const noexcept;           // whole slabs
  std::uint64_t metadata_bytes() const noexcept;  // of this object
  std::uint64_t base_address() const noexcept;
  const CacheLayout& layout() const noexcept;

  // Invariant 7 and 9 of protocol.md, for tests at quiescent points: aborts with the rule that is broken.
  void check_invariants() const;

  // Typed access: RouteError if the block's kind is not K.
  template <ObjectKind K>
  TypedBlock<K> as(Block block) const {
    const ObjectKind have = kind_of(block);
    if (have != K) throw RouteError(std::string(kind_name(have)), "use as " + std::string(kind_name(K)));
    return {block.offset, block.pool};
  }
  ObjectKind kind_of(Block block) const noexcept;

 private:
  friend class Charge;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hetkv
