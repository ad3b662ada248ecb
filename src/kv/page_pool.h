// SPDX-License-Identifier: Apache-2.0
// The pages of one memory tier: which are in use, by what handle, and where they lie.
//
// State of a page:
//
//      allocate()         seal()
//   free -------> filling -------> sealed
//    ^               |                |
//    +---------------+----------------+
//        release(): generation + 1
//
// A page is `filling` from the moment it is reserved, written or not; `sealed` when its last token
// is committed and its content final. Every page is in exactly one state:
//
//   free + filling + sealed == total                                    (the page equation)
//
// and audit() recounts it. A handle names a page *and* its generation, so one kept after release()
// is recognised instead of reaching the next owner's tokens.
//
// Thread: external synchronisation (the engine thread). Lifetime: the memory resource outlives the
// pool; the pool outlives every sequence that holds pages of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/device.h"
#include "backend/ops.h"
#include "layout/kv_geometry.h"
#include "spin/status.h"

namespace spin::kv {

enum class PageState : uint8_t { kFree, kFilling, kSealed };

struct PageHandle {
  uint32_t slot = 0;
  uint32_t generation = 0;
  friend bool operator==(const PageHandle&, const PageHandle&) = default;
};

struct PageCounts {
  uint64_t free = 0;
  uint64_t filling = 0;
  uint64_t sealed = 0;
  uint64_t total = 0;
  uint64_t in_use() const { return filling + sealed; }
  friend bool operator==(const PageCounts&, const PageCounts&) = default;
};

// Whether pages are filled with NaNs while nobody has written them (debug and sanitizer builds).
#if defined(SPIN_SANITIZED) || !defined(NDEBUG)
constexpr bool kPoisonByDefault = true;
#else
constexpr bool kPoisonByDefault = false;
#endif

struct PagePoolOptions {
  uint64_t pages = 0;
  // Fills a page with NaNs when it is first handed out and when it is released, so that a read of
  // a row nobody wrote shows in the result. Only for memory that the host can write.
  bool poison = kPoisonByDefault;
  // Where kernels read the tables of dense sequences, and the stream for copies to it (idle
  // between calls); null: in the process's memory. Lifetime: both outlive the pool.
  backend::MemoryResource* table_memory = nullptr;
  backend::Stream* table_stream = nullptr;
};

class PagePool {
 public:
  // One allocation for all pages. Nothing touches it: the system backs a page's memory when its
  // first row is written. Errors: kInvalidArgument (no pages, 2^32 - 1 or more, a size that
  // overflows), those of `memory`.
  static Result<std::unique_ptr<PagePool>> create(backend::MemoryResource& memory,
                                                  const layout::KvGeometry& geometry,
                                                  const PagePoolOptions& options);

  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  const layout::KvGeometry& geometry() const { return geometry_; }
  const PageCounts& counts() const { return counts_; }
  backend::MemoryResource* table_memory() const { return table_memory_; }
  backend::Stream* table_stream() const { return table_stream_; }
  // What kernels need. Lifetime: that of the pool.
  backend::KvPoolRef ref() const { return {arena_.data(), geometry_}; }
  uint64_t size_bytes() const { return arena_.size_bytes(); }
  // First byte of a slot. Requires: slot < counts().total.
  std::byte* page_address(uint32_t slot) const;

  // Fills `out` with free pages, which become filling, or changes nothing and returns false.
  [[nodiscard]] bool allocate(std::span<PageHandle> out);
  // filling -> sealed. Requires: a current handle of a filling page.
  void seal(PageHandle page);
  // Back to free. Requires: current handles; no queued work reads or writes the pages.
  void release(std::span<const PageHandle> pages);

  // Whether the handle's generation is in use now.
  bool is_current(PageHandle page) const;
  // Requires: slot < counts().total.
  PageState state(uint32_t slot) const;

  // Recounts every page and the free list from scratch.
  // Errors: kInternal, saying which invariant does not hold and for which page.
  Status audit() const;

 private:
  struct Page {
    uint32_t generation = 0;
    PageState state = PageState::kFree;
  };

  PagePool(const layout::KvGeometry& geometry,
           const PagePoolOptions& options,
           backend::Buffer arena);
  Page& checked(PageHandle page);
  void poison(uint32_t slot);

  layout::KvGeometry geometry_;
  bool poison_ = false;
  backend::MemoryResource* table_memory_ = nullptr;
  backend::Stream* table_stream_ = nullptr;
  backend::Buffer arena_;
  std::vector<Page> pages_;          // [total]
  std::vector<uint32_t> free_list_;  // last in, first out: warm memory is used again first
  PageCounts counts_;
};

}  // namespace spin::kv
