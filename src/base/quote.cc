// SPDX-License-Identifier: Apache-2.0
#include "base/quote.h"

#include "base/utf8.h"

namespace spin::base {
namespace {

constexpr size_t kMaxQuotedBytes = 80;

}  // namespace

std::string printable_text(std::string_view text) {
  std::string out = utf8_replace_invalid(text);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return out;
}

std::string quote_text(std::string_view text) {
  const bool cut = text.size() > kMaxQuotedBytes;
  if (cut) {
    text = text.substr(0, kMaxQuotedBytes);
    text = text.substr(0, utf8_complete_prefix(text));
  }
  std::string out(1, '\'');
  out += printable_text(text);
  out += cut ? "...'" : "'";
  return out;
}

}  // namespace spin::base
