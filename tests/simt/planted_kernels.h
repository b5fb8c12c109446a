// Launches of planted_kernels.cu.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hetkv::planted {

void reverse(const float* in, float* out, unsigned blocks, bool barrier);  // 128 per block
void write_after_read(float* out);                                         // [64]
void write_after_write(float* out);                                        // [64]
void bytes(std::uint32_t* out, bool early);                                // [16]
void warp_exchange(float* out, int how);                                   // [32]; __syncwarp, a shuffle, half masks, nothing
void uninitialised(float* out);                                            // [64]
void out_of_bounds(float* out, int index);
void read_back(float* out);  // [4]
void shared_out_of_bounds(float* out);
void misaligned(const float* in, float* out);
void divergent(float* out, int how);  // [64]
void block_write(float* out);
void block_read(float* out);
void atomics(int* out);  // [2]
// [64] rows of 16 bytes, in reverse order
void copy(std::byte* in, std::uint32_t* out, int source_bytes, int fault, std::size_t shared_bytes = 1024);
// d[16][16] = a[16][64] times b[16][64] transposed (kind 0 bf16, 2 f16), or a[16][0..15] times b[16][0..15] (kind 1, bf16)
void matmul(const std::uint16_t* a, const std::uint16_t* b, float* d, int kind, bool swizzled);
void fragment(const std::uint32_t* a, const std::uint32_t* b, float* c, int kind);  // [32][4], [32][2], [32][4]
void warp_calls(std::uint32_t* out);                                                // [8][32]
void e4m3(const float* in, std::uint8_t* by_integers, std::uint8_t* native, float* back, unsigned blocks);  // 256 per block

}  // namespace hetkv::planted
