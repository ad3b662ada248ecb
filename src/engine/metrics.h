// SPDX-License-Identifier: Apache-2.0
// The engine's counters and histograms. They only grow; gauges are computed from the live state
// when asked (engine_impl). Recording cannot fail.
// Thread: thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "base/histogram.h"
#include "base/mutex.h"
#include "spin/request.h"
#include "spin/stats.h"

namespace spin::engine {

// vLLM's bucket bounds, so that its dashboards fit.
std::vector<double> time_to_first_token_bounds();
std::vector<double> inter_token_latency_bounds();
std::vector<double> request_latency_bounds();
std::vector<double> iteration_tokens_bounds();
// 1, 2, 5, 10, 20, 50, ... up to `limit`.
std::vector<double> one_two_five_bounds(uint64_t limit);

// When the stations of a request's life were passed, seconds of the engine's clock; negative: not.
struct RequestTimes {
  double submitted = 0;
  double admitted = -1;
  double first_token = -1;
  double finished = -1;
};

class Metrics {
 public:
  explicit Metrics(uint64_t max_model_len);

  void record_received();
  void record_refused();
  void record_step(uint64_t tokens);
  void record_preemption();
  void record_first_token(double since_submit_s);
  void record_token_gap(double gap_s);
  // `tokens` of output were delivered.
  void record_generated(uint64_t tokens);
  void record_finished(FinishReason reason, const RequestTimes& times, const Usage& usage);

  // Counters and histograms; the gauges are left zero.
  EngineStats snapshot() const;

 private:
  struct Histograms {
    base::Histogram time_to_first_token;
    base::Histogram inter_token_latency;
    base::Histogram e2e_latency;
    base::Histogram queue_time;
    base::Histogram prefill_time;
    base::Histogram decode_time;
    base::Histogram inference_time;
    base::Histogram iteration_tokens;
    base::Histogram prompt_tokens;
    base::Histogram generation_tokens;
  };

  mutable base::Mutex mutex_;
  EngineStats counters_ SPIN_GUARDED_BY(mutex_);
  Histograms histograms_ SPIN_GUARDED_BY(mutex_);
};

}  // namespace spin::engine
