#include "simt/machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>

namespace hetkv::simt {
namespace {

void* map_zero(std::size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  return memory;
}

bool same_site(const Site& a, const Site& b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

std::string site_name(const Site& site) {
  const char* const slash = std::strrchr(site.file, '/');
  return std::string(slash == nullptr ? site.file : slash + 1) + ":" + std::to_string(site.line);
}

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

std::uint64_t key_of(const Site& site) { return (reinterpret_cast<std::uintptr_t>(site.file) << 20) ^ site.line; }

}  // namespace

Machine* Machine::current = nullptr;
Lane* Machine::running = nullptr;

Machine::Machine(const Settings& given) : settings(given), random_(given.seed) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  shared_map_ = static_cast<std::byte*>(map_zero(kSharedSpan + 2 * page));
  mprotect(shared_map_, page, PROT_NONE);
  mprotect(shared_map_ + page + kSharedSpan, page, PROT_NONE);
  shared_ = shared_map_ + page;
  written_.resize(kSharedSpan);
  shared_words_ = static_cast<AccessRecord*>(map_zero(kSharedSpan / 4 * sizeof(AccessRecord)));
  shared_bytes_ = static_cast<AccessRecord*>(map_zero(kSharedSpan * sizeof(AccessRecord)));
}

Machine::~Machine() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  munmap(shared_map_, kSharedSpan + 2 * page);
  munmap(shared_words_, kSharedSpan / 4 * sizeof(AccessRecord));
  munmap(shared_bytes_, kSharedSpan * sizeof(AccessRecord));
  for (const Buffer& buffer : buffers_) {
    const std::size_t words = (buffer.end - 1) / 4 - buffer.first_word + 1;
    munmap(buffer.words, words * sizeof(AccessRecord));
    munmap(buffer.bytes, 4 * words * sizeof(AccessRecord));
    if (buffer.written != nullptr) munmap(buffer.written, buffer.end - buffer.begin);
  }
}

void Machine::allow(std::string name, const void* data, std::size_t bytes, Rights rights) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  for (const Buffer& buffer : buffers_) {
    if (begin < buffer.end && buffer.begin < begin + bytes) {
      throw std::logic_error("simt::Device: " + name + " overlaps " + buffer.name);
    }
  }
  Buffer buffer{begin, begin + bytes, std::move(name), rights};
  buffer.first_word = begin / 4;
  const std::size_t words = (buffer.end - 1) / 4 - buffer.first_word + 1;
  buffer.words = static_cast<AccessRecord*>(map_zero(words * sizeof(AccessRecord)));
  buffer.bytes = static_cast<AccessRecord*>(map_zero(4 * words * sizeof(AccessRecord)));
  if (rights == Rights::kWorkspace) {
    buffer.written = static_cast<std::uint8_t*>(map_zero(bytes));
    std::memset(const_cast<void*>(data), 0xff, bytes);
  }
  buffers_.push_back(std::move(buffer));
}

void Machine::allow_races(const void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  racy_.push_back({begin, begin + bytes});
}

std::string Machine::thread_name(const Lane& lane) const {
  const uint3 i = lane.index;
  return block_size.y == 1 && block_size.z == 1 ? "thread " + std::to_string(i.x) : "thread " + triple(i.x, i.y, i.z);
}

std::string Machine::here() const {
  std::string text = std::string("in ") + op_ + ", block " + triple(block_index.x, block_index.y, block_index.z);
  if (running != nullptr) text += ", " + thread_name(*running);
  return text;
}

void Machine::fault(Kind kind, std::uint64_t key, const std::string& text) { log.add(kind, key, text); }

void Machine::abandon_block() {
  abandoned_ = true;
  Lane& lane = *running;
  switch_fiber(lane.fiber, host_);
  std::abort();  // an abandoned thread is never continued
}

