// SPDX-License-Identifier: Apache-2.0
// Errors as values. Spin throws no exceptions: a function that can fail because the caller or the
// world is wrong returns `Status` or `Result<T>`; both must be looked at.
//
// Thread: immutable value types; distinct objects may be used from distinct threads.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace spin {

// What kind of failure it was. The HTTP layer maps a code to a status (docs/serving.md), the
// command line to an exit code (docs/cli.md).
enum class StatusCode {
  kOk,
  kInvalidArgument,    // the caller passed something outside the documented range
  kCorrupt,            // a file's bytes contradict its format
  kUnsupported,        // well formed, but not something Spin runs
  kNotFound,           // a file, a model or a key does not exist
  kResourceExhausted,  // memory, pages or queue slots are used up; trying later may help
  kUnavailable,        // loading, draining or stopped
  kCancelled,          // the caller gave up
  kIoError,            // the operating system refused an operation
  kInternal,           // a fault of Spin's own; the request ends, the process does not
};

// Lower-case name of the code, e.g. "invalid_argument".
std::string_view status_code_name(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok

  // Requires: code != kOk. `message` says what was expected, what was found and where. It never
  // holds addresses, machine paths of the server, or text of another user.
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  // As above; `param` names the request field at fault (OpenAI's `error.param`).
  Status(StatusCode code, std::string message, std::string param)
      : code_(code), message_(std::move(message)), param_(std::move(param)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  const std::string& param() const { return param_; }

  // "invalid_argument: top_p must be in (0, 1], found 2"
  std::string to_string() const;

  // The same error with "`context`: " in front of the message.
  Status with_context(std::string_view context) const;

  friend bool operator==(const Status&, const Status&) = default;

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
  std::string param_;
};

inline Status ok_status() { return Status(); }

// A value or the reason why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  // Implicit on purpose: `return value;` and `return Status(...);` both read well.
  Result(T value) : value_(std::move(value)) {}         // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {  // NOLINT(google-explicit-constructor)
    if (status_.ok()) std::abort();                     // a Result without value needs an error
  }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  // Requires: ok().
  T& value() & { return checked(); }
  const T& value() const& { return const_cast<Result*>(this)->checked(); }
  T&& value() && { return std::move(checked()); }
  T& operator*() & { return checked(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(checked()); }
  T* operator->() { return &checked(); }
  const T* operator->() const { return &value(); }

 private:
  T& checked() {
    if (!value_.has_value()) std::abort();
    return *value_;
  }

  std::optional<T> value_;
  Status status_;
};

}  // namespace spin

// Returns from the enclosing function if `expr` (a Status) is an error.
#define SPIN_RETURN_IF_ERROR(expr)                     \
  do {                                                 \
    ::spin::Status spin_status_tmp = (expr);           \
    if (!spin_status_tmp.ok()) return spin_status_tmp; \
  } while (false)

#define SPIN_CONCAT_INNER(a, b) a##b
#define SPIN_CONCAT(a, b) SPIN_CONCAT_INNER(a, b)

// `SPIN_ASSIGN_OR_RETURN(auto x, f());` declares x or returns f's error.
#define SPIN_ASSIGN_OR_RETURN(decl, expr) \
  SPIN_ASSIGN_OR_RETURN_INNER(SPIN_CONCAT(spin_result_, __LINE__), decl, expr)
#define SPIN_ASSIGN_OR_RETURN_INNER(tmp, decl, expr) \
  auto tmp = (expr);                                 \
  if (!tmp.ok()) return tmp.status();                \
  decl = std::move(tmp).value()
