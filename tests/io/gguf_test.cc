// SPDX-License-Identifier: Apache-2.0
#include "io/gguf.h"

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/io/io_test_support.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/test_data.h"

namespace spin::io {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace spin::testing;  // NOLINT(google-build-using-namespace): the builder's constants

TEST(Gguf, ReadsEveryScalarType) {
  const std::string bytes = GgufBuilder()
                                .add_number<uint8_t>("u8", kGgufU8, 255)
                                .add_number<int8_t>("i8", kGgufI8, -5)
                                .add_number<uint16_t>("u16", kGgufU16, 65535)
                                .add_number<int16_t>("i16", kGgufI16, -300)
                                .add_u32("u32", 4000000000u)
                                .add_i32("i32", 77)
                                .add_f32("f32", 0.5f)
                                .add_bool("yes", true)
                                .add_string("s", "text")
                                .add_u64("u64", ~0ull)
                                .add_number<int64_t>("i64", kGgufI64, -(1ll << 40))
                                .add_number<double>("f64", kGgufF64, 1e300)
                                .build();
  const auto file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const GgufMetadata& meta = (*file)->metadata();
  EXPECT_EQ(*meta.get_uint("u8"), 255u);
  EXPECT_EQ(*meta.get_int("i8"), -5);
  EXPECT_EQ(*meta.get_uint("u16"), 65535u);
  EXPECT_EQ(*meta.get_int("i16"), -300);
  EXPECT_EQ(*meta.get_uint("u32"), 4000000000u);
  EXPECT_EQ(*meta.get_int("u32"), 4000000000);
  EXPECT_EQ(*meta.get_uint("i32"), 77u);
  EXPECT_EQ(*meta.get_float("f32"), 0.5);
  EXPECT_TRUE(*meta.get_bool("yes"));
  EXPECT_EQ(*meta.get_string("s"), "text");
  EXPECT_EQ(*meta.get_uint("u64"), ~0ull);
  EXPECT_EQ(*meta.get_int("i64"), -(1ll << 40));
  EXPECT_EQ(*meta.get_float("f64"), 1e300);
  EXPECT_EQ(meta.keys().size(), 12u);
  EXPECT_EQ(meta.keys()[0], "u8");
  EXPECT_EQ(*meta.type_of("f64"), GgufType::kF64);
  EXPECT_TRUE(meta.contains("s"));
  EXPECT_FALSE(meta.contains("t"));
}

// S11, S18: another type is an error that names both, never a reinterpretation.
TEST(Gguf, ChecksTheTypeOfAKeyBeforeReadingIt) {
  const std::string bytes = GgufBuilder()
                                .add_string("llama.block_count", "30")
                                .add_i32("negative", -1)
                                .add_u64("large", 1ull << 63)
                                .add_raw("bool", kGgufBool, "\x02")
                                .add_strings("list", {"a"})
                                .build();
  const auto file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const GgufMetadata& meta = (*file)->metadata();
  const auto count = meta.get_uint("llama.block_count");
  ASSERT_FALSE(count.ok());
  EXPECT_EQ(count.status().code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(count.status().message(), HasSubstr("key 'llama.block_count' at offset"));
  EXPECT_THAT(count.status().message(), HasSubstr("expected an integer, found string"));
  EXPECT_FALSE(meta.get_uint_or("llama.block_count", 3).ok());
  EXPECT_FALSE(meta.get_float("llama.block_count").ok());
  EXPECT_FALSE(meta.get_bool("llama.block_count").ok());
  EXPECT_FALSE(meta.get_array("llama.block_count").ok());
  EXPECT_FALSE(meta.get_string("negative").ok());
  EXPECT_EQ(meta.get_uint("negative").status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(meta.get_int("large").status().code(), StatusCode::kCorrupt);
  EXPECT_EQ(meta.get_bool("bool").status().code(), StatusCode::kCorrupt);
  EXPECT_FALSE(meta.get_uint("list").ok());
  EXPECT_EQ(meta.get_uint("absent").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(*meta.get_uint_or("absent", 3), 3u);
  EXPECT_EQ(*meta.get_string_or("absent", "x"), "x");
  EXPECT_EQ(*meta.get_float_or("absent", 1.5), 1.5);
  EXPECT_TRUE(*meta.get_bool_or("absent", true));
}

TEST(Gguf, ReadsArraysByIndexWithoutCopies) {
  std::vector<std::string> tokens;
  for (int i = 0; i < 100; ++i)
    tokens.push_back(std::string(static_cast<size_t>(i % 7), 'a') + std::to_string(i));
  const std::string bytes = GgufBuilder()
                                .add_strings("tokens", tokens)
                                .add_f32s("scores", {0.f, -1.5f})
                                .add_i32s("types", {1, -3})
                                .add_array_raw("flags", kGgufBool, 2, std::string("\x01\x03", 2))
                                .add_strings("none", {})
                                .build();
  const auto file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const GgufMetadata& meta = (*file)->metadata();
  const GgufArray& array = **meta.get_array("tokens");
  ASSERT_EQ(array.size(), 100u);
  EXPECT_EQ(array.element_type(), GgufType::kString);
  for (uint64_t i = 0; i < 100; ++i) {
    const auto token = array.string_at(i);
    ASSERT_TRUE(token.ok());
    EXPECT_EQ(*token, tokens[i]);
    EXPECT_GE(token->data(), bytes.data());
    EXPECT_LE(token->data() + token->size(), bytes.data() + bytes.size());
  }
  EXPECT_EQ(*(*meta.get_array("scores"))->float_at(1), -1.5);
  EXPECT_EQ(*(*meta.get_array("types"))->int_at(1), -3);
  EXPECT_EQ((*meta.get_array("types"))->uint_at(1).status().code(), StatusCode::kCorrupt);
  EXPECT_TRUE(*(*meta.get_array("flags"))->bool_at(0));
  EXPECT_FALSE((*meta.get_array("flags"))->bool_at(1).ok());
  EXPECT_EQ((*meta.get_array("none"))->size(), 0u);
}

// S14: an index outside the array is an error in every accessor, as is another element type.
TEST(Gguf, BoundsArrayIndicesAndTypes) {
  const std::string bytes = GgufBuilder()
                                .add_strings("s", {"a", "b"})
                                .add_i32s("i", {1, 2})
                                .add_strings("none", {})
                                .build();
  const auto file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok());
  const GgufArray& strings = **(*file)->metadata().get_array("s");
  const GgufArray& numbers = **(*file)->metadata().get_array("i");
  const GgufArray& none = **(*file)->metadata().get_array("none");
  for (const uint64_t i : {2ull, 16ull, 1ull << 32, 1ull << 62, ~0ull}) {
    EXPECT_EQ(strings.string_at(i).status().code(), StatusCode::kInvalidArgument) << i;
    EXPECT_EQ(numbers.int_at(i).status().code(), StatusCode::kInvalidArgument) << i;
    EXPECT_FALSE(numbers.uint_at(i).ok());
    EXPECT_FALSE(numbers.float_at(i).ok());
    EXPECT_FALSE(numbers.bool_at(i).ok());
  }
  EXPECT_THAT(numbers.int_at(2).status().message(),
              HasSubstr("expected an index below 2, found 2"));
  EXPECT_FALSE(none.string_at(0).ok());
  EXPECT_FALSE(strings.int_at(0).ok());
  EXPECT_FALSE(numbers.string_at(0).ok());
  EXPECT_FALSE(numbers.float_at(0).ok());
}

TEST(Gguf, ReversesDimensionsAndFindsDataAfterTheAlignedHeader) {
  for (const uint32_t alignment : {1u, 8u, 32u, 64u, 65536u}) {
    GgufBuilder builder;
    builder.padding = alignment;
    builder.add_u32("general.alignment", alignment);
    builder.add_f32_tensor("m", {3, 2}, {1, 2, 3, 4, 5, 6});
    builder.add_f32_tensor("v", {1}, {9});
    const std::string bytes = builder.build();
    const auto file = parse_gguf(bytes);
    ASSERT_TRUE(file.ok()) << file.status().to_string();
    EXPECT_EQ((*file)->alignment(), alignment);
    const TensorInfo* m = (*file)->find("m");
    ASSERT_NE(m, nullptr);
    EXPECT_THAT(m->shape, ElementsAre(2, 3));  // slowest first
    EXPECT_EQ(m->offset % alignment, 0u);
    std::vector<float> row(3);
    ASSERT_TRUE((*file)->read_rows_f32(*m, 1, 1, row).ok());
    EXPECT_THAT(row, ElementsAre(4, 5, 6));
    std::vector<float> one(1);
    ASSERT_TRUE((*file)->read_rows_f32(*(*file)->find("v"), 0, 1, one).ok());
    EXPECT_EQ(one[0], 9);
    EXPECT_EQ((*file)->gguf_metadata(), &(*file)->metadata());
  }
}

TEST(Gguf, DecodesQuantizedRowsAndListsOtherTypes) {
  // Q8_0: scale 2, values 0..31; then the same with scale 1.
  std::string block;
  for (int i = 0; i < 32; ++i) block.push_back(static_cast<char>(i));
  GgufTensorRecord q8{
      "q8",      {32, 2},
      kGgmlQ8_0, le_bytes<uint16_t>(0x4000) + block + le_bytes<uint16_t>(0x3C00) + block,
      {},        {}};
  GgufTensorRecord q2{"q2", {256}, kGgmlQ2_K, std::string(84, '\0'), {}, {}};
  GgufBuilder builder;
  builder.version = 2;
  const std::string bytes = builder.add_tensor(q8).add_tensor(q2).build();
  const auto file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ((*file)->version(), 2u);
  const TensorInfo& info = *(*file)->find("q8");
  EXPECT_EQ(info.type_name, "Q8_0");
  std::vector<float> rows(64);
  ASSERT_TRUE((*file)->read_rows_f32(info, 0, 2, rows).ok());
  EXPECT_EQ(rows[31], 62.f);
  EXPECT_EQ(rows[63], 31.f);
  const TensorInfo& other = *(*file)->find("q2");
  EXPECT_EQ(other.type, ElementType::kUnsupported);
  std::vector<float> row(256);
  const Status status = (*file)->read_rows_f32(other, 0, 1, row);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("Q2_K"));
}

TEST(Gguf, LoadsAVocabularyWithoutTensors) {
  const std::string bytes = GgufBuilder()
                                .add_string("general.architecture", "gpt2")
                                .add_strings("tokenizer.ggml.tokens", {"a", "b", "\xC4\xA0"})
                                .build();
  const auto file = parse_gguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_TRUE((*file)->tensors().empty());
  EXPECT_EQ((*(*file)->metadata().get_array("tokenizer.ggml.tokens"))->size(), 3u);
  const std::string nothing = GgufBuilder().build();
  EXPECT_TRUE(parse_gguf(nothing).ok());
}

// S15: the range is checked again when the bytes are asked for.
TEST(Gguf, RefusesBytesOfAFileCutAfterOpening) {
  TempDir dir;
  const auto path = dir.write(
      "m.gguf", GgufBuilder().add_f32_tensor("w", {4096}, std::vector<float>(4096, 1.f)).build());
  const auto file = GgufFile::open(path.string());
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const TensorInfo& info = *(*file)->find("w");
  std::vector<float> row(4096);
  EXPECT_TRUE((*file)->read_rows_f32(info, 0, 1, row).ok());
  (*file)->drop(info);
  std::filesystem::resize_file(path, 8192);
  const Status status = (*file)->read_rows_f32(info, 0, 1, row);
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_THAT(status.message(), HasSubstr("found a file of 8192 bytes"));
}

// S16, S22: offsets above 2^32 (a sparse file).
TEST(Gguf, ReadsRowsBeyondFourGibibytes) {
  constexpr uint64_t kColumns = 35'000, kRows = 70'000;
  TempDir dir;
  GgufTensorRecord tensor{"w", {kColumns, kRows}, kGgmlBF16, "", {}, {}};
  std::string bytes = GgufBuilder().add_tensor(tensor).build();
  bytes.resize((bytes.size() + 31) / 32 * 32, '\0');
  const auto path = dir.write("big.gguf", bytes);
  std::error_code error;
  const uint64_t size = bytes.size() + kColumns * kRows * 2;
  std::filesystem::resize_file(path, size, error);
  if (error) GTEST_SKIP() << "no sparse files here: " << error.message();
  {
    std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(static_cast<std::streamoff>(size - 2));
    out.write("\x40\x40", 2);
  }
  const auto file = GgufFile::open(path.string());
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  std::vector<float> row(kColumns, -1.f);
  ASSERT_TRUE((*file)->read_rows_f32(*(*file)->find("w"), kRows - 1, 1, row).ok());
  EXPECT_EQ(row[0], 0.f);
  EXPECT_EQ(row[kColumns - 1], 3.f);
}

}  // namespace
}  // namespace spin::io
