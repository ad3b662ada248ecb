// SPDX-License-Identifier: Apache-2.0
#include "engine/metrics.h"

namespace spin::engine {

std::vector<double> time_to_first_token_bounds() {
  return {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,  0.25,  0.5,   0.75,
          1.0,   2.5,   5.0,  7.5,  10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0};
}

std::vector<double> inter_token_latency_bounds() {
  return {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,  0.3,  0.4, 0.5,
          0.75, 1.0,   2.5,  5.0,   7.5, 10.0, 20.0, 40.0, 80.0};
}

std::vector<double> request_latency_bounds() {
  return {0.3,  0.5,  0.8,  1.0,  1.5,   2.0,   2.5,   5.0,   10.0,   15.0,  20.0,
          30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0};
}

std::vector<double> iteration_tokens_bounds() {
  return {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
}

std::vector<double> one_two_five_bounds(uint64_t limit) {
  std::vector<double> bounds;
  for (double decade = 1; decade <= static_cast<double>(limit); decade *= 10) {
    for (const double mantissa : {1.0, 2.0, 5.0}) {
      if (mantissa * decade <= static_cast<double>(limit)) bounds.push_back(mantissa * decade);
    }
  }
  return bounds;
}

Metrics::Metrics(uint64_t max_model_len)
    : histograms_{base::Histogram(time_to_first_token_bounds()),
                  base::Histogram(inter_token_latency_bounds()),
                  base::Histogram(request_latency_bounds()),
                  base::Histogram(request_latency_bounds()),
                  base::Histogram(request_latency_bounds()),
                  base::Histogram(request_latency_bounds()),
                  base::Histogram(request_latency_bounds()),
                  base::Histogram(iteration_tokens_bounds()),
                  base::Histogram(one_two_five_bounds(max_model_len)),
                  base::Histogram(one_two_five_bounds(max_model_len))} {}

void Metrics::record_received() {
  base::MutexLock lock(mutex_);
  ++counters_.requests_received;
}

void Metrics::record_refused() {
  base::MutexLock lock(mutex_);
  ++counters_.requests_refused;
}

void Metrics::record_step(uint64_t tokens) {
  base::MutexLock lock(mutex_);
  ++counters_.steps;
  histograms_.iteration_tokens.observe(static_cast<double>(tokens));
}

void Metrics::record_preemption() {
  base::MutexLock lock(mutex_);
  ++counters_.preemptions;
}

void Metrics::record_first_token(double since_submit_s) {
  base::MutexLock lock(mutex_);
  histograms_.time_to_first_token.observe(since_submit_s);
}

void Metrics::record_token_gap(double gap_s) {
  base::MutexLock lock(mutex_);
  histograms_.inter_token_latency.observe(gap_s);
}

void Metrics::record_generated(uint64_t tokens) {
  base::MutexLock lock(mutex_);
  counters_.generation_tokens += tokens;
}

void Metrics::record_finished(FinishReason reason, const RequestTimes& times, const Usage& usage) {
  base::MutexLock lock(mutex_);
  ++counters_.requests_finished[static_cast<size_t>(reason)];
  counters_.prompt_tokens += usage.prompt_tokens;
  histograms_.e2e_latency.observe(times.finished - times.submitted);
  histograms_.prompt_tokens.observe(static_cast<double>(usage.prompt_tokens));
  histograms_.generation_tokens.observe(static_cast<double>(usage.completion_tokens));
  if (times.admitted < 0) return;
  histograms_.queue_time.observe(times.admitted - times.submitted);
  histograms_.inference_time.observe(times.finished - times.admitted);
  if (times.first_token < 0) return;
  histograms_.prefill_time.observe(times.first_token - times.admitted);
  histograms_.decode_time.observe(times.finished - times.first_token);
}

EngineStats Metrics::snapshot() const {
  base::MutexLock lock(mutex_);
  EngineStats stats = counters_;
  stats.time_to_first_token_s = histograms_.time_to_first_token.snapshot();
  stats.inter_token_latency_s = histograms_.inter_token_latency.snapshot();
  stats.e2e_latency_s = histograms_.e2e_latency.snapshot();
  stats.queue_time_s = histograms_.queue_time.snapshot();
  stats.prefill_time_s = histograms_.prefill_time.snapshot();
  stats.decode_time_s = histograms_.decode_time.snapshot();
  stats.inference_time_s = histograms_.inference_time.snapshot();
  stats.iteration_tokens = histograms_.iteration_tokens.snapshot();
  stats.prompt_tokens_per_request = histograms_.prompt_tokens.snapshot();
  stats.generation_tokens_per_request = histograms_.generation_tokens.snapshot();
  return stats;
}

}  // namespace spin::engine
