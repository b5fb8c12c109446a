// Results of a run: a table on stdout while it goes on, and one JSON file at the end.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "measure.h"

namespace hetkv::bench {

struct Result {
  std::string name = {};         // of the case: "warm_admit", ...
  std::string layout = {};       // "full", "full+window", "v4"; "" where it does not matter
  std::uint32_t block_size = 0;  // tokens
  std::int64_t tokens = 0;       // length of the prefix or prompt; 0 where it does not matter
  std::uint32_t threads = 1;
  Timing time = {};  // of one operation
  double operations_per_second = 0;
  std::vector<std::pair<std::string, double>> extra = {};  // named numbers: "ns_per_block", "bytes_per_block", ...
};

class Report {
 public:
  // Prints the row at once. operations_per_second is filled from the time if it is 0.
  void add(Result result);
  // False if the file cannot be written.
  bool write_json(const std::string& path, const std::string& mode) const;

 private:
  std::vector<Result> results_;
  bool headed_ = false;
};

}  // namespace hetkv::bench
