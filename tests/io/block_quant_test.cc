// SPDX-License-Identifier: Apache-2.0
#include "io/block_quant.h"

#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "io/byte_reader.h"
#include "tests/support/test_data.h"

namespace spin::io {
namespace {

ElementType type_named(std::string_view name) {
  for (int i = 0; i < static_cast<int>(ElementType::kUnsupported); ++i) {
    const auto type = static_cast<ElementType>(i);
    if (element_type_name(type) == name) return type;
  }
  return ElementType::kUnsupported;
}

// tools/make_block_quant_golden.py wrote the file with ggml's own Python package.
TEST(BlockQuant, EqualsTheReferenceBitForBitForEveryType) {
  const std::string golden = testing::read_file(testing::test_data("block_quant_golden.bin"));
  ByteReader reader(std::as_bytes(std::span(golden)));
  const auto records = reader.u32("records");
  ASSERT_TRUE(records.ok());
  EXPECT_EQ(*records, static_cast<uint32_t>(ElementType::kUnsupported));
  for (uint32_t i = 0; i < *records; ++i) {
    const auto name = reader.string_u64(100, "name");
    ASSERT_TRUE(name.ok());
    SCOPED_TRACE(std::string(*name));
    const ElementType type = type_named(*name);
    ASSERT_NE(type, ElementType::kUnsupported);
    const auto encoded = reader.string_u64(100000, "encoded");
    const auto count = reader.u64("count");
    ASSERT_TRUE(encoded.ok() && count.ok());
    const auto expected = reader.bytes(*count * sizeof(float), "values");
    ASSERT_TRUE(expected.ok());
    std::vector<float> values(*count);
    const Status status = decode_f32(type, std::as_bytes(std::span(*encoded)), values);
    ASSERT_TRUE(status.ok()) << status.to_string();
    for (size_t j = 0; j < values.size(); ++j) {
      uint32_t found = 0, wanted = 0;
      std::memcpy(&found, &values[j], 4);
      std::memcpy(&wanted, expected->data() + 4 * j, 4);
      ASSERT_EQ(found, wanted) << "value " << j;
    }
  }
  EXPECT_EQ(reader.remaining(), 0u);
}

TEST(BlockQuant, RefusesLengthsThatAreNotWholeBlocks) {
  const std::vector<std::byte> bytes(144);
  std::vector<float> values(256);
  EXPECT_TRUE(decode_f32(ElementType::kQ4_K, bytes, values).ok());
  EXPECT_TRUE(decode_f32(ElementType::kQ4_K, {}, {}).ok());
  EXPECT_FALSE(decode_f32(ElementType::kQ4_K, std::span(bytes).first(143), values).ok());
  EXPECT_FALSE(decode_f32(ElementType::kQ4_K, bytes, std::span(values).first(255)).ok());
  EXPECT_FALSE(decode_f32(ElementType::kF32, bytes, values).ok());
  EXPECT_EQ(decode_f32(ElementType::kUnsupported, bytes, values).code(), StatusCode::kUnsupported);
}

TEST(BlockQuant, ChecksSizesForOverflow) {
  EXPECT_EQ(encoded_size(ElementType::kQ6_K, 512), 420u);
  EXPECT_EQ(encoded_size(ElementType::kQ6_K, 511), std::nullopt);
  EXPECT_EQ(encoded_size(ElementType::kF32, 1ull << 62), std::nullopt);
  EXPECT_EQ(encoded_size(ElementType::kF32, (1ull << 62) - 1), UINT64_MAX - 3);
}

}  // namespace
}  // namespace spin::io
