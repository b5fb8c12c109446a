#include "allocator/arena.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "allocator/locked_reservation.h"
#include "allocator/reservation.h"
#include "allocator/slab.h"
#include "allocator/slab_size.h"
#include "base/check.h"
#include "base/error.h"
#include "base/test_point.h"

namespace hetkv {
namespace {

constexpr std::uint64_t kMostUnits = std::uint64_t{1} << 31;  // block tables are int32

// Division by a number that stays the same, as a multiplication: exact for 32-bit numbers. Every use of a block finds its place so.
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(std::uint32_t divisor) : inverse_(divisor > 1 ? ~std::uint64_t{0} / divisor + 1 : 0) {}
  std::uint32_t operator()(std::uint32_t n) const noexcept {
    if (inverse_ == 0) return n;
    return static_cast<std::uint32_t>(static_cast<unsigned __int128>(inverse_) * n >> 64);
  }

 private:
  std::uint64_t inverse_ = 0;  // 2^64 / divisor, rounded up; 0 for 1
};

std::uint64_t alignment_of(const CacheLayout& layout) {
  std::uint64_t alignment = kOffsetUnit;
  for (const Group& group : layout.groups()) alignment = std::max<std::uint64_t>(alignment, group.spec.alignment);
  return alignment;
}

std::uint64_t slab_bytes_of(const CacheLayout& layout, const ArenaConfig& config) {
  const std::span<const PoolSpec> pools = layout.pools();
  const std::uint64_t alignment = alignment_of(layout);
  if (pools.empty()) throw LayoutError("", "", "it has no pools");
  if (pools.size() > kMaxPools) throw LayoutError("", "", "it has more than " + std::to_string(kMaxPools) + " pools");
  if (config.bytes / kOffsetUnit > kMostUnits)
    throw ArgumentError("bytes", std::to_string(config.bytes), "at most 512 GiB, so that offsets of 256 bytes fit int32");
  const auto largest = std::max_element(pools.begin(), pools.end(),
                                        [](const PoolSpec& a, const PoolSpec& b) { return a.block_bytes < b.block_bytes; });
  std::uint64_t slab = config.slab_bytes;
  if (slab == 0) {
    std::vector<std::uint64_t> sizes;
    for (const PoolSpec& pool : pools) sizes.push_back(pool.block_bytes);
    slab = choose_slab_bytes(config.bytes, sizes, alignment);
    if (slab == 0)
      throw ArgumentError("bytes", std::to_string(config.bytes),
                          "at least one block of pool '" + largest->name + "', " + std::to_string(largest->block_bytes));
  }
  if (slab % alignment != 0)
    throw ArgumentError("slab_bytes", std::to_string(slab),
                        "a multiple of " + std::to_string(alignment) + ", the largest alignment");
  if (largest->block_bytes > slab)
    throw LayoutError(layout.group(largest->group).spec.name, "",
                      "a block of pool '" + largest->name + "' has " + std::to_string(largest->block_bytes) + " bytes, a slab " +
                          std::to_string(slab));
  if (config.bytes / slab == 0 || config.bytes / slab >= SlabMove::kMaxSlabs)
    throw ArgumentError("bytes", std::to_string(config.bytes), "1 to 2^24 - 1 slabs of " + std::to_string(slab) + " bytes");
  return slab;
}

std::vector<PoolGeometry> geometry_of(const CacheLayout& layout, std::uint64_t slab_bytes) {
  std::vector<PoolGeometry> pools;
  for (const PoolSpec& pool : layout.pools())
    pools.push_back({pool.kind, pool.block_bytes,
                     static_cast<std::uint32_t>(std::min<std::uint64_t>(slab_bytes / pool.block_bytes, SlabWord::kMaxUsed))});
  return pools;
}

void check_floors(const CacheLayout& layout, const ArenaConfig& config, std::uint64_t slab_bytes) {
  const std::uint64_t slabs = config.bytes / slab_bytes;
  std::uint64_t others = 0;
  for (std::size_t k = 0; k < kNumKinds; ++k) {
    const std::uint64_t floor = config.limits[k].floor_slabs;
    if (floor == 0) continue;
    const auto kind = static_cast<ObjectKind>(k);
    const std::string name(kind_name(kind));
    if (std::none_of(layout.pools().begin(), layout.pools().end(), [&](const PoolSpec& pool) { return pool.kind == kind; }))
      throw ArgumentError("floor of '" + name + "'", std::to_string(floor), "0: the layout has no group of this kind");
    if (floor > slabs - others) {
      const std::uint64_t need = floor * slab_bytes, cap = (slabs - others) * slab_bytes;
      throw AdmissionError(name, need, cap, false,
                           "the floor of kind '" + name + "' needs " + std::to_string(need) +
                               " bytes, the arena and the other floors leave " + std::to_string(cap));
    }
    others += floor;
  }
}

std::unique_ptr<Reservation> make_reservation(bool lock_free, const ReservationRules& rules, SlabTable& slabs) {
  if (lock_free) return std::make_unique<VectorReservation>(rules, slabs);
  return std::make_unique<LockedReservation>(rules, slabs);
}

}  // namespace

