// SPDX-License-Identifier: Apache-2.0
#include "engine/engine_impl.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/counter_rng.h"
#include "base/entropy.h"
#include "base/memory_guard.h"
#include "base/start_thread.h"
#include "base/utf8.h"
#include "spin/device_name.h"

namespace spin {}  // namespace spin

namespace spin::engine {
namespace {

// Steps that delivery may be behind before the step thread waits for it.
constexpr size_t kEventBatches = 64;
// Rows of logits beyond one per sequence.
constexpr uint32_t kSpareLogitRows = 32;
constexpr uint32_t kMaxSequences = 4096;
constexpr uint32_t kMaxStepTokens = 1 << 20;
constexpr double kMaxBufferRatio = 1000;

Status invalid_option(std::string message, std::string param) {
  return Status(StatusCode::kInvalidArgument, std::move(message), std::move(param));
}

RequestLimits make_limits(const EngineParts& parts) {
  RequestLimits limits;
  limits.vocab_size = parts.info.vocab_size;
  limits.max_model_len = parts.info.max_model_len;
  limits.kv_capacity_tokens = parts.info.kv_capacity_tokens;
  limits.memory = parts.runner->total_memory();
  limits.default_max_tokens = parts.default_max_tokens;
  if (!parts.options.enable_chunked_prefill) {
    limits.max_prompt_tokens = parts.options.max_num_batched_tokens;
  }
  return limits;
}

Status check_device_options(const EngineOptions& options) {
  SPIN_ASSIGN_OR_RETURN(const DeviceName device, parse_device_name(options.device));
  if (!options.gpu_memory_utilization) return ok_status();
  if (device.kind == DeviceKind::kCpu) {
    return invalid_option(
        "gpu_memory_utilization needs a GPU: on the CPU all tiers share one memory, and "
        "kv_cache_memory_bytes bounds the KV cache",
        "gpu_memory_utilization");
  }
  const double share = *options.gpu_memory_utilization;
  if (!(share > 0 && share <= 1)) {
    return invalid_option(fmt::format("gpu_memory_utilization must be in (0, 1], found {}", share),
                          "gpu_memory_utilization");
  }
  return ok_status();
}

}  // namespace

Status check_engine_options(const EngineOptions& options) {
  SPIN_RETURN_IF_ERROR(check_device_options(options));
  if (options.max_num_seqs < 1 || options.max_num_seqs > kMaxSequences) {
    return invalid_option(fmt::format("max_num_seqs must be in [1, {}], found {}", kMaxSequences,
                                      options.max_num_seqs),
                          "max_num_seqs");
  }
  if (options.max_num_batched_tokens < options.max_num_seqs ||
      options.max_num_batched_tokens > kMaxStepTokens) {
    return invalid_option(
        fmt::format("max_num_batched_tokens must be at least max_num_seqs ({}) and at most {}, "
                    "found {}",
                    options.max_num_seqs, kMaxStepTokens, options.max_num_batched_tokens),
        "max_num_batched_tokens");
  }
  if (options.page_tokens != 8 && options.page_tokens != 16 && options.page_tokens != 32 &&
      options.page_tokens != 64) {
    return invalid_option(
        fmt::format("page_tokens must be 8, 16, 32 or 64, found {}", options.page_tokens),
        "page_tokens");
  }
  if (options.kv_buffer_ratio &&
      !(*options.kv_buffer_ratio >= 0 && *options.kv_buffer_ratio <= kMaxBufferRatio)) {
    return invalid_option(fmt::format("kv_buffer_ratio must be in [0, {}], found {}",
                                      kMaxBufferRatio, *options.kv_buffer_ratio),
                          "kv_buffer_ratio");
  }
  if (options.sparse.empty() && !options.selection_trace.empty()) {
    return invalid_option("selection_trace needs sparse attention: dense requests select nothing",
                          "selection_trace");
  }
  if (options.sparse.empty() && options.host_memory_bytes > 0) {
    return invalid_option(
        "host_memory_bytes needs sparse attention: dense requests read all their "
        "pages in every step and stay in fast memory",
        "host_memory_bytes");
  }
  if (options.generation_config != "auto" && options.generation_config != "vllm") {
    return invalid_option("generation_config must be \"auto\" or \"vllm\"", "generation_config");
  }
  return ok_status();
}

uint32_t logit_rows_for(const EngineOptions& options) {
  return options.max_num_seqs + kSpareLogitRows;
}

Result<std::unique_ptr<Engine>> start_engine(EngineParts parts) {
  auto engine = std::make_unique<EngineImpl>(std::move(parts));
  SPIN_RETURN_IF_ERROR(engine->start());
  return std::unique_ptr<Engine>(std::move(engine));
}

EngineImpl::EngineImpl(EngineParts parts)
    : parts_(std::move(parts)),
      limits_(make_limits(parts_)),
      entropy_(base::system_entropy()),
      metrics_(parts_.info.max_model_len),
      events_(kEventBatches) {
  StepLoopParts step;
  step.runner = parts_.runner.get();
  step.shared = &shared_;
  step.events = &events_;
  step.metrics = &metrics_;
  step.clock = parts_.clock;
  step.scheduler.max_num_seqs = parts_.options.max_num_seqs;
  step.scheduler.max_num_batched_tokens = parts_.options.max_num_batched_tokens;
  step.scheduler.chunked_prefill = parts_.options.enable_chunked_prefill;
  step.scheduler.max_logit_rows = parts_.runner->max_logit_rows();
  step.scheduler.min_decoded_tokens = parts_.min_decoded_tokens;
  step.model_end_ids = parts_.end_ids;
  step.sampled_vocab = parts_.info.vocab_size;
  step_loop_ = std::make_unique<StepLoop>(std::move(step));

  DeliveryParts delivery;
  delivery.shared = &shared_;
  delivery.events = &events_;
  delivery.metrics = &metrics_;
  delivery.clock = parts_.clock;
  delivery.tokenizer = parts_.tokenizer.get();
  delivery_ = std::make_unique<Delivery>(delivery);
}

EngineImpl::~EngineImpl() { stop(); }

Status EngineImpl::start() {
  shared_.last_progress_s.store(parts_.clock->now_s());
  SPIN_RETURN_IF_ERROR(
      base::start_thread(delivery_thread_, "delivery", [this] { delivery_->run(); }));
  // Why the loop ended is told by EngineShared::failed; the requests get it through delivery.
  return base::start_thread(step_thread_, "the engine's steps",
                            [this] { static_cast<void>(step_loop_->run()); });
}

Result<std::vector<TokenId>> EngineImpl::tokenize(std::string_view text, bool add_special) const {
  text::EncodeOptions options;
  options.add_special = add_special;
  return base::guard_memory("tokenizing", [&] { return parts_.tokenizer->encode(text, options); });
}

Result<std::string> EngineImpl::detokenize(std::span<const TokenId> ids, bool skip_special) const {
  for (const TokenId id : ids) {
    if (id >= parts_.info.vocab_size) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("token ids must be below the vocabulary size {}, found {}",
                                parts_.info.vocab_size, id),
                    "tokens");
    }
  }
  return base::guard_memory("detokenizing", [&]() -> Result<std::string> {
    return base::utf8_replace_invalid(parts_.tokenizer->decode(ids, skip_special));
  });
}

