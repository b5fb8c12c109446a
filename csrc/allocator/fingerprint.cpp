#include "allocator/fingerprint.h"

// The hash is compiled in, so that neither the module nor a wheel needs libxxhash at run time.
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace hetkv {

namespace {

// One frame: length of the tag, tag, type of the value, length of the value, value. Lengths are 8 bytes, lowest first, on every
// machine, so the framed bytes are the same everywhere and can be parsed in one way only.
void append_u64(std::string& out, std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) out.push_back(static_cast<char>((value >> shift) & 0xff));
}

void append_frame(std::string& out, std::string_view tag, char type, std::string_view value) {
  append_u64(out, tag.size());
  out.append(tag);
  out.push_back(type);
  append_u64(out, value.size());
  out.append(value);
}

}  // namespace

std::string Fingerprint::hex() const {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string text(32, '0');
  for (std::size_t i = 0; i < 16; ++i) {
    text[15 - i] = digits[(high >> (4 * i)) & 0xf];
    text[31 - i] = digits[(low >> (4 * i)) & 0xf];
  }
  return text;
}

FingerprintBuilder::FingerprintBuilder(std::string_view domain) { append_frame(bytes_, "", 'd', domain); }

FingerprintBuilder& FingerprintBuilder::add(std::string_view tag, std::string_view value) {
  append_frame(bytes_, tag, 's', value);
  return *this;
}

FingerprintBuilder& FingerprintBuilder::add(std::string_view tag, std::uint64_t value) {
  std::string encoded;
  append_u64(encoded, value);
  append_frame(bytes_, tag, 'u', encoded);
  return *this;
}

Fingerprint FingerprintBuilder::finish() const {
  const XXH128_hash_t hash = XXH3_128bits(bytes_.data(), bytes_.size());
  return Fingerprint{hash.high64, hash.low64};
}

}  // namespace hetkv
