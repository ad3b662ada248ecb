// SPDX-License-Identifier: Apache-2.0
// Bytes -> selection trace parser -> every record within its header.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "sparse/selection_trace.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto trace = spin::sparse::parse_selection_trace(bytes);
  if (!trace.ok()) return 0;
  uint64_t words = 0;
  for (const spin::sparse::SelectionRecord& record : trace->records) {
    SPIN_CHECK(record.layer < trace->header.layers && record.kv_head < trace->header.kv_heads);
    for (size_t i = 1; i < record.pages.size(); ++i) {
      SPIN_CHECK(record.pages[i - 1] < record.pages[i]);
    }
    words += 5 + record.pages.size();
  }
  // Header, settings and records are all there is.
  SPIN_CHECK(8 + 5 * 4 + trace->header.settings.size() + 4 * words == size);
  return 0;
}
