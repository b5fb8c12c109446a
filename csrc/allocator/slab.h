// Slab words, the bitmaps of their blocks, and the hand-over of slabs between pools.
//
// The word of a slab, changed by CAS only:
//
//   63       56 55      40 39       8 7     0
//   | owner(8) | used (16)| gen (32) | flags |     flags: bit 7 dirty, bits 0-5 pool that owned it last, plus 1 (0: nobody yet)
//
// gen grows with every change of owner, and with every refused retirement, so that one move of a slab is decided exactly once
// whoever carries it out.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "allocator/reservation_rules.h"
#include "allocator/slab_array.h"

namespace hetkv {

struct SlabWord {
  static constexpr unsigned kFlagBits = 8, kGenBits = 32, kUsedBits = 16, kOwnerBits = 8;
  static constexpr unsigned kGenShift = kFlagBits, kUsedShift = kGenShift + kGenBits, kOwnerShift = kUsedShift + kUsedBits;
  static_assert(kOwnerShift + kOwnerBits == 64, "the bit budget of the slab word");
  static constexpr PoolId kNobody = 0xFF;
  static constexpr std::uint32_t kMaxUsed = 0xFFFF;
  static constexpr std::uint32_t kDirty = 0x80, kLastOwner = 0x3F;
  static_assert(kMaxPools + 1 <= kLastOwner && kMaxPools < kNobody);

  std::uint64_t bits = 0;

  constexpr PoolId owner() const { return static_cast<PoolId>(bits >> kOwnerShift); }
  constexpr std::uint32_t used() const { return static_cast<std::uint32_t>(bits >> kUsedShift) & kMaxUsed; }
  constexpr std::uint32_t gen() const { return static_cast<std::uint32_t>(bits >> kGenShift); }
  constexpr std::uint32_t flags() const { return static_cast<std::uint32_t>(bits & 0xFF); }
  constexpr bool dirty() const { return (flags() & kDirty) != 0; }

  static constexpr SlabWord make(PoolId owner, std::uint32_t used, std::uint32_t gen, std::uint32_t flags) {
    return {(std::uint64_t{owner} << kOwnerShift) | (std::uint64_t{used} << kUsedShift) | (std::uint64_t{gen} << kGenShift) |
            flags};
  }
  constexpr SlabWord add_used(std::int32_t n) const {
    return {bits + (static_cast<std::uint64_t>(static_cast<std::int64_t>(n)) << kUsedShift)};
  }
};
static_assert(sizeof(SlabWord) == 8 && std::atomic<std::uint64_t>::is_always_lock_free);

// One slab that changes its owner, as agreed in the reservation's vector: to `pool` from nobody, or from `pool` to nobody.
// Its gen makes it idempotent: any thread may carry it out, any number of times, however late.
struct SlabMove {
  std::uint32_t slab = 0;
  PoolId pool = 0;
  std::uint32_t gen = 0;  // of the slab's word before the move

  static constexpr std::uint32_t kMaxSlabs = 1u << 24;
  std::uint64_t pack() const { return (std::uint64_t{slab} << 40) | (std::uint64_t{pool} << 32) | gen; }
  static SlabMove unpack(std::uint64_t v) {
    return {static_cast<std::uint32_t>(v >> 40), static_cast<PoolId>((v >> 32) & 0xFF), static_cast<std::uint32_t>(v)};
  }
};

// SlabTable: owns slab words, block bitmaps and clearing marks. Does not own counters or credits: who takes a block has a credit,
// who moves a slab has the reservation's word for it. All methods: thread-safe, lock-free, no allocation, never block.
class SlabTable {
 public:
  struct Place {
    std::uint32_t slab = 0, index = 0;
  };

  SlabTable(std::span<const PoolGeometry> pools, std::uint32_t slabs);

  // Takes a block of the pool; the caller has a credit, so there is one. Lowest slab first.
  Place take(PoolId pool) noexcept;
  // Gives a block back: its bit first, then the slab's count. The caller then counts the release, last.
  void put_back(PoolId pool, Place place) noexcept;

