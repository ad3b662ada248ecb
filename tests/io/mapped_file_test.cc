// SPDX-License-Identifier: Apache-2.0
#include "io/mapped_file.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/text_file.h"
#include "tests/support/test_data.h"

namespace spin::io {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::TempDir;

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(MappedFile, GivesSlicesInsideTheFileOnly) {
  TempDir dir;
  auto file = MappedFile::open(dir.write("a.bin", "0123456789").string());
  ASSERT_TRUE(file.ok()) << file.status().to_string();
  EXPECT_EQ(file->name(), "a.bin");
  EXPECT_EQ(text_of(*file->slice(2, 3)), "234");
  EXPECT_EQ(text_of(*file->slice(10, 0)), "");
  for (const auto& [offset, size] : std::vector<std::pair<uint64_t, uint64_t>>{
           {8, 3}, {11, 0}, {UINT64_MAX, 1}, {1, UINT64_MAX}, {UINT64_MAX, UINT64_MAX}}) {
    const auto slice = file->slice(offset, size);
    ASSERT_FALSE(slice.ok()) << offset << " " << size;
    EXPECT_EQ(slice.status().code(), StatusCode::kCorrupt);
    EXPECT_THAT(slice.status().message(), HasSubstr("found a file of 10 bytes"));
  }
}

TEST(MappedFile, AcceptsAnEmptyFile) {
  TempDir dir;
  auto file = MappedFile::open(dir.write("empty", "").string());
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file->size(), 0u);
  EXPECT_TRUE(file->slice(0, 0).ok());
  EXPECT_FALSE(file->slice(0, 1).ok());
}

TEST(MappedFile, RefusesWhatIsNotARegularFileAndDoesNotBlock) {
  TempDir dir;
  const std::string fifo = (dir.path() / "fifo").string();
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  for (const std::string& path : {dir.path().string(), fifo, std::string("/dev/null")}) {
    const auto mapped = MappedFile::open(path);
    ASSERT_FALSE(mapped.ok()) << path;
    EXPECT_EQ(mapped.status().code(), StatusCode::kInvalidArgument) << path;
    EXPECT_FALSE(read_text_file(path, 100).ok());
  }
}

TEST(MappedFile, NamesTheFileButNotItsDirectory) {
  TempDir dir;
  const auto missing = MappedFile::open((dir.path() / "missing.gguf").string());
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("missing.gguf"));
  EXPECT_THAT(missing.status().message(), Not(HasSubstr("/")));
  EXPECT_FALSE(MappedFile::open("").ok());
  EXPECT_FALSE(MappedFile::open(std::string("a\0b", 3)).ok());
}

TEST(MappedFile, KeepsItsSlicesWhenMoved) {
  TempDir dir;
  auto file = MappedFile::open(dir.write("a", "hello").string());
  ASSERT_TRUE(file.ok());
  const auto before = file->bytes();
  MappedFile moved = std::move(*file);
  EXPECT_EQ(text_of(before), "hello");
  EXPECT_EQ(moved.bytes().data(), before.data());
  auto other = MappedFile::open(dir.write("b", "other").string());
  ASSERT_TRUE(other.ok());
  moved = std::move(*other);
  EXPECT_EQ(text_of(moved.bytes()), "other");
}

// S15: a range is compared with the file at each slice, not only at open.
TEST(MappedFile, RefusesASliceOfAFileCutAfterOpening) {
  TempDir dir;
  const auto path = dir.write("a", std::string(10000, 'x'));
  auto file = MappedFile::open(path.string());
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE(file->slice(5000, 5000).ok());
  std::filesystem::resize_file(path, 6000);
  EXPECT_FALSE(file->slice(5000, 5000).ok());
  EXPECT_TRUE(file->slice(0, 6000).ok());
}

// Pages of the mapping that this process has touched, by the kernel's own count.
size_t resident_file_kib() {
  std::ifstream status("/proc/self/status");
  size_t sum = 0;
  for (std::string line; std::getline(status, line);) {
    // Files of a memory file system count as shared memory.
    for (const std::string_view field : {"RssFile:", "RssShmem:"}) {
      if (line.starts_with(field)) sum += std::stoul(line.substr(field.size()));
    }
  }
  return sum;
}

TEST(MappedFile, DropGivesPagesBackAndTheBytesStayReadable) {
  constexpr size_t kBytes = 16u << 20;
  TempDir dir;
  auto file = MappedFile::open(dir.write("big", std::string(kBytes, 'y')).string());
  ASSERT_TRUE(file.ok());
  const auto count = [&] {
    return std::count(file->bytes().begin(), file->bytes().end(), std::byte{'y'});
  };
  const size_t before = resident_file_kib();
  EXPECT_EQ(static_cast<size_t>(count()), kBytes);
  const size_t touched = resident_file_kib();
  ASSERT_GE(touched, before + kBytes / 1024 / 2);
  file->drop(0, UINT64_MAX);  // clipped
  EXPECT_LE(resident_file_kib(), touched - kBytes / 1024 / 2);
  EXPECT_EQ(static_cast<size_t>(count()), kBytes);
  file->drop(UINT64_MAX, 1);
}

TEST(TextFile, ReadsUpToTheLimit) {
  TempDir dir;
  const std::string path = dir.write("config.json", "{\"a\": 1}").string();
  EXPECT_EQ(*read_text_file(path, 8), "{\"a\": 1}");
  const auto refused = read_text_file(path, 7);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(refused.status().message(), "config.json: expected at most 7 bytes, found 8");
  EXPECT_EQ(read_text_file(path + "x", 7).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(*read_text_file(dir.write("empty", "").string(), 0), "");
}

}  // namespace
}  // namespace spin::io
