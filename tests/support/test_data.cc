// SPDX-License-Identifier: Apache-2.0
#include "tests/support/test_data.h"

#include <fstream>
#include <iterator>

#include <gtest/gtest.h>
#include <stdlib.h>

namespace spin::testing {

std::filesystem::path test_data(std::string_view name) {
  return std::filesystem::path(SPIN_TEST_DATA) / name;
}

std::filesystem::path source_path(std::string_view name) {
  return std::filesystem::path(SPIN_SOURCE_DIR) / name;
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << "cannot open " << path;
  return std::string(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
}

TempDir::TempDir() {
  std::string pattern = (std::filesystem::temp_directory_path() / "spin-test-XXXXXX").string();
  char* made = mkdtemp(pattern.data());
  EXPECT_NE(made, nullptr);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::filesystem::path TempDir::write(std::string_view name, std::string_view content) const {
  const std::filesystem::path target = path_ / name;
  std::ofstream out(target, std::ios::binary);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  EXPECT_TRUE(out.good());
  return target;
}

}  // namespace spin::testing
