// Every access of a kernel: is it allowed, initialised, ordered against the accesses of other threads and blocks.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "simt/machine.h"

extern "C" char __executable_start;
extern "C" char _end;

namespace hetkv::simt {
namespace {

std::uint32_t short_code(std::uintptr_t code) {
  return static_cast<std::uint32_t>(code - reinterpret_cast<std::uintptr_t>(&__executable_start));
}

std::string long_mark(std::uint32_t code) { return code_mark(reinterpret_cast<std::uintptr_t>(&__executable_start) + code); }

const char* verb(Access access) { return access == Access::kRead ? "read" : access == Access::kWrite ? "write" : "atomic"; }

std::string hex(std::uintptr_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%zx", static_cast<std::size_t>(value));
  return text;
}

}  // namespace

std::string Machine::place_name(std::uintptr_t address) const {
  const std::uintptr_t shared = reinterpret_cast<std::uintptr_t>(shared_);
  if (address - shared < kSharedSpan) return "shared+" + hex(address - shared);
  constexpr std::uintptr_t kNear = std::uintptr_t{1} << 20;
  const Buffer* nearest = nullptr;
  std::uintptr_t best = kNear;
  for (const Buffer& buffer : buffers_) {
    if (address >= buffer.begin && address < buffer.end) return buffer.name + "+" + hex(address - buffer.begin);
    const std::uintptr_t distance = address >= buffer.end ? address - buffer.end : buffer.begin - address;
    if (distance < best) {
      best = distance;
      nearest = &buffer;
    }
  }
  if (nearest != nullptr) {
    return address >= nearest->end ? std::to_string(address - nearest->end) + " bytes past the end of " + nearest->name
                                   : std::to_string(nearest->begin - address) + " bytes before " + nearest->name;
  }
  for (std::size_t i = 0; i < num_threads_; ++i) {
    if (address - stacks_.low(i) < FiberStacks::kBytes) return "the local memory of " + thread_name(lanes_[i]);
  }
  return "address " + hex(address);
}

bool Machine::ordered(const Lane& lane, std::uint16_t other, std::uint32_t time) const {
  if (other == AccessRecord::kMany) return false;
  const Warp& warp = warps_[lane.warp];
  if ((other & AccessRecord::kManyOfWarp) != 0) {
    return (other & ~AccessRecord::kManyOfWarp) == static_cast<int>(lane.warp) && warp.last_full > time;
  }
  const unsigned number = other - 1u;
  if (number / 32 != lane.warp) return false;
  if (warp.last_full > time) return true;
  const std::uint32_t both = (1u << (number % 32)) | (1u << lane.lane);
  for (std::size_t i = warp.partial.size(); i > 0 && warp.partial[i - 1].time > time; --i) {
    if ((warp.partial[i - 1].mask & both) == both) return true;
  }
  return false;
}

void Machine::conflict(Kind kind, const char* what, std::uintptr_t address, Lane& lane, std::uint32_t code, std::uint16_t other,
                       std::uint32_t other_code) {
  const std::uint64_t key = (static_cast<std::uint64_t>(code) << 32) | other_code;
  if (log.known(kind, key)) return;
  std::string who;
  if (kind == Kind::kBlockConflict) {
    who = "another block";
  } else if (other == AccessRecord::kMany) {
    who = "several threads";
  } else if ((other & AccessRecord::kManyOfWarp) != 0) {
    who = "several threads of its warp";
  } else {
    who = thread_name(lanes_[other - 1u]);
  }
  fault(kind, key,
        here() + ": " + what + " at " + place_name(address) + ", " + long_mark(code) + ", against " + who + " at " +
            long_mark(other_code));
  static_cast<void>(lane);
}

void Machine::check_record(AccessRecord& record, Lane& lane, Access access, std::uint32_t code, bool racy, bool shared,
                           std::uintptr_t address) {
  const auto me = static_cast<std::uint16_t>(lane.number + 1);
  const bool both_atomic = access == Access::kAtomic && record.written_by_atomic;
  if (!racy) {
    if (!both_atomic && record.write_epoch >= block_begin_) {
      if (record.write_epoch == epoch_ && record.writer != me && !ordered(lane, record.writer, record.write_time)) {
        conflict(Kind::kRace, access == Access::kRead ? "read after write" : "write after write", address, lane, code,
                 record.writer, record.write_code);
      }
    } else if (!both_atomic && !shared && record.write_epoch >= launch_begin_) {
      conflict(Kind::kBlockConflict, access == Access::kRead ? "read after write" : "write after write", address, lane, code,
               record.writer, record.write_code);
    }
    if (access != Access::kRead) {
      if (record.read_epoch == epoch_ && record.reader != me && !ordered(lane, record.reader, record.read_time)) {
        conflict(Kind::kRace, "write after read", address, lane, code, record.reader, record.read_code);
      }
      if (!shared && record.first_read_epoch >= launch_begin_ && record.first_read_epoch < block_begin_) {
        conflict(Kind::kBlockConflict, "write after read", address, lane, code, record.reader, record.read_code);
      }
    }
  }
  if (access != Access::kRead) {
    record.write_epoch = epoch_;
    record.writer = me;
    record.write_time = lane.time;
    record.write_code = code;
    record.written_by_atomic = access == Access::kAtomic;
    return;
  }
  if (record.first_read_epoch < launch_begin_) record.first_read_epoch = epoch_;
  record.read_code = code;
  if (record.read_epoch == epoch_ && record.reader != me && !ordered(lane, record.reader, record.read_time)) {
    const bool of_warp = (record.reader & AccessRecord::kManyOfWarp) != 0
                             ? record.reader == (AccessRecord::kManyOfWarp | lane.warp)
                             : (record.reader - 1u) / 32 == lane.warp;
    record.reader = static_cast<std::uint16_t>(of_warp ? AccessRecord::kManyOfWarp | lane.warp : AccessRecord::kMany);
    record.read_time = std::max(record.read_time, lane.time);
    return;
  }
  record.read_epoch = epoch_;
  record.reader = me;
  record.read_time = lane.time;
}

void Machine::check_words(AccessRecord* words, AccessRecord* bytes, std::size_t byte_offset, std::size_t bytes_count, Lane& lane,
                          Access access, std::uintptr_t code, bool racy, bool shared, std::uintptr_t address) {
  const std::uint32_t at = short_code(code);
  std::size_t done = 0;
  while (done < bytes_count) {
    const std::size_t offset = byte_offset + done;
    const std::size_t part = std::min<std::size_t>(4 - offset % 4, bytes_count - done);
    AccessRecord& word = words[offset / 4];
    if (word.in_flight != 0) {
      conflict(Kind::kInFlight, "touches bytes of a copy in flight", address + done, lane, at, word.in_flight, word.write_code);
    }
    if (part == 4) {
      check_record(word, lane, access, at, racy, shared, address + done);
      if (word.split_epoch >= launch_begin_) {
        for (std::size_t i = 0; i < 4; ++i) check_record(bytes[offset + i], lane, access, at, racy, shared, address + done + i);
      }
    } else {
      AccessRecord whole = word;  // against touches of the whole word; recorded for the bytes only
      check_record(whole, lane, access, at, racy, shared, address + done);
      word.split_epoch = epoch_;
      for (std::size_t i = 0; i < part; ++i) check_record(bytes[offset + i], lane, access, at, racy, shared, address + done + i);
    }
    done += part;
  }
}

bool Machine::inside_shared(std::uint32_t offset, std::size_t bytes) const {
  if (offset + bytes <= dynamic_bytes_) return true;
  return std::any_of(statics_.begin(), statics_.end(),
                     [&](const Static& s) { return offset >= s.begin && offset + bytes <= s.end; });
}

void Machine::access_shared(Lane& lane, std::uint32_t offset, std::size_t bytes, Access access, std::uintptr_t code) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(shared_) + offset;
  if (offset >= kSharedSpan || !inside_shared(offset, bytes)) {
    if (!log.known(Kind::kOutOfBounds, code)) {
      fault(Kind::kOutOfBounds, code,
            here() + ": " + verb(access) + " of " + std::to_string(bytes) + " bytes at shared+" + hex(offset) + ", " +
                code_mark(code) + ", outside of what the block has (" + std::to_string(dynamic_bytes_) + " dynamic bytes)");
    }
    abandon_block();
  }
  if (access != Access::kWrite) {
    const std::uint8_t* const written = written_.data() + offset;
    if (std::memchr(written, 0, bytes) != nullptr && !log.known(Kind::kUninitialised, code)) {
      fault(Kind::kUninitialised, code,
            here() + ": " + verb(access) + " of " + std::to_string(bytes) + " bytes at shared+" + hex(offset) + ", " +
                code_mark(code) + ", not all written");
    }
  }
  if (access != Access::kRead) std::memset(written_.data() + offset, 1, bytes);
  check_words(shared_words_, shared_bytes_, offset, bytes, lane, access, code, false, true, address);
}

