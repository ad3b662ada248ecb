// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/io/io_test_support.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/safetensors_builder.h"
#include "tests/support/test_data.h"

namespace spin::io {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::le_bytes;
using testing::parse_safetensors;
using testing::safetensors_file;
using testing::SafetensorsBuilder;
using testing::TempDir;

TEST(Safetensors, ReadsTensorsByNameAndRow) {
  const std::string bytes =
      SafetensorsBuilder()
          .add_f32("a", {2, 3}, {1, 2, 3, 4, 5, 6})
          .add("h", "F16", {2}, le_bytes<uint16_t>(0x3C00) + le_bytes<uint16_t>(0xC000))
          .add("b", "BF16", {1, 1, 2}, le_bytes<uint16_t>(0x3F80) + le_bytes<uint16_t>(0x4040))
          .add_f32("scalar", {}, {7})
          .build();
  const auto file = parse_safetensors(bytes);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  const TensorSource& source = **file;
  ASSERT_EQ(source.tensors().size(), 4u);
  const TensorInfo* a = source.find("a");
  ASSERT_NE(a, nullptr);
  EXPECT_THAT(a->shape, ElementsAre(2, 3));
  EXPECT_EQ(a->rows(), 2u);
  EXPECT_EQ(a->size_bytes, 24u);
  EXPECT_EQ(source.bytes(*a)->size(), 24u);
  std::vector<float> row(3);
  ASSERT_TRUE(source.read_rows_f32(*a, 1, 1, row).ok());
  EXPECT_THAT(row, ElementsAre(4, 5, 6));
  std::vector<float> two(2);
  ASSERT_TRUE(source.read_rows_f32(*source.find("h"), 0, 1, two).ok());
  EXPECT_THAT(two, ElementsAre(1, -2));
  ASSERT_TRUE(source.read_rows_f32(*source.find("b"), 0, 1, two).ok());
  EXPECT_THAT(two, ElementsAre(1, 3));
  std::vector<float> one(1);
  ASSERT_TRUE(source.read_rows_f32(*source.find("scalar"), 0, 1, one).ok());
  EXPECT_EQ(one[0], 7);
  EXPECT_EQ(source.find("A"), nullptr);
  EXPECT_EQ(source.find(""), nullptr);
  EXPECT_EQ(source.gguf_metadata(), nullptr);
  source.drop(*a);
}

TEST(Safetensors, RefusesRowsOutsideTheTensorAndWrongRoom) {
  const std::string bytes = SafetensorsBuilder().add_f32("a", {2, 3}, {1, 2, 3, 4, 5, 6}).build();
  const auto file = parse_safetensors(bytes);
  ASSERT_TRUE(file.ok());
  const TensorInfo& a = *(*file)->find("a");
  std::vector<float> row(3);
  EXPECT_FALSE((*file)->read_rows_f32(a, 2, 1, row).ok());
  EXPECT_FALSE((*file)->read_rows_f32(a, UINT64_MAX, 1, row).ok());
  EXPECT_FALSE((*file)->read_rows_f32(a, 1, UINT64_MAX, row).ok());
  EXPECT_FALSE((*file)->read_rows_f32(a, 0, 2, row).ok());
  EXPECT_TRUE((*file)->read_rows_f32(a, 2, 0, {}).ok());
}

TEST(Safetensors, ListsOtherTypesAndSaysSoWhenTheyAreRead) {
  const std::string bytes = SafetensorsBuilder()
                                .add("i", "I64", {1}, std::string(8, '\1'))
                                .add("f8", "F8_E4M3", {3}, "abc")
                                .add("f4", "F4", {2, 3}, "abc")
                                .add("new", "F8_FUTURE", {3}, "abcd")
                                .build();
  const auto file = parse_safetensors(bytes);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  for (const TensorInfo& info : (*file)->tensors()) {
    EXPECT_EQ(info.type, ElementType::kUnsupported);
    std::vector<float> row(info.row_elements());
    const Status status = (*file)->read_rows_f32(info, 0, 1, row);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    EXPECT_THAT(status.message(), HasSubstr(info.type_name));
    EXPECT_TRUE((*file)->bytes(info).ok());
  }
}

TEST(Safetensors, AcceptsMetadataPaddingEmptyTensorsAndAnyHeaderOrder) {
  const std::string header = R"({"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},)"
                             R"("__metadata__":{"format":"pt"},)"
                             R"("none":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]},)"
                             R"("\u0061":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"}}      )";
  const std::string bytes = safetensors_file(header, le_bytes(1.f) + le_bytes(2.f));
  const auto file = parse_safetensors(bytes);
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ((*file)->metadata().at("format"), "pt");
  std::vector<float> one(1);
  ASSERT_TRUE((*file)->read_rows_f32(*(*file)->find("b"), 0, 1, one).ok());
  EXPECT_EQ(one[0], 2);
  ASSERT_NE((*file)->find("a"), nullptr);  // escapes are decoded
  const TensorInfo* none = (*file)->find("none");
  ASSERT_NE(none, nullptr);
  EXPECT_EQ(none->rows(), 0u);
  EXPECT_TRUE((*file)->read_rows_f32(*none, 0, 0, {}).ok());
  const std::string empty = safetensors_file("{}", "");
  EXPECT_TRUE(parse_safetensors(empty).ok());
}

