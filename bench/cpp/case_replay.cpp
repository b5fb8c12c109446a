// Replays a trace of requests with prefix ids: Mooncake's format, one JSON object a line.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <optional>

#include "bench_layouts.h"
#include "cases.h"
#include "engine.h"

namespace hetkv::bench {
namespace {

struct Request {
  std::int64_t input_length = 0;
  std::vector<std::int64_t> hash_ids;
};

// The integers after `"key":`, one or a list.
std::optional<std::vector<std::int64_t>> integers_of(const std::string& line, const std::string& key) {
  const std::size_t at = line.find("\"" + key + "\"");
  if (at == std::string::npos) return std::nullopt;
  const char* p = line.data() + line.find(':', at) + 1;
  const char* const end = line.data() + line.size();
  std::vector<std::int64_t> values;
  while (p < end && (*p == ' ' || *p == '[')) ++p;
  for (;;) {
    std::int64_t value = 0;
    const auto [next, error] = std::from_chars(p, end, value);
    if (error != std::errc{}) break;
    values.push_back(value);
    p = next;
    if (p >= end || *p != ',') break;
    while (p < end && (*p == ',' || *p == ' ')) ++p;
  }
  return values;
}

std::optional<std::vector<Request>> read_trace(std::istream& in, std::size_t limit) {
  std::vector<Request> requests;
  for (std::string line; (limit == 0 || requests.size() < limit) && std::getline(in, line);) {
    if (line.empty()) continue;
    const auto length = integers_of(line, "input_length");
    auto ids = integers_of(line, "hash_ids");
    if (!length || length->size() != 1 || !ids) return std::nullopt;
    requests.push_back({length->front(), std::move(*ids)});
  }
  return requests;
}

// Token ids that share prefixes exactly as the ids do. An id stands for 16, 64 or 512 tokens, whichever fits the length.
std::vector<std::int32_t> tokens_of(const Request& request) {
  const auto ids = static_cast<std::int64_t>(request.hash_ids.size());
  std::int64_t unit = 512;
  for (const std::int64_t u : {std::int64_t{16}, std::int64_t{64}}) {
    if (ids * u >= request.input_length && request.input_length > (ids - 1) * u) {
      unit = u;
      break;
    }
  }
  std::vector<std::int32_t> tokens;
  tokens.reserve(static_cast<std::size_t>(ids * unit));
  for (const std::int64_t id : request.hash_ids) {
    for (std::int64_t t = id * unit; t < (id + 1) * unit; ++t) tokens.push_back(static_cast<std::int32_t>(t & 0x7FFFFFFF));
  }
  tokens.resize(static_cast<std::size_t>(std::min<std::int64_t>(request.input_length, ids * unit)));
  return tokens;
}

void replay(const ReplayOptions& options, const std::vector<Request>& requests, const std::string& layout_name,
            std::uint32_t block, const std::string& retention, Report& report) {
  const CacheLayout layout = make_layout(layout_name, block);
  Engine engine(layout, history_bytes(layout, options.pool_blocks), retention);
  std::int64_t prompt = 0, hash_hits = 0, recoverable = 0;
  double seconds = 0;
  std::vector<double> each;
  for (const Request& request : requests) {
    const std::vector<std::int32_t> tokens = tokens_of(request);
    if (tokens.empty()) continue;
    const auto begin = std::chrono::steady_clock::now();
    const HitReport hit = engine.serve(tokens);
    const double took = seconds_since(begin);
    seconds += took;
    each.push_back(took * 1e9);
    prompt += hit.num_prompt_tokens;
    hash_hits += hit.num_hash_hit_tokens;
    recoverable += hit.num_recoverable_tokens;
  }
  engine.allocator().check_invariants();
  const auto count = static_cast<double>(each.size());
  Result result{.name = "replay " + options.name + " " + retention, .layout = layout_name, .block_size = block};
  result.time = timing_of(std::move(each));
  result.operations_per_second = count / seconds;
  result.extra = {{"requests", count},
                  {"hash_hit_rate", static_cast<double>(hash_hits) / static_cast<double>(prompt)},
                  {"recoverable_rate", static_cast<double>(recoverable) / static_cast<double>(prompt)},
                  {"evicted", static_cast<double>(engine.allocator().store().counters().history_evicted.load())}};
  report.add(std::move(result));
}

}  // namespace

bool replay_trace(const ReplayOptions& options, Report& report) {
  std::ifstream file;
  if (options.path != "-") file.open(options.path);
  std::istream& in = options.path == "-" ? std::cin : file;
  const auto requests = in ? read_trace(in, options.limit) : std::nullopt;
  if (!requests || requests->empty()) {
    std::fprintf(stderr, "hetkv_bench: '%s' is not a trace: JSON lines with input_length and hash_ids (unpack .gz first)\n",
                 options.path.c_str());
    return false;
  }
  for (const std::string& layout : options.layouts) {
    for (const std::uint32_t block : options.block_sizes) {
      for (const std::string& retention : options.retentions) {
        // Retention is about checkpoints; pure history has none.
        if (layout == "full" && retention != options.retentions.front()) continue;
        replay(options, *requests, layout, block, retention, report);
      }
    }
  }
  return true;
}

}  // namespace hetkv::bench
