// SPDX-License-Identifier: Apache-2.0
#include "server/metrics.h"

#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include "spin/request.h"

namespace spin::server {

namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

class Families {
 public:
  explicit Families(std::string_view model_name) : model_name_(model_name) {}

  void gauge(const std::string& name, const std::string& help, double value) {
    ClientMetric metric = labelled();
    metric.gauge.value = value;
    families_.push_back({"spin:" + name, help, MetricType::Gauge, {std::move(metric)}});
  }

  void counter(const std::string& name, const std::string& help, double value) {
    ClientMetric metric = labelled();
    metric.counter.value = value;
    families_.push_back({"spin:" + name, help, MetricType::Counter, {std::move(metric)}});
  }

  // One gauge per entry of `values`, told apart by `label`.
  void gauges(const std::string& name,
              const std::string& help,
              const std::string& label,
              const std::vector<std::pair<std::string, double>>& values) {
    MetricFamily family{"spin:" + name, help, MetricType::Gauge, {}};
    for (const auto& [text, value] : values) {
      ClientMetric metric = labelled();
      metric.label.push_back({label, text});
      metric.gauge.value = value;
      family.metric.push_back(std::move(metric));
    }
    families_.push_back(std::move(family));
  }

  template <size_t N>
  void counters(const std::string& name,
                const std::string& help,
                const std::string& label,
                const std::array<std::string_view, N>& values,
                const std::array<uint64_t, N>& counts) {
    MetricFamily family{"spin:" + name, help, MetricType::Counter, {}};
    for (size_t i = 0; i < N; ++i) {
      ClientMetric metric = labelled();
      metric.label.push_back({label, std::string(values[i])});
      metric.counter.value = static_cast<double>(counts[i]);
      family.metric.push_back(std::move(metric));
    }
    families_.push_back(std::move(family));
  }

  void histogram(const std::string& name,
                 const std::string& help,
                 const HistogramSnapshot& snapshot) {
    ClientMetric metric = labelled();
    uint64_t total = 0;
    for (size_t i = 0; i < snapshot.counts.size(); ++i) {
      total += snapshot.counts[i];
      const double bound =
          i < snapshot.bounds.size() ? snapshot.bounds[i] : std::numeric_limits<double>::infinity();
      metric.histogram.bucket.push_back({total, bound});
    }
    metric.histogram.sample_count = total;
    metric.histogram.sample_sum = snapshot.sum;
    families_.push_back({"spin:" + name, help, MetricType::Histogram, {std::move(metric)}});
  }

  std::string text() const {
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families_);
    return out.str();
  }

 private:
  ClientMetric labelled() const {
    ClientMetric metric;
    if (!model_name_.empty()) metric.label.push_back({"model_name", model_name_});
    return metric;
  }

  std::string model_name_;
  std::vector<MetricFamily> families_;
};

void add_tiers(Families& out, const EngineStats& stats) {
  const auto of_each = [&](auto member) {
    std::vector<std::pair<std::string, double>> values;
    for (const TierStats& tier : stats.kv_tiers) values.emplace_back(tier.name, tier.*member);
    return values;
  };
  out.gauges("kv_tier_pages", "KV pages of a tier.", "tier", of_each(&TierStats::pages_total));
  out.gauges("kv_tier_pages_in_use", "KV pages of a tier that are handed out or reserved.", "tier",
             of_each(&TierStats::pages_in_use));
  out.gauges("kv_tier_bytes", "Bytes of a tier.", "tier", of_each(&TierStats::bytes_total));
  out.gauges("kv_tier_bytes_in_use", "Bytes of a tier that are handed out or reserved.", "tier",
             of_each(&TierStats::bytes_in_use));
}

void add_sparse(Families& out, const SparseStats& sparse) {
  out.gauges("sparse_sequences", "Open sparse sequences, by where their pages lie.", "residence",
             {{"resident", double(sparse.sequences_resident)},
              {"tiered", double(sparse.sequences_tiered)},
              {"suspended", double(sparse.sequences_suspended)}});
  out.gauge("sparse_lease_pages", "Fast pages held by sparse sequences.",
            double(sparse.lease_pages));
  out.gauge("sparse_buffer_pages", "Of these, pages beyond what a step needs.",
            double(sparse.buffer_pages));
  out.gauge("sparse_table_bytes", "Look-up tables, stamps and directories in fast memory.",
            double(sparse.table_bytes));
  out.gauge("sparse_summary_bytes", "Summaries in fast memory.", double(sparse.summary_bytes));
  out.counter("sparse_sequences_total", "Sequences opened with a sparse algorithm.",
              sparse.sequences);
  out.counter("sparse_dense_fallbacks_total",
              "Sequences asked for with an algorithm and run densely.", sparse.dense_fallbacks);
  out.counter("sparse_selections_total", "Selections, per step, layer and KV head.",
              sparse.selections);
  out.counter("sparse_dense_reads_total",
              "Reads of everything by sparse sequences, per step, layer and KV head.",
              sparse.dense_reads);
  out.counter("sparse_attended_tokens_total", "Tokens attended by sparse sequences, over both.",
              sparse.attended_tokens);
  out.counter("sparse_selected_partitions_total", "Partitions selected.",
              sparse.selected_partitions);
  out.counter("kv_page_hits_total", "Selected pages that were in fast memory.", sparse.page_hits);
  out.counter("kv_page_misses_total", "Selected pages fetched from the host.", sparse.page_misses);
  out.counter("kv_page_evictions_total", "Pages whose fast copy was given up.",
              sparse.page_evictions);
  out.counter("kv_page_faults_total", "Host pages that were not what they should be.",
              sparse.page_faults);
  out.counter("kv_fetched_bytes_total", "Bytes fetched from the host.", sparse.bytes_fetched);
  out.counter("kv_fetch_stall_seconds_total", "Time that steps waited for fetches.",
              sparse.fetch_stall_s);
  out.counter("sparse_overflows_total",
              "Selected partitions that did not fit and were estimated instead.", sparse.overflows);
  out.counter("kv_offloaded_bytes_total", "Bytes written to the host.", sparse.bytes_offloaded);
  out.counter("kv_lease_resizes_total", "Leases of fast pages made larger or smaller.",
              sparse.lease_resizes);
}

