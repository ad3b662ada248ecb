// SPDX-License-Identifier: Apache-2.0
// Opening of regular files for the readers of this folder. Thread: any.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "spin/status.h"

namespace spin::io {

// Owns a file descriptor.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor();

  bool valid() const { return fd_ >= 0; }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

struct RegularFile {
  FileDescriptor descriptor;
  std::string name;  // last component of the path
  uint64_t size = 0;
};

// Errors: kNotFound; kInvalidArgument for anything but a regular file (never blocks, not even on a
// FIFO); kIoError. Messages hold the file's name, not its directory.
Result<RegularFile> open_regular_file(const std::string& path);

// Last component of `path`; "/" and "a/" give the component before the slash.
std::string file_name_of(const std::string& path);

}  // namespace spin::io
