#include "simt/fault_log.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>

extern "C" char __executable_start;

namespace hetkv::simt {
namespace {

// "file:line" of code addresses of this program, by addr2line where there is one; else the offsets. One call for all.
std::map<std::uintptr_t, std::string> source_lines(const std::vector<std::uintptr_t>& addresses) {
  std::map<std::uintptr_t, std::string> lines;
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (length <= 0 || addresses.empty()) return lines;
  const std::string program(path, static_cast<std::size_t>(length));
  const bool quotable = program.find('\'') == std::string::npos;
  std::string command = "addr2line -s -e '" + program + "'";
  const auto base = reinterpret_cast<std::uintptr_t>(&__executable_start);
  for (const std::uintptr_t address : addresses) {
    char text[32];
    std::snprintf(text, sizeof(text), " 0x%zx", static_cast<std::size_t>(address - base - 1));  // -1: inside the call
    command += text;
    lines[address] = std::string("code") + text;
  }
  FILE* const pipe = quotable ? popen((command + " 2>/dev/null").c_str(), "r") : nullptr;
  if (pipe == nullptr) return lines;
  char line[1024];
  for (const std::uintptr_t address : addresses) {
    if (std::fgets(line, sizeof(line), pipe) == nullptr) break;
    std::string text(line);
    text.erase(std::find_if(text.begin(), text.end(), [](char c) { return c == '\n' || c == ' '; }), text.end());
    if (text.rfind("??", 0) != 0) lines[address] = text;
  }
  pclose(pipe);
  return lines;
}

}  // namespace

std::string code_mark(std::uintptr_t address) { return "\x01" + std::to_string(address) + "\x02"; }

bool FaultLog::known(Kind kind, std::uint64_t key) {
  for (Entry& entry : entries_) {
    if (entry.kind == kind && entry.key == key) {
      ++entry.count;
      return true;
    }
  }
  return false;
}

void FaultLog::add(Kind kind, std::uint64_t key, const std::string& text) {
  if (!known(kind, key)) entries_.push_back({kind, key, text, 1});
}

bool FaultLog::has(Kind kind) const {
  return std::any_of(entries_.begin(), entries_.end(), [kind](const Entry& entry) { return entry.kind == kind; });
}

std::vector<Fault> FaultLog::faults() const {
  constexpr std::size_t kShown = 20;
  const std::size_t shown = std::min(entries_.size(), kShown);
  std::vector<std::uintptr_t> addresses;
  const auto for_marks = [](const std::string& text, auto&& visit) {
    for (std::size_t begin = text.find('\x01'); begin != std::string::npos; begin = text.find('\x01', begin + 1)) {
      const std::size_t end = text.find('\x02', begin);
      visit(begin, end, static_cast<std::uintptr_t>(std::stoull(text.substr(begin + 1, end - begin - 1))));
    }
  };
  for (std::size_t i = 0; i < shown; ++i) {
    for_marks(entries_[i].text, [&](std::size_t, std::size_t, std::uintptr_t address) { addresses.push_back(address); });
  }
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  auto lines = source_lines(addresses);
  std::vector<Fault> faults;
  for (std::size_t i = 0; i < shown; ++i) {
    std::string text;
    std::size_t done = 0;
    for_marks(entries_[i].text, [&](std::size_t begin, std::size_t end, std::uintptr_t address) {
      text += entries_[i].text.substr(done, begin - done) + lines[address];
      done = end + 1;
    });
    faults.push_back({entries_[i].kind, text + entries_[i].text.substr(done), entries_[i].count});
  }
  return faults;
}

}  // namespace hetkv::simt
