// What went wrong, once per kind and pair of source lines. Code addresses become lines only when a report is written.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "simt/device.h"

namespace hetkv::simt {

class FaultLog {
 public:
  // `text` may hold \x01<address>\x02 for a code address. Later faults with equal kind and `key` are only counted.
  void add(Kind kind, std::uint64_t key, const std::string& text);
  bool known(Kind kind, std::uint64_t key);  // counts it if so; saves the caller the text
  std::vector<Fault> faults() const;         // with source lines
  bool has(Kind kind) const;
  bool empty() const { return entries_.empty(); }

 private:
  struct Entry {
    Kind kind;
    std::uint64_t key;
    std::string text;
    std::uint64_t count;
  };
  std::vector<Entry> entries_;
};

// A code address for FaultLog::add.
std::string code_mark(std::uintptr_t address);

}  // namespace hetkv::simt
