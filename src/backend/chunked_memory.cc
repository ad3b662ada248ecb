// SPDX-License-Identifier: Apache-2.0
#include "backend/chunked_memory.h"

#include <algorithm>
#include <iterator>

#include "base/check.h"

namespace spin::backend {
namespace {

size_t rounded(size_t bytes) {
  constexpr size_t kGranule = ChunkedMemoryResource::kGranule;
  return std::max<size_t>(1, (bytes + kGranule - 1) / kGranule) * kGranule;
}

}  // namespace

ChunkedMemoryResource::ChunkedMemoryResource(MemoryResource& upstream, size_t chunk_bytes)
    : upstream_(upstream), chunk_bytes_(chunk_bytes) {
  SPIN_CHECK(chunk_bytes > 0 && chunk_bytes % kGranule == 0);
}

ChunkedMemoryResource::~ChunkedMemoryResource() {
  base::MutexLock lock(mutex_);
  for (const Address chunk : chunks_) {
    upstream_.deallocate(reinterpret_cast<void*>(chunk), chunk_bytes_, kGranule);
  }
}

bool ChunkedMemoryResource::is_passed_through(size_t bytes, size_t alignment) const {
  // First, so that rounding cannot overflow.
  return bytes > chunk_bytes_ / 2 || alignment > kGranule;
}

uint64_t ChunkedMemoryResource::bytes_in_use() const {
  base::MutexLock lock(mutex_);
  return in_use_;
}

uint64_t ChunkedMemoryResource::bytes_held() const {
  base::MutexLock lock(mutex_);
  return chunks_.size() * chunk_bytes_ + passed_through_;
}

Result<void*> ChunkedMemoryResource::allocate(size_t bytes, size_t alignment) {
  SPIN_CHECK(alignment != 0 && (alignment & (alignment - 1)) == 0);
  if (is_passed_through(bytes, alignment)) {
    SPIN_ASSIGN_OR_RETURN(void* const pointer, upstream_.allocate(bytes, alignment));
    base::MutexLock lock(mutex_);
    in_use_ += bytes;
    passed_through_ += bytes;
    return pointer;
  }
  const size_t wanted = rounded(bytes);
  base::MutexLock lock(mutex_);
  auto fit = by_size_.lower_bound({wanted, 0});
  if (fit == by_size_.end()) {
    SPIN_RETURN_IF_ERROR(add_chunk());
    fit = by_size_.lower_bound({wanted, 0});
  }
  const auto [size, address] = *fit;
  remove_free(address, size);
  if (size > wanted) add_free(address + wanted, size - wanted);
  in_use_ += bytes;
  return reinterpret_cast<void*>(address);
}

void ChunkedMemoryResource::deallocate(void* pointer, size_t bytes, size_t alignment) {
  if (is_passed_through(bytes, alignment)) {
    upstream_.deallocate(pointer, bytes, alignment);
    base::MutexLock lock(mutex_);
    in_use_ -= bytes;
    passed_through_ -= bytes;
    return;
  }
  base::MutexLock lock(mutex_);
  Address address = reinterpret_cast<Address>(pointer);
  size_t size = rounded(bytes);
  const Address chunk = chunk_of(address);
  auto after = free_.upper_bound(address);
  SPIN_CHECK(after == free_.end() || after->first >= address + size ||
             after->first >= chunk + chunk_bytes_);
  if (after != free_.end() && after->first == address + size &&
      after->first != chunk + chunk_bytes_) {
    const size_t more = after->second;
    remove_free(address + size, more);
    size += more;
  }
  after = free_.upper_bound(address);
  if (after != free_.begin()) {
    const auto [before, before_size] = *std::prev(after);
    SPIN_CHECK(before + before_size <= address);
    if (before + before_size == address && before >= chunk) {
      remove_free(before, before_size);
      address = before;
      size += before_size;
    }
  }
  in_use_ -= bytes;
  const bool another_is_empty = !by_size_.empty() && by_size_.rbegin()->first == chunk_bytes_;
  if (size == chunk_bytes_ && another_is_empty) {
    chunks_.erase(chunk);
    upstream_.deallocate(reinterpret_cast<void*>(chunk), chunk_bytes_, kGranule);
    return;
  }
  add_free(address, size);
}

Status ChunkedMemoryResource::add_chunk() {
  SPIN_ASSIGN_OR_RETURN(void* const pointer, upstream_.allocate(chunk_bytes_, kGranule));
  const auto address = reinterpret_cast<Address>(pointer);
  SPIN_CHECK(address % kGranule == 0);
  chunks_.insert(address);
  add_free(address, chunk_bytes_);
  return ok_status();
}

void ChunkedMemoryResource::add_free(Address address, size_t bytes) {
  free_.emplace(address, bytes);
  by_size_.emplace(bytes, address);
}

void ChunkedMemoryResource::remove_free(Address address, size_t bytes) {
  free_.erase(address);
  by_size_.erase({bytes, address});
}

ChunkedMemoryResource::Address ChunkedMemoryResource::chunk_of(Address address) const {
  auto chunk = chunks_.upper_bound(address);
  SPIN_CHECK(chunk != chunks_.begin());
  --chunk;
  SPIN_CHECK(address < *chunk + chunk_bytes_);
  return *chunk;
}

}  // namespace spin::backend