std::string many_tensors(size_t count) {
  SafetensorsBuilder builder;
  for (size_t i = 0; i < count; ++i) builder.add(fmt::format("t{}", i), "U8", {1}, "x");
  return builder.build();
}

// The best of three, in CPU time.
double parse_seconds(const std::string& bytes) {
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const double start = testing::cpu_seconds();
    EXPECT_TRUE(parse_safetensors(bytes).ok());
    best = std::min(best, testing::cpu_seconds() - start);
  }
  return best;
}

// S25: a header of 100,000 tiny tensors is read at once, in time that grows with its length.
TEST(Safetensors, ReadsAHundredThousandTensorsInLinearTime) {
  const std::string small = many_tensors(10'000);
  const std::string large = many_tensors(100'000);
  const double small_seconds = parse_seconds(small);
  const double large_seconds = parse_seconds(large);
  // Ten times the tensors; a quadratic step would cost a hundred times as much.
  EXPECT_LT(large_seconds, 40 * small_seconds);
#ifndef SPIN_SANITIZED
  EXPECT_LT(large_seconds, 1.0);
#endif
}

// S16, S22: offsets and element counts above 2^32. The file is sparse: nearly 5 GB long, some
// blocks on disk.
TEST(Safetensors, ReadsRowsBeyondFourGibibytes) {
  constexpr uint64_t kRows = 70'000, kColumns = 35'000;  // 2.45e9 elements, 4.9e9 bytes
  TempDir dir;
  const std::string header = R"({"w":{"dtype":"BF16","shape":[70000,35000],"data_offsets":[0,)" +
                             std::to_string(kRows * kColumns * 2) + "]}}";
  const auto path = dir.write("model.safetensors", safetensors_file(header, ""));
  const uint64_t size = 8 + header.size() + kRows * kColumns * 2;
  std::error_code error;
  std::filesystem::resize_file(path, size, error);
  if (error) GTEST_SKIP() << "no sparse files here: " << error.message();
  {
    std::fstream out(path, std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(static_cast<std::streamoff>(size - 2));
    out.write("\x40\x40", 2);  // 3
  }
  const auto file = SafetensorsFile::open(path.string());
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  std::vector<float> row(kColumns, -1.f);
  const TensorInfo& info = *(*file)->find("w");
  ASSERT_TRUE((*file)->read_rows_f32(info, kRows - 1, 1, row).ok());
  EXPECT_EQ(row[0], 0.f);
  EXPECT_EQ(row[kColumns - 1], 3.f);
  ASSERT_TRUE((*file)->read_rows_f32(info, kRows - 2, 1, row).ok());
  EXPECT_EQ(row[kColumns - 1], 0.f);  // every value was written
}

class ShardedCheckpoint : public ::testing::Test {
 protected:
  ShardedCheckpoint() {
    dir_.write("model-00001-of-00002.safetensors",
               SafetensorsBuilder().add_f32("a", {1}, {1}).add_f32("b", {1}, {2}).build());
    dir_.write("model-00002-of-00002.safetensors",
               SafetensorsBuilder().add_f32("c", {1}, {3}).build());
  }

  Status open_with(std::string_view index) {
    dir_.write("model.safetensors.index.json", index);
    auto opened = SafetensorsCheckpoint::open(dir_.path().string());
    if (!opened.ok()) return opened.status();
    checkpoint_ = std::move(*opened);
    return ok_status();
  }

  static std::string index(std::string_view weight_map) {
    return R"({"metadata":{"total_size":12},"weight_map":)" + std::string(weight_map) + "}";
  }

  TempDir dir_;
  std::unique_ptr<SafetensorsCheckpoint> checkpoint_;
};

TEST_F(ShardedCheckpoint, JoinsTheShards) {
  const Status status = open_with(
      index(R"({"c":"model-00002-of-00002.safetensors","a":"model-00001-of-00002.safetensors",)"
            R"("b":"model-00001-of-00002.safetensors"})"));
  ASSERT_TRUE(status.ok()) << status.to_string();
  ASSERT_EQ(checkpoint_->tensors().size(), 3u);
  std::vector<float> one(1);
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, float>>{{"a", 1}, {"b", 2}, {"c", 3}}) {
    const TensorInfo* info = checkpoint_->find(name);
    ASSERT_NE(info, nullptr);
    ASSERT_TRUE(checkpoint_->read_rows_f32(*info, 0, 1, one).ok());
    EXPECT_EQ(one[0], value);
    checkpoint_->drop(*info);
  }
}

TEST_F(ShardedCheckpoint, RefusesNamesThatLeaveTheFolder) {
  for (const std::string name :
       {"../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", ".safetensors",
        "x.bin", "a..safetensors", "a\\\\b.safetensors", "a\\u0000.safetensors"}) {
    const Status status = open_with(index(fmt::format(R"({{"a":"{}"}})", name)));
    EXPECT_EQ(status.code(), StatusCode::kCorrupt) << name;
    EXPECT_THAT(status.message(), HasSubstr("plain name")) << name;
  }
}

TEST_F(ShardedCheckpoint, RefusesAnIndexThatDoesNotMatchTheShards) {
  const std::string one = R"("model-00001-of-00002.safetensors")";
  const std::string two = R"("model-00002-of-00002.safetensors")";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"a":)" + one + "}", "expected tensor 'b'"},
      {R"({"a":)" + one + R"(,"b":)" + two + R"(,"c":)" + two + "}", "found it under"},
      {R"({"a":)" + one + R"(,"b":)" + one + R"(,"d":)" + one + "}", "found none of that name"},
      {R"({"a":)" + one + R"(,"a":)" + one + "}", "found it twice"},
      {R"({"a":1})", "plain name"},
      {R"([])", "expected one object"},
      {R"({"c":"missing.safetensors"})", "missing.safetensors"},
  };
  for (const auto& [map, part] : cases) {
    EXPECT_THAT(open_with(index(map)).message(), HasSubstr(part)) << map;
  }
  EXPECT_THAT(open_with("{}").message(), HasSubstr("weight_map: expected an object"));
  EXPECT_THAT(open_with("[1]").message(), HasSubstr("expected '{'"));
  EXPECT_THAT(open_with("{\"weight_map\":{},\"weight_map\":{}}").message(),
              HasSubstr("found another type or two"));
  EXPECT_THAT(open_with(index("{\"a\":" + one).substr(0, 70)).message(),
              HasSubstr("expected a JSON object"));
}

}  // namespace
}  // namespace spin::io
