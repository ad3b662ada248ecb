// SPDX-License-Identifier: Apache-2.0
#include "kv/lease_tables.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "layout/residency.h"

namespace spin::kv {

using layout::HeadPages;

Status copy_now(void* dst, const void* src, uint64_t bytes, backend::Stream& stream) {
  if (bytes == 0) return ok_status();
  stream.enqueue_copy(dst, src, bytes);
  return stream.wait_idle();
}

Result<LeaseTables> LeaseTables::create(backend::MemoryResource& memory,
                                        uint64_t bytes,
                                        std::vector<HeadPages> records,
                                        uint64_t lease_pages,
                                        uint8_t epoch) {
  LeaseTables made;
  made.lease_pages_ = lease_pages;
  made.records_ = std::move(records);
  SPIN_ASSIGN_OR_RETURN(made.memory_, backend::Buffer::allocate(memory, bytes));
  made.image_.resize(bytes);
  // Largest alignment first, so that no padding is needed.
  auto* words = reinterpret_cast<uint32_t*>(made.heads() + made.records_.size());
  for (HeadPages& head : made.records_) {
    head.slots = words;
    words += head.lease_pages;
  }
  for (HeadPages& head : made.records_) {
    if (head.table_size == 0) continue;
    head.pages = words;
    words += head.lease_pages;
    head.table = words;
    words += head.table_size;
  }
  auto* stamps = reinterpret_cast<uint8_t*>(words);
  for (HeadPages& head : made.records_) {
    if (head.is_flat()) continue;
    head.stamps = stamps;
    stamps += head.lease_pages;
  }
  SPIN_CHECK(stamps == made.memory_.as<uint8_t>() + bytes);
  for (uint64_t i = 0; i < made.records_.size(); ++i) {
    HeadPages head = made.view(i);
    std::fill_n(head.slots, head.lease_pages, layout::kNoSlot);
    if (head.is_flat()) continue;
    layout::clear_residency(head, epoch);
    made.records_[i].swept_epoch = head.swept_epoch;
  }
  return made;
}

void LeaseTables::enqueue_records(uint64_t first, uint64_t count, backend::Stream& stream) {
  SPIN_CHECK(first <= records_.size() && count <= records_.size() - first);
  stream.enqueue_copy(heads() + first, records_.data() + first, count * sizeof(HeadPages));
}

HeadPages LeaseTables::view(uint64_t head) {
  SPIN_CHECK(!image_.empty());
  HeadPages view = records_[head];
  const auto to_image = [this](auto*& pointer) {
    if (pointer == nullptr) return;
    const auto offset = reinterpret_cast<std::byte*>(pointer) - memory_.as<std::byte>();
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(image_.data() + offset);
  };
  to_image(view.slots);
  to_image(view.pages);
  to_image(view.stamps);
  to_image(view.table);
  view.extents = nullptr;
  return view;
}

Status LeaseTables::publish(backend::Stream& stream) {
  SPIN_CHECK(!image_.empty());
  std::memcpy(image_.data(), records_.data(), records_.size() * sizeof(HeadPages));
  const Status copied = copy_now(memory_.data(), image_.data(), image_.size(), stream);
  drop_image();
  return copied;
}

Status LeaseTables::fetch(backend::Stream& stream) {
  image_.resize(memory_.size_bytes());
  return copy_now(image_.data(), memory_.data(), image_.size(), stream);
}

}  // namespace spin::kv
