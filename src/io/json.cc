// SPDX-License-Identifier: Apache-2.0
// A SAX handler builds the tree, so that every limit is checked before the value it stops exists.
#include "io/json.h"

#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace spin::io {
namespace {

using Json = nlohmann::json;

// Estimated bytes of heap, rounded up: a slot in an array with its share of growth, a map node,
// a container's own header; strings beyond the small-string buffer add their length.
constexpr uint64_t kValueBytes = 2 * sizeof(Json);
constexpr uint64_t kKeyBytes = 32 + sizeof(std::string) + sizeof(Json) + 16;
constexpr uint64_t kContainerBytes = 64;
constexpr uint64_t kAllocationBytes = 16;
constexpr size_t kSmallString = 15;

class TreeBuilder {
 public:
  using number_integer_t = Json::number_integer_t;
  using number_unsigned_t = Json::number_unsigned_t;
  using number_float_t = Json::number_float_t;
  using string_t = Json::string_t;
  using binary_t = Json::binary_t;

  TreeBuilder(std::string_view text, const JsonLimits& limits) : text_(text), limits_(limits) {}

  // nlohmann's SAX interface: false stops the parser.
  bool null() { return add(Json(nullptr), 0); }
  bool boolean(bool value) { return add(Json(value), 0); }
  bool number_integer(number_integer_t value) { return add(Json(value), 0); }
  bool number_unsigned(number_unsigned_t value) { return add(Json(value), 0); }
  bool number_float(number_float_t value, const string_t& /*digits*/) {
    return add(Json(value), 0);
  }
  bool string(string_t& value) {
    const uint64_t extra = sizeof(string_t) + kAllocationBytes + string_bytes(value);
    return charge(extra) && add(Json(std::move(value)), 0);
  }
  bool binary(binary_t& /*value*/) { return false; }  // not in JSON text
  bool start_object(size_t /*size*/) { return open(Json::value_t::object); }
  bool start_array(size_t /*size*/) { return open(Json::value_t::array); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(string_t& name);
  bool parse_error(size_t position, const std::string& last_token, const Json::exception& error);

  Status status() const { return status_; }
  Json take() { return std::move(root_); }

 private:
  static uint64_t string_bytes(const string_t& text) {
    return text.size() <= kSmallString ? 0 : text.size() + kAllocationBytes;
  }

  bool fail(StatusCode code, std::string message) {
    if (status_.ok()) status_ = Status(code, std::move(message));
    return false;
  }

  bool charge(uint64_t bytes) {
    memory_ += bytes;  // far below 2^64: each call adds little more than the text has bytes
    if (memory_ <= limits_.max_memory_bytes) return true;
    return fail(StatusCode::kResourceExhausted,
                fmt::format("JSON: expected a text that takes at most {} bytes as a tree, found "
                            "more after {} values",
                            limits_.max_memory_bytes, values_));
  }

  bool count_value() {
    if (++values_ <= limits_.max_values) return true;
    return fail(StatusCode::kResourceExhausted,
                fmt::format("JSON: expected at most {} values, found more", limits_.max_values));
  }

  // Puts `value` where the parser stands. Returns where it went; null after an error.
  Json* place(Json value, uint64_t extra_bytes) {
    if (!count_value() || !charge(kValueBytes + extra_bytes)) return nullptr;
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (auto* array = stack_.back()->get_ptr<Json::array_t*>()) {
      array->push_back(std::move(value));
      return &array->back();
    }
    *member_ = std::move(value);
    return member_;
  }

  bool add(Json value, uint64_t extra_bytes) {
    return place(std::move(value), extra_bytes) != nullptr;
  }

  bool open(Json::value_t kind) {
    if (stack_.size() >= limits_.max_depth) {
      return fail(StatusCode::kResourceExhausted,
                  fmt::format("JSON: expected at most {} nested arrays and objects, found more",
                              limits_.max_depth));
    }
    // Elements of a container do not move while a container inside it is open.
    Json* placed = place(Json(kind), kContainerBytes);
    if (placed == nullptr) return false;
    stack_.push_back(placed);
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  std::string_view text_;
  const JsonLimits& limits_;
  Json root_;
  std::vector<Json*> stack_;  // open containers, outermost first
  Json* member_ = nullptr;    // where the value of the last key goes
  uint64_t values_ = 0;
  uint64_t memory_ = 0;
  Status status_;
};

bool TreeBuilder::key(string_t& name) {
  if (!count_value() || !charge(kKeyBytes + string_bytes(name))) return false;
  auto& object = *stack_.back()->get_ptr<Json::object_t*>();
  const auto [place, inserted] = object.emplace(std::move(name), nullptr);
  if (!inserted) {
    return fail(StatusCode::kInvalidArgument,
                fmt::format("JSON: expected each key of an object once, found one twice (object at "
                            "depth {}, value {})",
                            stack_.size(), values_));
  }
  member_ = &place->second;
  return true;
}

bool TreeBuilder::parse_error(size_t position,
                              const std::string& /*last_token*/,
                              const Json::exception& error) {
  constexpr int kNumberOutOfRange = 406;
  if (error.id == kNumberOutOfRange) {
    return fail(StatusCode::kInvalidArgument,
                fmt::format("JSON: expected a number that a finite double holds, found a larger "
                            "one before byte {}",
                            position));
  }
  // `position` counts the bytes read, the offending one included. One byte is shown, no more: the
  // text may be someone's prompt.
  if (position == 0 || position > text_.size()) {
    return fail(
        StatusCode::kInvalidArgument,
        fmt::format("JSON: expected more, found the end of the text at byte {}", text_.size()));
  }
  const auto byte = static_cast<unsigned char>(text_[position - 1]);
  const bool printable = byte > 0x20 && byte < 0x7F;
  return fail(StatusCode::kInvalidArgument,
              fmt::format("JSON: expected well-formed text, found {} at byte {}",
                          printable ? fmt::format("'{}'", static_cast<char>(byte))
                                    : fmt::format("0x{:02X}", byte),
                          position - 1));
}

}  // namespace

Result<nlohmann::json> parse_json(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return Status(
        StatusCode::kResourceExhausted,
        fmt::format("JSON: expected at most {} bytes, found {}", limits.max_bytes, text.size()));
  }
  // The library skips a byte order mark and takes a NUL byte for the end of the text.
  if (text.starts_with("\xEF\xBB\xBF")) {
    return Status(StatusCode::kInvalidArgument,
                  "JSON: expected a value, found a byte order mark at byte 0");
  }
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("JSON: expected well-formed text, found 0x00 at byte {}", nul));
  }
  try {
    TreeBuilder builder(text, limits);
    const bool done = Json::sax_parse(text.data(), text.data() + text.size(), &builder,
                                      nlohmann::detail::input_format_t::json, /*strict=*/true);
    if (done) return builder.take();
    return builder.status().ok()
               ? Status(StatusCode::kInvalidArgument, "JSON: expected well-formed text")
               : builder.status();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted, "JSON: no memory for the text");
  } catch (const std::exception&) {  // the library's text may quote the input
    return Status(StatusCode::kInvalidArgument, "JSON: expected well-formed text");
  }
}

}  // namespace spin::io
