// SPDX-License-Identifier: Apache-2.0
// Shared by the tests of src/io.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/gguf.h"
#include "io/mapped_file.h"
#include "io/safetensors.h"
#include "tests/io/allocation_watch.h"
#include "tests/support/cpu_time.h"

namespace spin::testing {

inline io::MappedFile in_memory(std::string_view bytes, std::string name) {
  return io::MappedFile::borrow(std::as_bytes(std::span(bytes)), std::move(name));
}

// Lifetime: `bytes` outlives the result.
inline Result<std::unique_ptr<io::GgufFile>> parse_gguf(std::string_view bytes) {
  return io::GgufFile::parse(in_memory(bytes, "test.gguf"));
}
inline Result<std::unique_ptr<io::SafetensorsFile>> parse_safetensors(std::string_view bytes) {
  return io::SafetensorsFile::parse(in_memory(bytes, "test.safetensors"));
}

// Fixed part of the parsers' own tables; a size taken from a hostile field is far above it.
constexpr size_t kAllocationSlack = 8 * 1024;

// A bad file: `bytes` must be refused with a message that holds all of `message_parts` beside what
// was expected, what was found and where.
struct BadFile {
  std::string what;
  std::string bytes;
  std::vector<std::string> message_parts;
};

template <typename Parse>
void expect_refused(const BadFile& file, Parse parse) {
  SCOPED_TRACE(file.what);
  AllocationWatch watch;
  const auto result = parse(file.bytes);
  EXPECT_LE(watch.largest(), 2 * file.bytes.size() + kAllocationSlack);
  ASSERT_FALSE(result.ok());
  const std::string& message = result.status().message();
  EXPECT_THAT(message, ::testing::StartsWith("test."));
  EXPECT_THAT(message, ::testing::HasSubstr("expected"));
  EXPECT_THAT(message, ::testing::HasSubstr("found"));
  EXPECT_THAT(message, ::testing::HasSubstr("offset"));
  for (const std::string& part : file.message_parts) {
    EXPECT_THAT(message, ::testing::HasSubstr(part));
  }
}

}  // namespace spin::testing
