// SPDX-License-Identifier: Apache-2.0
#include "server/json_writer.h"

#include <charconv>
#include <cmath>

#include "base/utf8.h"

namespace spin::server {

namespace {

constexpr char kHex[] = "0123456789abcdef";

void append_escaped_ascii(std::string& out, char c) {
  switch (c) {
    case '"':
      out += "\\\"";
      return;
    case '\\':
      out += "\\\\";
      return;
    case '\n':
      out += "\\n";
      return;
    case '\r':
      out += "\\r";
      return;
    case '\t':
      out += "\\t";
      return;
    case '\b':
      out += "\\b";
      return;
    case '\f':
      out += "\\f";
      return;
    default:
      break;
  }
  const auto byte = static_cast<unsigned char>(c);
  if (byte < 0x20 || byte == 0x7F) {
    out += "\\u00";
    out += kHex[byte >> 4];
    out += kHex[byte & 15];
  } else {
    out += c;
  }
}

}  // namespace

void append_json_string(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    if (static_cast<unsigned char>(text.front()) < 0x80) {
      append_escaped_ascii(out, text.front());
      text.remove_prefix(1);
      continue;
    }
    const base::Utf8Step step = base::utf8_step(text);
    if (step.kind == base::Utf8Step::Kind::kValid) {
      if (step.code_point == 0x2028) {
        out += "\\u2028";
      } else if (step.code_point == 0x2029) {
        out += "\\u2029";
      } else {
        out += text.substr(0, step.length);
      }
      text.remove_prefix(step.length);
      continue;
    }
    out += "\xEF\xBF\xBD";
    // An incomplete sequence can only stand at the end.
    if (step.kind == base::Utf8Step::Kind::kIncomplete) break;
    text.remove_prefix(step.length);
  }
  out += '"';
}

void append_json_number(std::string& out, double value) {
  if (!std::isfinite(value)) {
    out += "null";
    return;
  }
  char buffer[32];
  const auto result = std::to_chars(buffer, buffer + sizeof(buffer), value);
  out.append(buffer, result.ptr);
}

}  // namespace spin::server
