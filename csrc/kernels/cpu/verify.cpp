#include "kernels/verify.h"

#include <cstring>

#include "base/checksum.h"
#include "kernels/cpu/pick_level.h"
#include "kernels/paged_rows.h"

namespace hetkv {
namespace {

bool all_zero(const std::byte* data, std::int64_t count) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    if (data[i] != std::byte{0}) return false;
  }
  return true;
}

// Whether no value of `bits` wide words has all bits of `exponent` set.
template <typename Word>
bool all_finite(const std::byte* data, std::int64_t bytes, Word exponent) noexcept {
  bool finite = true;
  for (std::int64_t i = 0; i + static_cast<std::int64_t>(sizeof(Word)) <= bytes; i += static_cast<std::int64_t>(sizeof(Word))) {
    Word word = 0;
    std::memcpy(&word, data + i, sizeof word);
    finite = finite && (word & exponent) != exponent;
  }
  return finite;
}

bool all_finite(const std::byte* data, std::int64_t bytes, FiniteType type) noexcept {
  switch (type) {
    case FiniteType::kFloat32:
      return all_finite<std::uint32_t>(data, bytes, 0x7f800000u);
    case FiniteType::kFloat16:
      return all_finite<std::uint16_t>(data, bytes, 0x7c00u);
    case FiniteType::kBFloat16:
      return all_finite<std::uint16_t>(data, bytes, 0x7f80u);
    case FiniteType::kE4m3:
      return all_finite<std::uint8_t>(data, bytes, 0x7fu);  // only the NaN codes
  }
  return true;
}

std::int32_t status_of(const VerifyParams& params, std::int64_t index) noexcept {
  const std::int64_t offset = std::int64_t{params.blocks[index]} << kBlockOffsetShift;
  if (offset < 0 || offset > params.arena_bytes - params.block_bytes) return kBlockOutside;
  const std::byte* const block = params.arena + offset;
  std::int32_t status = 0;
  if (reinterpret_cast<std::uintptr_t>(block) % static_cast<std::uintptr_t>(params.base_alignment) != 0)
    status |= kBlockMisaligned;
  if (params.block_bytes % params.stride_alignment != 0) status |= kBlockStride;
  for (std::int64_t r = 0; r < params.num_zero_ranges; ++r) {
    const std::int64_t begin = params.zero_ranges[2 * r], end = params.zero_ranges[2 * r + 1];
    if (!all_zero(block + begin, end - begin)) status |= kBlockPadding;
  }
  if (params.checksums != nullptr) {
    const std::uint64_t found = checksum_cpu(block, static_cast<std::size_t>(params.block_bytes));
    if (found != static_cast<std::uint64_t>(params.checksums[index])) status |= kBlockChecksum;
  }
  for (std::int64_t r = 0; r < params.num_finite_ranges; ++r) {
    const std::int64_t* const range = params.finite_ranges + 3 * r;
    if (!all_finite(block + range[0], range[1] - range[0], static_cast<FiniteType>(range[2]))) status |= kBlockNotFinite;
  }
  return status;
}

}  // namespace

std::uint64_t checksum_cpu(const std::byte* data, std::size_t length) noexcept {
  const auto sum = pick_level(portable::checksum_segments, avx2::checksum_segments, avx512::checksum_segments)(data, length, 0);
  return checksum_finish(sum, length);
}

void checksum_blocks_cpu(const ChecksumParams& params, std::int64_t begin, std::int64_t end) noexcept {
  for (std::int64_t i = begin; i < end; ++i) {
    const std::byte* const block = params.arena + (std::int64_t{params.blocks[i]} << kBlockOffsetShift);
    params.checksums[i] = static_cast<std::int64_t>(checksum_cpu(block, static_cast<std::size_t>(params.block_bytes)));
  }
}

void verify_blocks_cpu(const VerifyParams& params, std::int64_t begin, std::int64_t end) noexcept {
  for (std::int64_t i = begin; i < end; ++i) params.status[i] = status_of(params, i);
}

}  // namespace hetkv