std::string EngineImpl::token_bytes(TokenId id) const {
  SPIN_CHECK(id < parts_.info.vocab_size);
  return std::string(parts_.tokenizer->token_bytes(id));
}

Result<std::vector<TokenId>> EngineImpl::encode_chat(std::span<const ChatMessage> messages,
                                                     const ChatOptions& options) const {
  if (!parts_.chat_format) return parts_.chat_error;
  return base::guard_memory("tokenizing", [&] {
    return text::encode_chat(*parts_.tokenizer, *parts_.chat_format, messages, options);
  });
}

Result<RequestId> EngineImpl::submit(GenerateRequest request, std::shared_ptr<RequestSink> sink) {
  SPIN_CHECK(sink != nullptr);
  metrics_.record_received();
  Result<RequestId> id = base::guard_memory("accepting the request", [&]() -> Result<RequestId> {
    SPIN_ASSIGN_OR_RETURN(std::unique_ptr<Request> made,
                          make_request(std::move(request), std::move(sink)));
    return enqueue(std::move(made));
  });
  if (!id.ok()) metrics_.record_refused();
  return id;
}

Result<AlgorithmRef> EngineImpl::resolve_sparse(const std::optional<std::string>& spec) const {
  if (parts_.algorithms != nullptr) return parts_.algorithms->resolve(spec);
  if (!spec || *spec == "dense") return AlgorithmRef();
  return Status(StatusCode::kInvalidArgument,
                "this server was started without sparse attention; only dense can be asked for",
                "sparse");
}

