// SPDX-License-Identifier: Apache-2.0
// docs/serving.md lists every field of the request table as the code has it.
#include <fstream>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "server/openai_request.h"

namespace spin::server {
namespace {

std::string routes_text(unsigned apis) {
  std::string out;
  auto add = [&](unsigned api, const char* letter) {
    if ((apis & api) == 0) return;
    if (!out.empty()) out += ' ';
    out += letter;
  };
  add(kCompletions, "C");
  add(kChat, "H");
  add(kTokenize, "T");
  add(kDetokenize, "D");
  return out;
}

std::string kind_text(FieldKind kind) {
  switch (kind) {
    case FieldKind::kBoolean:
      return "boolean";
    case FieldKind::kInteger:
      return "integer";
    case FieldKind::kNumber:
      return "number";
    case FieldKind::kOther:
      return "";
    case FieldKind::kIgnored:
      return "ignored";
    case FieldKind::kOff:
      return "refused";
  }
  return "";
}

// One row of the table in docs/serving.md.
std::string row(const FieldInfo& field) {
  std::ostringstream out;
  out << "| `" << field.name << "` | " << routes_text(field.apis) << " | ";
  if (field.kind == FieldKind::kOff) {
    out << "refused unless null";
    if (!field.range.empty()) out << " or `" << field.range << "`";
    out << " | - |";
  } else if (field.kind == FieldKind::kIgnored) {
    out << "anything; no effect | - |";
  } else {
    const std::string kind = kind_text(field.kind);
    const bool repeat = kind.empty() || field.range == kind;
    out << (repeat ? std::string() : kind + ", ") << field.range << " | " << field.default_text
        << " |";
  }
  return out.str();
}

TEST(Documentation, ListsEveryRequestField) {
  std::ifstream file(std::string(SPIN_SOURCE_DIR) + "/docs/serving.md");
  std::ostringstream text;
  text << file.rdbuf();
  std::string missing;
  for (const FieldInfo& field : request_fields()) {
    if (text.str().find(row(field)) == std::string::npos) missing += row(field) + "\n";
  }
  EXPECT_EQ(missing, "") << "rows to be put into docs/serving.md";
}

}  // namespace
}  // namespace spin::server
