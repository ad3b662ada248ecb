// SPDX-License-Identifier: Apache-2.0
#include "server/server.h"

#include <array>
#include <atomic>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/counter_rng.h"
#include "base/entropy.h"
#include "base/free_memory.h"
#include "server/access_log.h"
#include "server/api_error.h"
#include "server/auth.h"
#include "server/generation.h"
#include "server/http_server.h"
#include "server/json_writer.h"
#include "server/metrics.h"
#include "server/routes.h"
#include "server/shard.h"
#include "server/text_routes.h"
#include "server/worker_pool.h"
#include "spin/version.h"

namespace spin::server {

namespace {

using Clock = std::chrono::steady_clock;

// The client's x-request-id if it is fit for headers and logs, else "".
std::string usable_request_id(const RequestHead& head) {
  const std::string* id = head.find("x-request-id");
  if (id == nullptr || id->empty() || id->size() > kMaxRequestIdBytes) return {};
  for (const char c : *id) {
    const bool good = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      c == '-' || c == '_' || c == '.' || c == ':';
    if (!good) return {};
  }
  return *id;
}

// "application/json", with no charset but UTF-8.
bool is_json_type(const std::string& value) {
  std::string_view rest = value;
  const size_t end = rest.find(';');
  std::string_view type = rest.substr(0, end);
  while (!type.empty() && (type.back() == ' ' || type.back() == '\t')) type.remove_suffix(1);
  if (!ascii_iequals(type, "application/json")) return false;
  if (end == std::string_view::npos) return true;
  const std::string parameters = ascii_lower(rest.substr(end));
  const size_t charset = parameters.find("charset=");
  if (charset == std::string::npos) return true;
  std::string_view name = std::string_view(parameters).substr(charset + 8);
  if (!name.empty() && name.front() == '"') name.remove_prefix(1);
  return name.starts_with("utf-8") || name.starts_with("utf8");
}

// Of a request that has been read. What a large one took, many times its size as a tree of values,
// is given back to the system and not kept for the next one of its kind.
void drop_body(std::string& body, BodyCharge& charge) {
  const bool large = body.size() >= kLargeBodyBytes;
  std::string().swap(body);
  charge.release();
  if (large) base::return_freed_memory();
}

// The workers' queue is full.
void refuse_overload(Exchange& exchange, const std::string& request_id) {
  HttpResponse response =
      error_response({429, "too many requests are waiting; try again later", "", "overloaded"});
  response.fields.emplace_back("X-Request-Id", request_id);
  exchange.respond(std::move(response));
}

const char* health_name(HealthState state) {
  switch (state) {
    case HealthState::kLoading:
      return "loading";
    case HealthState::kReady:
      return "ready";
    case HealthState::kDraining:
      return "draining";
    case HealthState::kStalled:
      return "stalled";
    case HealthState::kFailed:
      return "failed";
    case HealthState::kStopped:
      return "stopped";
  }
  return "failed";
}

}  // namespace

class Server::Impl final : public HttpHandler {
 public:
  explicit Impl(const ServerOptions& options)
      : options_(options),
        authorizer_(options.api_keys),
        log_(options.access_log),
        id_seed_(base::system_entropy()),
        workers_(options.limits.max_pending_requests),
        http_(*this, options.limits, options.io_threads) {}

  ~Impl() override { stop(); }

  Status start() {
    SPIN_RETURN_IF_ERROR(http_.listen(options_.host, options_.port));
    SPIN_RETURN_IF_ERROR(log_.start());
    SPIN_RETURN_IF_ERROR(workers_.start(options_.worker_threads));
    return http_.start();
  }

  void stop() {
    draining_.store(true);
    http_.stop();  // nothing new, and every exchange is lost, which cancels its requests
    workers_.stop();
  }

  // HttpHandler.
  std::optional<HttpResponse> check_head(const RequestHead& head) override;
  void handle(HttpRequest request, std::shared_ptr<Exchange> exchange) override;
  HttpResponse make_error(int status, std::string_view text) override {
    return error_response({status, std::string(text), "", ""});
  }
  void on_refused(const RequestHead* head, int status) override;

  ServerOptions options_;
  std::atomic<Engine*> engine_{nullptr};
  std::atomic<bool> draining_{false};
  std::atomic<uint64_t> requests_active_{0};
  GenerationCounters generation_counters_;
  Authorizer authorizer_;
  AccessLog log_;
  const uint64_t id_seed_;
  std::atomic<uint64_t> id_counter_{0};
  std::array<std::atomic<uint64_t>, 6> responses_by_class_{};
  WorkerPool workers_;
  HttpServer http_;

