// Invariant checks. A broken invariant is a bug in hetkv, never a caller's mistake: it aborts with file, line and the rule.
// A caller's mistake is an exception (error.h); an expected outcome is a return value.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace hetkv {

[[noreturn]] inline void invariant_failed(const char* file, int line, const char* rule, const char* why) {
  std::fprintf(stderr, "%s:%d: hetkv invariant broken: %s (%s)\n", file, line, rule, why);
  std::abort();
}

}  // namespace hetkv

// Always on: cheap checks on cold paths and on every ownership hand-over.
#define HETKV_CHECK(rule, why) \
  do { \
    if (!(rule)) [[unlikely]] \
      ::hetkv::invariant_failed(__FILE__, __LINE__, #rule, why); \
  } while (false)

// Debug and sanitizer builds only: checks inside hot loops.
#ifdef NDEBUG
#define HETKV_DCHECK(rule, why) static_cast<void>(0)
#else
#define HETKV_DCHECK(rule, why) HETKV_CHECK(rule, why)
#endif
