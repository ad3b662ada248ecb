// SPDX-License-Identifier: Apache-2.0
// What an engine tells about itself at one moment. Counters only grow; gauges are computed from
// the live state when asked. Thread: plain data.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace spin {

// Counts per bucket (not cumulative): counts[i] holds values <= bounds[i] and above the previous
// bound; the last entry counts values above all bounds.
struct HistogramSnapshot {
  std::vector<double> bounds;
  std::vector<uint64_t> counts;  // bounds.size() + 1
  double sum = 0;
};

// One tier of the KV cache's memory.
struct TierStats {
  std::string name;  // "fast", "host"
  uint64_t pages_total = 0;
  uint64_t pages_in_use = 0;  // handed out or reserved
  uint64_t bytes_total = 0;
  uint64_t bytes_in_use = 0;
  uint64_t bytes_peak = 0;  // most that were in use at a time
};

// Sparse attention. A page is that of one KV head of one layer.
struct SparseStats {
  // Gauges over the sequences that are open now.
  uint64_t sequences_resident = 0;  // all their pages lie in fast memory
  uint64_t sequences_tiered = 0;
  uint64_t sequences_suspended = 0;  // their pages lie on the host until they resume
  uint64_t lease_pages = 0;          // slots of the fast tier that they hold
  uint64_t buffer_pages = 0;         // of these, beyond what a step needs
  uint64_t table_bytes = 0;          // look-up tables, stamps, directories
  uint64_t summary_bytes = 0;        // what Select reads
  uint64_t table_bytes_peak = 0;
  uint64_t summary_bytes_peak = 0;

  // Counters.
  uint64_t sequences = 0;        // opened with an algorithm
  uint64_t dense_fallbacks = 0;  // of requests for an algorithm: below its minimum length, or
                                 // their prompt's log-probabilities were wanted
  uint64_t selections = 0;       // (step, layer, KV head) that read a selection
  uint64_t dense_reads = 0;      // (step, layer, KV head) of such sequences that read everything
  uint64_t attended_tokens = 0;  // over both
  uint64_t selected_partitions = 0;
  uint64_t page_hits = 0;    // selected pages that were in fast memory
  uint64_t page_misses = 0;  // fetched from the host
  uint64_t page_evictions = 0;
  uint64_t page_faults = 0;  // host pages that were not what they should be
  uint64_t bytes_fetched = 0;
  double fetch_stall_s = 0;  // steps waited for fetches
  uint64_t overflows = 0;    // selected partitions that did not fit and were estimated instead
  uint64_t bytes_offloaded = 0;
  uint64_t lease_resizes = 0;
};

struct EngineStats {
  // Gauges.
  uint64_t requests_running = 0;
  uint64_t requests_waiting = 0;
  double kv_cache_usage = 0;  // 0..1, pages in use / pages
  uint64_t kv_pages_total = 0;
  uint64_t kv_pages_in_use = 0;
  std::vector<TierStats> kv_tiers;
  SparseStats sparse;

  // Counters of accepted requests by how they ended: stop, length, abort, error.
  std::array<uint64_t, 4> requests_finished{};
  uint64_t requests_received = 0;  // every submit(), the refused ones too
  uint64_t requests_refused = 0;   // submit() returned an error
  uint64_t prompt_tokens = 0;
  uint64_t generation_tokens = 0;
  uint64_t preemptions = 0;  // sequences suspended to make room for another
  uint64_t steps = 0;

  HistogramSnapshot time_to_first_token_s;
  HistogramSnapshot inter_token_latency_s;
  HistogramSnapshot e2e_latency_s;
  HistogramSnapshot queue_time_s;
  HistogramSnapshot prefill_time_s;
  HistogramSnapshot decode_time_s;
  HistogramSnapshot inference_time_s;
  HistogramSnapshot iteration_tokens;
  HistogramSnapshot prompt_tokens_per_request;
  HistogramSnapshot generation_tokens_per_request;
};

enum class HealthState : uint8_t { kLoading, kReady, kDraining, kStalled, kFailed, kStopped };

struct Health {
  HealthState state = HealthState::kLoading;
  // Seconds since the engine last ended a step or was idle.
  double seconds_since_progress = 0;
  std::string reason;  // short, fixed text
};

// What was loaded, for `spin serve`'s start-up lines and /v1/models.
struct ModelInfo {
  std::string name;          // as served
  std::string architecture;  // "llama", "qwen2", "qwen3"
  std::string dtype;         // of products: "bfloat16" or "float32"
  std::string kv_dtype;
  std::string device;       // DeviceProperties::name
  std::string chat_format;  // "none" if chat is not available
  uint64_t parameters = 0;
  uint64_t vocab_size = 0;     // ids below this can be sampled
  uint64_t max_model_len = 0;  // tokens, prompt and output together
  uint64_t kv_capacity_tokens = 0;
  uint64_t kv_cache_bytes = 0;      // of the fast tier
  uint64_t host_cache_bytes = 0;    // of the host tier
  uint64_t index_bytes = 0;         // fast memory for summaries and tables of sparse requests
  uint64_t staging_bytes = 0;       // fast memory for the prompt of a sparse request
  std::string kv_buffer_ratio;      // "auto" or a number; empty without a host tier
  std::vector<std::string> sparse;  // algorithms with all their options, the default first
  uint64_t weight_bytes = 0;
  uint32_t threads = 0;
  int64_t created_unix_s = 0;
};

}  // namespace spin