void add_engine(Families& out, const EngineStats& stats) {
  out.gauge("num_requests_running", "Requests in the running set.", double(stats.requests_running));
  out.gauge("num_requests_waiting", "Requests waiting for admission.",
            double(stats.requests_waiting));
  out.gauge("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", stats.kv_cache_usage);
  out.gauge("kv_pages", "KV pages of the pool.", double(stats.kv_pages_total));
  out.gauge("kv_pages_in_use", "KV pages held by requests.", double(stats.kv_pages_in_use));
  out.counter("num_preemptions_total", "Requests put back to make room.", stats.preemptions);
  out.counter("prompt_tokens_total", "Prompt tokens processed.", stats.prompt_tokens);
  out.counter("generation_tokens_total", "Tokens generated.", stats.generation_tokens);
  out.counter("steps_total", "Engine steps.", stats.steps);
  out.counter("requests_received_total", "Requests submitted, the refused ones too.",
              stats.requests_received);
  out.counter("requests_refused_total", "Requests refused at submission.", stats.requests_refused);
  out.counters<4>(
      "request_success_total", "Accepted requests by how they ended.", "finished_reason",
      {finish_reason_name(FinishReason::kStop), finish_reason_name(FinishReason::kLength),
       finish_reason_name(FinishReason::kAborted), finish_reason_name(FinishReason::kError)},
      stats.requests_finished);
  out.histogram("time_to_first_token_seconds", "From arrival to the first token.",
                stats.time_to_first_token_s);
  out.histogram("inter_token_latency_seconds", "Between two tokens of a choice.",
                stats.inter_token_latency_s);
  out.histogram("e2e_request_latency_seconds", "From arrival to the end.", stats.e2e_latency_s);
  out.histogram("request_queue_time_seconds", "From arrival to admission.", stats.queue_time_s);
  out.histogram("request_prefill_time_seconds", "From admission to the first token.",
                stats.prefill_time_s);
  out.histogram("request_decode_time_seconds", "From the first token to the last.",
                stats.decode_time_s);
  out.histogram("request_inference_time_seconds", "From admission to the end.",
                stats.inference_time_s);
  out.histogram("iteration_tokens_total", "Tokens of one step.", stats.iteration_tokens);
  out.histogram("request_prompt_tokens", "Prompt tokens of a request.",
                stats.prompt_tokens_per_request);
  out.histogram("request_generation_tokens", "Generated tokens of a request.",
                stats.generation_tokens_per_request);
}

void add_front_end(Families& out, const FrontEndCounts& front) {
  out.gauge("http_connections", "Open connections.", double(front.connections_open));
  out.gauge("http_requests_active", "Requests received and not yet answered.",
            double(front.requests_active));
  out.gauge("http_body_bytes", "Bytes of request bodies held.", double(front.body_bytes_pending));
  out.gauge("http_pending_response_bytes",
            "Bytes of whole answers above 64 KiB that their clients have not taken.",
            double(front.answer_bytes_pending));
  out.gauge("http_worker_queue", "Requests waiting for a worker.", double(front.worker_queue));
  out.counter("http_connections_total", "Connections accepted.", front.connections_total);
  out.counter("http_connections_refused_total", "Connections above the limit.",
              front.connections_refused);
  out.counter("http_accept_errors_total", "Failures to accept a connection.", front.accept_errors);
  out.counter("http_timeouts_total", "Requests that did not arrive in time.", front.timeouts);
  out.counter("http_client_left_total", "Requests whose client left before the end.",
              front.client_left);
  out.counter("http_slow_readers_total", "Requests ended because the client read too slowly.",
              front.slow_readers);
  out.counter("http_log_lines_dropped_total", "Access log lines lost to a slow log.",
              front.log_lines_dropped);
  out.counters<4>("http_responses_total", "Responses by class of status.", "class",
                  {"2xx", "3xx", "4xx", "5xx"},
                  {front.responses_by_class[2], front.responses_by_class[3],
                   front.responses_by_class[4], front.responses_by_class[5]});
}

}  // namespace

std::string metrics_text(const EngineStats* stats,
                         const FrontEndCounts& front,
                         std::string_view model_name) {
  Families families(model_name);
  if (stats != nullptr) add_engine(families, *stats);
  if (stats != nullptr) {
    add_tiers(families, *stats);
    add_sparse(families, stats->sparse);
  }
  add_front_end(families, front);
  return families.text();
}

}  // namespace spin::server
