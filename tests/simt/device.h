// The executor as tests see it: a pretended GPU that knows which memory a kernel may touch, how threads take turns, and what went
// wrong. Kernels reach it through launch() (csrc/kernels/cuda/launch.cuh); nothing here needs CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace hetkv::simt {

enum class Schedule : std::uint8_t { kAscending, kDescending, kShuffled };  // order of blocks and of the threads in them
enum class Copies : std::uint8_t { kLate, kEarly };                         // when copy_async happens: at its wait, or at once
enum class Sums : std::uint8_t { kInOrder, kPairs };                        // order of the additions inside an mma

struct Settings {
  Schedule schedule = Schedule::kAscending;
  std::uint32_t seed = 1;  // of kShuffled
  Copies copies = Copies::kLate;
  Sums sums = Sums::kInOrder;
  std::size_t shared_limit = 232448;  // bytes per block; sm_90 and sm_100. sm_80: 166912, sm_120: 101376
};

enum class Rights : std::uint8_t {
  kRead,
  kWrite,      // a read is a fault
  kReadWrite,  // holds data
  kWorkspace,  // read and write; a read of a byte that no kernel wrote is a fault
};

enum class Kind : std::uint8_t {
  kOutOfBounds,
  kRights,            // a write to what may only be read, or the reverse
  kMisaligned,        // the GPU would trap
  kUninitialised,     // shared memory or a workspace
  kRace,              // two threads of a block, no barrier between
  kBlockConflict,     // two blocks of a launch, one of them writing
  kInFlight,          // a touch of bytes that an asynchronous copy has not delivered
  kDivergentBarrier,  // not all threads at one __syncthreads
  kDivergentWarp,     // lanes of a mask that do not make the same call
  kCopy,              // wrong use of copy_async
  kSharedMemory,      // more than a block can have
};
const char* name_of(Kind kind);

struct Fault {
  Kind kind;
  std::string text;     // where, who, both source lines
  std::uint64_t count;  // how often at these lines
};

// Summed over the launches of a device.
struct Counts {
  std::uint64_t launches = 0, blocks = 0, barriers = 0, matrix_products = 0, copies = 0;
  std::uint64_t matrix_phases = 0;                                // of 8 lanes, in load_matrix
  std::uint64_t bank_conflicts = 0;                               // phases' extra passes through shared memory
  std::uint64_t global_bytes_read = 0, global_bytes_written = 0;  // as the threads ask for them
};

// One at a time, in one thread. Buffers are borrowed and must outlive it.
class Device {
 public:
  explicit Device(const Settings& settings = {});
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void allow(std::string name, const void* data, std::size_t bytes, Rights rights);
  // Several threads may write or read these bytes without order (the block behind padded slots). Part of an allowed buffer.
  void allow_races(const void* data, std::size_t bytes);

  template <typename Container>
  void reads(std::string name, const Container& data) {
    allow(std::move(name), std::data(data), bytes_of(data), Rights::kRead);
  }
  template <typename Container>
  void writes(std::string name, Container& data) {
    allow(std::move(name), std::data(data), bytes_of(data), Rights::kWrite);
  }
  template <typename Container>
  void updates(std::string name, Container& data) {
    allow(std::move(name), std::data(data), bytes_of(data), Rights::kReadWrite);
  }
  template <typename Container>
  void workspace(std::string name, Container& data) {
    allow(std::move(name), std::data(data), bytes_of(data), Rights::kWorkspace);
  }

  std::vector<Fault> faults() const;
  bool has(Kind kind) const;
  std::string report() const;  // all faults, one a line; empty if there are none
  Counts counts() const;

 private:
  template <typename Container>
  static std::size_t bytes_of(const Container& data) {
    return std::size(data) * sizeof(*std::data(data));
  }
};

}  // namespace hetkv::simt