void Machine::run(const char* op, dim3 grid, dim3 block, std::size_t shared_bytes, void (*call)(const void*),
                  const void* context) {
  op_ = op;
  grid_size = grid;
  block_size = block;
  call_ = call;
  context_ = context;
  num_threads_ = std::size_t{block.x} * block.y * block.z;
  dynamic_bytes_ = shared_bytes;
  if (num_threads_ == 0 || num_threads_ > 1024 || block.z > 64 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    throw std::invalid_argument(std::string(op) + ": the GPU refuses grid " + triple(grid.x, grid.y, grid.z) + ", block " +
                                triple(block.x, block.y, block.z));
  }
  ++counts.launches;
  if (shared_bytes > settings.shared_limit) {
    log.add(Kind::kSharedMemory, shared_bytes,
            std::string("in ") + op + ": " + std::to_string(shared_bytes) + " bytes of dynamic shared memory, the card has " +
                std::to_string(settings.shared_limit));
    return;
  }
  stacks_.grow(num_threads_);
  lanes_.resize(std::max(lanes_.size(), num_threads_));
  warps_.resize((num_threads_ + 31) / 32);
  for (std::size_t i = 0; i < num_threads_; ++i) {
    Lane& lane = lanes_[i];
    lane.number = static_cast<unsigned>(i);
    lane.warp = static_cast<unsigned>(i / 32);
    lane.lane = static_cast<unsigned>(i % 32);
    lane.index = {static_cast<unsigned>(i % block.x), static_cast<unsigned>(i / block.x % block.y),
                  static_cast<unsigned>(i / (std::size_t{block.x} * block.y))};
  }
  order_.resize(num_threads_);
  std::iota(order_.begin(), order_.end(), 0u);
  if (settings.schedule == Schedule::kDescending) std::reverse(order_.begin(), order_.end());

  launch_begin_ = epoch_ + 1;
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  std::vector<std::uint32_t> permutation;
  if (settings.schedule == Schedule::kShuffled) {
    permutation.resize(blocks);
    std::iota(permutation.begin(), permutation.end(), 0u);
    std::shuffle(permutation.begin(), permutation.end(), random_);
  }
  for (std::uint64_t i = 0; i < blocks; ++i) {
    std::uint64_t number = settings.schedule == Schedule::kDescending ? blocks - 1 - i : i;
    if (!permutation.empty()) number = permutation[i];
    block_index = {static_cast<unsigned>(number % grid.x), static_cast<unsigned>(number / grid.x % grid.y),
                   static_cast<unsigned>(number / (std::uint64_t{grid.x} * grid.y))};
    run_block();
  }
}

void Machine::enter() {
  Machine& machine = *current;
  machine.call_(machine.context_);
  Lane& lane = *running;
  if (!lane.copies.empty()) {
    const std::uintptr_t code = lane.copies.front().code;
    machine.fault(Kind::kCopy, code, machine.here() + ": ends while its copy is in flight, issued at " + code_mark(code));
  }
  lane.state = LaneState::kDone;
  --machine.num_live_;
  switch_fiber(lane.fiber, machine.host_);
  std::abort();
}

