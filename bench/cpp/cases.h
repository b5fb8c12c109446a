// The cases of hetkv_bench. Each adds its rows to the report.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "report.h"

namespace hetkv::bench {

struct Plan {
  std::vector<std::int64_t> prefixes;      // tokens
  std::vector<std::uint32_t> block_sizes;  // tokens
  std::vector<std::uint32_t> thread_counts;
  std::int64_t request_tokens = 32768;  // cold admission, churn, publish
  std::int64_t lookup_tokens = 131072;  // lookups by threads
  std::size_t repeats = 11;
  double thread_seconds = 0.25;  // of one sample with threads
};

void measure_memory(const Plan& plan, Report& report);    // reserve and free, pin and unpin
void measure_prefixes(const Plan& plan, Report& report);  // hash, probe, warm admit, with and without the conversation so far
void measure_requests(const Plan& plan, Report& report);  // cold admission, publication, churn, decode, metadata
void measure_threads(const Plan& plan, Report& report);   // probes and admissions by thread count

struct ReplayOptions {
  std::string path;                    // of JSON lines with input_length and hash_ids; "-" = stdin
  std::string name;                    // of the trace, for the report
  std::size_t limit = 0;               // requests; 0 = all
  std::uint64_t pool_blocks = 200000;  // memory of the arena, as so many blocks of history
  std::vector<std::string> layouts, retentions;
  std::vector<std::uint32_t> block_sizes;
};

// False, with one line on stderr, if the trace cannot be read.
bool replay_trace(const ReplayOptions& options, Report& report);

}  // namespace hetkv::bench
