// Stacks for the threads of a block, and switching between them: six instructions on x86-64, ucontext elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace hetkv::simt {

// A saved place to continue. Owns nothing; its stack belongs to FiberStacks.
struct Fiber {
#ifdef __x86_64__
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

// Leaves `from`, continues `to`. Returns when someone continues `from`.
void switch_fiber(Fiber& from, Fiber& to);

// Owns the stacks, each with a guard page below it. They are reused from block to block.
class FiberStacks {
 public:
  static constexpr std::size_t kBytes = 64 * 1024;
  FiberStacks() = default;
  ~FiberStacks();
  FiberStacks(const FiberStacks&) = delete;
  FiberStacks& operator=(const FiberStacks&) = delete;

  void grow(std::size_t count);                                             // at least this many stacks
  void prepare(std::size_t number, Fiber& fiber, void (*entry)());          // `entry` never returns
  std::uintptr_t low(std::size_t number) const { return stacks_[number]; }  // the lowest usable byte

 private:
  std::vector<std::uintptr_t> stacks_;
};

}  // namespace hetkv::simt