struct Arena::Impl {
  Impl(const CacheLayout& for_layout, const ArenaConfig& config)
      : layout(for_layout), slab_bytes(slab_bytes_of(layout, config)),
        slab_units(static_cast<std::uint32_t>(slab_bytes / kOffsetUnit)), by_slab(slab_units), base_address(config.base_address),
        rules((check_floors(layout, config, slab_bytes), geometry_of(layout, slab_bytes)),
              static_cast<std::uint32_t>(config.bytes / slab_bytes), slab_bytes, config.limits),
        slabs(rules.pools(), rules.slabs()), holds(rules.slabs(), slabs.least_blocks(), slabs.most_blocks()),
        owners(rules.slabs(), slabs.least_blocks(), slabs.most_blocks()),
        reservation(make_reservation(config.lock_free, rules, slabs)) {
    for (std::size_t p = 0; p < rules.num_pools(); ++p) {
      block_units[p] = static_cast<std::uint32_t>(layout.pools()[p].block_bytes / kOffsetUnit);
      by_block[p] = Divisor(block_units[p]);
    }
  }

  SlabTable::Place locate(Block block) const noexcept {
    HETKV_CHECK(block.pool < rules.num_pools(), "a block of no pool");
    const std::uint32_t slab = by_slab(block.offset), rest = block.offset - slab * slab_units;
    const std::uint32_t index = by_block[block.pool](rest);
    HETKV_CHECK(slab < rules.slabs() && index * block_units[block.pool] == rest && index < rules.pool(block.pool).blocks_per_slab,
                "an offset at which its pool has no block");
    return {slab, index};
  }
  Block block_at(PoolId pool, SlabTable::Place place) const noexcept {
    return {place.slab * slab_units + place.index * block_units[pool], pool};
  }
  std::atomic<std::uint16_t>& hold_count(SlabTable::Place place) const noexcept { return holds.at(place.slab, place.index); }

  Block take(PoolId pool) noexcept {
    const SlabTable::Place place = slabs.take(pool);
    HETKV_CHECK(hold_count(place).exchange(1, std::memory_order_relaxed) == 0, "a block in two hands");
    return block_at(pool, place);
  }
  // Frees the block with its last hold; its credit stays counted.
  bool put_back(Block block) noexcept {
    const SlabTable::Place place = locate(block);
    const std::uint16_t before = hold_count(place).fetch_sub(1, std::memory_order_acq_rel);
    HETKV_CHECK(before > 0, "a hold was released twice");
    if (before > 1) return false;
    owners.at(place.slab, place.index).store(0, std::memory_order_relaxed);
    HETKV_TEST_POINT("drop: last hold gone");
    slabs.put_back(block.pool, place);
    return true;
  }
  bool drop(Block block) noexcept {
    if (!put_back(block)) return false;
    HETKV_TEST_POINT("drop: before the release counts");
    reservation->release(block.pool, 1);
    return true;
  }
  std::uint64_t live_blocks(PoolId pool) const noexcept {
    std::uint64_t live = 0;
    for (std::uint32_t s = 0; s < rules.slabs(); ++s)
      if (const SlabWord w = slabs.word(s); w.owner() == pool) live += w.used();
    return live;
  }

