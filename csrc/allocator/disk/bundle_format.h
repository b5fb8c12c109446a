// The bytes of a bundle: one persisted object, self-describing. docs/bundle-format.md is the specification; this is its code.
//
// A bundle is a header of whole pages, then one section per group, each beginning on a page. All numbers are little-endian. Nothing here
// touches a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "allocator/fingerprint.h"
#include "allocator/layout.h"
#include "base/hash.h"

namespace hetkv {

inline constexpr std::size_t kBundlePage = 4096;
inline constexpr std::uint32_t kBundleFormat = 1;

enum class Codec : std::uint8_t { kNone = 0, kZstd = 1 };

struct VersionPrints {
  Fingerprint layout, abi, model;
  friend bool operator==(const VersionPrints&, const VersionPrints&) = default;
};

// Which object of which prefix in which version.
struct BundleId {
  Key128 key;  // of the prefix that ends with its block
  VersionPrints version;
  std::uint32_t space = 0;   // tag of the namespace instance, so that all of it can be taken away
  std::uint8_t part = 0xFF;  // kHistorySet, or a point set
  std::uint32_t depth = 0;   // in blocks, >= 1
};

struct BundleMeta {
  Key128 parent;                     // key of the prefix one block shorter; zeros at depth 1
  std::vector<std::int32_t> tokens;  // of its block
  bool canonical = false;
  std::uint32_t gap_tokens = 0;  // points: to the next shallower checkpoint
};

struct BundleSection {
  GroupId group = 0;
  Codec codec = Codec::kNone;
  std::uint64_t offset = 0;        // from the start of the file; a multiple of kBundlePage
  std::uint64_t stored_bytes = 0;  // in the file
  std::uint64_t raw_bytes = 0;     // of the block
  std::uint64_t stored_checksum = 0, raw_checksum = 0;
};

struct BundleHeader {
  BundleId id;
  BundleMeta meta;
  std::uint64_t publisher = 0;   // of the process that wrote it: sections of one bundle come from one
  std::uint64_t file_bytes = 0;  // a multiple of kBundlePage
  std::vector<BundleSection> sections;
};

constexpr std::uint64_t whole_pages(std::uint64_t bytes) { return (bytes + kBundlePage - 1) / kBundlePage * kBundlePage; }

// Bytes of the header of a bundle: whole pages.
std::size_t header_bytes(std::size_t block_size, std::size_t sections);

// Writes header_bytes() bytes.
void encode_header(const BundleHeader& header, std::byte* to);

enum class HeaderFault : std::uint8_t {
  kNone,
  kTooShort,  // fewer bytes than the header says, or than a header has
  kForeign,   // no bundle
  kNewer,     // a later format
  kDamaged,   // the checksum, or a number that cannot be
};
// Reads a header from the first bytes of a file of `file_bytes` bytes. Everything that is used later is checked here: sizes, offsets,
// that sections lie inside the file and do not overlap. On a fault `header` means nothing.
HeaderFault decode_header(std::span<const std::byte> bytes, std::uint64_t file_bytes, BundleHeader* header);

}  // namespace hetkv
