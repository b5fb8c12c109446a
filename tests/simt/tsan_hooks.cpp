// The functions that the compiler calls on every load and store of a source compiled with -fsanitize=thread. No sanitizer is linked.
#include <cstring>

#include "simt/machine.h"

namespace {

using hetkv::simt::Access;
using hetkv::simt::Machine;

inline void note(const void* pointer, std::size_t bytes, Access access, void* code, bool must_align) {
  if (Machine::running == nullptr) return;  // host code of the same source
  Machine::current->access(reinterpret_cast<std::uintptr_t>(pointer), bytes, access, reinterpret_cast<std::uintptr_t>(code),
                           must_align);
}

}  // namespace

#define HETKV_HOOK(bytes) \
  void __tsan_read##bytes(void* p) { note(p, bytes, Access::kRead, __builtin_return_address(0), true); } \
  void __tsan_write##bytes(void* p) { note(p, bytes, Access::kWrite, __builtin_return_address(0), true); } \
  void __tsan_unaligned_read##bytes(void* p) { note(p, bytes, Access::kRead, __builtin_return_address(0), false); } \
  void __tsan_unaligned_write##bytes(void* p) { note(p, bytes, Access::kWrite, __builtin_return_address(0), false); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
HETKV_HOOK(1)
HETKV_HOOK(2)
HETKV_HOOK(4)
HETKV_HOOK(8)
HETKV_HOOK(16)
void __tsan_read_range(void* p, std::size_t bytes) { note(p, bytes, Access::kRead, __builtin_return_address(0), false); }
void __tsan_write_range(void* p, std::size_t bytes) { note(p, bytes, Access::kWrite, __builtin_return_address(0), false); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void* hetkv_simt_memcpy(void* to, const void* from, std::size_t bytes) noexcept {
  note(from, bytes, Access::kRead, __builtin_return_address(0), false);
  note(to, bytes, Access::kWrite, __builtin_return_address(0), false);
  return std::memcpy(to, from, bytes);
}
void* hetkv_simt_memmove(void* to, const void* from, std::size_t bytes) noexcept {
  note(from, bytes, Access::kRead, __builtin_return_address(0), false);
  note(to, bytes, Access::kWrite, __builtin_return_address(0), false);
  return std::memmove(to, from, bytes);
}
void* hetkv_simt_memset(void* to, int value, std::size_t bytes) noexcept {
  note(to, bytes, Access::kWrite, __builtin_return_address(0), false);
  return std::memset(to, value, bytes);
}
}