 private:
  std::optional<ApiError> refusal(const RequestHead& head);
  std::optional<ApiError> check_body_type(const RequestHead& head);
  bool host_is_allowed(const RequestHead& head) const;
  void watch_exchange(const RouteInfo& route,
                      const RequestHead& head,
                      Exchange& exchange,
                      const std::string& request_id);
  void log_line(std::string_view method,
                std::string_view path,
                int status,
                uint64_t bytes,
                double seconds,
                std::string_view request_id,
                bool complete);
  void generate(Api api,
                HttpRequest request,
                std::shared_ptr<Exchange> exchange,
                const std::string& request_id);
  void text_route(Api api,
                  HttpRequest request,
                  std::shared_ptr<Exchange> exchange,
                  const std::string& request_id);
  HttpResponse answer_get(const RouteInfo& route, const RequestHead& head);
  HttpResponse health();
  HttpResponse models();
  HttpResponse metrics();
  std::string new_id() {
    const uint64_t number = id_counter_.fetch_add(1, std::memory_order_relaxed);
    return fmt::format("{:016x}{:016x}", base::mix64(id_seed_),
                       base::mix64(id_seed_ ^ (number + 1)));
  }
};

// --- Checks on the head, in this order: name of the server, method, path, key, readiness, type.

bool Server::Impl::host_is_allowed(const RequestHead& head) const {
  if (!http_.loopback()) return true;
  const std::string* host = head.find("host");
  if (host == nullptr || is_loopback_host(*host)) return true;
  for (const std::string& name : options_.allowed_hosts) {
    if (ascii_iequals(name, *host) || ascii_iequals(name, host_without_port(*host))) return true;
  }
  return false;
}

std::optional<ApiError> Server::Impl::check_body_type(const RequestHead& head) {
  const std::string* coding = head.find("content-encoding");
  if (coding != nullptr && !ascii_iequals(*coding, "identity")) {
    return ApiError{415, "the body must not have a content coding", "", "unsupported_media_type"};
  }
  // Required, also because a browser page cannot send this type to another site unasked.
  const std::string* type = head.find("content-type");
  if (type == nullptr || !is_json_type(*type)) {
    return ApiError{415, "Content-Type must be application/json in UTF-8", "",
                    "unsupported_media_type"};
  }
  return std::nullopt;
}

std::optional<ApiError> Server::Impl::refusal(const RequestHead& head) {
  if (!host_is_allowed(head)) {
    return ApiError{403, "the Host field does not name this server", "", "host_not_allowed"};
  }
  const bool get = head.method == "GET" || head.method == "HEAD";
  if (!get && head.method != "POST") {
    return ApiError{405, "the method is not supported", "", "method_not_allowed"};
  }
  const auto route = find_route(head.path);
  if (!route) return ApiError{404, "there is no such route", "", "not_found"};
  if (get == route->post) {
    return ApiError{405, "the method is not supported by this route", "", "method_not_allowed"};
  }
  if (route->needs_key && !authorizer_.allows(head)) {
    return ApiError{401, "a valid API key is needed: Authorization: Bearer KEY", "",
                    "invalid_api_key"};
  }
  if (route->needs_engine && engine_.load() == nullptr) {
    return ApiError{503, "the model is being loaded", "", "loading"};
  }
  if (route->post && draining_.load()) {
    return ApiError{503, "the server is shutting down", "", "draining"};
  }
  return route->post ? check_body_type(head) : std::nullopt;
}

std::optional<HttpResponse> Server::Impl::check_head(const RequestHead& head) {
  const auto error = refusal(head);
  if (!error) return std::nullopt;
  HttpResponse response = error_response(*error);
  if (error->status == 405) {
    const auto route = find_route(head.path);
    response.fields.emplace_back("Allow", route ? std::string(route->allowed) : "GET, HEAD, POST");
  }
  if (std::string id = usable_request_id(head); !id.empty()) {
    response.fields.emplace_back("X-Request-Id", std::move(id));
  }
  return response;
}

// --- Log and counts.

void Server::Impl::log_line(std::string_view method,
                            std::string_view path,
                            int status,
                            uint64_t bytes,
                            double seconds,
                            std::string_view request_id,
                            bool complete) {
  const size_t status_class = static_cast<size_t>(status / 100);
  if (status_class < responses_by_class_.size()) {
    responses_by_class_[status_class].fetch_add(1, std::memory_order_relaxed);
  }
  if (!log_.enabled()) return;
  log_.add(fmt::format("method={} path={} status={} bytes={} ms={} complete={} request_id={}",
                       method, path, status, bytes, static_cast<uint64_t>(seconds * 1000),
                       complete ? 1 : 0, request_id.empty() ? std::string_view("-") : request_id));
}

void Server::Impl::on_refused(const RequestHead* head, int status) {
  std::string_view method = "-", path = "-";
  std::string request_id;
  if (head != nullptr) {
    for (const std::string_view known : {"GET", "HEAD", "POST"}) {
      if (head->method == known) method = known;
    }
    if (const auto route = find_route(head->path)) path = route->path;
    request_id = usable_request_id(*head);
  }
  log_line(method, path, status, 0, 0, request_id, true);
}

void Server::Impl::watch_exchange(const RouteInfo& route,
                                  const RequestHead& head,
                                  Exchange& exchange,
                                  const std::string& request_id) {
  requests_active_.fetch_add(1);
  const std::string_view method = route.post ? "POST" : head.method == "HEAD" ? "HEAD" : "GET";
  exchange.set_on_done([this, method, path = route.path, request_id, began = Clock::now()](
                           const Exchange& done, bool complete) {
    const std::chrono::duration<double> took = Clock::now() - began;
    // 499: nginx's word for a client that left; no such status is sent.
    log_line(method, path, done.started() ? done.status() : 499, done.response_bytes(),
             took.count(), request_id, complete);
    requests_active_.fetch_sub(1);
  });
}

// --- Routes.

void Server::Impl::handle(HttpRequest request, std::shared_ptr<Exchange> exchange) {
  const auto route = find_route(request.head.path);
  if (!route) return exchange->respond(make_error(404, "there is no such route"));
  std::string request_id = usable_request_id(request.head);
  if (request_id.empty()) request_id = new_id();
  watch_exchange(*route, request.head, *exchange, request_id);
  switch (route->route) {
    case Route::kCompletions:
      return generate(kCompletions, std::move(request), std::move(exchange), request_id);
    case Route::kChatCompletions:
      return generate(kChat, std::move(request), std::move(exchange), request_id);
    case Route::kTokenize:
      return text_route(kTokenize, std::move(request), std::move(exchange), request_id);
    case Route::kDetokenize:
      return text_route(kDetokenize, std::move(request), std::move(exchange), request_id);
    default: {
      HttpResponse response = answer_get(*route, request.head);
      response.fields.emplace_back("X-Request-Id", request_id);
      return exchange->respond(std::move(response));
    }
  }
}

void Server::Impl::generate(Api api,
                            HttpRequest request,
                            std::shared_ptr<Exchange> exchange,
                            const std::string& request_id) {
  auto generation = std::make_shared<Generation>(*engine_.load(), exchange, options_.limits,
                                                 generation_counters_, request_id);
  generation->attach();
  const bool queued =
      workers_.try_post([generation, api, body = std::move(request.body),
                         charge = std::move(request.charge), id = new_id()]() mutable {
        generation->prepare(api, body, std::move(id));
        drop_body(body, charge);
      });
  if (!queued) refuse_overload(*exchange, request_id);
}

void Server::Impl::text_route(Api api,
                              HttpRequest request,
                              std::shared_ptr<Exchange> exchange,
                              const std::string& request_id) {
  Engine& engine = *engine_.load();
  auto left = std::make_shared<std::atomic<bool>>(false);
  exchange->set_callbacks([left] { left->store(true); }, nullptr);
  const bool queued = workers_.try_post(
      [&engine, api, exchange, left, request_id, max_body = options_.limits.max_body_bytes,
       body = std::move(request.body), charge = std::move(request.charge)]() mutable {
        if (left->load()) return;
        HttpResponse response = api == kTokenize ? answer_tokenize(engine, body, max_body)
                                                 : answer_detokenize(engine, body, max_body);
        drop_body(body, charge);
        response.fields.emplace_back("X-Request-Id", request_id);
        exchange->post([exchange, response = std::move(response)]() mutable {
          exchange->respond(std::move(response));
        });
      });
  if (!queued) refuse_overload(*exchange, request_id);
}

HttpResponse Server::Impl::answer_get(const RouteInfo& route, const RequestHead& head) {
  switch (route.route) {
    case Route::kHealth:
    case Route::kPing:
      return health();
    case Route::kMetrics:
      return metrics();
    case Route::kModels:
      return models();
    case Route::kModel: {
      const auto id = model_id_of(head.path);
      const ModelInfo& model = engine_.load()->model_info();
      if (!id || *id != model.name) {
        return error_response({404, "the model does not exist; GET /v1/models names the one served",
                               "model", "model_not_found"});
      }
      HttpResponse response;
      response.body = model_json(model);
      return response;
    }
    default: {
      HttpResponse response;
      response.body = "{\"version\":";
      append_json_string(response.body, kVersion);
      response.body += '}';
      return response;
    }
  }
}

HttpResponse Server::Impl::health() {
  Health health;
  if (Engine* engine = engine_.load()) {
    health = engine->health(options_.stall_limit);
    if (draining_.load() && health.state == HealthState::kReady) {
      health.state = HealthState::kDraining;
    }
  }
  HttpResponse response;
  if (health.state != HealthState::kReady) {
    response.status = 503;
    response.fields.emplace_back("Retry-After", std::to_string(kRetryAfterUnavailableSeconds));
  }
  response.body = "{\"status\":";
  append_json_string(response.body, health_name(health.state));
  response.body += ",\"seconds_since_progress\":";
  append_json_number(response.body, health.seconds_since_progress);
  response.body += '}';
  return response;
}

HttpResponse Server::Impl::models() {
  HttpResponse response;
  response.body =
      fmt::format(R"({{"object":"list","data":[{}]}})", model_json(engine_.load()->model_info()));
  return response;
}

HttpResponse Server::Impl::metrics() {
  FrontEndCounts front;
  const HttpCounters& http = http_.counters();
  front.connections_open = http.connections_open.load();
  front.connections_total = http.connections_total.load();
  front.connections_refused = http.connections_refused.load();
  front.accept_errors = http.accept_errors.load();
  front.timeouts = http.timeouts.load();
  front.body_bytes_pending = http.body_bytes_pending.load();
  front.answer_bytes_pending = http.answer_bytes_pending.load();
  front.client_left = generation_counters_.client_left.load();
  front.slow_readers = http.slow_readers_closed.load();
  front.log_lines_dropped = log_.dropped();
  front.requests_active = requests_active_.load();
  front.worker_queue = workers_.queued();
  for (size_t i = 0; i < responses_by_class_.size(); ++i) {
    front.responses_by_class[i] = responses_by_class_[i].load();
  }
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  if (Engine* engine = engine_.load()) {
    const EngineStats stats = engine->stats();
    response.body = metrics_text(&stats, front, engine->model_info().name);
  } else {
    response.body = metrics_text(nullptr, front, "");
  }
  return response;
}

// --- Server.

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() { stop(); }

Result<std::unique_ptr<Server>> Server::start(const ServerOptions& options) {
  for (const std::string& key : options.api_keys) {
    if (key.empty() || key.size() > kMaxApiKeyBytes) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("an API key must have 1 to {} bytes", kMaxApiKeyBytes), "api_key");
    }
  }
  try {
    auto impl = std::make_unique<Impl>(options);
    SPIN_RETURN_IF_ERROR(impl->start());
    return std::unique_ptr<Server>(new Server(std::move(impl)));
  } catch (const std::exception& error) {  // Asio's, out of descriptors or memory
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("cannot start the server: {}", error.what()));
  }
}

