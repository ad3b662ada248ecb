// SPDX-License-Identifier: Apache-2.0
// Strict JSON from untrusted text (request bodies, config.json). Depth, number of values and memory
// are limited while reading, before the tree is built; nothing throws.
//
// Refused beyond RFC 8259 syntax errors: a byte order mark, NUL bytes, invalid UTF-8, lone
// surrogate escapes, NaN, Infinity, numbers that no finite double holds, duplicate keys, and
// anything after the value. Integers outside [-2^63, 2^64) become doubles.
//
// Thread: pure function. A unit that uses the result includes <nlohmann/json.hpp>.
#pragma once

#include <cstdint>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include "spin/status.h"

namespace spin::io {

struct JsonLimits {
  uint64_t max_bytes = 64ull << 20;          // of the text
  uint32_t max_depth = 64;                   // nested arrays and objects
  uint64_t max_values = 4'000'000;           // values of any kind, containers and keys included
  uint64_t max_memory_bytes = 256ull << 20;  // estimated size of the tree
};

// Errors: kInvalidArgument (syntax and everything refused above), kResourceExhausted (a limit).
// Messages say what was expected, what was found and at which byte; they do not repeat the text.
Result<nlohmann::json> parse_json(std::string_view text, const JsonLimits& limits = {});

}  // namespace spin::io
