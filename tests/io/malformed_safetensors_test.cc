// SPDX-License-Identifier: Apache-2.0
// Handcrafted bad safetensors files. Ids such as S24 name rows of the advisory table in docs/.
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tests/io/io_test_support.h"
#include "tests/support/gguf_builder.h"
#include "tests/support/safetensors_builder.h"

namespace spin::io {
namespace {

using testing::BadFile;
using testing::expect_refused;
using testing::le_bytes;
using testing::parse_safetensors;
using testing::safetensors_file;
using testing::SafetensorsBuilder;

// One F32 tensor entry.
std::string entry(std::string_view name, std::string_view shape, std::string_view offsets) {
  return fmt::format(R"("{}":{{"dtype":"F32","shape":{},"data_offsets":{}}})", name, shape,
                     offsets);
}

std::string with_header(std::string_view inside, size_t data_bytes) {
  return safetensors_file(fmt::format("{{{}}}", inside), std::string(data_bytes, 'd'));
}

TEST(MalformedSafetensors, RefusesBadHeaders) {
  const std::string good = entry("a", "[1]", "[0,4]");
  const std::vector<BadFile> files = {
      {"empty file", "", {"header length: expected 8 bytes at offset 0, found 0"}},
      // S08: nothing but the first bytes of the length
      {"four bytes", "\x10\0\0", {"header length"}},
      {"header cut off", le_bytes<uint64_t>(10) + "{}", {"header: expected 10 bytes at offset 8"}},
      {"no header", le_bytes<uint64_t>(0), {"expected '{'"}},
      {"array as header", safetensors_file("[]", ""), {"expected '{'"}},
      {"byte order mark", safetensors_file("\xEF\xBB\xBF{}", ""), {"expected '{'"}},
      {"leading space", safetensors_file(" {}", ""), {"expected '{'"}},
      {"two values", safetensors_file("{}{}", ""), {"JSON object"}},
      {"bad JSON", safetensors_file("{\"a\":}", ""), {"JSON object"}},
      {"invalid UTF-8", with_header(entry("a\xFF", "[1]", "[0,4]"), 4), {"JSON object"}},
      {"too deep", safetensors_file("{\"a\":[[[[[[[[[[]]]]]]]]]]}", ""), {"depth 8"}},
      // S24: duplicate keys
      {"same tensor twice",
       with_header(good + "," + entry("a", "[1]", "[4,8]"), 8),
       {"'a': expected the name once"}},
      {"same tensor by an escape",
       with_header(good + "," + entry("\\u0061", "[1]", "[4,8]"), 8),
       {"'a'"}},
      {"same field twice",
       with_header(R"("a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]})", 4),
       {"repeated 'dtype'"}},
      {"metadata twice",
       with_header(R"("__metadata__":{},"__metadata__":{})", 0),
       {"__metadata__ once"}},
      {"metadata key twice", with_header(R"("__metadata__":{"k":"1","k":"2"})", 0), {"'k'"}},
      {"metadata of numbers", with_header(R"("__metadata__":{"k":1})", 0), {"'k'"}},
      {"metadata list", with_header(R"("__metadata__":[])", 0), {"__metadata__"}},
  };
  for (const BadFile& file : files) expect_refused(file, parse_safetensors);
}

TEST(MalformedSafetensors, RefusesBadEntries) {
  const std::vector<BadFile> files = {
      {"entry is a number", with_header(R"("a":1)", 0), {"'a': expected an object"}},
      {"no dtype",
       with_header(R"("a":{"shape":[1],"data_offsets":[0,4]})", 4),
       {"found 2 of them"}},
      {"no shape",
       with_header(R"("a":{"dtype":"F32","data_offsets":[0,4]})", 4),
       {"found 2 of them"}},
      {"no offsets", with_header(R"("a":{"dtype":"F32","shape":[1]})", 4), {"found 2 of them"}},
      {"empty entry", with_header(R"("a":{})", 0), {"found 0 of them"}},
      {"unknown field",
       with_header(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})", 4),
       {"'x'"}},
      {"dtype is a number",
       with_header(R"("a":{"dtype":1,"shape":[1],"data_offsets":[0,4]})", 4),
       {"'dtype'"}},
      {"dtype is long",
       with_header(R"("a":{"dtype":"01234567890123456","shape":[1],"data_offsets":[0,4]})", 4),
       {"'dtype'"}},
      {"shape is a number", with_header(entry("a", "1", "[0,4]"), 4), {"'shape'"}},
      {"negative size", with_header(entry("a", "[-1]", "[0,4]"), 4), {"'shape'"}},
      {"fractional size", with_header(entry("a", "[1.5]", "[0,4]"), 4), {"'shape'"}},
      {"17 dimensions",
       with_header(entry("a", "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[0,4]"), 4),
       {"'shape'"}},
      {"one offset", with_header(entry("a", "[1]", "[0]"), 4), {"'data_offsets'"}},
      {"three offsets", with_header(entry("a", "[1]", "[0,4,8]"), 4), {"'data_offsets'"}},
      {"negative offset", with_header(entry("a", "[1]", "[-4,0]"), 4), {"'data_offsets'"}},
      {"offset above 2^64",
       with_header(entry("a", "[1]", "[0,18446744073709551620]"), 4),
       {"header"}},
      {"falling offsets", with_header(entry("a", "[1]", "[4,0]"), 4), {"rising order", "[4, 0]"}},
      {"too few bytes for the shape",
       with_header(entry("a", "[2]", "[0,4]"), 4),
       {"expected 8 bytes", "found 4"}},
      {"too many bytes for the shape",
       with_header(entry("a", "[1]", "[0,8]"), 8),
       {"expected 4 bytes", "found 8"}},
      {"half a byte",
       with_header(R"("a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]})", 1),
       {"a possible number of bytes"}},
  };
  for (const BadFile& file : files) expect_refused(file, parse_safetensors);
}

