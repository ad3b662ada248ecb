// SPDX-License-Identifier: Apache-2.0
// What a model, a context, a batch and an algorithm take in each tier, before anything is loaded:
// every table and buffer with its bytes, beside the flat layouts they replace, and how many
// requests fit. The sizes are those that the engine allocates (tests compare them). Thread: pure
// functions over the model's configuration file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spin/options.h"
#include "spin/status.h"

namespace spin {

struct PlanQuestion {
  // As EngineOptions::model; only the configuration is read.
  std::string model;
  uint64_t context_tokens = 32768;  // prompt and output of one request
  uint32_t batch = 1;
  std::string sparse = "dense";  // "NAME[:key=value,...]"
  DTypeChoice dtype = DTypeChoice::kBFloat16;
  uint32_t page_tokens = 8;
  double buffer_ratio = 4;  // buffering pages per mandatory page
  uint32_t max_num_batched_tokens = 512;
  // Memory there is, for the question what fits; 0: not asked.
  uint64_t fast_memory_bytes = 0;
  uint64_t host_memory_bytes = 0;
};

struct PlanLine {
  std::string name;
  std::string tier;  // "fast" or "host"
  uint64_t bytes = 0;
  bool metadata = false;  // counts as metadata of the KV cache
  std::string formula;    // with the numbers put in
};

struct Plan {
  std::vector<PlanLine> lines;  // for the whole batch
  uint64_t fast_bytes = 0;
  uint64_t host_bytes = 0;
  uint64_t kv_buffer_bytes = 0;      // fast slots of all requests
  uint64_t fast_metadata_bytes = 0;  // look-up, stamps, leases, directory
  uint64_t flat_plain_bytes = 0;     // one 8-byte entry per logical page
  uint64_t flat_worst_bytes = 0;     // four tables with room for the worst case of each partition
  std::string flat_worst_formula;
  uint64_t mandatory_pages = 0;  // per KV head of a layer that is not dense
  uint64_t lease_pages = 0;
  uint64_t attended_tokens = 0;  // most per KV head and step
  // Of requests of this context, by each tier alone; set where the memory was given.
  uint64_t batch_by_fast = 0;
  uint64_t batch_by_host = 0;
};

// Errors: those of reading the configuration, kInvalidArgument (the algorithm or its options, a
// context longer than the model's).
Result<Plan> plan_serving(const PlanQuestion& question);

}  // namespace spin
