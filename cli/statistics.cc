// SPDX-License-Identifier: Apache-2.0
#include "cli/statistics.h"

#include <algorithm>
#include <array>
#include <chrono>

#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "base/parse_number.h"

namespace spin::cli {
namespace {

constexpr std::chrono::milliseconds kSampleEvery{20};

double rate(double count, double seconds) { return seconds > 0 ? count / seconds : 0; }

// The kilobytes of the line "key:   123 kB", in bytes.
uint64_t kilobytes_line(std::string_view text, std::string_view key) {
  const size_t at = text.find(key);
  if (at == std::string_view::npos) return 0;
  text.remove_prefix(at + key.size());
  const size_t begin = text.find_first_of("0123456789");
  if (begin == std::string_view::npos) return 0;
  text.remove_prefix(begin);
  const size_t end = std::min(text.find_first_not_of("0123456789"), text.size());
  return base::parse_decimal(text.substr(0, end)).value_or(0) * 1024;
}

ProcessMemory process_memory() {
  std::array<char, 8192> block;
  const int fd = ::open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t got = ::read(fd, block.data(), block.size());
  ::close(fd);
  if (got <= 0) return {};
  return parse_process_status(std::string_view(block.data(), static_cast<size_t>(got)));
}

}  // namespace

Statistics make_statistics(const ModelInfo& info,
                           const RequestResult& result,
                           FinishReason reason) {
  Statistics s;
  s.model = info.name;
  s.device = info.device;
  s.dtype = info.dtype;
  s.threads = info.threads;
  s.prompt_tokens = result.usage.prompt_tokens;
  s.completion_tokens = result.usage.completion_tokens;
  s.finish_reason = finish_reason_name(reason);
  s.total_s = result.timing.finished;
  if (s.completion_tokens > 0) {
    const double prefill = result.timing.first_token - result.timing.queued;
    const double decode = result.timing.finished - result.timing.first_token;
    s.ttft_s = result.timing.first_token;
    s.prefill_tokens_per_s = rate(static_cast<double>(s.prompt_tokens), prefill);
    s.decode_tokens_per_s = rate(static_cast<double>(s.completion_tokens - 1), decode);
  }
  s.weight_bytes = info.weight_bytes;
  s.kv_reserved_bytes = info.kv_cache_bytes;
  s.attention = info.sparse;
  if (info.kv_capacity_tokens > 0) {
    const uint64_t per_token = info.kv_cache_bytes / info.kv_capacity_tokens;
    const uint64_t tokens = s.prompt_tokens + s.completion_tokens;
    s.kv_used_bytes = per_token * std::min(tokens, info.kv_capacity_tokens);
  }
  return s;
}

std::string bytes_text(uint64_t bytes) {
  constexpr std::array<std::string_view, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  auto value = static_cast<double>(bytes);
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

namespace {

// Tokens that a head attended to in a step of a sparse request.
double attended_per_read(const SparseStats& s) {
  const uint64_t reads = s.selections + s.dense_reads;
  return reads == 0 ? 0 : static_cast<double>(s.attended_tokens) / static_cast<double>(reads);
}

std::string sparse_statistics_text(const Statistics& stats) {
  const SparseStats& s = stats.sparse;
  std::string out = fmt::format("attention    {}\n", stats.attention.front());
  if (s.dense_fallbacks > 0) {
    out += fmt::format(
        "             dense for {} of {} sequences: below the minimum length, or "
        "scores of the prompt\n",
        s.dense_fallbacks, s.dense_fallbacks + s.sequences);
  }
  out += fmt::format(
      "             {:.1f} tokens attended per head and step, {} selections, {} "
      "dense reads\n",
      attended_per_read(s), s.selections, s.dense_reads);
  for (const TierStats& tier : stats.tiers) {
    out += fmt::format("{:<12} {} of {} used at most\n", tier.name + " tier",
                       bytes_text(tier.bytes_peak), bytes_text(tier.bytes_total));
  }
  out += fmt::format("metadata     tables {}, summaries {} at most\n",
                     bytes_text(s.table_bytes_peak), bytes_text(s.summary_bytes_peak));
  out += fmt::format(
      "pages        {} hits, {} misses, {} evictions; {} fetched in {:.3f} s, {} offloaded\n",
      s.page_hits, s.page_misses, s.page_evictions, bytes_text(s.bytes_fetched), s.fetch_stall_s,
      bytes_text(s.bytes_offloaded));
  if (s.overflows > 0) {
    out += fmt::format("             {} selected partitions did not fit and were estimated\n",
                       s.overflows);
  }
  return out;
}

nlohmann::ordered_json sparse_statistics_json(const Statistics& stats) {
  const SparseStats& s = stats.sparse;
  nlohmann::ordered_json object;
  object["algorithms"] = stats.attention;
  object["sequences"] = s.sequences;
  object["dense_fallbacks"] = s.dense_fallbacks;
  object["selections"] = s.selections;
  object["dense_reads"] = s.dense_reads;
  object["attended_tokens"] = s.attended_tokens;
  object["attended_tokens_per_head_and_step"] = attended_per_read(s);
  object["selected_partitions"] = s.selected_partitions;
  object["page_hits"] = s.page_hits;
  object["page_misses"] = s.page_misses;
  object["page_evictions"] = s.page_evictions;
  object["bytes_fetched"] = s.bytes_fetched;
  object["fetch_stall_s"] = s.fetch_stall_s;
  object["overflows"] = s.overflows;
  object["bytes_offloaded"] = s.bytes_offloaded;
  object["lease_resizes"] = s.lease_resizes;
  object["table_bytes_peak"] = s.table_bytes_peak;
  object["summary_bytes_peak"] = s.summary_bytes_peak;
  for (const TierStats& tier : stats.tiers) {
    object["tiers"][tier.name] = {{"bytes_total", tier.bytes_total},
                                  {"bytes_peak", tier.bytes_peak}};
  }
  return object;
}

}  // namespace

std::string statistics_text(const Statistics& s) {
  std::string out;
  out += fmt::format("model        {}, {}, {} threads, loaded in {:.2f} s\n", s.model, s.dtype,
                     s.threads, s.load_s);
  out += fmt::format("prompt       {} tokens, {:.1f} tokens/s\n", s.prompt_tokens,
                     s.prefill_tokens_per_s);
  out += fmt::format("first token  after {:.3f} s\n", s.ttft_s);
  out += fmt::format("output       {} tokens, {:.1f} tokens/s, ended by {}\n", s.completion_tokens,
                     s.decode_tokens_per_s, s.finish_reason);
  out += fmt::format("memory       peak {} anonymous, {} resident (weights {})\n",
                     bytes_text(s.peak_anonymous_bytes), bytes_text(s.peak_resident_bytes),
                     bytes_text(s.weight_bytes));
  out += fmt::format("kv cache     {} used of {} reserved\n", bytes_text(s.kv_used_bytes),
                     bytes_text(s.kv_reserved_bytes));
  return s.attention.empty() ? out : out + sparse_statistics_text(s);
}

std::string sparse_text(const ModelInfo& info) {
  if (info.sparse.empty()) return "";
  std::string out =
      fmt::format("sparse attention: {}; the first is the default\n", fmt::join(info.sparse, "; "));
  out += fmt::format(
      "fast memory: {} of KV cache ({} tokens), {} to stage a prompt, {} for "
      "summaries and tables\n",
      bytes_text(info.kv_cache_bytes), info.kv_capacity_tokens, bytes_text(info.staging_bytes),
      bytes_text(info.index_bytes));
  out += info.host_cache_bytes == 0
             ? std::string("host memory: none, every request stays in fast memory\n")
             : fmt::format("host memory: {} of KV cache, buffer ratio {}\n",
                           bytes_text(info.host_cache_bytes), info.kv_buffer_ratio);
  return out;
}

std::string statistics_line(const Statistics& s) {
  return fmt::format("{} tokens, {:.1f} tokens/s, first token after {:.2f} s", s.completion_tokens,
                     s.decode_tokens_per_s, s.ttft_s);
}

std::string statistics_json(const Statistics& s) {
  nlohmann::ordered_json object;
  object["model"] = s.model;
  object["device"] = s.device;
  object["dtype"] = s.dtype;
  object["threads"] = s.threads;
  object["prompt_tokens"] = s.prompt_tokens;
  object["completion_tokens"] = s.completion_tokens;
  object["finish_reason"] = s.finish_reason;
  object["load_s"] = s.load_s;
  object["ttft_s"] = s.ttft_s;
  object["total_s"] = s.total_s;
  object["prefill_tokens_per_s"] = s.prefill_tokens_per_s;
  object["decode_tokens_per_s"] = s.decode_tokens_per_s;
  object["peak_anonymous_bytes"] = s.peak_anonymous_bytes;
  object["peak_resident_bytes"] = s.peak_resident_bytes;
  object["weight_bytes"] = s.weight_bytes;
  object["kv_used_bytes"] = s.kv_used_bytes;
  object["kv_reserved_bytes"] = s.kv_reserved_bytes;
  if (!s.attention.empty()) object["sparse"] = sparse_statistics_json(s);
  // `replace`: a model's name may come from a path that is not UTF-8.
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

ProcessMemory parse_process_status(std::string_view text) {
  return {kilobytes_line(text, "RssAnon:"), kilobytes_line(text, "VmHWM:")};
}

MemorySampler::MemorySampler() : thread_([this] { run(); }) {}

MemorySampler::~MemorySampler() {
  {
    const base::MutexLock lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

MemorySampler::Peak MemorySampler::peak() {
  const base::MutexLock lock(mutex_);
  sample();
  return peak_;
}

void MemorySampler::sample() {
  const ProcessMemory memory = process_memory();
  peak_.anonymous_bytes = std::max(peak_.anonymous_bytes, memory.anonymous_bytes);
  peak_.resident_bytes = std::max(peak_.resident_bytes, memory.peak_resident_bytes);
}

void MemorySampler::run() {
  const base::MutexLock lock(mutex_);
  while (!stop_) {
    sample();
    wake_.wait_until(mutex_, std::chrono::steady_clock::now() + kSampleEvery);
  }
}

}  // namespace spin::cli
