#include "report.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace hetkv::bench {
namespace {

std::string first_line_with(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const std::size_t colon = line.find(':');
    return colon == std::string::npos ? line : line.substr(line.find_first_not_of(" \t", colon + 1));
  }
  return "";
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

std::string with_unit(double ns) {
  char text[32];
  if (ns < 1e3) {
    std::snprintf(text, sizeof text, "%.1f ns", ns);
  } else if (ns < 1e6) {
    std::snprintf(text, sizeof text, "%.2f us", ns / 1e3);
  } else {
    std::snprintf(text, sizeof text, "%.2f ms", ns / 1e6);
  }
  return text;
}

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

}  // namespace

void Report::add(Result result) {
  if (result.operations_per_second == 0 && result.time.median_ns > 0) result.operations_per_second = 1e9 / result.time.median_ns;
  if (!headed_)
    std::printf("%-26s %-12s %5s %8s %7s %12s %14s  %s\n", "case", "layout", "block", "tokens", "threads", "median",
                "operations/s", "more");
  headed_ = true;
  std::string more;
  for (const auto& [name, value] : result.extra) more += name + "=" + number(value) + " ";
  std::printf("%-26s %-12s %5" PRIu32 " %8" PRId64 " %7" PRIu32 " %12s %14.0f  %s\n", result.name.c_str(), result.layout.c_str(),
              result.block_size, result.tokens, result.threads, with_unit(result.time.median_ns).c_str(),
              result.operations_per_second, more.c_str());
  std::fflush(stdout);
  results_.push_back(std::move(result));
}

bool Report::write_json(const std::string& path, const std::string& mode) const {
  std::ofstream out(path);
  utsname system{};
  uname(&system);
  std::string load;
  std::getline(std::ifstream("/proc/loadavg"), load);
  out << "{\n  \"format\": 1,\n  \"program\": \"hetkv_bench\",\n  \"mode\": " << quoted(mode)
      << ",\n  \"cpu\": " << quoted(first_line_with("/proc/cpuinfo", "model name")) << ",\n  \"cpu_family_model\": "
      << quoted(first_line_with("/proc/cpuinfo", "cpu family") + "/" + first_line_with("/proc/cpuinfo", "model\t"))
      << ",\n  \"cpus\": " << sysconf(_SC_NPROCESSORS_ONLN) << ",\n  \"machine\": " << quoted(system.machine)
      << ",\n  \"compiler\": " << quoted(__VERSION__) << ",\n  \"loadavg\": " << quoted(load) << ",\n  \"results\": [";
  const char* separator = "\n";
  for (const Result& r : results_) {
    out << separator << "    {\"case\": " << quoted(r.name) << ", \"layout\": " << quoted(r.layout)
        << ", \"block\": " << r.block_size << ", \"tokens\": " << r.tokens << ", \"threads\": " << r.threads
        << ", \"median_ns\": " << number(r.time.median_ns) << ", \"least_ns\": " << number(r.time.least_ns)
        << ", \"most_ns\": " << number(r.time.most_ns) << ", \"repeats\": " << r.time.repeats
        << ", \"operations_per_second\": " << number(r.operations_per_second);
    for (const auto& [name, value] : r.extra) out << ", " << quoted(name) << ": " << number(value);
    out << "}";
    separator = ",\n";
  }
  out << "\n  ]\n}\n";
  out.flush();
  return out.good();
}

}  // namespace hetkv::bench