  const CacheLayout layout;
  const std::uint64_t slab_bytes;
  const std::uint32_t slab_units;
  const Divisor by_slab;
  const std::uint64_t base_address;
  const ReservationRules rules;
  SlabTable slabs;
  SlabArray<std::uint16_t> holds;
  SlabArray<std::uint32_t> owners;
  std::unique_ptr<Reservation> reservation;
  std::array<std::uint32_t, kMaxPools> block_units{};
  std::array<Divisor, kMaxPools> by_block{};
};

Charge::Charge(Charge&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)), counts_(std::exchange(other.counts_, {})) {}

Charge& Charge::operator=(Charge&& other) noexcept {
  if (this == &other) return *this;
  release();
  arena_ = std::exchange(other.arena_, nullptr);
  counts_ = std::exchange(other.counts_, {});
  return *this;
}

Charge::~Charge() { release(); }

void Charge::merge(Charge&& other) noexcept {
  if (other.arena_ == nullptr || this == &other) return;
  HETKV_CHECK(arena_ == nullptr || arena_ == other.arena_, "charges of two arenas");
  arena_ = std::exchange(other.arena_, nullptr);
  for (std::size_t p = 0; p < kMaxPools; ++p) counts_[p] += std::exchange(other.counts_[p], 0);
}

Block Charge::take(PoolId pool) noexcept {
  HETKV_CHECK(pool < kMaxPools && counts_[pool] > 0, "a block taken without a credit");
  --counts_[pool];
  return arena_->impl_->take(pool);
}

void Charge::give_back(PoolId pool, std::uint32_t count) noexcept {
  HETKV_CHECK(pool < kMaxPools && count <= counts_[pool], "more credits given back than there are");
  if (count == 0) return;
  counts_[pool] -= count;
  arena_->impl_->reservation->release(pool, count);
}

void Charge::put_back(Block block) noexcept {
  HETKV_CHECK(arena_ != nullptr, "a block put back into a charge of no arena");
  HETKV_CHECK(arena_->impl_->put_back(block), "a block put back that others hold");
  ++counts_[block.pool];
}

void Charge::release() noexcept {
  if (arena_ == nullptr) return;
  for (std::size_t p = 0; p < arena_->impl_->rules.num_pools(); ++p) give_back(static_cast<PoolId>(p), counts_[p]);
  arena_ = nullptr;
}

Arena::Arena(const CacheLayout& layout, const ArenaConfig& config) : impl_(std::make_unique<Impl>(layout, config)) {}

Arena::~Arena() {
  const ReservationNumbers now = impl_->reservation->numbers();
  for (std::size_t p = 0; p < impl_->rules.num_pools(); ++p)
    HETKV_CHECK(now.used[p] == 0, "an arena ends with credits or blocks out");
}

ReserveOutcome Arena::reserve(const BlockCounts& need, const BlockCounts& headroom, Charge& charge) {
  HETKV_CHECK(charge.arena_ == nullptr || charge.arena_ == this, "a charge of another arena");
  for (std::size_t p = impl_->rules.num_pools(); p < kMaxPools; ++p)
    HETKV_CHECK(need[p] == 0 && headroom[p] == 0, "a need of a pool that does not exist");
  const ReserveOutcome outcome = impl_->reservation->reserve(need, headroom);
  if (outcome.status != ReserveOutcome::Status::kReserved) return outcome;
  charge.arena_ = this;
  for (std::size_t p = 0; p < impl_->rules.num_pools(); ++p) charge.counts_[p] += need[p];
  return outcome;
}