void Machine::access_global(Lane& lane, std::uintptr_t address, std::size_t bytes, Access access, std::uintptr_t code,
                            bool must_align) {
  Buffer* buffer = nullptr;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    const std::size_t number = last_buffer_ + i < buffers_.size() ? last_buffer_ + i : last_buffer_ + i - buffers_.size();
    if (address >= buffers_[number].begin && address < buffers_[number].end) {
      buffer = &buffers_[number];
      last_buffer_ = number;
      break;
    }
  }
  const auto describe = [&] {
    return here() + ": " + verb(access) + " of " + std::to_string(bytes) + " bytes at " + place_name(address) + ", " +
           code_mark(code);
  };
  if (buffer == nullptr || address + bytes > buffer->end) {
    if (buffer == nullptr && access == Access::kRead) {
      // Tables of constants, and the arguments of the launch.
      if (address >= reinterpret_cast<std::uintptr_t>(&__executable_start) && address < reinterpret_cast<std::uintptr_t>(&_end))
        return;
      for (const Place& place : places) {
        if (address >= place.begin && address + bytes <= place.end) return;
      }
    }
    if (!log.known(Kind::kOutOfBounds, code)) fault(Kind::kOutOfBounds, code, describe() + ", outside of every buffer");
    abandon_block();
  }
  if (must_align && address % bytes != 0) {
    if (!log.known(Kind::kMisaligned, code)) fault(Kind::kMisaligned, code, describe() + ", not aligned to its size");
    abandon_block();
  }
  const bool wrong = (access == Access::kRead && buffer->rights == Rights::kWrite) ||
                     (access == Access::kWrite && buffer->rights == Rights::kRead) ||
                     (access == Access::kAtomic && (buffer->rights == Rights::kWrite || buffer->rights == Rights::kRead));
  if (wrong) {
    if (!log.known(Kind::kRights, code)) {
      fault(Kind::kRights, code, describe() + ", which is " + (buffer->rights == Rights::kRead ? "read-only" : "write-only"));
    }
    abandon_block();
  }
  (access == Access::kRead ? counts.global_bytes_read : counts.global_bytes_written) += bytes;
  if (buffer->written != nullptr) {
    std::uint8_t* const written = buffer->written + (address - buffer->begin);
    if (access != Access::kWrite && std::memchr(written, 0, bytes) != nullptr && !log.known(Kind::kUninitialised, code)) {
      fault(Kind::kUninitialised, code, describe() + ", not all written");
    }
    if (access != Access::kRead) std::memset(written, 1, bytes);
  }
  const bool racy =
      std::any_of(racy_.begin(), racy_.end(), [&](const Place& p) { return address >= p.begin && address + bytes <= p.end; });
  check_words(buffer->words, buffer->bytes, address - 4 * buffer->first_word, bytes, lane, access, code, racy, false, address);
}

