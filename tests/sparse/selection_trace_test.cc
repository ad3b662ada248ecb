// SPDX-License-Identifier: Apache-2.0
// Recording and reading back selection traces, and files that are not what they say.
#include "sparse/selection_trace.h"

#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/test_data.h"

namespace spin::sparse {
namespace {

using testing::read_file;
using testing::TempDir;

// Lists of two heads.
struct Lists {
  std::vector<uint32_t> pages = {0, 2, 7, 99, 1, 4294967294, 99, 99};  // [2, 4]
  std::vector<uint32_t> counts = {3, 2};
  layout::PageList ref() { return {pages.data(), nullptr, counts.data(), 4}; }
};

std::string words(std::initializer_list<uint32_t> values) {
  std::string out;
  for (const uint32_t value : values) {
    out.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  return out;
}

// A file of 2 layers, 3 heads and pages of 8, with the given bytes as its records.
std::string file_with(const std::string& records) {
  return "SPINTRC1" + words({1, 2, 3, 8, 5}) + "quest" + records;
}

StatusCode code_of(const std::string& bytes) {
  return parse_selection_trace(bytes).status().code();
}

TEST(SelectionTrace, WhatIsRecordedIsReadBack) {
  TempDir folder;
  const std::string path = (folder.path() / "trace").string();
  Lists lists;
  auto recorder = SelectionRecorder::create(path, {3, 2, 16, "sketch:bits=2"});
  ASSERT_TRUE(recorder.ok()) << recorder.status().to_string();
  (*recorder)->record(1, 0, 2, lists.ref(), 1, 4294967294);
  lists.counts = {0, 1};
  (*recorder)->record(4, 7, 0, lists.ref(), 0, 4294967295);
  ASSERT_TRUE((*recorder)->close().ok());

  const auto trace = parse_selection_trace(read_file(path));
  ASSERT_TRUE(trace.ok()) << trace.status().to_string();
  EXPECT_EQ(trace->header.layers, 3u);
  EXPECT_EQ(trace->header.kv_heads, 2u);
  EXPECT_EQ(trace->header.page_tokens, 16u);
  EXPECT_EQ(trace->header.settings, "sketch:bits=2");
  ASSERT_EQ(trace->records.size(), 4u);
  EXPECT_EQ(trace->records[0].pages, (std::vector<uint32_t>{2, 7}));
  EXPECT_EQ(trace->records[1].pages, std::vector<uint32_t>{1});
  EXPECT_EQ(trace->records[1].kv_head, 1u);
  EXPECT_EQ(trace->records[1].layer, 2u);
  EXPECT_TRUE(trace->records[2].pages.empty());
  EXPECT_EQ(trace->records[3].sequence, 4u);
  EXPECT_EQ(trace->records[3].step, 7u);
  EXPECT_EQ(trace->records[3].pages, std::vector<uint32_t>{1});
}

TEST(SelectionTrace, AFileThatCannotBeWrittenIsReported) {
  TempDir folder;
  EXPECT_EQ(SelectionRecorder::create((folder.path() / "none" / "trace").string(), {1, 1, 8, ""})
                .status()
                .code(),
            StatusCode::kIoError);
  EXPECT_EQ(
      SelectionRecorder::create((folder.path() / "trace").string(), {0, 1, 8, ""}).status().code(),
      StatusCode::kInvalidArgument);
  // A device that is always full.
  auto recorder = SelectionRecorder::create("/dev/full", {1, 2, 8, ""});
  ASSERT_TRUE(recorder.ok());
  Lists lists;
  for (int i = 0; i < 1000; ++i) (*recorder)->record(1, 0, 0, lists.ref(), 0, 100);
  EXPECT_EQ((*recorder)->close().code(), StatusCode::kIoError);
}

TEST(SelectionTrace, EveryPrefixOfAFileIsRefusedExceptAtARecordsEnd) {
  const std::string record = words({1, 0, 1, 2, 2, 5, 6});
  const std::string bytes = file_with(record + record);
  for (size_t size = 0; size < bytes.size(); ++size) {
    const bool whole = size == file_with("").size() || size == file_with(record).size();
    EXPECT_EQ(code_of(bytes.substr(0, size)), whole ? StatusCode::kOk : StatusCode::kCorrupt)
        << size;
  }
  EXPECT_EQ(parse_selection_trace(bytes)->records.size(), 2u);
}

TEST(SelectionTrace, FieldsThatContradictTheFileAreRefused) {
  EXPECT_EQ(code_of("SPINTRC2" + words({1, 2, 3, 8, 0})), StatusCode::kCorrupt);
  EXPECT_EQ(code_of("SPINTRC1" + words({2, 2, 3, 8, 0})), StatusCode::kUnsupported);
  EXPECT_EQ(code_of("SPINTRC1" + words({1, 0, 3, 8, 0})), StatusCode::kCorrupt);
  EXPECT_EQ(code_of("SPINTRC1" + words({1, 2, 0, 8, 0})), StatusCode::kCorrupt);
  EXPECT_EQ(code_of("SPINTRC1" + words({1, 2, 3, 0, 0})), StatusCode::kCorrupt);
  EXPECT_EQ(code_of("SPINTRC1" + words({1, 5000, 3, 8, 0})), StatusCode::kCorrupt);
  EXPECT_EQ(code_of("SPINTRC1" + words({1, 2, 3, 8, 0xFFFFFFFF})), StatusCode::kCorrupt);
  // Layer and head beyond the header's, counts beyond the file, pages out of order.
  EXPECT_EQ(code_of(file_with(words({1, 0, 2, 0, 1, 5}))), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(file_with(words({1, 0, 0, 3, 1, 5}))), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(file_with(words({1, 0, 0, 0, 0xFFFFFFFF, 5}))), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(file_with(words({1, 0, 0, 0, 0x40000000, 5}))), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(file_with(words({1, 0, 0, 0, 2, 5, 5}))), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(file_with(words({1, 0, 0, 0, 2, 6, 5}))), StatusCode::kCorrupt);
  EXPECT_EQ(code_of(file_with(words({1, 0, 0, 0, 2, 5, 6}))), StatusCode::kOk);
}

}  // namespace
}  // namespace spin::sparse
