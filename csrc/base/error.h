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
  ArgumentError(std::string argument, std::string value, std::string expected)
      : std::invalid_argument(argument + " = " + value + ": expected " + expected),
        argument(std::move(argument)), value(std::move(value)), expected(std::move(expected)) {}
  std::string argument, value, expected;
};

// A layout that cannot be built, or does not fit what it is used with.
class LayoutError : public std::invalid_argument {
 public:
  LayoutError(std::string group, std::string field, std::string why)
      : std::invalid_argument("layout" + (group.empty() ? "" : " group '" + group + "'") +
                              (field.empty() ? "" : " " + field) + ": " + why),
        group(std::move(group)), field(std::move(field)) {}
  std::string group, field;
};

// An operation that the kind x operation table forbids. Raised before anything is touched.
class RouteError : public std::invalid_argument {
 public:
  RouteError(std::string kind, std::string operation)
      : std::invalid_argument("operation '" + operation + "' is not legal on kind '" + kind + "'"),
        kind(std::move(kind)), operation(std::move(operation)) {}
  std::string kind, operation;
};

// A refused admission or growth. `retryable` is false for what can never fit (need > cap), true when memory is short now.
class AdmissionError : public std::runtime_error {
 public:
  AdmissionError(std::string kind, std::uint64_t need, std::uint64_t cap, bool retryable, const std::string& why)
      : std::runtime_error(why), kind(std::move(kind)), need(need), cap(cap), retryable(retryable) {}
  std::string kind;          // the kind (or "namespace", "pin_prefix") that was short
  std::uint64_t need, cap;   // bytes
  bool retryable;
};

// Rows or a step of another weights version than the sequence's.
class StaleVersionError : public std::runtime_error {
 public:
  StaleVersionError(std::string have, std::string running)
      : std::runtime_error("sequence belongs to version '" + have + "', running is '" + running + "'"),
        have(std::move(have)), running(std::move(running)) {}
  std::string have, running;
};

// A publication whose bytes do not hold the claimed position.
class PositionError : public std::invalid_argument {
 public:
  PositionError(std::string group, std::int64_t claimed, std::int64_t actual)
      : std::invalid_argument("group '" + group + "': state of position " + std::to_string(actual) +
                              " cannot be published as the state at " + std::to_string(claimed)),
        group(std::move(group)), claimed(claimed), actual(actual) {}
  std::string group;
  std::int64_t claimed, actual;
};

// Blocks that changed hands between kinds were published or used before their clearing was confirmed.
class NotClearedError : public std::runtime_error {
 public:
  explicit NotClearedError(std::uint64_t ranges)
      : std::runtime_error(std::to_string(ranges) + " range(s) handed out for clearing were not confirmed"), ranges(ranges) {}
  std::uint64_t ranges;
};

}  // namespace hetkv