void Machine::access(std::uintptr_t address, std::size_t bytes, Access access, std::uintptr_t code, bool must_align) {
  Lane& lane = *running;
  if (bytes == 0 || address - stacks_.low(lane.number) < FiberStacks::kBytes) return;
  const std::uintptr_t offset = address - reinterpret_cast<std::uintptr_t>(shared_);
  if (offset < kSharedSpan) {
    if (must_align && address % bytes != 0) {
      if (!log.known(Kind::kMisaligned, code)) {
        fault(Kind::kMisaligned, code,
              here() + ": " + verb(access) + " of " + std::to_string(bytes) + " bytes at shared+" + hex(offset) + ", " +
                  code_mark(code) + ", not aligned to its size");
      }
      abandon_block();
    }
    access_shared(lane, static_cast<std::uint32_t>(offset), bytes, access, code);
  } else {
    access_global(lane, address, bytes, access, code, must_align);
  }
}

void* Machine::static_shared(const void* declaration, std::size_t bytes, std::size_t alignment) {
  for (const Static& s : statics_) {
    if (s.declaration == declaration) return shared_ + s.begin;
  }
  constexpr std::size_t kGap = 64;  // so that an index past the end is seen
  const std::size_t align = std::max<std::size_t>(alignment, 16);
  const std::size_t begin = (static_end_ + kGap + align - 1) / align * align;
  shared_used_ += bytes;
  std::size_t statics = bytes;
  for (const Static& s : statics_) statics += s.end - s.begin;
  if (statics > 48 * 1024 || shared_used_ > settings.shared_limit || begin + bytes > kSharedSpan) {
    fault(Kind::kSharedMemory, shared_used_,
          here() + ": " + std::to_string(statics) + " bytes of HETKV_SHARED and " + std::to_string(dynamic_bytes_) +
              " dynamic bytes are too much for a block");
    abandon_block();
  }
  std::memset(shared_ + begin, 0xff, bytes);
  std::memset(written_.data() + begin, 0, bytes);
  statics_.push_back({declaration, static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(begin + bytes)});
  static_end_ = begin + bytes;
  return shared_ + begin;
}

