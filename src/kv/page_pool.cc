// SPDX-License-Identifier: Apache-2.0
#include "kv/page_pool.h"

#include <cstring>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::kv {
namespace {

// All-ones bytes are a NaN in both bf16 and f32.
constexpr int kPoisonByte = 0xFF;

Status broken(std::string what) {
  return Status(StatusCode::kInternal, "page pool audit: " + std::move(what));
}

}  // namespace

Result<std::unique_ptr<PagePool>> PagePool::create(backend::MemoryResource& memory,
                                                   const layout::KvGeometry& geometry,
                                                   const PagePoolOptions& options) {
  // The largest slot number is left free for "no slot" in kernels' tables.
  constexpr uint64_t kMaxPages = std::numeric_limits<uint32_t>::max() - 1;
  if (options.pages == 0 || options.pages > kMaxPages) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("a KV pool has 1 to {} pages, asked for {}", kMaxPages, options.pages));
  }
  SPIN_CHECK(geometry.page_bytes() > 0);
  const auto bytes = base::checked_mul<uint64_t>(options.pages, geometry.page_bytes());
  if (!bytes || !base::checked_cast<size_t>(*bytes)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a KV pool of {} pages of {} bytes does not fit an address space",
                              options.pages, geometry.page_bytes()));
  }
  auto arena = backend::Buffer::allocate(memory, *bytes);
  if (!arena.ok()) {
    return arena.status().with_context(
        fmt::format("KV pool of {} pages of {} bytes", options.pages, geometry.page_bytes()));
  }
  return std::unique_ptr<PagePool>(new PagePool(geometry, options, std::move(*arena)));
}

PagePool::PagePool(const layout::KvGeometry& geometry,
                   const PagePoolOptions& options,
                   backend::Buffer arena)
    : geometry_(geometry),
      poison_(options.poison),
      table_memory_(options.table_memory),
      table_stream_(options.table_stream),
      arena_(std::move(arena)) {
  pages_.resize(options.pages);
  free_list_.resize(options.pages);
  for (uint64_t i = 0; i < options.pages; ++i) {
    free_list_[i] = static_cast<uint32_t>(options.pages - 1 - i);  // slot 0 is taken first
  }
  counts_.free = counts_.total = options.pages;
}

std::byte* PagePool::page_address(uint32_t slot) const {
  SPIN_CHECK(slot < pages_.size());
  return arena_.as<std::byte>() + uint64_t{slot} * geometry_.page_bytes();
}

void PagePool::poison(uint32_t slot) {
  if (poison_) std::memset(page_address(slot), kPoisonByte, geometry_.page_bytes());
}

bool PagePool::allocate(std::span<PageHandle> out) {
  if (out.size() > free_list_.size()) return false;
  for (PageHandle& handle : out) {
    const uint32_t slot = free_list_.back();
    free_list_.pop_back();
    Page& page = pages_[slot];
    SPIN_CHECK(page.state == PageState::kFree);
    if (page.generation == 0) poison(slot);  // later ones were poisoned by release()
    page.state = PageState::kFilling;
    handle = {slot, page.generation};
  }
  counts_.free -= out.size();
  counts_.filling += out.size();
  return true;
}

PagePool::Page& PagePool::checked(PageHandle page) {
  SPIN_CHECK(is_current(page));
  return pages_[page.slot];
}

void PagePool::seal(PageHandle handle) {
  Page& page = checked(handle);
  SPIN_CHECK(page.state == PageState::kFilling);
  page.state = PageState::kSealed;
  --counts_.filling;
  ++counts_.sealed;
}

void PagePool::release(std::span<const PageHandle> handles) {
  for (const PageHandle& handle : handles) {
    Page& page = checked(handle);
    --(page.state == PageState::kFilling ? counts_.filling : counts_.sealed);
    ++counts_.free;
    page.state = PageState::kFree;
    ++page.generation;
    if (page.generation == 0) page.generation = 1;  // 0 means never used
    poison(handle.slot);
    free_list_.push_back(handle.slot);
  }
}

bool PagePool::is_current(PageHandle page) const {
  return page.slot < pages_.size() && pages_[page.slot].state != PageState::kFree &&
         pages_[page.slot].generation == page.generation;
}

PageState PagePool::state(uint32_t slot) const {
  SPIN_CHECK(slot < pages_.size());
  return pages_[slot].state;
}

Status PagePool::audit() const {
  PageCounts found;
  found.total = pages_.size();
  for (const Page& page : pages_) {
    if (page.state == PageState::kFree) ++found.free;
    if (page.state == PageState::kFilling) ++found.filling;
    if (page.state == PageState::kSealed) ++found.sealed;
  }
  if (found != counts_) {
    return broken(
        fmt::format("counted {} free, {} filling, {} sealed of {}; the counters say "
                    "{}, {}, {} of {}",
                    found.free, found.filling, found.sealed, found.total, counts_.free,
                    counts_.filling, counts_.sealed, counts_.total));
  }
  if (found.free + found.filling + found.sealed != found.total) {
    return broken(fmt::format("{} free + {} filling + {} sealed is not {}", found.free,
                              found.filling, found.sealed, found.total));
  }
  if (free_list_.size() != found.free) {
    return broken(
        fmt::format("{} pages are free, the free list has {}", found.free, free_list_.size()));
  }
  std::vector<bool> listed(pages_.size());
  for (uint32_t slot : free_list_) {
    if (slot >= pages_.size() || pages_[slot].state != PageState::kFree || listed[slot]) {
      return broken(fmt::format("slot {} is on the free list twice or in use", slot));
    }
    listed[slot] = true;
  }
  return ok_status();
}

}  // namespace spin::kv
