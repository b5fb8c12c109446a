// Compression of a section: zstd where it was built in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hetkv {

bool zstd_available();
// Compresses; false if that would not make it smaller, or if zstd is not built in. Thread-safe; allocates.
bool zstd_compress(std::span<const std::byte> raw, std::vector<std::byte>& out);
// Exactly raw.size() bytes, or false. Thread-safe.
bool zstd_decompress(std::span<const std::byte> stored, std::span<std::byte> raw);

}  // namespace hetkv
