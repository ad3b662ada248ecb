// SPDX-License-Identifier: Apache-2.0
// Many clients, clients that leave, clients that do not read, too many clients, and the end of the
// server. Behind it the fake engine with its real pages, so that a leak is a number.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/server/fake_server.h"
#include "tests/server/server_fixture.h"
#include "tests/server/stream_readers.h"

namespace spin::server {
namespace {

using testing::eventually;
using testing::post_text;
using testing::RawClient;
using testing::RawResponse;
using testing::sse_events;
using Json = nlohmann::json;
using std::chrono::milliseconds;

constexpr int kAborts = 2000;
#ifdef SPIN_SANITIZED
constexpr int kStreams = 60;
constexpr int kOutputs = 60;
constexpr int kDeaf = 10;
#else
constexpr int kStreams = 200;
constexpr int kOutputs = 600;
constexpr int kDeaf = 40;
#endif

// A request whose output depends on `seed` only.
Json request_of(uint64_t seed, bool stream) {
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + 12345;
  auto next = [&x](uint64_t below) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    return (x >> 33) % below;
  };
  Json out = {{"prompt", testing::cat({"prompt number ", std::to_string(seed)})},
              {"seed", seed},
              {"temperature", 0.1 * static_cast<double>(next(15))},
              {"max_tokens", 1 + next(40)},
              {"stream", stream}};
  if (next(3) == 0) out["n"] = 1 + next(3);
  if (next(3) == 0) out["stop"] = {"stop", "a", "\nUser"};
  if (next(4) == 0) out["logprobs"] = next(4);
  if (next(5) == 0) out["echo"] = true;
  if (next(4) == 0) out["top_k"] = 1 + next(20);
  if (next(4) == 0) out["ignore_eos"] = true;
  if (next(6) == 0) out["include_stop_str_in_output"] = true;
  if (next(6) == 0) out["min_tokens"] = 1;
  if (stream) out["stream_options"] = {{"include_usage", true}};
  return out;
}

// Per choice: text, finish_reason, stop_reason, log-probabilities; and the usage.
Json summary_of_whole(const Json& body) {
  Json out = {{"usage", body["usage"]}, {"choices", Json::object()}};
  for (const Json& choice : body["choices"]) {
    Json entry = {{"text", choice["text"]},
                  {"finish", choice["finish_reason"]},
                  {"stop", choice["stop_reason"]},
                  {"logprobs", choice["logprobs"]}};
    out["choices"][std::to_string(choice["index"].get<int>())] = entry;
  }
  return out;
}

Json summary_of_stream(const std::string& body) {
  Json out = {{"usage", nullptr}, {"choices", Json::object()}};
  for (const std::string& event : sse_events(body)) {
    if (event == "[DONE]") continue;
    const Json chunk = Json::parse(event, nullptr, false);
    if (!chunk.is_object() || !chunk.contains("choices")) return {{"bad event", event}};
    if (chunk["choices"].empty()) {
      out["usage"] = chunk["usage"];
      continue;
    }
    const Json& choice = chunk["choices"][0];
    Json& entry = out["choices"][std::to_string(choice["index"].get<int>())];
    if (entry.is_null()) {
      entry = {{"text", ""}, {"finish", nullptr}, {"stop", nullptr}, {"logprobs", nullptr}};
    }
    entry["text"] = entry["text"].get<std::string>() + choice["text"].get<std::string>();
    if (!choice["finish_reason"].is_null()) {
      entry["finish"] = choice["finish_reason"];
      entry["stop"] = choice["stop_reason"];
    }
    if (choice["logprobs"].is_null()) continue;
    if (entry["logprobs"].is_null()) {
      entry["logprobs"] = choice["logprobs"];
      continue;
    }
    for (auto& [key, list] : entry["logprobs"].items()) {
      for (const Json& value : choice["logprobs"][key]) list.push_back(value);
    }
  }
  return out;
}

TEST(Load, StreamedAndWholeAnswersOfManyRequestsAreEqual) {
  FakeServer server;
  for (int i = 0; i < kOutputs; ++i) {
    const auto whole = server.post("/v1/completions", request_of(i, false));
    ASSERT_EQ(whole.status, 200) << whole.body;
    const auto streamed = server.post("/v1/completions", request_of(i, true));
    ASSERT_EQ(streamed.status, 200) << streamed.body;
    ASSERT_EQ(summary_of_stream(streamed.body), summary_of_whole(Json::parse(whole.body)))
        << request_of(i, true) << "\n"
        << streamed.body;
  }
  EXPECT_TRUE(eventually([&] { return server.idle(); }));
}

TEST(Load, ConcurrentStreamsEqualTheirSoloRuns) {
  EngineOptions engine_options;
  engine_options.max_num_seqs = 256;
  FakeServer server({}, engine_options);
  std::vector<Json> solo;
  for (int i = 0; i < kStreams; ++i) {
    solo.push_back(summary_of_stream(server.post("/v1/completions", request_of(i, true)).body));
  }
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(std::make_unique<RawClient>(server.port()));
    ASSERT_TRUE(clients.back()->connected());
  }
  for (int i = 0; i < kStreams; ++i) {
    clients[i]->send(post_text("/v1/completions", request_of(i, true).dump()));
  }
  for (int i = 0; i < kStreams; ++i) {
    const auto response = clients[i]->read_response(milliseconds(60'000));
    ASSERT_TRUE(response.complete) << i;
    EXPECT_EQ(summary_of_stream(response.body), solo[i]) << i;
  }
  EXPECT_TRUE(eventually([&] { return server.idle(); }));
}

// Closes at a random byte of the request, in the queue, in prefill, in decode, in the last chunk.
void abort_once(uint16_t port, uint64_t seed) {
  uint64_t x = seed * 0xD1B54A32D192ED03ull + 7;
  auto next = [&x](uint64_t below) {
    x = x * 6364136223846793005ull + 1442695040888963407ull;
    return (x >> 33) % below;
  };
  Json body = {{"prompt", std::string(1 + next(1500), 'p')},
               {"max_tokens", 1 + next(60)},
               {"ignore_eos", true},
               {"n", 1 + next(3)},
               {"stream", next(2) == 0}};
  const std::string text = post_text("/v1/completions", body.dump());
  RawClient client(port);
  const uint64_t kind = next(6);
  if (kind == 0) {
    client.send(std::string_view(text).substr(0, next(100)));  // in the head
  } else if (kind == 1) {
    client.send(std::string_view(text).substr(0, next(text.size())));
  } else {
    client.send(text);
    if (kind == 3) client.receive_some(milliseconds(next(20)));  // somewhere in decode
    if (kind == 4) std::this_thread::sleep_for(std::chrono::microseconds(next(3000)));
    if (kind == 5) {
      for (uint64_t reads = next(12); reads > 0; --reads) client.receive_some(milliseconds(20));
    }
  }
  if (next(2) == 0) {
    client.reset();
  } else {
    client.close();
  }
}

TEST(Load, AbortsAtRandomBytesLeakNoPageDescriptorOrThread) {
  engine::FakeModelOptions model;
  model.step_delay = std::chrono::microseconds(100);
  ServerOptions options;
  options.io_threads = 2;
  FakeServer server(model, {}, options);
  server.post("/v1/completions", request_of(1, true));
  ASSERT_TRUE(
      eventually([&] { return server.idle() && server.server().stats().connections_open == 0; }));
  const size_t descriptors = testing::open_descriptors();
  const size_t threads = testing::thread_count();
  std::vector<std::thread> workers;
  std::atomic<int> next{0};
  for (int w = 0; w < 8; ++w) {
    workers.emplace_back([&] {
      for (int i = next++; i < kAborts; i = next++) abort_once(server.port(), i);
    });
  }
  for (auto& worker : workers) worker.join();
  EXPECT_TRUE(eventually([&] { return server.idle(); }, milliseconds(30'000)));
  EXPECT_TRUE(eventually([&] { return server.server().stats().connections_open == 0; },
                         milliseconds(30'000)));
  EXPECT_TRUE(eventually([&] { return testing::open_descriptors() == descriptors; }));
  EXPECT_EQ(testing::thread_count(), threads);
  EXPECT_GT(server.server().stats().client_left, 0u);
  const EngineStats stats = server.engine().stats();
  uint64_t ended = 0;
  for (const uint64_t count : stats.requests_finished) ended += count;
  EXPECT_EQ(ended + stats.requests_refused, stats.requests_received);
  // And it still answers the same.
  EXPECT_EQ(
      summary_of_stream(server.post("/v1/completions", request_of(5, true)).body),
      summary_of_whole(Json::parse(server.post("/v1/completions", request_of(5, false)).body)));
}

TEST(Load, AClientThatLeavesFreesItsPlaceAtOnceInBothModes) {
  engine::FakeModelOptions model;
  model.step_delay = std::chrono::microseconds(500);
  FakeServer server(model);
  for (const bool stream : {true, false}) {
    RawClient client(server.port());
    client.send(post_text(
        "/v1/completions",
        Json{{"prompt", "x"}, {"max_tokens", 4000}, {"ignore_eos", true}, {"stream", stream}}
            .dump()));
    ASSERT_TRUE(eventually([&] { return server.engine().stats().requests_running == 1; }));
    client.close();
    EXPECT_TRUE(eventually([&] { return server.idle(); }, milliseconds(5000)));
    EXPECT_LT(server.engine().stats().generation_tokens, 3500u);
  }
}

TEST(Load, DeafClientsAreBoundedAndEndedWhileOthersAreServed) {
  ScriptedOptions flood;
  flood.flood_bytes = 2000;
  flood.step_delay = std::chrono::microseconds(200);
  flood.max_model_len = 1'000'000;
  ServerOptions options;
  options.limits.socket_send_buffer_bytes = 16 << 10;
  options.limits.max_unsent_bytes = 32 << 10;
  options.limits.max_held_bytes = 64 << 10;
  ServerFixture fixture(flood, options);
  std::vector<std::unique_ptr<RawClient>> deaf;
  const std::string request =
      post_text("/v1/completions", R"({"prompt":"d","stream":true,"max_tokens":900000})");
  for (int i = 0; i < kDeaf; ++i) {
    deaf.push_back(std::make_unique<RawClient>(fixture.port(), 4096));
    deaf.back()->send(request);
  }
  const auto other = fixture.post("/v1/completions", {{"prompt", "x"}, {"max_tokens", 20}});
  EXPECT_EQ(other.status, 200);
  EXPECT_TRUE(eventually([&] { return fixture.engine().active() == 0; }, milliseconds(30'000)));
  EXPECT_EQ(fixture.server().stats().slow_readers, static_cast<uint64_t>(kDeaf));
}

TEST(Load, AClientThatStopsReadingIsEndedAfterTheStallTime) {
  ScriptedOptions flood;
  flood.flood_bytes = 2000;
  flood.max_model_len = 1'000'000;
  ServerOptions options;
  options.limits.socket_send_buffer_bytes = 16 << 10;
  options.limits.max_unsent_bytes = 1 << 20;  // so that the volume alone does not end it
  options.limits.write_stall_timeout = milliseconds(300);
  ServerFixture fixture(flood, options);
  RawClient client(fixture.port(), 4096);
  client.send(post_text("/v1/completions", R"({"prompt":"d","stream":true,"max_tokens":300})"));
  EXPECT_TRUE(eventually([&] { return fixture.server().stats().slow_readers == 1; }));
  EXPECT_TRUE(eventually([&] { return fixture.server().stats().connections_open == 0; }));
}

TEST(Load, ASlowReaderGetsEveryByteInFewerEvents) {
  ScriptedOptions fast;
  fast.flood_bytes = 1000;
  fast.max_model_len = 1'000'000;
  ServerOptions options;
  options.limits.socket_send_buffer_bytes = 8 << 10;
  options.limits.max_unsent_bytes = 8 << 10;
  options.limits.max_held_bytes = 64 << 20;
  ServerFixture fixture(fast, options);
  RawClient client(fixture.port(), 4096);
  client.send(post_text("/v1/completions", R"({"prompt":"d","stream":true,"max_tokens":2000})"));
  ASSERT_TRUE(eventually([&] { return fixture.engine().active() == 0; }));
  const auto response = client.read_response(milliseconds(60'000));
  const ClientView view = read_like_sglang(response.body, false);
  EXPECT_TRUE(view.success);
  EXPECT_EQ(view.text, std::string(2'000'000, 'f'));
  EXPECT_LT(view.token_events, 2000u);
}

TEST(Load, AFullQueueGives429AndRecovers) {
  ScriptedOptions slow;
  slow.max_queued = 2;
  ServerFixture fixture(slow, {});
  fixture.engine().hang(true);
  std::vector<std::unique_ptr<RawClient>> held;
  for (int i = 0; i < 2; ++i) {
    held.push_back(std::make_unique<RawClient>(fixture.port()));
    held.back()->send(post_text("/v1/completions", R"({"prompt":"q","max_tokens":2})"));
  }
  ASSERT_TRUE(eventually([&] { return fixture.engine().active() == 2; }));
  const auto refused = fixture.post("/v1/completions", {{"prompt", "q"}});
  EXPECT_EQ(refused.status, 429);
  EXPECT_EQ(refused.fields.count("retry-after"), 1u);
  EXPECT_EQ(parse(refused)["error"]["code"], "overloaded");
  fixture.engine().hang(false);
  for (auto& client : held) EXPECT_EQ(client->read_response().status, 200);
  // A client has its answer a moment before its place in the queue is free.
  ASSERT_TRUE(eventually([&] { return fixture.engine().active() == 0; }));
  EXPECT_EQ(fixture.post("/v1/completions", {{"prompt", "q"}, {"max_tokens", 2}}).status, 200);
}

TEST(Load, WaitingForAWorkerIsBounded) {
  ServerOptions options;
  options.worker_threads = 1;
  options.limits.max_pending_requests = 2;
  ServerFixture fixture({}, options);
  fixture.engine().slow_tokenizer(0.3);
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<RawClient>(fixture.port()));
    clients.back()->send(
        post_text(i % 2 == 0 ? "/v1/completions" : "/tokenize",
                  i % 2 == 0 ? R"({"prompt":"q","max_tokens":1})" : R"({"prompt":"q"})"));
  }
  // The I/O thread stays free all the while.
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(fixture.get("/health").status, 200);
  EXPECT_LT(std::chrono::steady_clock::now() - began, milliseconds(250));
  int served = 0, refused = 0;
  for (auto& client : clients) {
    const int status = client->read_response().status;
    served += status == 200;
    refused += status == 429;
  }
  EXPECT_EQ(served + refused, 8);
  EXPECT_GE(served, 2);
  EXPECT_GE(refused, 4);
}

TEST(Load, DrainingFinishesWhatRunsAndRefusesWhatComes) {
  engine::FakeModelOptions model;
  model.step_delay = std::chrono::microseconds(2000);
  FakeServer server(model);
  RawClient running(server.port());
  RawClient idle(server.port());
  idle.send(testing::get_text("/version"));
  EXPECT_EQ(idle.read_response().status, 200);
  running.send(
      post_text("/v1/completions",
                R"({"prompt":"x","max_tokens":150,"ignore_eos":true,"stream":true,"seed":1})"));
  ASSERT_TRUE(eventually([&] { return server.engine().stats().requests_running == 1; }));
  bool clean = false;
  std::thread drainer([&] { clean = server.server().drain(std::chrono::seconds(30)); });
  ASSERT_TRUE(eventually(
      [&] { return testing::fetch(server.port(), testing::get_text("/health")).status == 503; }));
  const auto refused = server.post("/v1/completions", {{"prompt", "x"}});
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.fields.count("retry-after"), 1u);
  EXPECT_EQ(refused.fields.at("connection"), "close");
  const auto response = running.read_response();
  EXPECT_TRUE(response.complete);
  EXPECT_EQ(sse_events(response.body).back(), "[DONE]");
  EXPECT_NE(response.body.find("\"finish_reason\":\"length\""), std::string::npos);
  drainer.join();
  EXPECT_TRUE(clean);
  EXPECT_TRUE(idle.wait_closed(milliseconds(1000)));
  EXPECT_FALSE(RawClient(server.port()).connected());
}

TEST(Load, DrainingEndsWhatTakesTooLongWithAnErrorEvent) {
  engine::FakeModelOptions model;
  model.step_delay = std::chrono::microseconds(5000);
  FakeServer server(model);
  RawClient streaming(server.port());
  RawClient waiting(server.port());
  const std::string fields = R"("prompt":"x","max_tokens":4000,"ignore_eos":true})";
  streaming.send(post_text("/v1/completions", testing::cat({R"({"stream":true,)", fields})));
  waiting.send(post_text("/v1/completions", testing::cat({"{", fields})));
  ASSERT_TRUE(eventually([&] { return server.engine().stats().generation_tokens >= 4; }));
  const auto began = std::chrono::steady_clock::now();
  EXPECT_FALSE(server.server().drain(std::chrono::milliseconds(100)));
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
  const auto streamed = streaming.read_response();
  EXPECT_TRUE(streamed.complete);
  const auto events = sse_events(streamed.body);
  ASSERT_GE(events.size(), 3u);
  EXPECT_EQ(events.back(), "[DONE]");
  EXPECT_TRUE(Json::parse(events[events.size() - 2]).contains("error"));
  EXPECT_EQ(waiting.read_response().status, 503);
}

TEST(Load, StoppingWithRequestsAtWorkIsQuietAndTheEngineMayGoOn) {
  engine::FakeModelOptions model;
  model.step_delay = std::chrono::microseconds(300);
  FakeServer server(model);
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<RawClient>(server.port()));
    clients.back()->send(post_text("/v1/completions", request_of(i, i % 2 == 0).dump()));
  }
  testing::sleep_ms(5);
  server.server().stop();
  server.server().stop();
  for (auto& client : clients) client->read_response(milliseconds(2000));
  EXPECT_TRUE(eventually([&] { return server.engine().stats().kv_pages_in_use == 0; }));
}

TEST(Load, PortsAreFreeAgainAtOnce) {
  uint16_t port = 0;
  for (int i = 0; i < 20; ++i) {
    ScriptedEngine engine;
    ServerOptions options;
    options.port = port;
    auto server = Server::start(options);
    ASSERT_TRUE(server.ok()) << server.status().to_string();
    (*server)->attach(engine);
    port = (*server)->port();
    RawClient client(port);
    client.send(post_text("/v1/completions", R"({"prompt":"q","max_tokens":2})"));
    EXPECT_EQ(client.read_response().status, 200);
    (*server)->stop();
  }
}

}  // namespace
}  // namespace spin::server
