// SPDX-License-Identifier: Apache-2.0
// Handcrafted bad GGUF files. Ids such as S12 name rows of the advisory table in docs/.
#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "tests/io/io_test_support.h"
#include "tests/support/gguf_builder.h"

namespace spin::io {
namespace {

using namespace spin::testing;  // NOLINT(google-build-using-namespace): the builder's constants

// A good file whose fields the cases below change.
GgufTensorRecord f32_tensor(std::string name, std::vector<uint64_t> dims, size_t data_bytes) {
  GgufTensorRecord record;
  record.name = std::move(name);
  record.dims = std::move(dims);
  record.data = std::string(data_bytes, 'd');
  return record;
}

std::string file_with(GgufTensorRecord tensor) {
  return GgufBuilder().add_tensor(std::move(tensor)).build();
}

std::string file_of(const std::function<void(GgufBuilder&)>& change) {
  GgufBuilder builder;
  builder.add_u32("general.quantization_version", 2).add_tensor(f32_tensor("t", {4}, 16));
  change(builder);
  return builder.build();
}

TEST(MalformedGguf, RefusesBadHeaders) {
  const std::vector<BadFile> files = {
      {"empty file", "", {"magic: expected 4 bytes at offset 0, found 0"}},
      // S08: nothing but the magic
      {"four bytes", "GGUF", {"version: expected 4 bytes at offset 4, found 0"}},
      {"bad magic",
       file_of([](GgufBuilder& b) { b.magic = "GGML"; }),
       {"expected 'GGUF'", "47 47 4d 4c"}},
      {"version 0", file_of([](GgufBuilder& b) { b.version = 0; }), {"expected 2 or 3", "found 0"}},
      {"version 1", file_of([](GgufBuilder& b) { b.version = 1; }), {"found 1"}},
      {"version 4", file_of([](GgufBuilder& b) { b.version = 4; }), {"found 4"}},
      {"big-endian", file_of([](GgufBuilder& b) { b.version = 0x03000000; }), {"big-endian"}},
      {"no counts", "GGUF" + le_bytes(3u), {"number of tensors: expected 8 bytes at offset 8"}},
      {"one key too many", file_of([](GgufBuilder& b) { b.kv_count = 2; }), {"expected"}},
      {"one tensor too many", file_of([](GgufBuilder& b) { b.tensor_count = 2; }), {"expected"}},
      {"a part of a split file",
       file_of([](GgufBuilder& b) { b.add_number<uint16_t>("split.count", kGgufU16, 3); }),
       {"split.count", "found a part of 3"}},
  };
  for (const BadFile& file : files) expect_refused(file, parse_gguf);
}

TEST(MalformedGguf, RefusesBadKeysAndValues) {
  const auto with = [](std::string_view key, uint32_t type, std::string_view value) {
    return file_of([&](GgufBuilder& b) { b.add_raw(key, type, value); });
  };
  const std::string long_key(kMaxGgufKeyBytes + 1, 'k');
  const std::vector<BadFile> files = {
      {"key too long",
       file_of([&](GgufBuilder& b) { b.add_u32(long_key, 1); }),
       {"key: expected a length of at most 65535"}},
      {"same key twice",
       file_of([](GgufBuilder& b) { b.add_u32("a", 1).add_u32("b", 1).add_u32("a", 2); }),
       {"key 'a': expected it once"}},
      {"unknown value type",
       with("k", 13, "\1\1\1\1"),
       {"value type: expected 0 to 12", "found 13"}},
      {"value type 2^32-1", with("k", ~0u, "\1\1\1\1"), {"found 4294967295"}},
      {"unknown element type",
       with("k", kGgufArray, le_bytes(13u) + le_bytes<uint64_t>(0)),
       {"array element type", "found 13"}},
      {"nested array",
       with("k", kGgufArray,
            le_bytes<uint32_t>(kGgufArray) + le_bytes<uint64_t>(1) + le_bytes<uint32_t>(kGgufU8) +
                le_bytes<uint64_t>(1) + "x"),
       {"nested arrays"}},
      // S05: an array fails in its middle, after some elements were taken in
      {"array of strings cut in the middle",
       with("k", kGgufArray,
            le_bytes<uint32_t>(kGgufString) + le_bytes<uint64_t>(3) + gguf_string("one") +
                le_bytes<uint64_t>(1ull << 40)),
       {"key 'k'", "array string"}},
      // S04: a token longer than INT32_MAX, and one just over the cap with all its bytes there
      {"token of 2^31 bytes",
       with("tokenizer.ggml.tokens", kGgufArray,
            le_bytes<uint32_t>(kGgufString) + le_bytes<uint64_t>(1) +
                le_bytes<uint64_t>(1ull << 31)),
       {"at most 65536", "found 2147483648"}},
      {"token over the cap",
       with("tokenizer.ggml.tokens", kGgufArray,
            le_bytes<uint32_t>(kGgufString) + le_bytes<uint64_t>(1) +
                gguf_string(std::string(65537, 't'))),
       {"at most 65536", "found 65537"}},
      // S12: counts of 2^60 in a file below 1 KB
      {"string of 2^60 bytes",
       with("k", kGgufString, le_bytes<uint64_t>(1ull << 60)),
       {"string value", "1152921504606846976"}},
      {"2^60 strings",
       with("k", kGgufArray, le_bytes<uint32_t>(kGgufString) + le_bytes<uint64_t>(1ull << 60)),
       {"array length: expected at most", "1152921504606846976"}},
      {"2^60 numbers",
       with("k", kGgufArray, le_bytes<uint32_t>(kGgufU64) + le_bytes<uint64_t>(1ull << 61)),
       {"array length"}},
      {"2^60 keys",
       file_of([](GgufBuilder& b) { b.kv_count = 1ull << 60; }),
       {"number of keys: expected at most"}},
      {"2^60 tensors",
       file_of([](GgufBuilder& b) { b.tensor_count = 1ull << 60; }),
       {"number of tensors: expected at most"}},
  };
  for (const BadFile& file : files) expect_refused(file, parse_gguf);
}

// S21: 48 bytes that announce an array of 2^63 elements must be answered at once.
TEST(MalformedGguf, AnswersAtOnceToAnArrayOf2To63Elements) {
  for (const uint32_t type : {kGgufU8, kGgufU64, kGgufString, kGgufBool}) {
    const std::string bytes =
        "GGUF" + le_bytes(3u) + le_bytes<uint64_t>(0) + le_bytes<uint64_t>(1) + gguf_string("") +
        le_bytes<uint32_t>(kGgufArray) + le_bytes(type) + le_bytes<uint64_t>(1ull << 63);
    ASSERT_EQ(bytes.size(), 48u);
    expect_refused({"array of 2^63", bytes, {"array length", "9223372036854775808"}}, parse_gguf);
  }
}

TEST(MalformedGguf, RefusesBadTensorEntries) {
  const auto changed = [](const std::function<void(GgufTensorRecord&)>& change) {
    GgufTensorRecord tensor = f32_tensor("t", {4}, 16);
    change(tensor);
    return file_with(std::move(tensor));
  };
  const std::string long_name(kMaxGgufTensorNameBytes + 1, 'n');
  const std::vector<BadFile> files = {
      {"name too long",
       changed([&](auto& t) { t.name = long_name; }),
       {"tensor name: expected a length of at most 64", "found 65"}},
      {"no dimensions",
       changed([](auto& t) { t.dims = {}; }),
       {"number of dimensions: expected 1 to 4", "found 0"}},
      {"five dimensions",
       changed([](auto& t) {
         t.dims = {4, 1, 1, 1, 1};
       }),
       {"found 5"}},
      {"2^32-1 dimensions", changed([](auto& t) { t.n_dims = ~0u; }), {"found 4294967295"}},
      // S18: zero-size tensors
      {"a dimension of 0",
       changed([](auto& t) {
         t.dims = {4, 0};
       }),
       {"dimension 1: expected at least 1", "found 0"}},
      {"unknown type", changed([](auto& t) { t.type = 1000; }), {"element type", "found 1000"}},
      {"removed type", changed([](auto& t) { t.type = 4; }), {"element type", "found 4"}},
      {"row is not whole blocks",
       changed([](auto& t) {
         t.type = kGgmlQ4_0;
         t.dims = {33};
         t.data = std::string(64, 'd');
       }),
       {"rows of Q4_0: expected a multiple of 32", "found 33"}},
      {"row of half a super-block",
       changed([](auto& t) {
         t.type = kGgmlQ6_K;
         t.dims = {128, 2};
         t.data = std::string(420, 'd');
       }),
       {"multiple of 256", "found 128"}},
      {"misaligned offset",
       changed([](auto& t) {
         t.offset = 8;
         t.data = std::string(64, 'd');
       }),
       {"offset: expected a multiple of 32", "found 8"}},
      {"same name twice",
       GgufBuilder()
           .add_tensor(f32_tensor("t", {4}, 16))
           .add_tensor(f32_tensor("t", {4}, 16))
           .build(),
       {"tensor 't': expected the name once"}},
      {"overlap",
       GgufBuilder()
           .add_tensor(f32_tensor("a", {16}, 64))
           .add_tensor([] {
             auto t = f32_tensor("b", {4}, 16);
             t.offset = 32;
             return t;
           }())
           .build(),
       {"tensor 'b': expected to begin at offset", "after 'a'"}},
      {"same place",
       GgufBuilder()
           .add_tensor(f32_tensor("a", {4}, 16))
           .add_tensor([] {
             auto t = f32_tensor("b", {4}, 16);
             t.offset = 0;
             return t;
           }())
           .build(),
       {"expected to begin at offset"}},
  };
  for (const BadFile& file : files) expect_refused(file, parse_gguf);
}

// S01, S02, S15, S18: sizes and offsets that wrap or leave the file.
TEST(MalformedGguf, RefusesTensorPastEndOfFile) {
  const auto sized = [](std::vector<uint64_t> dims, uint32_t type, std::optional<uint64_t> offset) {
    GgufTensorRecord tensor = f32_tensor("t", std::move(dims), 16);
    tensor.type = type;
    tensor.offset = offset;
    return tensor;
  };
  const std::vector<BadFile> files = {
      {"S01 product wraps",
       file_with(sized({1ull << 32, 1ull << 32}, kGgmlF32, {})),
       {"tensor size overflow"}},
      {"S01 product wraps to 4 Mi",
       file_with(sized({1ull << 31, 1ull << 31, 5}, kGgmlF32, {})),
       {"tensor size overflow"}},
      {"S01 bytes wrap", file_with(sized({1ull << 62}, kGgmlF32, {})), {"tensor size overflow"}},
      {"S01 bytes of blocks wrap",
       file_with(sized({1ull << 59, 31}, kGgmlQ8_0, {})),
       {"tensor size overflow"}},
      {"2^60 values",
       file_with(sized({1ull << 60}, kGgmlF32, {})),
       {"expected 4611686018427387904 bytes"}},
      {"S02 two tensors near 2^64",
       GgufBuilder()
           .add_tensor(sized({~0ull - 63}, kGgmlI8, 0))
           .add_tensor(sized({~0ull - 63}, kGgmlI8, 0))
           .build(),
       {"expected 18446744073709551552 bytes"}},
      {"S02 offset plus size wraps",
       file_with(sized({64}, kGgmlI8, ~0ull - 31)),
       {"data offset 18446744073709551584"}},
      {"S18 size next to 2^64",
       file_with(sized({~0ull}, kGgmlI8, {})),
       {"expected 18446744073709551615 bytes"}},
      {"S15 one byte short",
       file_with(sized({5}, kGgmlF32, {})),
       {"expected 20 bytes at data offset 0"}},
      {"S15 offset past the end",
       file_with(sized({4}, kGgmlF32, 1ull << 40)),
       {"data offset 1099511627776"}},
      {"offset 2^63",
       file_with(sized({4}, kGgmlF32, 1ull << 63)),
       {"data offset 9223372036854775808"}},
  };
  for (const BadFile& file : files) expect_refused(file, parse_gguf);
}

// S10, S18: alignment 0 divides by zero, others wrap the padding; another type trips an assert.
TEST(MalformedGguf, RefusesBadAlignments) {
  for (const uint32_t alignment : {0u, 3u, 33u, 65535u, 131072u, 1u << 31, ~0u}) {
    expect_refused({"alignment " + std::to_string(alignment),
                    file_of([&](GgufBuilder& b) { b.add_u32("general.alignment", alignment); }),
                    {"power of two up to 65536", "found " + std::to_string(alignment)}},
                   parse_gguf);
  }
  expect_refused({"i32",
                  file_of([](GgufBuilder& b) { b.add_i32("general.alignment", 32); }),
                  {"expected u32", "found i32"}},
                 parse_gguf);
  expect_refused({"u64",
                  file_of([](GgufBuilder& b) { b.add_u64("general.alignment", 32); }),
                  {"expected u32", "found u64"}},
                 parse_gguf);
  expect_refused({"string",
                  file_of([](GgufBuilder& b) { b.add_string("general.alignment", "32"); }),
                  {"expected u32", "found string"}},
                 parse_gguf);
  expect_refused({"array",
                  file_of([](GgufBuilder& b) { b.add_i32s("general.alignment", {32}); }),
                  {"expected u32", "found array"}},
                 parse_gguf);
}

// S06, S22: each count and length field at the edges of each integer type. From 2^31 on no field
// of this small file can be right; below, an answer without a large allocation is all that counts.
TEST(MalformedGguf, ComparesEveryCountWithTheBytesPresent) {
  using Make = std::function<std::string(uint64_t)>;
  const std::vector<std::pair<std::string, Make>> fields = {
      {"number of tensors",
       [](uint64_t n) { return file_of([&](GgufBuilder& b) { b.tensor_count = n; }); }},
      {"number of keys",
       [](uint64_t n) { return file_of([&](GgufBuilder& b) { b.kv_count = n; }); }},
      {"string length",
       [](uint64_t n) {
         return file_of([&](GgufBuilder& b) { b.add_raw("k", kGgufString, le_bytes(n) + "x"); });
       }},
      {"key length",
       [](uint64_t n) {
         return file_of([&](GgufBuilder& b) {
                  b.kv_count = 2;
                  b.padding = 1;
                  b.add_raw("", kGgufU8, "x");
                }).substr(0, 24) +
                le_bytes(n) + std::string(40, 'k');
       }},
      {"array of strings",
       [](uint64_t n) {
         return file_of(
             [&](GgufBuilder& b) { b.add_array_raw("k", kGgufString, n, gguf_string("x")); });
       }},
      {"array of numbers",
       [](uint64_t n) {
         return file_of([&](GgufBuilder& b) { b.add_array_raw("k", kGgufF64, n, le_bytes(1.0)); });
       }},
      {"number of dimensions",
       [](uint64_t n) {
         auto t = f32_tensor("t", {4}, 16);
         t.n_dims = static_cast<uint32_t>(std::min<uint64_t>(n, ~0u));
         return file_with(t);
       }},
      {"dimension", [](uint64_t n) { return file_with(f32_tensor("t", {n}, 16)); }},
      {"offset",
       [](uint64_t n) {
         auto t = f32_tensor("t", {4}, 16);
         t.offset = n;
         return file_with(t);
       }},
  };
  for (const auto& [name, make] : fields) {
    for (const uint64_t n :
         {0ull, 1ull, (1ull << 31) - 1, 1ull << 31, 1ull << 32, 1ull << 63, ~0ull}) {
      SCOPED_TRACE(name + " = " + std::to_string(n));
      const std::string bytes = make(n);
      AllocationWatch watch;
      const auto parsed = parse_gguf(bytes);
      EXPECT_LE(watch.largest(), 2 * bytes.size() + kAllocationSlack);
      if (n >= (1ull << 31)) {
        EXPECT_FALSE(parsed.ok());
      }
    }
  }
}

std::string rich_file() {
  GgufBuilder builder;
  builder.add_string("general.architecture", "llama")
      .add_u32("general.alignment", 32)
      .add_strings("tokenizer.ggml.tokens", {"a", "bc", "def"})
      .add_i32s("tokenizer.ggml.token_type", {1, 1, 3})
      .add_f32("llama.rope.freq_base", 10000.f)
      .add_bool("tokenizer.ggml.add_bos_token", false);
  builder.add_f32_tensor("a", {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  GgufTensorRecord q4{"b", {32, 1}, kGgmlQ4_0, std::string(18, '\x55'), {}, {}};
  return builder.add_tensor(q4).build();
}

// Reads all there is; only to run the code under sanitizers.
void walk(const GgufFile& file) {
  for (const std::string_view key : file.metadata().keys()) {
    const auto array = file.metadata().get_array(key);
    if (!array.ok()) continue;
    for (uint64_t i = 0; i <= (*array)->size(); ++i) {
      static_cast<void>((*array)->string_at(i).ok());
      static_cast<void>((*array)->float_at(i).ok());
    }
  }
  for (const TensorInfo& info : file.tensors()) {
    std::vector<float> row(info.row_elements());
    static_cast<void>(file.read_rows_f32(info, info.rows() - 1, 1, row).ok());
  }
}

TEST(MalformedGguf, RefusesEveryPrefixOfAGoodFile) {
  const std::string good = rich_file();
  const auto parsed = parse_gguf(good);
  ASSERT_TRUE(parsed.ok()) << parsed.status().to_string();
  walk(**parsed);
  for (size_t size = 0; size < good.size(); ++size) {
    // A copy of its own, so that ASan sees a read past the end.
    const std::vector<char> cut(good.begin(), good.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_FALSE(parse_gguf(std::string_view(cut.data(), cut.size())).ok()) << size;
  }
}

TEST(MalformedGguf, SurvivesEveryChangeOfOneByte) {
  const std::string good = rich_file();
  size_t accepted = 0;
  for (size_t i = 0; i < good.size(); ++i) {
    for (const int value : {0x00, 0x01, 0x7F, 0x80, 0xFF, good[i] ^ 0x01, good[i] ^ 0x20}) {
      std::vector<char> bytes(good.begin(), good.end());
      bytes[i] = static_cast<char>(value);
      const auto parsed = parse_gguf(std::string_view(bytes.data(), bytes.size()));
      if (!parsed.ok()) continue;
      ++accepted;
      walk(**parsed);
    }
  }
  EXPECT_GT(accepted, 100u);  // data bytes and text are free
}

}  // namespace
}  // namespace spin::io