Result<std::unique_ptr<Request>> EngineImpl::make_request(GenerateRequest spec,
                                                          std::shared_ptr<RequestSink> sink) const {
  {
    base::MutexLock lock(shared_.mutex);
    SPIN_RETURN_IF_ERROR(check_open());
  }
  SPIN_RETURN_IF_ERROR(check_request(spec, limits_));
  auto request = std::make_unique<Request>();
  SPIN_ASSIGN_OR_RETURN(request->algorithm, resolve_sparse(spec.sparse));
  request->max_tokens = resolved_max_tokens(spec, limits_);
  const SamplingParams& sampling = spec.sampling;
  request->need = parts_.runner->need({spec.prompt, spec.prompt.size() + request->max_tokens,
                                       request->algorithm, sampling.prompt_logprobs.has_value()});
  Status fits = check_memory(request->need.memory, spec, limits_);
  if (!fits.ok() && request->algorithm != nullptr && sampling.prompt_logprobs) {
    fits = Status(fits.code(),
                  "log-probabilities of the prompt are those of dense attention, which keeps the "
                  "whole context in fast memory: " +
                      fits.message(),
                  "prompt_logprobs");
  }
  SPIN_RETURN_IF_ERROR(fits);
  SPIN_ASSIGN_OR_RETURN(request->texts, make_choice_texts(sampling, *parts_.tokenizer));
  request->choices.resize(sampling.n);
  request->stop_hit = std::make_unique<std::atomic<bool>[]>(sampling.n);
  if (!sampling.ignore_eos) request->end_ids = parts_.end_ids;
  request->end_ids.insert(request->end_ids.end(), sampling.stop_token_ids.begin(),
                          sampling.stop_token_ids.end());
  request->sink = std::move(sink);
  request->spec = std::move(spec);
  return request;
}

Status EngineImpl::check_open() const {
  if (shared_.failed) return Status(StatusCode::kUnavailable, "the engine has failed");
  if (shared_.stopping) return Status(StatusCode::kUnavailable, "the engine is stopped");
  if (shared_.draining) {
    return Status(StatusCode::kUnavailable, "the engine is draining and takes no new requests");
  }
  return ok_status();
}

uint64_t EngineImpl::waiting_requests() const {
  return static_cast<uint64_t>(
      std::count_if(shared_.live.begin(), shared_.live.end(),
                    [](const auto& entry) { return !entry.second->admitted.load(); }));
}

// Seats of the running set that are still free do not count as queue.
Status EngineImpl::check_queue() const {
  const uint64_t seats = parts_.options.max_num_seqs;
  const uint64_t free_seats = seats - std::min<uint64_t>(seats, shared_.running_sequences);
  const uint64_t waiting = waiting_requests();
  if (waiting < parts_.options.max_queued_requests + free_seats) return ok_status();
  return Status(StatusCode::kResourceExhausted,
                fmt::format("the queue is full: {} requests are waiting (limit {}); try again "
                            "later",
                            waiting, parts_.options.max_queued_requests));
}

