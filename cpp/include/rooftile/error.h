// SPDX-License-Identifier: Apache-2.0
// The one exception type of the library, and the check that throws it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace rooftile {

enum class ErrorKind {
  value,          // the caller passed a value that cannot be right (Python: ArgumentError, a ValueError)
  type,           // the caller passed the wrong type or dtype     (Python: ArgumentTypeError, a TypeError)
  not_supported,  // right, but not compiled or not implemented    (Python: NotSupportedError, a NotImplementedError)
  device,         // the device or its driver failed               (Python: DeviceError, a RuntimeError)
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <class... Parts>
[[noreturn]] void fail(ErrorKind kind, Parts&&... parts) {
  std::ostringstream text;
  (text << ... << std::forward<Parts>(parts));
  throw Error(kind, text.str());
}

}  // namespace rooftile

// ROOFTILE_CHECK(condition, parts...): throws a value error whose text is the parts put together.
// The text names the op and the argument, says what came and what is expected.
#define ROOFTILE_CHECK(condition, ...)                                             \
  do {                                                                             \
    if (!(condition)) ::rooftile::fail(::rooftile::ErrorKind::value, __VA_ARGS__); \
  } while (0)

// The same, with the kind of error given first.
#define ROOFTILE_CHECK_KIND(kind, condition, ...)                                 \
  do {                                                                            \
    if (!(condition)) ::rooftile::fail(::rooftile::ErrorKind::kind, __VA_ARGS__); \
  } while (0)