  // Carries out a move to `move.pool` from nobody; does nothing if that is done already.
  void grant(SlabMove move) noexcept;
  // Carries out a move from `move.pool` to nobody, or decides against it if the slab is in use by now.
  void retire(SlabMove move) noexcept;
  // The decision of a retirement that has been carried out, read before the slab's next move.
  bool retired(SlabMove move) const noexcept { return word(move.slab).owner() == SlabWord::kNobody; }

  // Calls sink(SlabMove) for up to `count` slabs of nobody, lowest first, with pool 0. Returns how many there were.
  template <class Sink>
  std::uint32_t find_free(std::uint64_t count, Sink sink) const {
    std::uint32_t found = 0;
    for (std::uint32_t s = 0; s < slabs_ && found < count; ++s) {
      const SlabWord w = word(s);
      if (w.owner() == SlabWord::kNobody) sink(found++, SlabMove{s, 0, w.gen()});
    }
    return found;
  }
  // Calls sink(SlabMove) for up to plan.missing empty slabs, highest first, as the surplus of pools and kinds allows.
  template <class Sink>
  std::uint32_t find_empty(SlabPlan& plan, Sink sink) const {
    std::uint32_t found = 0;
    for (std::uint32_t s = slabs_; s-- > 0 && found < plan.missing;) {
      const SlabWord w = word(s);
      if (w.owner() == SlabWord::kNobody || w.used() > 0) continue;
      std::uint64_t& of_pool = plan.surplus[w.owner()];
      std::uint64_t& of_kind = plan.kind_surplus[static_cast<std::size_t>(pools_[w.owner()].kind)];
      if (of_pool == 0 || of_kind == 0) continue;
      --of_pool;
      --of_kind;
      sink(found++, SlabMove{s, w.owner(), w.gen()});
    }
    return found;
  }

  SlabWord word(std::uint32_t slab) const noexcept { return {words_[slab].load(std::memory_order_acquire)}; }
  bool is_set(Place place) const noexcept {
    return (bitmap_.at(place.slab, place.index / 64).load(std::memory_order_acquire) >> (place.index % 64) & 1) != 0;
  }
  // Clear before use. The marks need no sweep at a hand-over: a confirmation only counts under the gen that the owner got.
  bool must_clear(Place place) const noexcept;
  void confirm_cleared(Place place) noexcept;

  std::uint32_t slabs() const noexcept { return slabs_; }
  std::uint32_t least_blocks() const noexcept { return least_; }
  std::uint32_t most_blocks() const noexcept { return most_; }
  // Most blocks that a slab has been cut into so far; 0 if it never had an owner.
  std::uint32_t widest(std::uint32_t slab) const noexcept { return widest_[slab].load(std::memory_order_relaxed); }
  std::uint64_t metadata_bytes() const noexcept;

 private:
  bool enter(std::uint32_t slab, PoolId pool, std::uint32_t blocks) noexcept;
  std::uint32_t take_bit(std::uint32_t slab, std::uint32_t blocks) noexcept;
  void lower_hint(PoolId pool, std::uint32_t slab) noexcept;

  // {tag 32, slab 32}: below it the pool has no slab with room. Raised by takers that scanned past full slabs, unless the tag moved;
  // lowered, tag + 1, by whoever makes room. Wrong only between making room and saying so, and takers then wrap around.
  struct alignas(64) Hint {
    std::atomic<std::uint64_t> word{0};
  };

  std::array<PoolGeometry, kMaxPools> pools_{};
  std::uint32_t slabs_, least_, most_;
  std::unique_ptr<std::atomic<std::uint64_t>[]> words_;
  std::unique_ptr<std::atomic<std::uint32_t>[]> epochs_;  // gen of the word when the present owner got the slab
  std::unique_ptr<std::atomic<std::uint16_t>[]> widest_;
  SlabArray<std::uint64_t> bitmap_;     // 1: taken
  SlabArray<std::uint64_t> confirmed_;  // {epoch 32, bits 32}: blocks cleared under that epoch
  std::array<Hint, kMaxPools> hints_;
};

}  // namespace hetkv