Result<RequestId> EngineImpl::enqueue(std::unique_ptr<Request> request) {
  request->id = next_id_.fetch_add(1);
  const auto& seed = request->spec.sampling.seed;
  request->seed = seed                  ? *seed
                  : parts_.options.seed ? *parts_.options.seed
                                        : base::mix64(entropy_ ^ base::mix64(request->id));
  const double now = parts_.clock->now_s();
  request->times.submitted = now;
  const RequestId id{request->id};
  base::MutexLock lock(shared_.mutex);
  SPIN_RETURN_IF_ERROR(check_open());
  SPIN_RETURN_IF_ERROR(check_queue());
  if (shared_.live.empty()) shared_.last_progress_s.store(now);
  shared_.inbox.reserve(shared_.inbox.size() + 1);
  shared_.inbox.push_back(shared_.live.emplace(id.value, std::move(request)).first->second.get());
  shared_.wake_step.notify_one();
  return id;
}

void EngineImpl::cancel(RequestId id) {
  base::MutexLock lock(shared_.mutex);
  const auto place = shared_.live.find(id.value);
  if (place == shared_.live.end()) return;
  place->second->cancel_requested.store(true);
  shared_.signalled = true;
  shared_.wake_step.notify_one();
}

EngineStats EngineImpl::stats() const {
  EngineStats stats = metrics_.snapshot();
  {
    base::MutexLock lock(shared_.mutex);
    stats.requests_waiting = waiting_requests();
    stats.requests_running = shared_.live.size() - stats.requests_waiting;
  }
  stats.kv_pages_total = parts_.runner->pages_total();
  stats.kv_pages_in_use = parts_.runner->pages_in_use();
  stats.kv_cache_usage =
      static_cast<double>(stats.kv_pages_in_use) / static_cast<double>(stats.kv_pages_total);
  parts_.runner->add_stats(stats);
  return stats;
}

Health EngineImpl::health(std::chrono::duration<double> stall_limit) const {
  Health health;
  const double now = parts_.clock->now_s();
  base::MutexLock lock(shared_.mutex);
  if (!shared_.live.empty() || shared_.ending > 0) {
    health.seconds_since_progress = std::max(0.0, now - shared_.last_progress_s.load());
  }
  if (shared_.failed) {
    health.state = HealthState::kFailed;
    health.reason = "a step failed";
  } else if (shared_.stopping) {
    health.state = HealthState::kStopped;
    health.reason = "stopped";
  } else if (health.seconds_since_progress > stall_limit.count()) {
    health.state = HealthState::kStalled;
    health.reason = "work is queued, but no step has ended";
  } else if (shared_.draining) {
    health.state = HealthState::kDraining;
    health.reason = "draining";
  } else {
    health.state = HealthState::kReady;
    health.reason = "ready";
  }
  return health;
}

void EngineImpl::begin_drain() {
  base::MutexLock lock(shared_.mutex);
  shared_.draining = true;
}

bool EngineImpl::wait_drained(std::chrono::duration<double> limit) {
  // At most a year, so that the deadline is representable.
  const std::chrono::duration<double> bounded =
      std::clamp(limit, std::chrono::duration<double>(0), std::chrono::duration<double>(3.2e7));
  const auto deadline = std::chrono::steady_clock::now() +
                        std::chrono::duration_cast<std::chrono::steady_clock::duration>(bounded);
  base::MutexLock lock(shared_.mutex);
  while (!shared_.live.empty() || shared_.ending > 0) {
    if (!shared_.ended.wait_until(shared_.mutex, deadline)) {
      return shared_.live.empty() && shared_.ending == 0;
    }
  }
  return true;
}

void EngineImpl::stop() {
  base::MutexLock one_at_a_time(stop_mutex_);
  {
    base::MutexLock lock(shared_.mutex);
    shared_.stopping = true;
    shared_.wake_step.notify_one();
  }
  if (step_thread_.joinable()) {
    step_thread_.join();
  } else {
    events_.close();  // it never started
  }
  if (delivery_thread_.joinable()) delivery_thread_.join();
}

}  // namespace spin::engine
