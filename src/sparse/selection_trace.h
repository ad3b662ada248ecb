// SPDX-License-Identifier: Apache-2.0
// Which pages every head selected in every step, recorded to a file and read back: locality can
// then be studied without a model (bench/locality_bench.cc). Sinks and tail are left out: they
// never leave fast memory.
//
// File, little endian: header {magic "SPINTRC1", u32 version, u32 layers, u32 kv_heads, u32
// page_tokens, u32 settings length, settings bytes}, then records {u32 sequence, u32 step, u32
// layer, u32 kv_head, u32 count, u32 pages[count]} with ascending pages.
//
// Thread: record() runs on the stream's thread, everything else on the caller's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "layout/head_pages.h"
#include "spin/status.h"

namespace spin::sparse {

struct TraceHeader {
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t page_tokens = 0;
  std::string settings;  // the algorithm and its options
};

class SelectionRecorder {
 public:
  // Errors: kIoError, kInvalidArgument (a header out of the format's ranges).
  static Result<std::unique_ptr<SelectionRecorder>> create(const std::string& path,
                                                           const TraceHeader& header);
  ~SelectionRecorder();

  // Appends the records of one (sequence, step, layer): the pages of the list with ids in
  // [first_page, end_page). Errors: kIoError, reported by close().
  void record(uint32_t sequence,
              uint32_t step,
              uint32_t layer,
              const layout::PageList& list,
              uint32_t first_page,
              uint32_t end_page);
  // Nothing is recorded after it. Requires: no work that records is queued.
  Status close();

 private:
  struct Impl;
  explicit SelectionRecorder(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct SelectionRecord {
  uint32_t sequence = 0;
  uint32_t step = 0;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  std::vector<uint32_t> pages;
};

struct SelectionTrace {
  TraceHeader header;
  std::vector<SelectionRecord> records;
};

// The file is hostile until checked: counts are bounded by its size. Errors: kCorrupt, kIoError,
// kUnsupported (version).
Result<SelectionTrace> parse_selection_trace(std::string_view bytes);

}  // namespace spin::sparse
