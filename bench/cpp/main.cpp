// hetkv_bench: what the allocator costs, without a model.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>

#include "cases.h"

namespace {

using namespace hetkv::bench;

constexpr const char* kUsage =
    "usage: hetkv_bench [--quick | --smallest] [--only memory,prefix,request,threads] [--block 16,64] [--repeats N] [--json "
    "FILE]\n"
    "       hetkv_bench --replay FILE|- [--name NAME] [--limit N] [--pool BLOCKS] [--layouts full,full+window,v4]\n"
    "                   [--retention adaptive,turn_ends,...] [--block 64] [--json FILE]\n"
    "  --quick     prefixes of 8k, 32k and 128k tokens only\n"
    "  --smallest  seconds in all: to see that it works, not for numbers\n";

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

std::vector<std::uint32_t> numbers(const std::string& text) {
  std::vector<std::uint32_t> values;
  for (const std::string& part : split(text)) values.push_back(static_cast<std::uint32_t>(std::stoul(part)));
  return values;
}

struct Options {
  Plan plan;
  ReplayOptions replay;
  std::string mode = "full", json, only = "memory,prefix,request,threads";
  bool bad = false;
};

Options parse(int argc, char** argv) {
  Options o;
  o.plan.prefixes = {1024, 8192, 32768, 131072, 1048576};
  o.plan.block_sizes = {64, 16};
  o.plan.thread_counts = {1, 2, 4};
  o.replay.layouts = {"full", "full+window"};
  o.replay.retentions = {"adaptive"};
  std::string blocks;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    auto value = [&]() -> std::string {
      if (i + 1 < argc) return argv[++i];
      o.bad = true;
      return "0";
    };
    if (option == "--quick") {
      o.mode = "quick";
      o.plan.prefixes = {8192, 32768, 131072};
    } else if (option == "--smallest") {
      o.mode = "smallest";
      o.plan.prefixes = {1024};
      o.plan.request_tokens = 8192;
      o.plan.lookup_tokens = 1024;
      o.plan.repeats = 3;
      o.plan.thread_seconds = 0.01;
    } else if (option == "--repeats") {
      o.plan.repeats = std::stoul(value());
    } else if (option == "--json") {
      o.json = value();
    } else if (option == "--only") {
      o.only = value();
    } else if (option == "--block") {
      blocks = value();
    } else if (option == "--replay") {
      o.replay.path = value();
    } else if (option == "--name") {
      o.replay.name = value();
    } else if (option == "--limit") {
      o.replay.limit = std::stoul(value());
    } else if (option == "--pool") {
      o.replay.pool_blocks = std::stoul(value());
    } else if (option == "--layouts") {
      o.replay.layouts = split(value());
    } else if (option == "--retention") {
      o.replay.retentions = split(value());
    } else {
      o.bad = true;
    }
  }
  if (!blocks.empty()) o.plan.block_sizes = numbers(blocks);
  o.replay.block_sizes = blocks.empty() ? std::vector<std::uint32_t>{64} : o.plan.block_sizes;
  if (o.replay.name.empty()) o.replay.name = o.replay.path;
  if (o.plan.repeats == 0) o.bad = true;
  return o;
}

int run(const Options& o) {
  Report report;
  if (!o.replay.path.empty()) {
    if (!replay_trace(o.replay, report)) return 1;
  } else {
    for (const std::string& part : split(o.only)) {
      if (part == "memory") measure_memory(o.plan, report);
      if (part == "prefix") measure_prefixes(o.plan, report);
      if (part == "request") measure_requests(o.plan, report);
      if (part == "threads") measure_threads(o.plan, report);
    }
  }
  if (!o.json.empty() && !report.write_json(o.json, o.replay.path.empty() ? o.mode : "replay")) {
    std::fprintf(stderr, "hetkv_bench: cannot write '%s'\n", o.json.c_str());
    return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse(argc, argv);
    if (options.bad) {
      std::fputs(kUsage, stderr);
      return 2;
    }
    return run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "hetkv_bench: %s\n", error.what());
    return 1;
  }
}
