// The layouts that are measured, with the group structure of real models.
#pragma once

#include <cstdint>
#include <string>

#include "allocator/layout.h"

namespace hetkv::bench {

// "full": one full-attention group. "full+window": and a sliding window of 128 tokens with blocks of the same bytes.
// "v4": DeepSeek-V4's seven groups (ratios 4 and 128, index, window 128, three tails). ArgumentError otherwise.
CacheLayout make_layout(const std::string& name, std::uint32_t block_size);

// Bytes of an arena in which `blocks` blocks of block_size tokens of history fit, and nothing else.
std::uint64_t history_bytes(const CacheLayout& layout, std::uint64_t blocks);

}  // namespace hetkv::bench
