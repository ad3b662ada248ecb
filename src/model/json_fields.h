// SPDX-License-Identifier: Apache-2.0
// Typed, range-checked access to the fields of a JSON object. The first failure sticks and later
// reads return neutral values, so that a caller reads all fields and looks at status() once.
// null counts as absent. Internal to src/model. Thread: external synchronisation.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "spin/status.h"

namespace spin::model {

class JsonFields {
 public:
  // `where` goes in front of messages ("config.json"). Lifetime: `object` outlives the reader.
  JsonFields(const nlohmann::json& object, std::string where);

  const Status& status() const { return status_; }
  void fail(StatusCode code, std::string message);

  // The value, or null if the field is absent or null.
  const nlohmann::json* find(std::string_view name) const;
  bool has(std::string_view name) const { return find(name) != nullptr; }

  uint64_t integer(std::string_view name, uint64_t low, uint64_t high);
  uint64_t integer_or(std::string_view name, uint64_t low, uint64_t high, uint64_t fallback);
  std::optional<uint64_t> optional_integer(std::string_view name, uint64_t low, uint64_t high);
  double number(std::string_view name, double low, double high);
  double number_or(std::string_view name, double low, double high, double fallback);
  std::optional<double> optional_number(std::string_view name, double low, double high);
  bool flag_or(std::string_view name, bool fallback);
  std::optional<bool> optional_flag(std::string_view name);
  std::string text_or(std::string_view name, std::string_view fallback);
  // One id or a list of up to `max_ids`.
  std::vector<uint32_t> ids(std::string_view name, uint64_t max_id, size_t max_ids);

 private:
  std::optional<uint64_t> checked_integer(std::string_view name,
                                          const nlohmann::json& value,
                                          uint64_t low,
                                          uint64_t high);

  const nlohmann::json& object_;
  std::string where_;
  Status status_;
};

}  // namespace spin::model
