// The 64-bit word of an object: pure bit layout and legal transitions. No atomics here (object_control.h has the only CAS).
//
//   63        44 43        24 23      8 7    3 2   0
//   | gen (20) | kids (20)  | pins(16)| flags| state|
//
#pragma once

#include <cstdint>
#include <string_view>

namespace hetkv {

enum class ObjectState : std::uint8_t { kAbsent = 0, kFilling = 1, kSealed = 2, kEvicting = 3, kBroken = 4 };

constexpr std::string_view state_name(ObjectState state) {
  switch (state) {
    case ObjectState::kAbsent:
      return "absent";
    case ObjectState::kFilling:
      return "filling";
    case ObjectState::kSealed:
      return "sealed";
    case ObjectState::kEvicting:
      return "evicting";
    case ObjectState::kBroken:
      return "broken";
  }
  return "?";
}

struct ObjectWord {
  static constexpr unsigned kStateBits = 3, kFlagBits = 5, kPinBits = 16, kKidBits = 20, kGenBits = 20;
  static constexpr unsigned kFlagShift = kStateBits, kPinShift = kFlagShift + kFlagBits, kKidShift = kPinShift + kPinBits,
                            kGenShift = kKidShift + kKidBits;
  static_assert(kGenShift + kGenBits == 64, "the bit budget of the object word");
  static constexpr std::uint64_t mask(unsigned bits) { return (std::uint64_t{1} << bits) - 1; }
  static constexpr std::uint32_t kMaxPins = (std::uint32_t{1} << kPinBits) - 1;
  static constexpr std::uint32_t kMaxKids = (std::uint32_t{1} << kKidBits) - 1;
  // Flags that an eviction leaves in the word of what was there, until the next fill.
  static constexpr std::uint32_t kLastingFlags = 0b11110;
  static constexpr std::uint32_t kMaxGen = (std::uint32_t{1} << kGenBits) - 1;

  std::uint64_t bits = 0;

  constexpr ObjectState state() const { return static_cast<ObjectState>(bits & mask(kStateBits)); }
  constexpr std::uint32_t flags() const { return static_cast<std::uint32_t>((bits >> kFlagShift) & mask(kFlagBits)); }
  constexpr std::uint32_t pins() const { return static_cast<std::uint32_t>((bits >> kPinShift) & mask(kPinBits)); }
  constexpr std::uint32_t kids() const { return static_cast<std::uint32_t>((bits >> kKidShift) & mask(kKidBits)); }
  constexpr std::uint32_t gen() const { return static_cast<std::uint32_t>(bits >> kGenShift); }
  friend constexpr bool operator==(ObjectWord, ObjectWord) = default;

  static constexpr ObjectWord make(ObjectState state, std::uint32_t flags, std::uint32_t pins, std::uint32_t kids,
                                   std::uint32_t gen) {
    return {static_cast<std::uint64_t>(state) | (std::uint64_t{flags} << kFlagShift) | (std::uint64_t{pins} << kPinShift) |
            (std::uint64_t{kids} << kKidShift) | (std::uint64_t{gen} << kGenShift)};
  }
  constexpr ObjectWord with_state(ObjectState s) const { return {(bits & ~mask(kStateBits)) | static_cast<std::uint64_t>(s)}; }
  constexpr ObjectWord with_flags(std::uint32_t f) const {
    return {(bits & ~(mask(kFlagBits) << kFlagShift)) | (std::uint64_t{f} << kFlagShift)};
  }
  constexpr ObjectWord add_pins(std::int32_t n) const {
    return {bits + (static_cast<std::uint64_t>(static_cast<std::int64_t>(n)) << kPinShift)};
  }
  constexpr ObjectWord add_kids(std::int32_t n) const {
    return {bits + (static_cast<std::uint64_t>(static_cast<std::int64_t>(n)) << kKidShift)};
  }
};
static_assert(sizeof(ObjectWord) == 8);

}  // namespace hetkv