void Machine::run_block() {
  ++counts.blocks;
  block_begin_ = ++epoch_;
  static_end_ = (dynamic_bytes_ + 127) / 128 * 128;
  shared_used_ = dynamic_bytes_;
  statics_.clear();
  std::memset(shared_, 0xff, dynamic_bytes_);
  std::memset(written_.data(), 0, dynamic_bytes_);
  for (Warp& warp : warps_) {
    warp.time = warp.last_full = 0;
    warp.partial.clear();
  }
  const auto reorder = [this] {
    if (settings.schedule != Schedule::kShuffled) return;
    // Warps in random order, the lanes of a warp together.
    std::vector<std::uint32_t> warps(warps_.size());
    std::iota(warps.begin(), warps.end(), 0u);
    std::shuffle(warps.begin(), warps.end(), random_);
    order_.clear();
    for (const std::uint32_t warp : warps) {
      const auto begin = static_cast<std::ptrdiff_t>(order_.size());
      for (std::uint32_t i = 32 * warp; i < std::min<std::size_t>(32 * (warp + 1), num_threads_); ++i) order_.push_back(i);
      std::shuffle(order_.begin() + begin, order_.end(), random_);
    }
  };
  for (std::size_t i = 0; i < num_threads_; ++i) {
    Lane& lane = lanes_[i];
    lane.state = LaneState::kReady;
    lane.collective = nullptr;
    lane.time = 0;
    lane.groups_committed = 0;
    lane.copies.clear();
    stacks_.prepare(i, lane.fiber, &Machine::enter);
  }
  num_live_ = num_threads_;
  num_at_barrier_ = 0;
  abandoned_ = false;
  reorder();
  while (num_live_ > 0 && !abandoned_) {
    bool moved = false;
    for (const std::uint32_t number : order_) {
      Lane& lane = lanes_[number];
      if (lane.state != LaneState::kReady) continue;
      moved = true;
      running = &lane;
      switch_fiber(host_, lane.fiber);
      running = nullptr;
      if (abandoned_) break;
    }
    if (abandoned_ || num_live_ == 0) break;
    if (num_at_barrier_ == num_live_) {
      release_barrier();
      reorder();
    } else if (!moved) {
      report_stuck();
      break;
    }
  }
  for (std::size_t i = 0; i < num_threads_; ++i) {
    for (const AsyncCopy& copy : lanes_[i].copies) mark_in_flight(copy.address, 0);
    lanes_[i].copies.clear();
  }
}

void Machine::yield(Lane& lane) { switch_fiber(lane.fiber, host_); }

int Machine::barrier(BlockVote vote, int value, Site site) {
  Lane& lane = *running;
  lane.state = LaneState::kAtBarrier;
  lane.site = site;
  lane.block_vote = vote;
  lane.block_value = value;
  ++num_at_barrier_;
  yield(lane);
  return lane.block_result;
}

void Machine::release_barrier() {
  const Lane* first = nullptr;
  int count = 0;
  for (std::size_t i = 0; i < num_threads_; ++i) {
    const Lane& lane = lanes_[i];
    if (lane.state != LaneState::kAtBarrier) continue;
    if (first == nullptr) first = &lane;
    if (!same_site(lane.site, first->site) || lane.block_vote != first->block_vote) {
      fault(Kind::kDivergentBarrier, key_of(first->site) ^ (key_of(lane.site) << 1),
            here() + ": " + thread_name(*first) + " waits at " + site_name(first->site) + ", " + thread_name(lane) + " at " +
                site_name(lane.site));
      abandoned_ = true;
      return;
    }
    count += lane.block_value != 0 ? 1 : 0;
  }
  if (num_live_ < num_threads_) {
    fault(Kind::kDivergentBarrier, key_of(first->site),
          here() + ": " + std::to_string(num_threads_ - num_live_) + " threads have left, the others wait at " +
              site_name(first->site));
  }
  int result = count;
  if (first->block_vote == BlockVote::kAnd) result = static_cast<std::size_t>(count) == num_live_ ? 1 : 0;
  if (first->block_vote == BlockVote::kOr) result = count > 0 ? 1 : 0;
  for (std::size_t i = 0; i < num_threads_; ++i) {
    if (lanes_[i].state != LaneState::kAtBarrier) continue;
    lanes_[i].state = LaneState::kReady;
    lanes_[i].block_result = result;
  }
  for (Warp& warp : warps_) warp.partial.clear();  // the next epoch orders everything before it
  num_at_barrier_ = 0;
  ++epoch_;
  ++counts.barriers;
}

