#include "simt/device.h"

#include <stdexcept>

#include "simt/machine.h"

namespace hetkv::simt {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kOutOfBounds:
      return "out of bounds";
    case Kind::kRights:
      return "access right";
    case Kind::kMisaligned:
      return "misaligned";
    case Kind::kUninitialised:
      return "uninitialised";
    case Kind::kRace:
      return "race";
    case Kind::kBlockConflict:
      return "conflict between blocks";
    case Kind::kInFlight:
      return "copy in flight";
    case Kind::kDivergentBarrier:
      return "divergent barrier";
    case Kind::kDivergentWarp:
      return "divergent warp";
    case Kind::kCopy:
      return "asynchronous copy";
    case Kind::kSharedMemory:
      return "shared memory";
  }
  return "?";
}

Device::Device(const Settings& settings) {
  if (Machine::current != nullptr) throw std::logic_error("simt::Device: there is one already");
  Machine::current = new Machine(settings);
}

Device::~Device() {
  delete Machine::current;
  Machine::current = nullptr;
}

void Device::allow(std::string name, const void* data, std::size_t bytes, Rights rights) {
  Machine::current->allow(std::move(name), data, bytes, rights);
}

void Device::allow_races(const void* data, std::size_t bytes) { Machine::current->allow_races(data, bytes); }

std::vector<Fault> Device::faults() const { return Machine::current->log.faults(); }
bool Device::has(Kind kind) const { return Machine::current->log.has(kind); }
Counts Device::counts() const { return Machine::current->counts; }

std::string Device::report() const {
  std::string text;
  for (const Fault& fault : faults()) {
    text += std::string(name_of(fault.kind)) + " (" + std::to_string(fault.count) + "x) " + fault.text + "\n";
  }
  return text;
}

}  // namespace hetkv::simt