void Server::attach(Engine& engine) { impl_->engine_.store(&engine); }

uint16_t Server::port() const { return impl_->http_.port(); }

std::string Server::url() const {
  const std::string& host = impl_->options_.host;
  const bool v6 = host.find(':') != std::string::npos;
  return fmt::format("http://{}:{}", v6 ? fmt::format("[{}]", host) : host, port());
}

ServerStats Server::stats() const {
  ServerStats out;
  out.connections_open = impl_->http_.counters().connections_open.load();
  out.requests_active = impl_->requests_active_.load();
  out.client_left = impl_->generation_counters_.client_left.load();
  out.slow_readers = impl_->http_.counters().slow_readers_closed.load();
  return out;
}

void Server::begin_drain() {
  impl_->draining_.store(true);
  impl_->http_.begin_drain();
}

bool Server::drain(std::chrono::duration<double> limit) {
  begin_drain();
  bool clean = true;
  if (Engine* engine = impl_->engine_.load()) {
    engine->begin_drain();
    clean = engine->wait_drained(limit);
    engine->stop();
  }
  // Every request has its terminal event now; the I/O threads only have to write.
  impl_->http_.close_idle();
  const auto deadline = Clock::now() + std::chrono::seconds(1);
  while (Clock::now() < deadline && impl_->http_.counters().connections_open.load() > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  stop();
  return clean;
}

void Server::stop() { impl_->stop(); }

}  // namespace spin::server