void Machine::report_stuck() {
  struct Group {
    const Lane* first;
    std::size_t count;
  };
  std::vector<Group> groups;
  const auto same = [](const Lane& a, const Lane& b) {
    if (a.state != b.state) return false;
    if (a.state == LaneState::kAtBarrier) return same_site(a.site, b.site);
    if (a.state != LaneState::kInCollective) return true;
    return a.warp == b.warp && a.collective->mask == b.collective->mask && a.collective->name == b.collective->name &&
           same_site(a.collective->site, b.collective->site);
  };
  for (std::size_t i = 0; i < num_threads_; ++i) {
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return same(*g.first, lanes_[i]); });
    if (group == groups.end()) {
      groups.push_back({&lanes_[i], 1});
    } else {
      ++group->count;
    }
  }
  std::string text = here() + ": no thread can go on.";
  std::uint64_t key = 0;
  for (std::size_t i = 0; i < std::min<std::size_t>(groups.size(), 6); ++i) {
    const Lane& lane = *groups[i].first;
    text += " " + std::to_string(groups[i].count) + " from " + thread_name(lane);
    if (lane.state == LaneState::kDone) {
      text += " have left;";
    } else if (lane.state == LaneState::kAtBarrier) {
      text += " wait at __syncthreads " + site_name(lane.site) + ";";
      key ^= key_of(lane.site);
    } else {
      char mask[16];
      std::snprintf(mask, sizeof(mask), "0x%08x", lane.collective->mask);
      text += std::string(" wait in ") + lane.collective->name + " with mask " + mask;
      text += lane.collective->site.file != nullptr ? " at " + site_name(lane.collective->site) + ";"
                                                    : " at " + code_mark(lane.collective->code) + ";";
      key ^= lane.collective->site.file != nullptr ? key_of(lane.collective->site) : lane.collective->code;
    }
  }
  fault(Kind::kDivergentWarp, key, text);
}

std::uint32_t Machine::lanes_of(unsigned warp) const {
  const std::size_t count = std::min<std::size_t>(32, num_threads_ - std::size_t{32} * warp);
  return count == 32 ? 0xffffffffu : (1u << count) - 1u;
}

void Machine::require_full_warp(const char* name, std::uintptr_t code) {
  if (lanes_of(running->warp) == 0xffffffffu) return;
  fault(Kind::kDivergentWarp, code, here() + ": " + name + " at " + code_mark(code) + " in a warp of fewer than 32 threads");
  abandon_block();
}

std::uint64_t Machine::collective(Collective& request) {
  Lane& lane = *running;
  const auto where = [&] { return request.site.file != nullptr ? site_name(request.site) : code_mark(request.code); };
  if ((request.mask >> lane.lane & 1u) == 0) {
    fault(Kind::kDivergentWarp, key_of(request.site) + request.code,
          here() + ": calls " + request.name + " at " + where() + " with a mask that does not name it");
    abandon_block();
  }
  lane.collective = &request;
  lane.state = LaneState::kInCollective;
  Lane* named[32] = {};
  bool all = true;
  for (unsigned i = 0; i < 32; ++i) {
    const std::size_t number = std::size_t{lane.warp} * 32 + i;
    if (number >= num_threads_) break;
    if ((request.mask >> i & 1u) == 0) continue;
    Lane& other = lanes_[number];
    if (other.state == LaneState::kDone) {
      fault(Kind::kDivergentWarp, key_of(request.site) + request.code,
            here() + ": " + request.name + " at " + where() + " names " + thread_name(other) + ", which has left");
      abandon_block();
    }
    if (other.state != LaneState::kInCollective || other.collective->name != request.name ||
        other.collective->mask != request.mask || other.collective->detail != request.detail) {
      all = false;
      break;
    }
    named[i] = &other;
  }
  if (!all) {
    yield(lane);
    return request.result;
  }
  request.complete(named);
  for (Lane* const other : named) {
    if (other == nullptr) continue;
    other->collective = nullptr;
    other->state = LaneState::kReady;
  }
  return request.result;
}

}  // namespace hetkv::simt