ReserveOutcome Arena::possible(const BlockCounts& need) const { return impl_->rules.possible(need); }

void Arena::hold(Block block) noexcept {
  const std::uint16_t before = impl_->hold_count(impl_->locate(block)).fetch_add(1, std::memory_order_relaxed);
  HETKV_CHECK(before > 0, "a hold on a free block");
  HETKV_CHECK(before < 0xFFFF, "more holds on a block than its count can carry");
}

bool Arena::drop(Block block) noexcept { return impl_->drop(block); }

std::uint32_t Arena::holds(Block block) const noexcept {
  return impl_->hold_count(impl_->locate(block)).load(std::memory_order_acquire);
}

void Arena::set_owner(Block block, std::uint32_t owner) noexcept {
  const SlabTable::Place place = impl_->locate(block);
  impl_->owners.at(place.slab, place.index).store(owner, std::memory_order_relaxed);
}

std::uint32_t Arena::owner(Block block) const noexcept {
  const SlabTable::Place place = impl_->locate(block);
  return impl_->owners.at(place.slab, place.index).load(std::memory_order_relaxed);
}

bool Arena::must_clear(Block block) const noexcept { return impl_->slabs.must_clear(impl_->locate(block)); }

void Arena::confirm_cleared(Block block) noexcept { impl_->slabs.confirm_cleared(impl_->locate(block)); }

ClearRange Arena::range(Block block) const noexcept {
  return {std::uint64_t{block.offset} * kOffsetUnit, impl_->rules.pool(block.pool).block_bytes};
}

std::uint32_t Arena::num_slabs() const noexcept { return impl_->rules.slabs(); }

std::uint32_t Arena::free_slabs() const noexcept { return static_cast<std::uint32_t>(impl_->reservation->numbers().free_slabs); }

std::optional<PoolId> Arena::slab_owner(std::uint32_t slab) const noexcept {
  HETKV_CHECK(slab < impl_->rules.slabs(), "a slab beyond the arena");
  const PoolId owner = impl_->slabs.word(slab).owner();
  return owner == SlabWord::kNobody ? std::nullopt : std::optional<PoolId>(owner);
}

std::uint32_t Arena::slab_used(std::uint32_t slab) const noexcept {
  HETKV_CHECK(slab < impl_->rules.slabs(), "a slab beyond the arena");
  return impl_->slabs.word(slab).used();
}

void Arena::live_blocks(std::uint32_t slab, std::vector<Block>& out) const {
  const std::optional<PoolId> owner = slab_owner(slab);
  out.clear();
  if (!owner) return;
  for (std::uint32_t i = 0; i < impl_->rules.pool(*owner).blocks_per_slab; ++i)
    if (impl_->slabs.is_set({slab, i})) out.push_back(impl_->block_at(*owner, {slab, i}));
}

bool Arena::may_steal(PoolId from, PoolId to, std::uint32_t blocks) const noexcept {
  const ReservationRules& rules = impl_->rules;
  if (from == to) return false;
  const ReservationNumbers now = impl_->reservation->numbers();
  const ObjectKind giver = rules.pool(from).kind, taker = rules.pool(to).kind;
  if (now.owned[from] == 0) return false;
  if (giver != taker && rules.kind_slabs(now, giver) <= rules.limits(giver).floor_slabs) return false;
  const std::uint64_t bytes = rules.kind_bytes(now, taker), cap = rules.limits(taker).cap_bytes;
  return bytes <= cap && blocks * rules.pool(to).block_bytes <= cap - bytes;
}

PoolUsage Arena::usage(PoolId pool) const noexcept {
  const ReservationNumbers now = impl_->reservation->numbers();
  const PoolGeometry& geometry = impl_->rules.pool(pool);
  return {now.used[pool], impl_->live_blocks(pool), now.owned[pool], geometry.block_bytes, geometry.blocks_per_slab};
}