// S01, S02, S12: sizes whose product or sum wraps, or that are simply far too large.
TEST(MalformedSafetensors, RefusesSizesThatWrap) {
  const std::vector<BadFile> files = {
      {"product wraps to 0",
       with_header(entry("a", "[4294967296,4294967296]", "[0,0]"), 0),
       {"tensor size overflow"}},
      {"product wraps to 4 bytes",
       with_header(entry("a", "[4611686018427387905]", "[0,4]"), 4),
       {"a possible number of bytes"}},
      {"huge length",
       with_header(entry("a", "[4611686018427387903]", "[0,18446744073709551612]"), 4),
       {"expected 18446744073709551612 bytes", "found 4"}},
      {"2^60 elements",
       with_header(entry("a", "[1152921504606846976]", "[0,4611686018427387904]"), 4),
       {"found 4"}},
      {"two tensors near 2^64",
       with_header(
           R"("a":{"dtype":"I8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]},"b":{"dtype":"I8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]})",
           4),
       {"found 4"}},
  };
  for (const BadFile& file : files) expect_refused(file, parse_safetensors);
}

// S15, S24: the tensors tile the data exactly.
TEST(MalformedSafetensors, RefusesGapsOverlapsAndTrailingBytes) {
  const std::string a = entry("a", "[1]", "[0,4]");
  const std::vector<BadFile> files = {
      {"past the end of the file",
       with_header(a + "," + entry("b", "[1]", "[4,8]"), 7),
       {"'b'", "found 3"}},
      {"bytes after the last tensor", with_header(a, 5), {"end of the file", "found 1 more bytes"}},
      {"bytes without tensors", with_header("", 1), {"found 1 more bytes"}},
      {"gap at the front",
       with_header(entry("a", "[1]", "[4,8]"), 8),
       {"begin at data offset 0", "found 4"}},
      {"gap",
       with_header(a + "," + entry("b", "[1]", "[8,12]"), 12),
       {"begin at data offset 4", "found 8"}},
      {"overlap",
       with_header(a + "," + entry("b", "[1]", "[2,6]"), 6),
       {"begin at data offset 4", "found 2"}},
      {"same place",
       with_header(a + "," + entry("b", "[1]", "[0,4]"), 4),
       {"begin at data offset 4", "found 0"}},
  };
  for (const BadFile& file : files) expect_refused(file, parse_safetensors);
}

// S06, S22: the one length field of the format at the edges of each integer type.
TEST(MalformedSafetensors, ComparesTheHeaderLengthWithTheFile) {
  const std::string good = with_header(entry("a", "[1]", "[0,4]"), 4);
  for (const uint64_t length : {0ull, 1ull, 1ull << 31, (1ull << 32) - 1, 1ull << 32, 1ull << 63,
                                ~0ull - 8, ~0ull - 7, ~0ull}) {
    expect_refused({"length " + std::to_string(length), le_bytes(length) + good.substr(8), {}},
                   [](const std::string& bytes) -> Result<int> {
                     auto parsed = parse_safetensors(bytes);
                     if (parsed.ok()) return 0;
                     // The two short ones cut the JSON; their message has no number to compare.
                     return parsed.status();
                   });
  }
}

TEST(MalformedSafetensors, RefusesEveryPrefixOfAGoodFile) {
  const std::string good =
      SafetensorsBuilder().add_f32("a", {2}, {1, 2}).add_f32("b", {1}, {3}).build();
  ASSERT_TRUE(parse_safetensors(good).ok());
  for (size_t size = 0; size < good.size(); ++size) {
    // A copy of its own, so that ASan sees a read past the end.
    const std::vector<char> cut(good.begin(), good.begin() + static_cast<ptrdiff_t>(size));
    EXPECT_FALSE(parse_safetensors(std::string_view(cut.data(), cut.size())).ok()) << size;
  }
}

}  // namespace
}  // namespace spin::io
