// Restore: objects on their way from lower tiers to the device, for one admission.
//
// Owns the target blocks until they are published or given back, a lease on what it builds upon, and the lease on what it has
// published: nothing of it can be evicted before the admission has looked. Loads run on the I/O pool, parents first; when all have
// ended, the good ones are published in depth order, up to the first gap; after a failure the points of the largest endpoint above it
// are loaded instead. A restore whose admission was aborted runs on.
// Restores that want the same object do not load it twice: the later one waits for the earlier.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator/disk/io_pool.h"
#include "allocator/lease.h"
#include "allocator/loss.h"
#include "allocator/lower_tier.h"
#include "allocator/memory_tier.h"

namespace hetkv {

class Restorer;

// One object to load, and the blocks for it: one per group of the object.
struct RestoreWish {
  std::uint32_t depth = 0;
  std::uint8_t part = kHistorySet;
  std::uint8_t tier = 0;  // index into the restorer's tiers
  std::vector<Block> blocks;
};

struct RestoreFailure {
  std::uint32_t depth = 0;
  std::uint8_t part = kHistorySet;
  LoadOutcome outcome = LoadOutcome::kFailed;
};

struct RestoreRequest {
  explicit RestoreRequest(Lease&& on) : base(std::move(on)) {}
  std::vector<Key128> keys;          // of the blocks up to the deepest wish
  std::vector<std::int32_t> tokens;  // the same blocks
  VersionId version = 0;
  std::uint32_t space = 0;  // namespace instance
  Namespace* charged = nullptr;
  Lease base;                       // pins the deepest resident node, at depth chain.size()
  std::vector<NodeId> chain;        // resident nodes by depth
  std::vector<RestoreWish> wishes;  // history by depth, then points
  std::vector<Block> spare;         // one endpoint's points: for another endpoint, if loading this one fails
};

class Restore : public std::enable_shared_from_this<Restore> {
 public:
  Restore(Restorer& restorer, RestoreRequest&& request);
  ~Restore();
  Restore(const Restore&) = delete;
  Restore& operator=(const Restore&) = delete;

  // Thread-safe. wait blocks; a callback runs at once if it is done, else on the thread that ends it.
  bool done() const { return done_.load(std::memory_order_acquire); }
  void wait();
  void when_done(std::function<void()> callback);

  // --- after it is done, by one thread ---
  const std::vector<RestoreFailure>& failures() const { return failures_; }
  // Bytes of blocks that became objects: their namespace pays for them as objects now.
  std::uint64_t published_bytes() const { return published_bytes_; }
  std::uint64_t loaded_bytes() const { return loaded_bytes_.load(std::memory_order_relaxed); }
  // Blocks that were not needed go back as credits. Returns their bytes, which the caller now owes to the namespace's quota.
  std::uint64_t return_blocks(Charge& charge);
  // Drops its pins now, and not when the last thread lets go of it: the caller has its own.
  void release_pins() { request_.base.release(); }

 private:
  friend class Restorer;
  void wait_for(std::vector<std::shared_ptr<Restore>> earlier);
  void one_dependency_less();
  void start();
  void load_next();
  bool resident(const RestoreWish& wish) const;
  void load(std::size_t index);
  LoadOutcome load_object(std::uint32_t depth, std::uint8_t part, LowerTier& tier, std::span<const Block> blocks,
                          ObjectFacts* facts);
  void commit();
  bool commit_history(const RestoreWish& wish);
  void commit_point(std::uint32_t depth, std::uint8_t part, std::vector<Block>& blocks, const ObjectFacts* facts);
  void fall_back();
  bool load_point(std::uint32_t depth, std::uint8_t part);
  void finish();

  Restorer& restorer_;
  RestoreRequest request_;
  std::vector<LoadOutcome> outcomes_;
  std::vector<ObjectFacts> facts_;
  std::vector<std::uint8_t> skipped_;  // resident when its turn came
  std::atomic<std::size_t> next_{0}, left_{0};
  std::atomic<std::uint32_t> failed_depth_{~std::uint32_t{0}};  // history from here on is of no use
  std::atomic<std::size_t> waiting_for_{0};
  std::atomic<std::uint64_t> loaded_bytes_{0};
  std::uint64_t published_bytes_ = 0;
  std::vector<RestoreFailure> failures_;
  std::atomic<bool> done_{false};
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<std::function<void()>> callbacks_;  // guarded by mutex_
};

// Starts restores into one device tier, and knows which are under way. The tiers and the pool must outlive it; it waits for its
// restores when it ends. Thread-safe.
class Restorer {
 public:
  Restorer(const CacheLayout& layout, MemoryTier& device, std::vector<LowerTier*> tiers, IoPool& pool);
  ~Restorer();

  // Until no restore is under way.
  void wait_idle();
  // Posts the loads and returns. Allocates; takes a mutex.
  std::shared_ptr<Restore> start(RestoreRequest&& request);

  struct Counters {
    std::atomic<std::uint64_t> restores{0}, objects{0}, bytes{0}, shared{0};
    std::array<std::atomic<std::uint64_t>, 5> outcomes{};  // by LoadOutcome
  };
  const Counters& counters() const { return counters_; }

 private:
  friend class Restore;
  struct Place {
    Key128 key;
    VersionId version = 0;
    std::uint32_t space = 0;
    std::uint8_t part = 0;
    friend bool operator==(const Place&, const Place&) = default;
  };
  struct PlaceHash {
    std::size_t operator()(const Place& p) const { return p.key.low ^ (std::uint64_t{p.part} << 56) ^ p.version; }
  };
  void forget(const Restore& restore);

  const CacheLayout& layout_;
  MemoryTier& device_;
  const std::vector<LowerTier*> tiers_;
  IoPool& pool_;
  Counters counters_;
  std::mutex mutex_;
  std::condition_variable idle_;
  std::size_t running_ = 0;                                               // guarded by mutex_
  std::unordered_map<Place, std::weak_ptr<Restore>, PlaceHash> loading_;  // guarded by mutex_
};

}  // namespace hetkv
