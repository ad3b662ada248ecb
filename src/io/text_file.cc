// SPDX-License-Identifier: Apache-2.0
#include "io/text_file.h"

#include <errno.h>
#include <fmt/format.h>
#include <unistd.h>

#include "base/errno_text.h"
#include "io/open_file.h"

namespace spin::io {

Result<std::string> read_text_file(const std::string& path, uint64_t max_bytes) {
  SPIN_ASSIGN_OR_RETURN(const RegularFile file, open_regular_file(path));
  if (file.size > max_bytes) {
    return Status(
        StatusCode::kResourceExhausted,
        fmt::format("{}: expected at most {} bytes, found {}", file.name, max_bytes, file.size));
  }
  std::string content(file.size, '\0');
  size_t done = 0;
  while (done < content.size()) {
    const ssize_t got = ::read(file.descriptor.get(), content.data() + done, content.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      return Status(StatusCode::kIoError, file.name + ": cannot read: " + base::errno_text(errno));
    }
    if (got == 0) {
      return Status(StatusCode::kIoError,
                    fmt::format("{}: expected {} bytes, found the end of the file at offset {}",
                                file.name, content.size(), done));
    }
    done += static_cast<size_t>(got);
  }
  return content;
}

}  // namespace spin::io
