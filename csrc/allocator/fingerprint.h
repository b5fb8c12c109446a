// 128-bit fingerprints of facts, as tagged and length-framed fields: ("salt", "x") and ("adapter", "x") can never collide,
// and neither can ("a", "bc") and ("ab", "c").
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <string_view>

namespace hetkv {

struct Fingerprint {
  std::uint64_t high = 0, low = 0;
  auto operator<=>(const Fingerprint&) const = default;
  std::string hex() const;  // 32 lower-case digits
};

// Builds a fingerprint field by field, in order. Not thread-safe; allocates.
class FingerprintBuilder {
 public:
  explicit FingerprintBuilder(std::string_view domain);  // e.g. "hetkv.layout.1"
  FingerprintBuilder& add(std::string_view tag, std::string_view value);
  FingerprintBuilder& add(std::string_view tag, std::uint64_t value);
  Fingerprint finish() const;
  const std::string& framed() const { return bytes_; }  // the framed bytes, for exact comparison

 private:
  std::string bytes_;
};

}  // namespace hetkv
