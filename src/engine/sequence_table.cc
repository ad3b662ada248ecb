// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence_table.h"

#include <utility>
#include <vector>

namespace spin::engine {

Result<SequenceHandle> SequenceTable::open(uint64_t max_tokens) {
  SPIN_ASSIGN_OR_RETURN(kv::SequenceKv sequence, kv::SequenceKv::reserve(pool_, max_tokens));
  const SequenceHandle handle = sequences_.insert(std::move(sequence));
  publish();
  return handle;
}

void SequenceTable::close(SequenceHandle handle) {
  sequences_.erase(handle);
  publish();
}

Status SequenceTable::audit() const {
  std::vector<const kv::SequenceKv*> live;
  sequences_.for_each([&](const kv::SequenceKv& sequence) { live.push_back(&sequence); });
  return kv::audit(pool_, live);
}

}  // namespace spin::engine
