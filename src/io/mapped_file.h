// SPDX-License-Identifier: Apache-2.0
// A regular file mapped read-only, seen through checked slices. Messages name the file, never its
// directory.
//
// A file that another process shortens while it is mapped raises SIGBUS on the next touch of a lost
// page; no user-space check can exclude that. slice() compares with the file's present size each
// time, so a file cut before the slice is taken is an error; do not rewrite a checkpoint in place
// while it is loading (replace it by rename).
//
// Thread: immutable after open(); const members may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "io/open_file.h"
#include "spin/status.h"

namespace spin::io {

class MappedFile {
 public:
  // Errors: kNotFound; kInvalidArgument for anything but a regular file (a directory, FIFO, device
  // or socket; opening never blocks); kIoError otherwise. An empty file is fine.
  static Result<MappedFile> open(const std::string& path);

  // The same interface over memory of the caller (tests, fuzzers). drop() does nothing.
  // Lifetime: `bytes` outlives the object.
  static MappedFile borrow(std::span<const std::byte> bytes, std::string name);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  // Last component of the path.
  const std::string& name() const { return name_; }
  uint64_t size() const { return bytes_.size(); }
  // Lifetime: that of this object, also after a move.
  std::span<const std::byte> bytes() const { return bytes_; }

  // Bytes [offset, offset + size). Errors: kCorrupt when they are not all inside the file as it was
  // mapped and as it is now.
  Result<std::span<const std::byte>> slice(uint64_t offset, uint64_t size) const;

  // Gives the resident pages that touch [offset, offset + size) back to the system; a later access
  // reads them again. Ranges outside the file are clipped.
  void drop(uint64_t offset, uint64_t size) const;

 private:
  MappedFile() = default;
  void unmap();

  std::span<const std::byte> bytes_;
  std::string name_;
  FileDescriptor descriptor_;  // invalid: borrowed memory
};

}  // namespace spin::io
