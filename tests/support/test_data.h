// SPDX-License-Identifier: Apache-2.0
// Where the files of tests/data lie, and small helpers around them. Tests only.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace spin::testing {

// Path of `name` under tests/data.
std::filesystem::path test_data(std::string_view name);

// Path of `name` under the repository's root (e.g. "models/needle-29m").
std::filesystem::path source_path(std::string_view name);

// Whole content of a file; fails the test and returns "" if it cannot be read.
std::string read_file(const std::filesystem::path& path);

// A folder of its own for the running test, removed at the end of its life.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::filesystem::path& path() const { return path_; }
  // Writes `content` to path()/name and returns that path.
  std::filesystem::path write(std::string_view name, std::string_view content) const;

 private:
  std::filesystem::path path_;
};

}  // namespace spin::testing
