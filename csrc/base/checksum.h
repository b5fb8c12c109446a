// The one checksum of hetkv: what verify_blocks computes on CPU and device, and what persisted sections carry.
//
// Bytes are read as 64-bit little-endian words, the last one filled with zeros. Segments of 1024 words are cut into 64 lanes: word i of a
// segment goes to lane i mod 64. A lane starts from a seed of its own and takes each word by a bijection (xor, xorshift, multiply,
// rotate); the digest mixes the sum of all mixed lanes with the length. The sum has no order, so lanes and segments may be computed in
// any.
//
// What it promises: a change within one aligned 8-byte word is detected for certain. Unrelated contents have the same checksum with
// probability about 2^-64. Nothing is promised of chosen changes to several words: flipping bits 31 and 63 of a word and bit 31 of the
// next word of its lane, 512 bytes on, is never noticed. It is an integrity check against faults, not a signature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// The formulas run in kernels as well. Macros of kernels/host_device.h are out of reach down here.
#ifdef __CUDACC__
#define HETKV_CHECKSUM_FORMULA __host__ __device__ constexpr
#else
#define HETKV_CHECKSUM_FORMULA constexpr
#endif

namespace hetkv {

inline constexpr int kChecksumLanes = 64;
inline constexpr int kChecksumRounds = 16;
inline constexpr std::size_t kChecksumSegment = std::size_t{kChecksumLanes} * kChecksumRounds * 8;  // bytes
inline constexpr std::uint64_t kChecksumFactor = 0x9e3779b97f4a7c15u;

HETKV_CHECKSUM_FORMULA std::uint64_t checksum_mix(std::uint64_t x) {  // a bijection
  x ^= x >> 32;
  x *= 0xd6e8feb86659fd93u;
  x ^= x >> 29;
  x *= 0xa0761d6478bd642fu;
  return x ^ x >> 32;
}
HETKV_CHECKSUM_FORMULA std::uint64_t checksum_seed(std::uint64_t segment, std::uint64_t lane) {
  return checksum_mix(segment * kChecksumLanes + lane + 1);
}
HETKV_CHECKSUM_FORMULA std::uint64_t checksum_round(std::uint64_t lane, std::uint64_t word) {
  std::uint64_t x = lane ^ word;
  x ^= x >> 32;
  x *= kChecksumFactor;
  return x << 32 | x >> 32;
}
HETKV_CHECKSUM_FORMULA std::uint64_t checksum_finish(std::uint64_t sum, std::uint64_t length) {
  return checksum_mix(sum + checksum_mix(length));
}

// Sum of the mixed lanes of segment `segment`, which has `length` bytes here: kChecksumSegment, or fewer in the last one.
// Thread-safe, allocates nothing.
std::uint64_t checksum_segment(const std::byte* data, std::size_t length, std::uint64_t segment) noexcept;

// The checksum of `length` bytes. Thread-safe, allocates nothing; linear.
std::uint64_t checksum(const std::byte* data, std::size_t length) noexcept;

// Copies `length` bytes and returns their checksum: one pass through the caches. Thread-safe, allocates nothing; linear.
std::uint64_t checksum_copy(std::byte* to, const std::byte* from, std::size_t length) noexcept;

}  // namespace hetkv
