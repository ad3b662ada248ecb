// SPDX-License-Identifier: Apache-2.0
#include "kv/host_pool.h"

#include <cstring>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::kv {
namespace {

constexpr int kPoisonByte = 0xFF;  // all-ones bytes are a NaN in both bf16 and f32

Status broken(std::string what) {
  return Status(StatusCode::kInternal, "host pool audit: " + std::move(what));
}

}  // namespace

Result<std::unique_ptr<HostPool>> HostPool::create(backend::MemoryResource& memory,
                                                   const layout::KvGeometry& geometry,
                                                   uint32_t extent_pages,
                                                   uint64_t bytes,
                                                   bool poison) {
  SPIN_CHECK(geometry.page_bytes() > 0);
  const layout::HostExtentLayout layout{extent_pages, geometry.page_bytes()};
  const auto with_tag =
      base::checked_add<uint64_t>(geometry.page_bytes(), sizeof(layout::HostPageTag));
  const auto extent_bytes =
      with_tag ? base::checked_mul<uint64_t>(extent_pages, *with_tag) : std::nullopt;
  if (extent_pages == 0 || !extent_bytes || *extent_bytes > bytes) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a host tier of {} bytes holds no extent of {} pages of {} bytes",
                              bytes, extent_pages, geometry.page_bytes()));
  }
  const uint64_t total = bytes / *extent_bytes;
  const uint64_t arena_bytes = total * *extent_bytes;  // <= bytes
  if (!base::checked_cast<uint32_t>(total) || !base::checked_cast<size_t>(arena_bytes)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a host tier of {} extents is too large", total));
  }
  auto arena = backend::Buffer::allocate(memory, arena_bytes);
  if (!arena.ok()) {
    return arena.status().with_context(
        fmt::format("host tier of {} extents of {} bytes", total, *extent_bytes));
  }
  return std::unique_ptr<HostPool>(new HostPool(layout, std::move(*arena), total, poison));
}

HostPool::HostPool(const layout::HostExtentLayout& layout,
                   backend::Buffer arena,
                   uint64_t total,
                   bool poison)
    : layout_(layout), poison_(poison), arena_(std::move(arena)), in_use_(total) {
  free_list_.resize(total);
  for (uint64_t i = 0; i < total; ++i) {
    free_list_[i] = static_cast<uint32_t>(total - 1 - i);  // extent 0 is taken first
  }
  counts_.free = counts_.total = total;
}

uint64_t HostPool::address(uint32_t index) const {
  return reinterpret_cast<uint64_t>(arena_.data()) + index * layout_.bytes();
}

bool HostPool::reserve(uint64_t extents) {
  if (extents > counts_.free) return false;
  counts_.free -= extents;
  counts_.reserved += extents;
  return true;
}

void HostPool::unreserve(uint64_t extents) {
  SPIN_CHECK(extents <= counts_.reserved);
  counts_.reserved -= extents;
  counts_.free += extents;
}

uint64_t HostPool::take() {
  SPIN_CHECK(counts_.reserved > 0 && !free_list_.empty());
  const uint32_t index = free_list_.back();
  free_list_.pop_back();
  SPIN_CHECK(in_use_[index] == 0);
  in_use_[index] = 1;
  --counts_.reserved;
  ++counts_.in_use;
  const uint64_t extent = address(index);
  if (poison_) std::memset(reinterpret_cast<void*>(extent), kPoisonByte, layout_.bytes());
  for (uint32_t page = 0; page < layout_.pages; ++page) {
    *layout_.tag(extent, page) = layout::HostPageTag();
  }
  return extent;
}

void HostPool::release(uint64_t extent) {
  const uint64_t offset = extent - address(0);
  SPIN_CHECK(extent >= address(0) && offset % layout_.bytes() == 0);
  const uint64_t index = offset / layout_.bytes();
  SPIN_CHECK(index < in_use_.size() && in_use_[index] == 1);
  in_use_[index] = 0;
  --counts_.in_use;
  ++counts_.free;
  if (poison_) std::memset(reinterpret_cast<void*>(extent), kPoisonByte, layout_.bytes());
  free_list_.push_back(static_cast<uint32_t>(index));
}

bool HostPool::is_in_use(uint64_t extent) const {
  const uint64_t offset = extent - address(0);
  if (extent < address(0) || offset % layout_.bytes() != 0) return false;
  const uint64_t index = offset / layout_.bytes();
  return index < in_use_.size() && in_use_[index] == 1;
}

Status HostPool::audit() const {
  uint64_t used = 0;
  for (uint8_t flag : in_use_) used += flag;
  if (used != counts_.in_use || counts_.total != in_use_.size()) {
    return broken(fmt::format("{} of {} extents are in use, the counters say {} of {}", used,
                              in_use_.size(), counts_.in_use, counts_.total));
  }
  if (counts_.free + counts_.reserved + counts_.in_use != counts_.total) {
    return broken(fmt::format("{} free + {} reserved + {} in use is not {}", counts_.free,
                              counts_.reserved, counts_.in_use, counts_.total));
  }
  if (free_list_.size() != counts_.free + counts_.reserved) {
    return broken(fmt::format("{} extents are free or reserved, the free list has {}",
                              counts_.free + counts_.reserved, free_list_.size()));
  }
  std::vector<bool> listed(in_use_.size());
  for (uint32_t index : free_list_) {
    if (index >= in_use_.size() || in_use_[index] != 0 || listed[index]) {
      return broken(fmt::format("extent {} is on the free list twice or in use", index));
    }
    listed[index] = true;
  }
  return ok_status();
}

}  // namespace spin::kv