std::uint64_t Arena::kind_bytes(ObjectKind kind) const noexcept {
  return impl_->rules.kind_bytes(impl_->reservation->numbers(), kind);
}

std::uint64_t Arena::stranded_bytes() const noexcept {
  std::uint64_t stranded = 0;
  for (std::uint32_t s = 0; s < impl_->rules.slabs(); ++s)
    if (const SlabWord w = impl_->slabs.word(s); w.owner() != SlabWord::kNobody)
      stranded += impl_->slab_bytes - w.used() * impl_->rules.pool(w.owner()).block_bytes;
  return stranded;
}

std::uint64_t Arena::slab_bytes() const noexcept { return impl_->slab_bytes; }
std::uint64_t Arena::bytes() const noexcept { return impl_->slab_bytes * impl_->rules.slabs(); }

std::uint64_t Arena::metadata_bytes() const noexcept {
  std::uint64_t bytes =
      sizeof(*this) + sizeof(Impl) - sizeof(SlabTable) + impl_->slabs.metadata_bytes() + impl_->reservation->metadata_bytes();
  for (std::uint32_t s = 0; s < impl_->rules.slabs(); ++s)
    if (const std::uint32_t blocks = impl_->slabs.widest(s); blocks > 0)
      bytes += impl_->holds.bytes(blocks) + impl_->owners.bytes(blocks);
  return bytes;
}

std::uint64_t Arena::base_address() const noexcept { return impl_->base_address; }
const CacheLayout& Arena::layout() const noexcept { return impl_->layout; }
ObjectKind Arena::kind_of(Block block) const noexcept { return impl_->rules.pool(block.pool).kind; }

void Arena::check_invariants() const {
  const ReservationRules& rules = impl_->rules;
  const ReservationNumbers now = impl_->reservation->numbers();
  std::array<std::uint64_t, kMaxPools> live{}, owned{};
  std::uint64_t nobody = 0;
  for (std::uint32_t s = 0; s < rules.slabs(); ++s) {
    const SlabWord w = impl_->slabs.word(s);
    if (w.owner() == SlabWord::kNobody) {
      ++nobody;
      HETKV_CHECK(w.used() == 0, "a free slab with blocks in use");
      continue;
    }
    HETKV_CHECK(w.owner() < rules.num_pools(), "a slab of no pool");
    const std::uint32_t blocks = rules.pool(w.owner()).blocks_per_slab;
    HETKV_CHECK(w.used() <= blocks, "more blocks in use than a slab has");
    std::uint32_t set = 0;
    for (std::uint32_t i = 0; i < blocks; ++i) {
      const bool taken = impl_->slabs.is_set({s, i});
      set += taken ? 1 : 0;
      HETKV_CHECK(taken == (impl_->hold_count({s, i}).load(std::memory_order_acquire) > 0),
                  "a hold without a block, or a block without a hold");
    }
    HETKV_CHECK(set == w.used(), "set bits and the count of a slab differ");
    live[w.owner()] += set;
    ++owned[w.owner()];
  }
  HETKV_CHECK(nobody == now.free_slabs, "free slabs and their count differ");
  for (std::size_t p = 0; p < rules.num_pools(); ++p) {
    HETKV_CHECK(owned[p] == now.owned[p], "owned slabs and their count differ");
    HETKV_CHECK(live[p] <= now.used[p], "more live blocks than reserved ones");
    HETKV_CHECK(now.used[p] <= now.owned[p] * rules.pool(static_cast<PoolId>(p)).blocks_per_slab,
                "credits without room in owned slabs");
  }
  for (std::size_t k = 0; k < kNumKinds; ++k) {
    const auto kind = static_cast<ObjectKind>(k);
    HETKV_CHECK(rules.kind_bytes(now, kind) <= rules.limits(kind).cap_bytes, "a kind above its cap");
  }
  HETKV_CHECK(rules.unfilled_floors(now) <= now.free_slabs, "floors that free slabs do not cover");
}

}  // namespace hetkv
