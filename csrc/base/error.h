// Exceptions for callers' mistakes. Each carries its fields, so that Python can show them as attributes.
// Everything derives from the std family: pybind11 and torch's stable ABI then raise the matching Python types unaided.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace hetkv {

// A bad argument: names the argument, the value that came and what was expected.
class ArgumentError : public std::invalid_argument {
 public:
  ArgumentError(std::string argument_name, std::string value_seen, std::string what_expected)
      : std::invalid_argument(argument_name + " = " + value_seen + ": expected " + what_expected),
        argument(std::move(argument_name)), value(std::move(value_seen)), expected(std::move(what_expected)) {}
  std::string argument, value, expected;
};

// A layout that cannot be built, or does not fit what it is used with.
class LayoutError : public std::invalid_argument {
 public:
  LayoutError(std::string group_name, std::string field_name, const std::string& why)
      : std::invalid_argument("layout" + (group_name.empty() ? "" : " group '" + group_name + "'") +
                              (field_name.empty() ? "" : " " + field_name) + ": " + why),
        group(std::move(group_name)), field(std::move(field_name)) {}
  std::string group, field;
};

// An operation that the kind x operation table forbids. Raised before anything is touched.
class RouteError : public std::invalid_argument {
 public:
  RouteError(std::string on_kind, std::string of_operation)
      : std::invalid_argument("operation '" + of_operation + "' is not legal on kind '" + on_kind + "'"),
        kind(std::move(on_kind)), operation(std::move(of_operation)) {}
  std::string kind, operation;
};

// A refused admission or growth. `retryable` is false for what can never fit (need > cap), true when memory is short now.
class AdmissionError : public std::runtime_error {
 public:
  AdmissionError(std::string short_kind, std::uint64_t need_bytes, std::uint64_t cap_bytes, bool may_retry,
                 const std::string& why)
      : std::runtime_error(why), kind(std::move(short_kind)), need(need_bytes), cap(cap_bytes), retryable(may_retry) {}
  std::string kind;         // the kind (or "namespace", "pin_prefix") that was short
  std::uint64_t need, cap;  // bytes
  bool retryable;
};

// Rows or a step of another weights version than the sequence's.
class StaleVersionError : public std::runtime_error {
 public:
  StaleVersionError(std::string have_version, std::string running_version)
      : std::runtime_error("sequence belongs to version '" + have_version + "', running is '" + running_version + "'"),
        have(std::move(have_version)), running(std::move(running_version)) {}
  std::string have, running;
};

// A publication whose bytes do not hold the claimed position.
class PositionError : public std::invalid_argument {
 public:
  PositionError(std::string of_group, std::int64_t claimed_position, std::int64_t actual_position)
      : std::invalid_argument("group '" + of_group + "': state of position " + std::to_string(actual_position) +
                              " cannot be published as the state at " + std::to_string(claimed_position)),
        group(std::move(of_group)), claimed(claimed_position), actual(actual_position) {}
  std::string group;
  std::int64_t claimed, actual;
};

// A sequence was used while what it resumes from is still being loaded.
class PendingError : public std::runtime_error {
 public:
  PendingError() : std::runtime_error("the sequence waits for a restore: wait for it, await it, or poll `ready`") {}
};

// Blocks that changed hands between kinds were published or used before their clearing was confirmed.
class NotClearedError : public std::runtime_error {
 public:
  explicit NotClearedError(std::uint64_t open_ranges)
      : std::runtime_error(std::to_string(open_ranges) + " range(s) handed out for clearing were not confirmed"),
        ranges(open_ranges) {}
  std::uint64_t ranges;
};

}  // namespace hetkv
