// SPDX-License-Identifier: Apache-2.0
#include "io/mapped_file.h"

#include <algorithm>
#include <utility>

#include <errno.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked_math.h"
#include "base/errno_text.h"

namespace spin::io {

Result<MappedFile> MappedFile::open(const std::string& path) {
  SPIN_ASSIGN_OR_RETURN(RegularFile regular, open_regular_file(path));
  MappedFile file;
  file.name_ = regular.name;
  file.descriptor_ = std::move(regular.descriptor);
  if (regular.size == 0) return file;  // mmap refuses an empty range
  void* start =
      ::mmap(nullptr, regular.size, PROT_READ, MAP_PRIVATE, file.descriptor_.get(), /*offset=*/0);
  if (start == MAP_FAILED) {
    return Status(StatusCode::kIoError, fmt::format("{}: cannot map {} bytes: {}", file.name_,
                                                    regular.size, base::errno_text(errno)));
  }
  file.bytes_ = {static_cast<const std::byte*>(start), regular.size};
  return file;
}

MappedFile MappedFile::borrow(std::span<const std::byte> bytes, std::string name) {
  MappedFile file;
  file.bytes_ = bytes;
  file.name_ = std::move(name);
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})),
      name_(std::move(other.name_)),
      descriptor_(std::move(other.descriptor_)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this != &other) {
    unmap();
    bytes_ = std::exchange(other.bytes_, {});
    name_ = std::move(other.name_);
    descriptor_ = std::move(other.descriptor_);
  }
  return *this;
}

MappedFile::~MappedFile() { unmap(); }

void MappedFile::unmap() {
  if (descriptor_.valid() && !bytes_.empty()) {
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
  bytes_ = {};
}

Result<std::span<const std::byte>> MappedFile::slice(uint64_t offset, uint64_t size) const {
  uint64_t present = bytes_.size();
  if (descriptor_.valid()) {
    struct stat info = {};
    if (::fstat(descriptor_.get(), &info) != 0) {
      return Status(StatusCode::kIoError, name_ + ": cannot stat: " + base::errno_text(errno));
    }
    present = std::min(present, static_cast<uint64_t>(info.st_size));
  }
  const auto end = base::checked_add(offset, size);
  if (!end || *end > present) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("{}: expected {} bytes at offset {}, found a file of {} bytes", name_,
                              size, offset, present));
  }
  return bytes_.subspan(offset, size);
}

void MappedFile::drop(uint64_t offset, uint64_t size) const {
  if (!descriptor_.valid() || offset >= bytes_.size() || size == 0) return;
  size = std::min<uint64_t>(size, bytes_.size() - offset);
  // Whole pages, outwards: a neighbour's part of a page is read again when it is needed.
  const uint64_t page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const uint64_t begin = offset / page * page;
  ::madvise(const_cast<std::byte*>(bytes_.data()) + begin, offset + size - begin, MADV_DONTNEED);
}

}  // namespace spin::io
