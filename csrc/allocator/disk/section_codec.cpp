#include "allocator/disk/section_codec.h"

#ifdef HETKV_ZSTD
#include <zstd.h>
#endif

namespace hetkv {

#ifdef HETKV_ZSTD

bool zstd_available() { return true; }

bool zstd_compress(std::span<const std::byte> raw, std::vector<std::byte>& out) {
  constexpr int kLevel = 1;  // rows of a cache hardly shrink further, and restores wait for it
  out.resize(ZSTD_compressBound(raw.size()));
  const std::size_t bytes = ZSTD_compress(out.data(), out.size(), raw.data(), raw.size(), kLevel);
  if (ZSTD_isError(bytes) != 0 || bytes >= raw.size()) return false;
  out.resize(bytes);
  return true;
}

bool zstd_decompress(std::span<const std::byte> stored, std::span<std::byte> raw) {
  return ZSTD_decompress(raw.data(), raw.size(), stored.data(), stored.size()) == raw.size();
}

#else

bool zstd_available() { return false; }
bool zstd_compress(std::span<const std::byte>, std::vector<std::byte>&) { return false; }
bool zstd_decompress(std::span<const std::byte>, std::span<std::byte>) { return false; }

#endif

}  // namespace hetkv
