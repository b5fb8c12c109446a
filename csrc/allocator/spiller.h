// Spiller: copies what is published on one tier of memory down to the next tier, in the background.
//
// Owns a thread and a bounded queue. The thread that publishes only leaves a note: a slow or full tier below delays copies and never
// a request. A note names node and generations, so one that comes too late names nothing. A copy pins its source until it is done, and
// parents go before children. Each object is tried once when it is published: what failed, and what the sink evicted, is tried again when an
// admission uses it, so a sink that fails or is too small costs each note one try. What does not fit the queue is found by a sweep. Source, sink and pool must outlive it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "allocator/bounded_queue.h"
#include "allocator/disk/io_pool.h"
#include "allocator/lower_tier.h"
#include "allocator/memory_tier.h"

namespace hetkv {

struct SpillPolicy {
  enum class Write : std::uint8_t {
    kThrough,     // as soon as it is published
    kOnEviction,  // once the tier above is nearly full, so that eviction meets objects that have a copy
    kNone,        // never: what is below is only read
  };
  enum class Points : std::uint8_t { kAll, kEvery, kTurnEnds, kNone };
  Write write = Write::kThrough;
  Points points = Points::kAll;
  std::uint32_t every_blocks = 0;  // kEvery: checkpoints at depths that are multiples of it

  // "through", "evict", "none"; "all", "every(N)" (N blocks), "turn_ends", "none". ArgumentError naming `write` or `retention`.
  static SpillPolicy parse(const std::string& write, const std::string& points);
};

class Spiller final : public PublicationObserver {
 public:
  struct Counters {
    std::atomic<std::uint64_t> stored{0}, stored_bytes{0}, already_there{0}, no_room{0}, failed{0};
    std::atomic<std::uint64_t> gone{0};       // evicted before their turn came
    std::atomic<std::uint64_t> no_parent{0};  // what they depend on could not be stored, or was evicted below
    std::atomic<std::uint64_t> missed{0};     // notes that found the queue full: left to a sweep
  };

  // pool: copies several at once where the sink gains by it; may be null. below: the spiller whose source is this one's sink, or null.
  Spiller(const CacheLayout& layout, MemoryTier& source, LowerTier& sink, IoPool* pool, SpillPolicy policy, Spiller* below);
  ~Spiller() override;  // copies what it was told of, then ends

  // Thread-safe, no allocation, does not wait.
  void published(NodeId node, std::uint8_t part, bool turn_end) noexcept override;
  void used(NodeId node) noexcept override;
  // Waits until all that was published before is copied or given up, whatever the write policy defers.
  void flush();
  const Counters& counters() const { return counters_; }

 private:
  struct Note {
    NodeId node = 0;
    std::uint32_t node_gen = 0, point_gen = 0;
    std::uint8_t part = kHistorySet;
    bool turn_end = false;
    bool climb = false;  // ancestors that the sink lacks are copied too
  };
  struct Copy {
    NodeId node = 0;
    std::uint8_t part = kHistorySet;
  };

  void run();
  bool next(Note& note);
  bool tight() const;  // whether the source is nearly full
  void sweep();
  bool wanted(const Note& note) const;
  // Pins what the note names and lists what must be copied for it, ancestors first. False if it names nothing any more.
  bool stage(const Note& note, std::vector<Copy>& copies);
  bool list_missing(const Note& note, std::vector<Copy>& copies);
  void tell(const Note& note) noexcept;
  void copy_all(const std::vector<Copy>& copies);
  void copy_one(const Copy& copy);
  void unpin(const Note& note);
  void wake();

  const CacheLayout& layout_;
  MemoryTier& source_;
  LowerTier& sink_;
  IoPool* const pool_;
  const SpillPolicy policy_;
  Spiller* const below_;
  Counters counters_;
  BoundedQueue<Note> queue_;
  std::deque<Note> deferred_;                  // kOnEviction: of the thread alone
  std::unordered_set<std::uint64_t> planned_;  // node and part of the present batch
  std::atomic<std::uint64_t> told_{0};
  std::atomic<bool> missed_{false}, sleeping_{false}, stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::uint64_t handled_ = 0, flush_upto_ = 0;  // in notes, missed ones not handled; guarded by mutex_
  std::thread thread_;
};

}  // namespace hetkv
