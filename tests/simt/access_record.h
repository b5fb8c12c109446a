// Who touched a word last, and when: enough to tell races within a block and conflicts between blocks.
#pragma once

#include <cstdint>

namespace hetkv::simt {

// Epochs count barriers over all blocks and launches, so an epoch names its block too: blocks run one after another.
// All zero: never touched. Threads are numbered from 1; kManyOfWarp + warp and kMany stand for several readers.
struct AccessRecord {
  static constexpr std::uint16_t kMany = 0xffff;
  static constexpr std::uint16_t kManyOfWarp = 0x8000;
  static constexpr std::uint32_t kUnordered = 0xffffffff;  // a warp time that no warp barrier follows

  std::uint32_t write_epoch, read_epoch;
  std::uint32_t first_read_epoch;       // within a launch
  std::uint32_t write_time, read_time;  // warp barriers that the thread's warp had passed
  std::uint32_t write_code, read_code;  // offsets from the program's start
  std::uint16_t writer, reader;
  std::uint32_t split_epoch;  // last touch of a part of the word: look at its bytes as well
  std::uint16_t in_flight;    // the thread whose asynchronous copy will write here
  bool written_by_atomic;
};

}  // namespace hetkv::simt