void Machine::count_phase(const std::uint32_t* addresses, int count) {
  ++counts.matrix_phases;
  int rows[8] = {};  // distinct 16-byte rows per group of four banks
  for (int i = 0; i < count; ++i) {
    bool seen = false;
    for (int j = 0; j < i; ++j) seen |= addresses[j] / 16 == addresses[i] / 16;
    if (!seen) ++rows[addresses[i] / 16 % 8];
  }
  counts.bank_conflicts += static_cast<std::uint64_t>(std::max(0, *std::max_element(rows, rows + 8) - 1));
}

void Machine::mark_in_flight(std::uint32_t address, std::uint16_t who) {
  for (std::uint32_t i = 0; i < 4; ++i) shared_words_[address / 4 + i].in_flight = who;
}

void Machine::copy_async(std::uint32_t address, const void* source, int source_bytes, std::uintptr_t code) {
  Lane& lane = *running;
  const auto from = reinterpret_cast<std::uintptr_t>(source);
  if (source_bytes < 0 || source_bytes > 16) {
    fault(Kind::kCopy, code, here() + ": copy_async_16 of " + std::to_string(source_bytes) + " bytes at " + code_mark(code));
    abandon_block();
  }
  if (address % 16 != 0 || from % 16 != 0) {
    fault(Kind::kMisaligned, code, here() + ": copy_async_16 at " + code_mark(code) + ": an address is not a multiple of 16");
    abandon_block();
  }
  if (source_bytes == 0) {  // reads nothing, but the address must be mapped
    const bool mapped =
        std::any_of(buffers_.begin(), buffers_.end(), [from](const Buffer& b) { return from >= b.begin && from < b.end; });
    if (!mapped) {
      fault(Kind::kOutOfBounds, code,
            here() + ": copy_async_16 at " + code_mark(code) + ": the source of an empty copy is " + place_name(from) +
                ", outside of every buffer");
      abandon_block();
    }
  } else {
    access_global(lane, from, static_cast<std::size_t>(source_bytes), Access::kRead, code, false);
  }
  access_shared(lane, address, 16, Access::kWrite, code);
  std::memset(written_.data() + address, 0, 16);  // until it has arrived
  AsyncCopy copy{address, static_cast<const std::byte*>(source), source_bytes, lane.groups_committed, code, {}};
  if (settings.copies == Copies::kEarly) {
    std::memcpy(copy.bytes, source, static_cast<std::size_t>(source_bytes));
    std::memcpy(shared_ + address, copy.bytes, 16);
  }
  mark_in_flight(address, static_cast<std::uint16_t>(lane.number + 1));
  lane.copies.push_back(copy);
  ++counts.copies;
}

void Machine::copy_async_commit() { ++running->groups_committed; }

void Machine::copy_async_wait(int newest_left, std::uintptr_t code) {
  Lane& lane = *running;
  const std::uint32_t left = static_cast<std::uint32_t>(std::max(newest_left, 0));
  complete_copies(lane, lane.groups_committed > left ? lane.groups_committed - left : 0, code);
}

void Machine::complete_copies(Lane& lane, std::uint32_t groups_done, std::uintptr_t) {
  std::size_t done = 0;
  for (; done < lane.copies.size() && lane.copies[done].group < groups_done; ++done) {
    AsyncCopy copy = lane.copies[done];
    if (settings.copies == Copies::kLate) {
      if (copy.source_bytes > 0) {
        access_global(lane, reinterpret_cast<std::uintptr_t>(copy.source), static_cast<std::size_t>(copy.source_bytes),
                      Access::kRead, copy.code, false);
      }
      std::memcpy(copy.bytes, copy.source, static_cast<std::size_t>(copy.source_bytes));
    }
    mark_in_flight(copy.address, 0);
    access_shared(lane, copy.address, 16, Access::kWrite, copy.code);
    std::memcpy(shared_ + copy.address, copy.bytes, 16);
  }
  lane.copies.erase(lane.copies.begin(), lane.copies.begin() + static_cast<std::ptrdiff_t>(done));
}

}  // namespace hetkv::simt
