#include "allocator/disk/bundle_format.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/check.h"
#include "base/checksum.h"

namespace hetkv {
namespace {

constexpr std::array<char, 8> kMagic{'h', 'e', 't', 'k', 'v', '\r', '\n', '\x1a'};
constexpr std::size_t kChecksumAt = 16;
constexpr std::size_t kFixedBytes = 176, kSectionBytes = 48;
constexpr std::uint32_t kMostSections = kMaxGroups, kMostTokens = 1U << 20;

class Writer {
 public:
  explicit Writer(std::byte* at) : at_(at) {}
  void u32(std::uint32_t v) {
    for (int i = 0; i < 4; ++i) *at_++ = static_cast<std::byte>(v >> 8 * i);
  }
  void u64(std::uint64_t v) {
    u32(static_cast<std::uint32_t>(v));
    u32(static_cast<std::uint32_t>(v >> 32));
  }
  void print(const Fingerprint& f) {
    u64(f.high);
    u64(f.low);
  }
  void key(const Key128& k) {
    u64(k.high);
    u64(k.low);
  }

 private:
  std::byte* at_;
};

class Reader {
 public:
  explicit Reader(const std::byte* at) : at_(at) {}
  std::uint32_t u32() {
    std::uint32_t v = 0;
    for (int i = 0; i < 4; ++i) v |= std::to_integer<std::uint32_t>(*at_++) << 8 * i;
    return v;
  }
  std::uint64_t u64() {
    const std::uint64_t low = u32();
    return low | std::uint64_t{u32()} << 32;
  }
  Fingerprint print() {
    const std::uint64_t high = u64();
    return {high, u64()};
  }
  Key128 key() {
    const std::uint64_t high = u64();
    return {high, u64()};
  }

 private:
  const std::byte* at_;
};

// Of the whole header, its own field taken as zeros.
std::uint64_t header_checksum(std::span<const std::byte> header) {
  HETKV_CHECK(header.size() >= kFixedBytes, "a header without its fixed part");
  std::vector<std::byte> copy(header.begin(), header.end());
  std::memset(copy.data() + kChecksumAt, 0, 8);
  return checksum(copy.data(), copy.size());
}

}  // namespace

std::size_t header_bytes(std::size_t block_size, std::size_t sections) {
  return whole_pages(kFixedBytes + sections * kSectionBytes + block_size * sizeof(std::int32_t));
}

void encode_header(const BundleHeader& header, std::byte* to) {
  const std::size_t bytes = header_bytes(header.meta.tokens.size(), header.sections.size());
  std::memset(to, 0, bytes);
  std::memcpy(to, kMagic.data(), kMagic.size());
  Writer first(to + 8);
  first.u32(kBundleFormat);
  first.u32(static_cast<std::uint32_t>(bytes));
  Writer w(to + 24);
  w.u64(header.file_bytes);
  w.u64(header.publisher);
  w.print(header.id.version.layout);
  w.print(header.id.version.abi);
  w.print(header.id.version.model);
  w.key(header.id.key);
  w.key(header.meta.parent);
  w.u32(header.id.depth);
  w.u32(header.id.part);
  w.u32(static_cast<std::uint32_t>(header.meta.tokens.size()));
  w.u32(static_cast<std::uint32_t>(header.sections.size()));
  w.u32(header.meta.canonical ? 1 : 0);
  w.u32(header.meta.gap_tokens);
  w.u32(header.id.space);
  w = Writer(to + kFixedBytes);
  for (const BundleSection& s : header.sections) {
    w.u32(s.group);
    w.u32(static_cast<std::uint32_t>(s.codec));
    w.u64(s.offset);
    w.u64(s.stored_bytes);
    w.u64(s.raw_bytes);
    w.u64(s.stored_checksum);
    w.u64(s.raw_checksum);
  }
  for (const std::int32_t token : header.meta.tokens) w.u32(static_cast<std::uint32_t>(token));
  Writer(to + kChecksumAt).u64(header_checksum({to, bytes}));
}

HeaderFault decode_header(std::span<const std::byte> bytes, std::uint64_t file_bytes, BundleHeader* header) {
  if (bytes.size() < kMagic.size() || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) return HeaderFault::kForeign;
  if (bytes.size() < kFixedBytes) return HeaderFault::kTooShort;
  Reader first(bytes.data() + 8);
  const std::uint32_t format = first.u32(), own_bytes = first.u32();
  if (own_bytes < kBundlePage || own_bytes % kBundlePage != 0) return HeaderFault::kDamaged;
  if (own_bytes > bytes.size()) return HeaderFault::kTooShort;
  // A later format keeps the magic, the format number, its size and its checksum where they are.
  if (Reader(bytes.data() + kChecksumAt).u64() != header_checksum(bytes.first(own_bytes))) return HeaderFault::kDamaged;
  if (format > kBundleFormat) return HeaderFault::kNewer;
  if (format != kBundleFormat) return HeaderFault::kDamaged;
  Reader r(bytes.data() + 24);
  header->file_bytes = r.u64();
  header->publisher = r.u64();
  header->id.version.layout = r.print();
  header->id.version.abi = r.print();
  header->id.version.model = r.print();
  header->id.key = r.key();
  header->meta.parent = r.key();
  header->id.depth = r.u32();
  const std::uint32_t part = r.u32(), tokens = r.u32(), sections = r.u32(), flags = r.u32();
  header->meta.gap_tokens = r.u32();
  header->id.space = r.u32();
  if (part > 0xFF || tokens > kMostTokens || sections > kMostSections || header->id.depth == 0 ||
      own_bytes != header_bytes(tokens, sections) || flags > 1)
    return HeaderFault::kDamaged;
  if (header->file_bytes != file_bytes) return HeaderFault::kTooShort;
  header->id.part = static_cast<std::uint8_t>(part);
  header->meta.canonical = flags == 1;
  r = Reader(bytes.data() + kFixedBytes);
  std::uint64_t end = own_bytes;
  header->sections.clear();
  for (std::uint32_t i = 0; i < sections; ++i) {
    BundleSection s;
    const std::uint32_t group = r.u32(), codec = r.u32();
    s.offset = r.u64();
    s.stored_bytes = r.u64();
    s.raw_bytes = r.u64();
    s.stored_checksum = r.u64();
    s.raw_checksum = r.u64();
    if (group >= kMaxGroups || codec > 1 || s.offset != end || s.stored_bytes > file_bytes - end) return HeaderFault::kDamaged;
    s.group = static_cast<GroupId>(group);
    s.codec = static_cast<Codec>(codec);
    end += whole_pages(s.stored_bytes);
    header->sections.push_back(s);
  }
  if (end != file_bytes) return HeaderFault::kDamaged;
  header->meta.tokens.resize(tokens);
  for (std::int32_t& token : header->meta.tokens) token = static_cast<std::int32_t>(r.u32());
  return HeaderFault::kNone;
}

}  // namespace hetkv
