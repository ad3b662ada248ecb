// SPDX-License-Identifier: Apache-2.0
#include "io/open_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked_math.h"
#include "base/errno_text.h"

namespace spin::io {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "something else";
}

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

std::string file_name_of(const std::string& path) {
  const size_t last = path.find_last_not_of('/');
  if (last == std::string::npos) return path.empty() ? "" : "/";
  const size_t slash = path.find_last_of('/', last);
  const size_t first = slash == std::string::npos ? 0 : slash + 1;
  return path.substr(first, last + 1 - first);
}

Result<RegularFile> open_regular_file(const std::string& path) {
  RegularFile file;
  file.name = file_name_of(path);
  // A path with a NUL byte would silently name another file.
  if (path.empty() || path.find('\0') != std::string::npos) {
    return Status(StatusCode::kInvalidArgument, "expected a file path, found an empty or cut one");
  }
  // O_NONBLOCK: opening a FIFO must not wait for its writer; it means nothing to a regular file.
  file.descriptor = FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.descriptor.valid()) {
    const int error = errno;
    const bool absent = error == ENOENT || error == ENOTDIR;
    return Status(absent ? StatusCode::kNotFound : StatusCode::kIoError,
                  file.name + ": cannot open: " + base::errno_text(error));
  }
  struct stat info = {};
  if (::fstat(file.descriptor.get(), &info) != 0) {
    return Status(StatusCode::kIoError, file.name + ": cannot stat: " + base::errno_text(errno));
  }
  if (!S_ISREG(info.st_mode)) {
    return Status(StatusCode::kInvalidArgument,
                  file.name + ": expected a regular file, found " + kind_of(info.st_mode));
  }
  const auto size = base::checked_cast<size_t>(info.st_size);
  if (!size) {
    return Status(StatusCode::kUnsupported, file.name + ": the file is larger than memory");
  }
  file.size = *size;
  return file;
}

}  // namespace spin::io
