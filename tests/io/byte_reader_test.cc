// SPDX-License-Identifier: Apache-2.0
#include "io/byte_reader.h"

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/gguf_builder.h"

namespace spin::io {
namespace {

using testing::gguf_string;
using ::testing::HasSubstr;
using testing::le_bytes;

ByteReader reader_of(std::string_view bytes) { return ByteReader(std::as_bytes(std::span(bytes))); }

TEST(ByteReader, ReadsEveryNumberTypeLittleEndian) {
  const std::string bytes = le_bytes<uint8_t>(200) + le_bytes<uint16_t>(60000) +
                            le_bytes<uint32_t>(4000000000u) + le_bytes<uint64_t>(1ull << 63) +
                            le_bytes<int8_t>(-100) + le_bytes<int16_t>(-30000) +
                            le_bytes<int32_t>(-2000000000) + le_bytes<int64_t>(-(1ll << 62)) +
                            le_bytes<float>(1.5f) + le_bytes<double>(-2.25);
  ByteReader reader = reader_of(bytes);
  EXPECT_EQ(*reader.u8("a"), 200);
  EXPECT_EQ(*reader.u16("b"), 60000);
  EXPECT_EQ(*reader.u32("c"), 4000000000u);
  EXPECT_EQ(*reader.u64("d"), 1ull << 63);
  EXPECT_EQ(*reader.i8("e"), -100);
  EXPECT_EQ(*reader.i16("f"), -30000);
  EXPECT_EQ(*reader.i32("g"), -2000000000);
  EXPECT_EQ(*reader.i64("h"), -(1ll << 62));
  EXPECT_EQ(*reader.f32("i"), 1.5f);
  EXPECT_EQ(*reader.f64("j"), -2.25);
  EXPECT_EQ(reader.remaining(), 0u);
  EXPECT_EQ(*reader_of("\x01\x02").u16("order"), 0x0201);
}

TEST(ByteReader, SaysExpectedFoundAndOffsetAndStaysInPlace) {
  ByteReader reader = reader_of("abcdef");
  ASSERT_TRUE(reader.skip(4, "front").ok());
  const auto number = reader.u32("count");
  ASSERT_FALSE(number.ok());
  EXPECT_EQ(number.status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(number.status().message(), "count: expected 4 bytes at offset 4, found 2");
  EXPECT_EQ(reader.position(), 4u);
  EXPECT_FALSE(reader.bytes(3, "tail").ok());
  EXPECT_FALSE(reader.skip(UINT64_MAX, "tail").ok());
  EXPECT_EQ(reader.bytes(2, "tail")->size(), 2u);
}

TEST(ByteReader, ComparesCountsWithWhatIsLeftWithoutOverflow) {
  ByteReader reader = reader_of("0123456789");
  EXPECT_TRUE(reader.need_elements(5, 2, "list").ok());
  EXPECT_FALSE(reader.need_elements(6, 2, "list").ok());
  EXPECT_FALSE(reader.need_elements(1ull << 63, 2, "list").ok());  // the product would wrap to 0
  EXPECT_FALSE(reader.need_elements(UINT64_MAX, UINT64_MAX, "list").ok());
  EXPECT_TRUE(reader.need_elements(0, 1000, "list").ok());
}

TEST(ByteReader, ReadsStringsUpToTheCapAndNoFurther) {
  const std::string bytes = gguf_string("hello") + gguf_string("");
  ByteReader reader = reader_of(bytes);
  const auto capped = reader.string_u64(4, "name");
  ASSERT_FALSE(capped.ok());
  EXPECT_THAT(capped.status().message(), HasSubstr("at most 4 at offset 0, found 5"));
  EXPECT_EQ(reader.position(), 0u);
  EXPECT_EQ(*reader.string_u64(5, "name"), "hello");
  EXPECT_EQ(*reader.string_u64(5, "name"), "");
  const std::string cut = le_bytes<uint64_t>(5) + "hell";
  ByteReader short_reader = reader_of(cut);
  EXPECT_FALSE(short_reader.string_u64(100, "name").ok());
  EXPECT_EQ(short_reader.position(), 0u);
}

}  // namespace
}  // namespace spin::io
