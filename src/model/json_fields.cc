// SPDX-License-Identifier: Apache-2.0
#include "model/json_fields.h"

#include <utility>

#include <fmt/format.h>

#include "base/quote.h"

namespace spin::model {
namespace {

using nlohmann::json;

// What was found, for a message: scalars with their value, the rest by type.
std::string describe(const json& value) {
  if (value.is_string()) {
    return "the string " + base::quote_text(value.get_ref<const std::string&>());
  }
  if (value.is_boolean()) return value.get<bool>() ? "true" : "false";
  if (value.is_number_unsigned()) return fmt::to_string(value.get<uint64_t>());
  if (value.is_number_integer()) return fmt::to_string(value.get<int64_t>());
  if (value.is_number_float()) return fmt::to_string(value.get<double>());
  return value.is_array() ? "an array" : value.is_object() ? "an object" : "null";
}

}  // namespace

JsonFields::JsonFields(const json& object, std::string where)
    : object_(object), where_(std::move(where)) {
  if (!object.is_object()) {
    fail(StatusCode::kInvalidArgument, "expected an object, found " + describe(object));
  }
}

void JsonFields::fail(StatusCode code, std::string message) {
  if (status_.ok()) status_ = Status(code, where_ + ": " + std::move(message));
}

const json* JsonFields::find(std::string_view name) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(std::string(name));
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

std::optional<uint64_t> JsonFields::checked_integer(std::string_view name,
                                                    const json& value,
                                                    uint64_t low,
                                                    uint64_t high) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number >= low && number <= high) return number;
  }
  fail(StatusCode::kInvalidArgument, fmt::format("{} must be an integer in [{}, {}], found {}",
                                                 name, low, high, describe(value)));
  return std::nullopt;
}

std::optional<uint64_t> JsonFields::optional_integer(std::string_view name,
                                                     uint64_t low,
                                                     uint64_t high) {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  return checked_integer(name, *value, low, high);
}

uint64_t JsonFields::integer_or(std::string_view name,
                                uint64_t low,
                                uint64_t high,
                                uint64_t fallback) {
  return optional_integer(name, low, high).value_or(fallback);
}

uint64_t JsonFields::integer(std::string_view name, uint64_t low, uint64_t high) {
  if (!has(name)) {
    fail(StatusCode::kInvalidArgument,
         fmt::format("{} is missing; expected an integer in [{}, {}]", name, low, high));
  }
  return integer_or(name, low, high, low);
}

std::optional<double> JsonFields::optional_number(std::string_view name, double low, double high) {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number()) {
    const double number = value->get<double>();
    if (number >= low && number <= high) return number;
  }
  fail(StatusCode::kInvalidArgument,
       fmt::format("{} must be a number in [{}, {}], found {}", name, low, high, describe(*value)));
  return std::nullopt;
}

double JsonFields::number_or(std::string_view name, double low, double high, double fallback) {
  return optional_number(name, low, high).value_or(fallback);
}

double JsonFields::number(std::string_view name, double low, double high) {
  if (!has(name)) {
    fail(StatusCode::kInvalidArgument,
         fmt::format("{} is missing; expected a number in [{}, {}]", name, low, high));
  }
  return number_or(name, low, high, low);
}

std::optional<bool> JsonFields::optional_flag(std::string_view name) {
  const json* value = find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_boolean()) return value->get<bool>();
  fail(StatusCode::kInvalidArgument,
       fmt::format("{} must be true or false, found {}", name, describe(*value)));
  return std::nullopt;
}

bool JsonFields::flag_or(std::string_view name, bool fallback) {
  return optional_flag(name).value_or(fallback);
}

std::string JsonFields::text_or(std::string_view name, std::string_view fallback) {
  const json* value = find(name);
  if (value == nullptr) return std::string(fallback);
  if (value->is_string()) return value->get<std::string>();
  fail(StatusCode::kInvalidArgument,
       fmt::format("{} must be a string, found {}", name, describe(*value)));
  return std::string(fallback);
}

std::vector<uint32_t> JsonFields::ids(std::string_view name, uint64_t max_id, size_t max_ids) {
  std::vector<uint32_t> ids;
  const json* value = find(name);
  if (value == nullptr) return ids;
  const auto add = [&](const json& one) {
    if (const auto id = checked_integer(name, one, 0, max_id)) {
      ids.push_back(static_cast<uint32_t>(*id));
    }
  };
  if (!value->is_array()) {
    add(*value);
    return ids;
  }
  if (value->size() > max_ids) {
    fail(StatusCode::kInvalidArgument,
         fmt::format("{} lists {} ids, at most {} are allowed", name, value->size(), max_ids));
    return ids;
  }
  for (const json& one : *value) add(one);
  return ids;
}

}  // namespace spin::model
