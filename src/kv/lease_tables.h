// SPDX-License-Identifier: Apache-2.0
// The look-up tables of all heads of a sequence (layout/head_pages.h), in one buffer of fast
// memory that only queued work can touch. The host works on an image of it: it makes one and
// publishes it, or fetches what kernels have made of it.
//
// Thread: engine thread, at drained points only. Lifetime: the stream outlives the tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "backend/device.h"
#include "layout/head_pages.h"
#include "spin/status.h"

namespace spin::kv {

// Blocks until `bytes` are copied, whichever memory either end lies in.
Status copy_now(void* dst, const void* src, uint64_t bytes, backend::Stream& stream);

class LeaseTables {
 public:
  LeaseTables() = default;
  // Tables for heads whose `records` say the number of entries, and table_size for those in the
  // tiered form (0 for flat ones); their addresses are filled in. The image is there: no entry has
  // a slot, nothing is resident as of `epoch`. `bytes` is what all of it takes
  // (kv/table_bytes.h). Errors: kResourceExhausted.
  static Result<LeaseTables> create(backend::MemoryResource& memory,
                                    uint64_t bytes,
                                    std::vector<layout::HeadPages> records,
                                    uint64_t lease_pages,
                                    uint8_t epoch);

  bool exists() const { return memory_.data() != nullptr; }
  uint64_t size_bytes() const { return memory_.size_bytes(); }
  uint64_t lease_pages() const { return lease_pages_; }

  // As kernels get them: [heads] in fast memory.
  layout::HeadPages* heads() const { return memory_.as<layout::HeadPages>(); }
  // The record of a head with the addresses in fast memory; all of it is current but the arrays'
  // contents and swept_epoch.
  const layout::HeadPages& record(uint64_t head) const { return records_[head]; }
  std::span<layout::HeadPages> records() { return records_; }

  // Writes records [first, first + count) behind what is queued on `stream`. Requires: the records
  // stay as they are until that has run; no kernel has swept these heads since they were made.
  void enqueue_records(uint64_t first, uint64_t count, backend::Stream& stream);

  // A head's record with addresses in the image (but `extents`). Requires: the image is there.
  layout::HeadPages view(uint64_t head);
  // The image becomes the tables' content, and is gone. Errors: the stream's.
  Status publish(backend::Stream& stream);
  // The image holds what the tables hold. Errors: the stream's, kResourceExhausted.
  Status fetch(backend::Stream& stream);
  void drop_image() { image_ = {}; }

 private:
  backend::Buffer memory_;                  // records, then their arrays
  std::vector<layout::HeadPages> records_;  // [heads]
  std::vector<std::byte> image_;            // of memory_, or empty
  uint64_t lease_pages_ = 0;
};

}  // namespace spin::kv
