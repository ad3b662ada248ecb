// SPDX-License-Identifier: Apache-2.0
// Objects by SequenceHandle: an index and a generation, so that a handle kept after erase() is
// recognised instead of reaching the next object.
// Thread: external synchronisation.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "engine/step_batch.h"

namespace spin::engine {

template <typename T>
class HandleTable {
 public:
  SequenceHandle insert(T object) {
    if (free_.empty()) {
      slots_.emplace_back();
      free_.reserve(slots_.size());
      free_.push_back(static_cast<uint32_t>(slots_.size() - 1));
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    slots_[index].object.emplace(std::move(object));
    return {index, slots_[index].generation};
  }

  // Requires: a current handle. Does not fail and allocates nothing.
  void erase(SequenceHandle handle) {
    Slot& slot = checked(handle);
    slot.object.reset();
    ++slot.generation;
    free_.push_back(handle.index);
  }

  // Requires: a current handle. Lifetime: until erase(), or the next insert().
  T& at(SequenceHandle handle) { return *checked(handle).object; }

  template <typename Body>
  void for_each(const Body& body) {
    for (Slot& slot : slots_) {
      if (slot.object) body(*slot.object);
    }
  }
  template <typename Body>
  void for_each(const Body& body) const {
    for (const Slot& slot : slots_) {
      if (slot.object) body(*slot.object);
    }
  }

 private:
  struct Slot {
    uint32_t generation = 0;
    std::optional<T> object;
  };
  Slot& checked(SequenceHandle handle) {
    SPIN_CHECK(handle.index < slots_.size());
    Slot& slot = slots_[handle.index];
    SPIN_CHECK(slot.generation == handle.generation && slot.object.has_value());
    return slot;
  }

  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;  // its capacity is at least slots_.size(): erase() cannot fail
};

}  // namespace spin::engine
