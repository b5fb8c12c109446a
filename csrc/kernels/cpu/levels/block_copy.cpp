#include "kernels/block_copy.h"

#include "kernels/cpu/levels/simd.h"

namespace hetkv::HETKV_LEVEL {
namespace {

constexpr std::size_t kPastCaches = 32 * 1024;  // bytes from which on the target is not worth a place in the caches

#if defined(__AVX512F__)
using Line = __m512i;
inline Line load_line(const std::byte* from) { return _mm512_loadu_si512(from); }
inline void stream_line(std::byte* to, Line line) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to), line); }
#elif defined(__AVX2__)
using Line = __m256i;
inline Line load_line(const std::byte* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
inline void stream_line(std::byte* to, Line line) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), line); }
#endif

}  // namespace

void copy_apart(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
#if defined(__AVX2__)
  constexpr std::size_t kAhead = 2048;
  if (bytes >= kPastCaches) {
    const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
    __builtin_memcpy(to, from, head);
    std::size_t done = head;
    for (; done + 64 <= bytes; done += 64) {
      __builtin_prefetch(from + done + kAhead);
      for (std::size_t part = 0; part < 64; part += sizeof(Line)) stream_line(to + done + part, load_line(from + done + part));
    }
    __builtin_memcpy(to + done, from + done, bytes - done);
    _mm_sfence();  // such stores are not ordered with others
    return;
  }
#endif
  __builtin_memcpy(to, from, bytes);
}

}  // namespace hetkv::HETKV_LEVEL
