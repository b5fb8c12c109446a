#include "allocator/slab.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

// A credit promises room, and a slab's count promises a clear bit; only other threads' successes can make a search miss them. A
// search that misses this often has found a broken promise.
constexpr std::uint32_t kMaxSearches = 1u << 20;

constexpr std::uint32_t words_for(std::uint32_t blocks, std::uint32_t bits) { return (blocks + bits - 1) / bits; }

constexpr std::uint64_t make_hint(std::uint64_t tag, std::uint32_t slab) { return (tag << 32) | slab; }
constexpr std::uint64_t hint_tag(std::uint64_t hint) { return hint >> 32; }
constexpr std::uint32_t hint_slab(std::uint64_t hint) { return static_cast<std::uint32_t>(hint); }

std::uint32_t least_of(std::span<const PoolGeometry> pools) {
  std::uint32_t least = SlabWord::kMaxUsed;
  for (const PoolGeometry& pool : pools) least = std::min(least, pool.blocks_per_slab);
  return least;
}

std::uint32_t most_of(std::span<const PoolGeometry> pools) {
  std::uint32_t most = 1;
  for (const PoolGeometry& pool : pools) most = std::max(most, pool.blocks_per_slab);
  return most;
}

}  // namespace

SlabTable::SlabTable(std::span<const PoolGeometry> pools, std::uint32_t slabs)
    : slabs_(slabs), least_(least_of(pools)), most_(most_of(pools)), words_(new std::atomic<std::uint64_t>[slabs]),
      epochs_(new std::atomic<std::uint32_t>[slabs]()), widest_(new std::atomic<std::uint16_t>[slabs]()),
      bitmap_(slabs, words_for(least_, 64), words_for(most_, 64)),
      confirmed_(slabs, words_for(least_, 32), words_for(most_, 32)) {
  HETKV_CHECK(slabs > 0 && slabs < SlabMove::kMaxSlabs, "the number of slabs");
  HETKV_CHECK(least_ > 0 && most_ <= SlabWord::kMaxUsed, "the number of blocks of a slab");
  std::copy(pools.begin(), pools.end(), pools_.begin());
  for (std::uint32_t s = 0; s < slabs; ++s)
    words_[s].store(SlabWord::make(SlabWord::kNobody, 0, 0, 0).bits, std::memory_order_relaxed);
}

bool SlabTable::enter(std::uint32_t slab, PoolId pool, std::uint32_t blocks) noexcept {
  std::uint64_t seen = words_[slab].load(std::memory_order_relaxed);
  for (;;) {
    const SlabWord w{seen};
    if (w.owner() != pool || w.used() >= blocks) return false;
    if (words_[slab].compare_exchange_weak(seen, w.add_used(1).bits, std::memory_order_acq_rel, std::memory_order_relaxed))
      return true;
  }
}

std::uint32_t SlabTable::take_bit(std::uint32_t slab, std::uint32_t blocks) noexcept {
  for (std::uint32_t search = 0; search < kMaxSearches; ++search) {
    for (std::uint32_t i = 0; i < blocks; i += 64) {
      std::atomic<std::uint64_t>& word = bitmap_.at(slab, i / 64);
      const std::uint64_t valid = blocks - i >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << (blocks - i)) - 1;
      std::uint64_t clear = ~word.load(std::memory_order_relaxed) & valid;
      while (clear != 0) {
        const std::uint64_t bit = clear & (~clear + 1);
        const std::uint64_t before = word.fetch_or(bit, std::memory_order_acq_rel);
        if ((before & bit) == 0) return i + static_cast<std::uint32_t>(std::countr_zero(bit));
        clear = ~before & valid;
      }
    }
  }
  HETKV_CHECK(false, "a slab's count promised a clear bit and there is none");
  return 0;
}

SlabTable::Place SlabTable::take(PoolId pool) noexcept {
  const std::uint32_t blocks = pools_[pool].blocks_per_slab;
  std::atomic<std::uint64_t>& hint = hints_[pool].word;
  for (std::uint32_t search = 0; search < kMaxSearches; ++search) {
    std::uint64_t seen = hint.load(std::memory_order_acquire);
    const std::uint32_t start = hint_slab(seen);
    for (std::uint32_t s = start; s < slabs_; ++s) {
      if (!enter(s, pool, blocks)) continue;
      if (s > start)
        hint.compare_exchange_strong(seen, make_hint(hint_tag(seen), s), std::memory_order_release, std::memory_order_relaxed);
      HETKV_TEST_POINT("take: counted, bit not taken");
      return {s, take_bit(s, blocks)};
    }
    for (std::uint32_t s = 0; s < start; ++s) {
      if (!enter(s, pool, blocks)) continue;
      lower_hint(pool, s);
      return {s, take_bit(s, blocks)};
    }
  }
  HETKV_CHECK(false, "a credit promised a block and no slab has room");
  return {};
}

