// What kernels call through device/cuda_runtime.h: indices, barriers, shuffles, votes, atomics, shared memory.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>

#include "simt/machine.h"

namespace hetkv::simt {
namespace {

void complete_warp_barrier(Lane* const* lanes) {
  Machine& machine = *Machine::current;
  const Lane* const first = *std::find_if(lanes, lanes + 32, [](const Lane* lane) { return lane != nullptr; });
  Warp& warp = machine.warp(first->warp);
  ++warp.time;
  std::uint32_t mask = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] == nullptr) continue;
    mask |= 1u << i;
    lanes[i]->time = warp.time;
  }
  if (mask == machine.lanes_of(first->warp)) {
    warp.last_full = warp.time;
  } else {
    warp.partial.push_back({warp.time, mask});
  }
}

void complete_shuffle(Lane* const* lanes) {
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] == nullptr) continue;
    Collective& call = *lanes[i]->collective;
    const unsigned width = call.in_words[0];
    const unsigned begin = i / width * width;
    unsigned from = i;
    switch (static_cast<Shuffle>(call.in_words[1])) {
      case Shuffle::kIndex:
        from = begin + call.argument % width;
        break;
      case Shuffle::kUp:
        from = i >= begin + call.argument ? i - call.argument : i;
        break;
      case Shuffle::kDown:
        from = i + call.argument < begin + width ? i + call.argument : i;
        break;
      case Shuffle::kXor:
        from = (i ^ call.argument) < begin + width ? i ^ call.argument : i;
        break;
    }
    if (lanes[from & 31u] == nullptr) {
      Machine& machine = *Machine::current;
      machine.fault(Kind::kDivergentWarp, call.site.line,
                    machine.here() + ": the shuffle at line " + std::to_string(call.site.line) + " reads lane " +
                        std::to_string(from) + ", which is not in its mask");
      call.result = ~std::uint64_t{0};
    } else {
      call.result = lanes[from & 31u]->collective->value;
    }
  }
}

void complete_vote(Lane* const* lanes) {
  std::uint32_t ballot = 0, mask = 0;
  Vote kind = Vote::kAny;
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] == nullptr) continue;
    mask |= 1u << i;
    kind = static_cast<Vote>(lanes[i]->collective->argument);
    if (lanes[i]->collective->value != 0) ballot |= 1u << i;
  }
  const std::uint32_t result = kind == Vote::kBallot ? ballot : kind == Vote::kAny ? ballot != 0 : ballot == mask;
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] != nullptr) lanes[i]->collective->result = result;
  }
}

void complete_reduce(Lane* const* lanes) {
  bool begun = false;
  std::uint32_t sum = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] == nullptr) continue;
    const auto value = static_cast<std::uint32_t>(lanes[i]->collective->value);
    const auto as_signed = [](std::uint32_t x) { return static_cast<std::int32_t>(x); };
    if (!begun) {
      sum = value;
      begun = true;
      continue;
    }
    switch (static_cast<Reduce>(lanes[i]->collective->argument)) {
      case Reduce::kAdd:
        sum += value;
        break;
      case Reduce::kMin:
        sum = std::min(sum, value);
        break;
      case Reduce::kMax:
        sum = std::max(sum, value);
        break;
      case Reduce::kAnd:
        sum &= value;
        break;
      case Reduce::kOr:
        sum |= value;
        break;
      case Reduce::kXor:
        sum ^= value;
        break;
      case Reduce::kSignedMin:
        sum = as_signed(value) < as_signed(sum) ? value : sum;
        break;
      case Reduce::kSignedMax:
        sum = as_signed(value) > as_signed(sum) ? value : sum;
        break;
    }
  }
  for (unsigned i = 0; i < 32; ++i) {
    if (lanes[i] != nullptr) lanes[i]->collective->result = sum;
  }
}

Lane& running() { return *Machine::running; }

}  // namespace

uint3 thread_index() { return running().index; }
uint3 block_index() { return Machine::current->block_index; }
dim3 block_size() { return Machine::current->block_size; }
dim3 grid_size() { return Machine::current->grid_size; }
std::byte* dynamic_shared() { return Machine::current->shared(); }
void* static_shared(const void* declaration, std::size_t bytes, std::size_t alignment) {
  return Machine::current->static_shared(declaration, bytes, alignment);
}

int barrier(BlockVote vote, int value, Site site) { return Machine::current->barrier(vote, value, site); }

void warp_barrier(std::uint32_t mask, Site site) {
  Collective call{.name = "__syncwarp", .mask = mask, .site = site, .complete = &complete_warp_barrier};
  Machine::current->collective(call);
}

std::uint64_t shuffle(Shuffle kind, std::uint32_t mask, std::uint64_t bits, unsigned argument, int width, Site site) {
  if (width < 1 || width > 32 || !std::has_single_bit(static_cast<unsigned>(width))) {
    Machine& machine = *Machine::current;
    machine.fault(Kind::kDivergentWarp, site.line, machine.here() + ": a shuffle of width " + std::to_string(width));
    machine.abandon_block();
  }
  Collective call{
      .name = "shuffle", .mask = mask, .site = site, .complete = &complete_shuffle, .value = bits, .argument = argument};
  call.detail = (static_cast<std::uint32_t>(kind) << 8) | static_cast<std::uint32_t>(width);
  call.in_words[0] = static_cast<std::uint32_t>(width);
  call.in_words[1] = static_cast<std::uint32_t>(kind);
  return Machine::current->collective(call);
}

std::uint32_t vote(Vote kind, std::uint32_t mask, int value, Site site) {
  const auto argument = static_cast<std::uint32_t>(kind);
  Collective call{.name = "vote", .detail = argument, .mask = mask, .site = site, .complete = &complete_vote};
  call.value = value != 0 ? 1 : 0;
  call.argument = argument;
  return static_cast<std::uint32_t>(Machine::current->collective(call));
}

std::uint32_t reduce(Reduce kind, std::uint32_t mask, std::uint32_t value, Site site) {
  const auto argument = static_cast<std::uint32_t>(kind);
  Collective call{.name = "reduce", .detail = argument, .mask = mask, .site = site, .complete = &complete_reduce};
  call.value = value;
  call.argument = argument;
  return static_cast<std::uint32_t>(Machine::current->collective(call));
}

void touch_atomic(const void* pointer, std::size_t bytes) {
  if (Machine::running == nullptr) return;
  Machine::current->access(reinterpret_cast<std::uintptr_t>(pointer), bytes, Access::kAtomic,
                           reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)), true);
}

std::size_t shared_bytes_limit() { return Machine::current == nullptr ? 0 : Machine::current->settings.shared_limit; }

void run(const char* op, dim3 grid, dim3 block, std::size_t shared_bytes, const void* const* arguments, const std::size_t* sizes,
         std::size_t num_arguments, void (*call)(const void*), const void* context, std::size_t context_bytes) {
  if (Machine::current == nullptr) {
    std::fprintf(stderr, "%s: a kernel was launched without a simt::Device\n", op);
    std::abort();
  }
  Machine& machine = *Machine::current;
  const auto place = [](const void* data, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return Machine::Place{begin, begin + bytes};
  };
  machine.places = {place(context, context_bytes)};
  for (std::size_t i = 0; i < num_arguments; ++i) machine.places.push_back(place(arguments[i], sizes[i]));
  machine.run(op, grid, block, shared_bytes, call, context);
}

}  // namespace hetkv::simt
