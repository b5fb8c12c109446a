// XXH3-128 with a secret, compiled once per instruction set (hash_block_*.cpp); hash.cpp picks one at start.
#pragma once

#include <cstddef>

#include "base/hash.h"

namespace hetkv {

Key128 hash_block_baseline(const void* data, std::size_t bytes, const std::byte* secret, std::size_t secret_bytes);
Key128 hash_block_avx2(const void* data, std::size_t bytes, const std::byte* secret, std::size_t secret_bytes);
Key128 hash_block_avx512(const void* data, std::size_t bytes, const std::byte* secret, std::size_t secret_bytes);

}  // namespace hetkv