void SlabTable::put_back(PoolId pool, Place place) noexcept {
  const std::uint64_t bit = std::uint64_t{1} << (place.index % 64);
  const auto clear_bit = [&] {
    const std::uint64_t before = bitmap_.at(place.slab, place.index / 64).fetch_and(~bit, std::memory_order_release);
    HETKV_CHECK((before & bit) != 0, "a block was given back twice");
  };
  SlabWord seen;
  const auto lower_count = [&] {
    std::atomic<std::uint64_t>& word = words_[place.slab];
    seen.bits = word.load(std::memory_order_relaxed);
    do {
      HETKV_CHECK(seen.owner() == pool && seen.used() > 0, "a block was given back to a slab of another pool");
    } while (
        !word.compare_exchange_weak(seen.bits, seen.add_used(-1).bits, std::memory_order_acq_rel, std::memory_order_relaxed));
  };
#ifdef HETKV_PLANT_USED_FIRST
  lower_count();
  HETKV_TEST_POINT("put_back: between bit and count");
  clear_bit();
#else
  clear_bit();
  HETKV_TEST_POINT("put_back: between bit and count");
  lower_count();
#endif
  if (seen.used() == pools_[pool].blocks_per_slab) lower_hint(pool, place.slab);
}

void SlabTable::lower_hint(PoolId pool, std::uint32_t slab) noexcept {
  std::atomic<std::uint64_t>& hint = hints_[pool].word;
  std::uint64_t seen = hint.load(std::memory_order_relaxed);
  while (!hint.compare_exchange_weak(seen, make_hint(hint_tag(seen) + 1, std::min(hint_slab(seen), slab)),
                                     std::memory_order_acq_rel, std::memory_order_relaxed)) {
  }
}

void SlabTable::grant(SlabMove move) noexcept {
  std::uint64_t seen = words_[move.slab].load(std::memory_order_acquire);
  const SlabWord w{seen};
  if (w.gen() != move.gen || w.owner() != SlabWord::kNobody) return;
  const std::uint32_t last = w.flags() & SlabWord::kLastOwner;
  const bool dirty = w.dirty() || (last != 0 && last != move.pool + 1u);
  // Both side facts are only ever raised, so a thread that does this late does no harm. They are in place before the owner is.
  const std::uint32_t gen = move.gen + 1;
  std::uint32_t epoch = epochs_[move.slab].load(std::memory_order_relaxed);
  while (static_cast<std::int32_t>(gen - epoch) > 0 &&
         !epochs_[move.slab].compare_exchange_weak(epoch, gen, std::memory_order_release, std::memory_order_relaxed)) {
  }
  const auto blocks = static_cast<std::uint16_t>(pools_[move.pool].blocks_per_slab);
  std::uint16_t widest = widest_[move.slab].load(std::memory_order_relaxed);
  while (widest < blocks && !widest_[move.slab].compare_exchange_weak(widest, blocks, std::memory_order_relaxed)) {
  }
  HETKV_TEST_POINT("grant: before the owner changes");
  if (words_[move.slab].compare_exchange_strong(seen,
                                                SlabWord::make(move.pool, 0, gen, last | (dirty ? SlabWord::kDirty : 0)).bits,
                                                std::memory_order_acq_rel, std::memory_order_relaxed))
    lower_hint(move.pool, move.slab);
}

void SlabTable::retire(SlabMove move) noexcept {
  std::uint64_t seen = words_[move.slab].load(std::memory_order_acquire);
  for (;;) {
    const SlabWord w{seen};
    if (w.gen() != move.gen) return;  // decided
    HETKV_TEST_POINT("retire: before the decision");
    const std::uint32_t gen = w.gen() + 1;
    const SlabWord next = w.used() == 0
                              ? SlabWord::make(SlabWord::kNobody, 0, gen, (w.flags() & SlabWord::kDirty) | (w.owner() + 1u))
                              : SlabWord::make(w.owner(), w.used(), gen, w.flags());
    if (words_[move.slab].compare_exchange_weak(seen, next.bits, std::memory_order_acq_rel, std::memory_order_acquire)) return;
  }
}

bool SlabTable::must_clear(Place place) const noexcept {
  if (!word(place.slab).dirty()) return false;
  const std::uint64_t marks = confirmed_.at(place.slab, place.index / 32).load(std::memory_order_acquire);
  return (marks >> 32) != epochs_[place.slab].load(std::memory_order_relaxed) || (marks >> (place.index % 32) & 1) == 0;
}

void SlabTable::confirm_cleared(Place place) noexcept {
  std::atomic<std::uint64_t>& word = confirmed_.at(place.slab, place.index / 32);
  const std::uint64_t epoch = epochs_[place.slab].load(std::memory_order_relaxed);
  std::uint64_t seen = word.load(std::memory_order_relaxed);
  std::uint64_t next;
  do {
    next = ((seen >> 32) == epoch ? seen : epoch << 32) | (std::uint64_t{1} << (place.index % 32));
  } while (!word.compare_exchange_weak(seen, next, std::memory_order_release, std::memory_order_relaxed));
}

std::uint64_t SlabTable::metadata_bytes() const noexcept {
  std::uint64_t bytes =
      sizeof(*this) + std::uint64_t{slabs_} * (sizeof(std::uint64_t) + sizeof(std::uint32_t) + sizeof(std::uint16_t));
  for (std::uint32_t s = 0; s < slabs_; ++s)
    if (const std::uint32_t blocks = widest(s); blocks > 0)
      bytes += bitmap_.bytes(words_for(blocks, 64)) + confirmed_.bytes(words_for(blocks, 32));
  return bytes;
}

}  // namespace hetkv
