// The executor's inside: one block at a time, a fiber per thread, every access checked. Used by the hooks, the instructions'
// twins and Device; tests use device.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "device/cuda_runtime.h"
#include "simt/access_record.h"
#include "simt/device.h"
#include "simt/fault_log.h"
#include "simt/fiber.h"

namespace hetkv::simt {

struct Lane;

// A call that lanes of a warp make together. `complete` runs once, when the last of them has arrived.
struct Collective {
  const char* name = "";
  std::uint32_t detail = 0;  // must be equal for all lanes as well
  std::uint32_t mask = 0;
  Site site{};
  void (*complete)(Lane* const* lanes) = nullptr;  // [32]; null where a lane is not in the mask
  std::uint64_t value = 0, result = 0;
  std::uint32_t argument = 0;
  const void* in[2] = {};
  std::uint32_t in_words[2] = {};
  void* out = nullptr;
  std::uintptr_t code = 0;
};

struct AsyncCopy {
  std::uint32_t address;
  const std::byte* source;
  int source_bytes;
  std::uint32_t group;
  std::uintptr_t code;
  std::byte bytes[16];
};

enum class LaneState : std::uint8_t { kReady, kAtBarrier, kInCollective, kDone };

struct Warp {
  std::uint32_t time = 0;       // warp barriers completed
  std::uint32_t last_full = 0;  // the last one of all its lanes
  struct Partial {
    std::uint32_t time, mask;
  };
  std::vector<Partial> partial;
};

// One thread of the running block.
struct Lane {
  Fiber fiber;
  uint3 index{};
  unsigned number = 0;  // in the block, x fastest
  unsigned warp = 0, lane = 0;
  LaneState state = LaneState::kReady;
  Site site{};
  BlockVote block_vote = BlockVote::kNone;
  int block_value = 0, block_result = 0;
  Collective* collective = nullptr;
  std::uint32_t time = 0;  // of its warp, at its last warp barrier
  std::uint32_t groups_committed = 0;
  std::vector<AsyncCopy> copies;  // in flight, oldest first
};

struct Buffer {
  std::uintptr_t begin, end;
  std::string name;
  Rights rights;
  AccessRecord* words = nullptr;  // of 4 bytes, by address / 4; mapped zero, so untouched memory costs nothing
  AccessRecord* bytes = nullptr;
  std::uint8_t* written = nullptr;  // workspaces: per byte
  std::uintptr_t first_word = 0;
};

enum class Access : std::uint8_t { kRead, kWrite, kAtomic };

class Machine {
 public:
  explicit Machine(const Settings& settings);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  static Machine* current;  // the installed device's
  static Lane* running;     // the thread that runs now; null on the host's side

  void allow(std::string name, const void* data, std::size_t bytes, Rights rights);
  void allow_races(const void* data, std::size_t bytes);
  void run(const char* op, dim3 grid, dim3 block, std::size_t shared_bytes, void (*call)(const void*), const void* context);

  // Checks one access of the running thread; does not return if the access cannot happen.
  void access(std::uintptr_t address, std::size_t bytes, Access access, std::uintptr_t code, bool must_align);
  void access_shared(Lane& lane, std::uint32_t offset, std::size_t bytes, Access access, std::uintptr_t code);

  int barrier(BlockVote vote, int value, Site site);
  std::uint64_t collective(Collective& request);
  void count_phase(const std::uint32_t* addresses, int count);  // 16-byte accesses of up to 8 lanes

  void copy_async(std::uint32_t address, const void* source, int source_bytes, std::uintptr_t code);
  void copy_async_commit();
  void copy_async_wait(int newest_left, std::uintptr_t code);

  Warp& warp(unsigned number) { return warps_[number]; }
  std::uint32_t lanes_of(unsigned warp) const;  // a bit per lane that exists
  void require_full_warp(const char* name, std::uintptr_t code);
  std::byte* shared() const { return shared_; }
  std::size_t dynamic_bytes() const { return dynamic_bytes_; }
  void* static_shared(const void* declaration, std::size_t bytes, std::size_t alignment);

  [[noreturn]] void abandon_block();
  void fault(Kind kind, std::uint64_t key, const std::string& text);
  std::string here() const;  // "op X, block (x, y, z), thread (x, y, z)"
  std::string thread_name(const Lane& lane) const;

  Settings settings;
  FaultLog log;
  Counts counts;
  uint3 block_index{};
  dim3 block_size, grid_size;
  struct Place {
    std::uintptr_t begin, end;
  };
  std::vector<Place> places;  // host memory that the kernel may read: its arguments

 private:
  static constexpr std::size_t kSharedSpan = 256 * 1024;
  static void enter();
  void run_block();
  void release_barrier();
  void report_stuck();
  void yield(Lane& lane);
  bool ordered(const Lane& lane, std::uint16_t other, std::uint32_t time) const;
  void check_record(AccessRecord& record, Lane& lane, Access access, std::uint32_t code, bool racy, bool shared,
                    std::uintptr_t address);
  void check_words(AccessRecord* words, AccessRecord* bytes, std::size_t byte_offset, std::size_t bytes_count, Lane& lane,
                   Access access, std::uintptr_t code, bool racy, bool shared, std::uintptr_t address);
  void access_global(Lane& lane, std::uintptr_t address, std::size_t bytes, Access access, std::uintptr_t code, bool must_align);
  void complete_copies(Lane& lane, std::uint32_t groups_done, std::uintptr_t code);
  void mark_in_flight(std::uint32_t address, std::uint16_t who);
  bool inside_shared(std::uint32_t offset, std::size_t bytes) const;
  std::string place_name(std::uintptr_t address) const;
  void conflict(Kind kind, const char* what, std::uintptr_t address, Lane& lane, std::uint32_t code, std::uint16_t other,
                std::uint32_t other_code);

  std::vector<Buffer> buffers_;
  std::size_t last_buffer_ = 0;
  std::vector<Place> racy_;
  FiberStacks stacks_;
  std::vector<Lane> lanes_;
  std::vector<Warp> warps_;
  std::vector<std::uint32_t> order_;
  std::mt19937 random_;
  Fiber host_;
  const char* op_ = "";
  void (*call_)(const void*) = nullptr;
  const void* context_ = nullptr;
  std::size_t num_threads_ = 0, num_live_ = 0, num_at_barrier_ = 0;
  bool abandoned_ = false;
  std::uint32_t epoch_ = 1, block_begin_ = 1, launch_begin_ = 1;

  std::byte* shared_map_ = nullptr;  // with guard pages
  std::byte* shared_ = nullptr;
  std::size_t dynamic_bytes_ = 0, static_end_ = 0, shared_used_ = 0;
  struct Static {
    const void* declaration;
    std::uint32_t begin, end;
  };
  std::vector<Static> statics_;
  std::vector<std::uint8_t> written_;  // shared memory, per byte
  AccessRecord* shared_words_ = nullptr;
  AccessRecord* shared_bytes_ = nullptr;
};

}  // namespace hetkv::simt
