#include "simt/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#ifdef __x86_64__
// The callee-saved registers and the return address are on the stack; the stack pointer is all there is to keep.
asm(R"(
.pushsection .text
.p2align 4
.globl hetkv_simt_switch
.type hetkv_simt_switch, @function
hetkv_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size hetkv_simt_switch, .-hetkv_simt_switch
.popsection
)");
extern "C" void hetkv_simt_switch(void** save, void* load);
#endif

namespace hetkv::simt {

FiberStacks::~FiberStacks() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (const std::uintptr_t low : stacks_) munmap(reinterpret_cast<void*>(low - page), kBytes + page);
}

void FiberStacks::grow(std::size_t count) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  while (stacks_.size() < count) {
    void* const memory = mmap(nullptr, kBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mprotect(memory, page, PROT_NONE);
    stacks_.push_back(reinterpret_cast<std::uintptr_t>(memory) + page);
  }
}

#ifdef __x86_64__

void switch_fiber(Fiber& from, Fiber& to) { hetkv_simt_switch(&from.stack_pointer, to.stack_pointer); }

void FiberStacks::prepare(std::size_t number, Fiber& fiber, void (*entry)()) {
  // Staggered, so that the hot ends of the stacks do not share cache sets.
  const std::uintptr_t end = stacks_[number] + kBytes - (number % 31) * 128;
  auto* const top = reinterpret_cast<void**>(end - 64);
  top[6] = reinterpret_cast<void*>(entry);  // where `ret` goes; the stack is then as after a call
  top[7] = nullptr;
  for (int i = 0; i < 6; ++i) top[i] = nullptr;
  fiber.stack_pointer = top;
}

#else

void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }

void FiberStacks::prepare(std::size_t number, Fiber& fiber, void (*entry)()) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = reinterpret_cast<void*>(stacks_[number]);
  fiber.context.uc_stack.ss_size = kBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
}

#endif

}  // namespace hetkv::simt
