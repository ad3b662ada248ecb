// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence_table.h"

#include <utility>

#include "base/check.h"

namespace spin::engine {

Result<SequenceHandle> SequenceTable::open(uint64_t max_tokens) {
  SPIN_ASSIGN_OR_RETURN(kv::SequenceKv sequence, kv::SequenceKv::reserve(pool_, max_tokens));
  if (free_.empty()) {
    slots_.emplace_back();
    free_.reserve(slots_.size());
    free_.push_back(static_cast<uint32_t>(slots_.size() - 1));
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  slots_[index].sequence.emplace(std::move(sequence));
  publish();
  return SequenceHandle{index, slots_[index].generation};
}

SequenceTable::Slot& SequenceTable::checked(SequenceHandle handle) {
  SPIN_CHECK(handle.index < slots_.size());
  Slot& slot = slots_[handle.index];
  SPIN_CHECK(slot.generation == handle.generation && slot.sequence.has_value());
  return slot;
}

void SequenceTable::close(SequenceHandle handle) {
  Slot& slot = checked(handle);
  slot.sequence.reset();
  ++slot.generation;
  free_.push_back(handle.index);
  publish();
}

kv::SequenceKv& SequenceTable::at(SequenceHandle handle) { return *checked(handle).sequence; }

Status SequenceTable::audit() const {
  std::vector<const kv::SequenceKv*> live;
  for (const Slot& slot : slots_) {
    if (slot.sequence) live.push_back(&*slot.sequence);
  }
  return kv::audit(pool_, live);
}

}  // namespace spin::engine
