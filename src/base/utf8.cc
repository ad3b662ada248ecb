// SPDX-License-Identifier: Apache-2.0
#include "base/utf8.h"

namespace spin::base {
namespace {

using Kind = Utf8Step::Kind;

struct Lead {
  size_t length;       // of the whole sequence; 0: not a lead byte
  uint8_t second_min;  // allowed range of the second byte
  uint8_t second_max;
};

Lead classify(uint8_t byte) {
  if (byte >= 0xC2 && byte <= 0xDF) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte >= 0xF1 && byte <= 0xF3) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

Utf8Step utf8_step(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  if (byte(0) < 0x80) return {Kind::kValid, 1, byte(0)};
  const Lead lead = classify(byte(0));
  if (lead.length == 0) return {Kind::kInvalid, 1, 0};
  char32_t code_point = byte(0) & (0x7Fu >> lead.length);
  for (size_t i = 1; i < lead.length; ++i) {
    if (i == bytes.size()) return {Kind::kIncomplete, i, 0};
    const uint8_t min = i == 1 ? lead.second_min : 0x80;
    const uint8_t max = i == 1 ? lead.second_max : 0xBF;
    if (byte(i) < min || byte(i) > max) return {Kind::kInvalid, i, 0};
    code_point = (code_point << 6) | (byte(i) & 0x3Fu);
  }
  return {Kind::kValid, lead.length, code_point};
}

bool is_valid_utf8(std::string_view bytes) {
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    if (step.kind != Kind::kValid) return false;
    bytes.remove_prefix(step.length);
  }
  return true;
}

size_t utf8_complete_prefix(std::string_view bytes) {
  // A sequence is at most four bytes long, so only the last three can be an unfinished one.
  const size_t first = bytes.size() > 3 ? bytes.size() - 3 : 0;
  for (size_t i = first; i < bytes.size(); ++i) {
    const uint8_t byte = static_cast<uint8_t>(bytes[i]);
    if (byte < 0xC0) continue;  // ASCII or a continuation byte starts nothing
    if (utf8_step(bytes.substr(i)).kind == Kind::kIncomplete) return i;
  }
  return bytes.size();
}

std::string utf8_replace_invalid(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    if (step.kind == Kind::kValid) {
      out.append(bytes.substr(0, step.length));
    } else {
      out += "\xEF\xBF\xBD";
    }
    bytes.remove_prefix(step.length);
  }
  return out;
}

void append_utf8(char32_t code_point, std::string& out) {
  const auto put = [&out](char32_t value) { out.push_back(static_cast<char>(value)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3F));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

}  // namespace spin::base
