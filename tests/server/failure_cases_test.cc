// SPDX-License-Identifier: Apache-2.0
// Failures of other servers, as docs/failure_cases.md lists them, over real sockets. Only those
// that no test of a part of the server would show.
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tests/server/fake_server.h"
#include "tests/server/server_fixture.h"

namespace spin::server {
namespace {

using testing::eventually;
using testing::get_text;
using ::testing::HasSubstr;
using testing::post_text;
using testing::RawClient;
using testing::sse_events;
using Json = nlohmann::json;
using std::chrono::milliseconds;

// Memory of this process that is no file, swapped out or not.
uint64_t anonymous_kib() {
  std::ifstream status("/proc/self/status");
  uint64_t sum = 0;
  for (std::string line; std::getline(status, line);) {
    for (const std::string_view field : {"RssAnon:", "VmSwap:"}) {
      if (line.starts_with(field)) sum += std::stoull(line.substr(field.size()));
    }
  }
  return sum;
}

// S36, S80: heads without end are refused at the limit; what was sent of them is not kept.
TEST(ServerFailureCases, EndlessHeadsTakeNoMemory) {
  ServerFixture fixture;
  const std::string front = "GET /health HTTP/1.1\r\nHost: localhost\r\n";
  const std::string value(1 << 20, 'v');
  std::string fields;
  while (fields.size() < (1u << 20)) fields += "Name: value\r\n";
  const auto attack = [&](const std::string& head, const std::string& block) {
    RawClient client(fixture.port());
    client.send(head);
    for (int i = 0; i < 64; ++i) {
      if (!client.send(block, milliseconds(1000))) break;
    }
    return client.read_response().status;
  };
  attack(front + "A: ", value);  // what the first one allocates for good is not of interest
  const uint64_t before = anonymous_kib();
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(attack(front + "A: ", value), 431);
    EXPECT_EQ(attack(front, fields), 431);
  }
#ifndef SPIN_SANITIZED  // its allocator keeps what is freed
  EXPECT_LE(anonymous_kib(), before + 1024);
#else
  static_cast<void>(before);
#endif
  EXPECT_EQ(fixture.get("/health").status, 200);
}

// H-44: no descriptor left for a connection: the server tries again after a while, not at once.
TEST(ServerFailureCases, OutOfDescriptorsItWaitsBetweenItsAttempts) {
  ServerFixture fixture;
  EXPECT_EQ(fixture.get("/health").status, 200);
  ASSERT_TRUE(eventually([&] { return fixture.server().stats().connections_open == 0; }));
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &old), 0);
  // The lowest free number goes to the client's socket, so the server's accept finds none.
  const int next = ::fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
  ASSERT_GE(next, 0);
  ::close(next);
  rlimit tight = old;
  tight.rlim_cur = static_cast<rlim_t>(next) + 1;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  RawClient client(fixture.port());
  const bool connected = client.connected();
  client.send(get_text("/health"));
  const bool answered = !client.receive_some(milliseconds(300)).empty();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &old), 0);
  ASSERT_TRUE(connected);
  EXPECT_FALSE(answered);
  EXPECT_EQ(client.read_response().status, 200);
  const std::string metrics = fixture.get("/metrics").body;
  const std::string name = "spin:http_accept_errors_total{model_name=\"scripted\"} ";
  const size_t at = metrics.find(name);
  ASSERT_NE(at, std::string::npos);
  const int errors = std::atoi(metrics.c_str() + at + name.size());
  EXPECT_GE(errors, 1);
  EXPECT_LE(errors, 100);
}

// B006: a client that leaves a request of many choices after the first event. Counted in steps of
// 1 ms, so that a busy machine does not decide.
TEST(ServerFailureCases, LeavingAfterTheFirstEventFreesAllChoicesSoon) {
  engine::FakeModelOptions model;
  model.step_delay = std::chrono::microseconds(1000);
  EngineOptions engine_options;
  engine_options.max_num_seqs = 128;
  FakeServer server(model, engine_options);
  RawClient client(server.port());
  client.send(
      post_text("/v1/completions",
                R"({"prompt":"x","n":128,"max_tokens":400,"ignore_eos":true,"stream":true})"));
  std::string seen;
  while (seen.find("data: ") == std::string::npos) {
    const std::string more = client.receive_some(milliseconds(20'000));
    ASSERT_FALSE(more.empty());
    seen += more;
  }
  const uint64_t left = server.engine().stats().steps;
  client.reset();
  ASSERT_TRUE(eventually([&] { return server.idle(); }, milliseconds(30'000)));
  EXPECT_LE(server.engine().stats().steps, left + 100);
  EXPECT_EQ(server.post("/v1/completions", {{"prompt", "y"}, {"max_tokens", 2}}).status, 200);
}

// B015, S41: an empty prompt is the BOS token where the model has one, else a refusal; many at once
// harm nobody.
TEST(ServerFailureCases, ManyEmptyPromptsAtOnceAreAnsweredOrRefused) {
  FakeServer with_bos;
  ServerFixture without;
  std::atomic<int> answered{0}, refused{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        const auto body = Json{{"prompt", ""}, {"max_tokens", 3}, {"stream", i % 2 == 0}};
        answered += with_bos.post("/v1/completions", body).status == 200;
        refused += without.post("/v1/completions", body).status == 400;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(answered, 160);
  EXPECT_EQ(refused, 160);
  EXPECT_EQ(with_bos.post("/v1/completions", {{"prompt", Json::array()}}).status, 400);
  const auto one = with_bos.post("/v1/completions", {{"prompt", ""}, {"max_tokens", 1}});
  EXPECT_EQ(parse(one)["usage"]["prompt_tokens"], 1);
  EXPECT_TRUE(eventually([&] { return with_bos.idle(); }));
}

// S44: refused before any of them becomes a request.
TEST(ServerFailureCases, AHundredThousandPromptsAreRefusedAtOnce) {
  FakeServer server;
  const Json body = {{"prompt", std::vector<std::string>(100'000, "a")}};
  const auto response = server.post("/v1/completions", body);
  EXPECT_EQ(response.status, 400);
  EXPECT_EQ(parse(response)["error"]["param"], "prompt");
  EXPECT_EQ(server.engine().stats().requests_received, 0u);
}

// B112, B114: with include_usage one event has the usage, the last before [DONE], without choices;
// without it none has.
TEST(ServerFailureCases, TheUsageComesInOneEventAndOnlyOnRequest) {
  FakeServer server;
  const Json chat = {{{"role", "user"}, {"content", "hi"}}};
  for (const bool wanted : {true, false}) {
    for (const char* path : {"/v1/completions", "/v1/chat/completions"}) {
      Json body = {{"max_tokens", 9}, {"ignore_eos", true}, {"stream", true}, {"n", 2}};
      if (std::string_view(path) == "/v1/completions") {
        body["prompt"] = "hi";
      } else {
        body["messages"] = chat;
      }
      if (wanted) body["stream_options"] = {{"include_usage", true}};
      const auto events = sse_events(server.post(path, body).body);
      ASSERT_GT(events.size(), 3u);
      EXPECT_EQ(events.back(), "[DONE]");
      for (size_t i = 0; i + 1 < events.size(); ++i) {
        const Json event = Json::parse(events[i]);
        const bool last = i + 2 == events.size();
        EXPECT_EQ(event["choices"].empty(), wanted && last);
        const bool has_usage = event.contains("usage") && !event["usage"].is_null();
        EXPECT_EQ(has_usage, wanted && last) << path << " event " << i;
        if (has_usage) {
          EXPECT_EQ(event["usage"]["completion_tokens"], 18);
        }
      }
    }
  }
}

// Text and log-probabilities of choice 0 of a chat, streamed or not.
std::pair<std::string, Json> chat_output(const std::string& body, bool stream) {
  if (!stream) {
    const Json choice = Json::parse(body, nullptr, false)["choices"][0];
    return {choice["message"]["content"], choice["logprobs"]["content"]};
  }
  std::pair<std::string, Json> out = {"", Json::array()};
  for (const std::string& text : sse_events(body)) {
    if (text == "[DONE]") break;
    const Json choice = Json::parse(text, nullptr, false)["choices"][0];
    if (choice["delta"].contains("content")) out.first += choice["delta"]["content"];
    if (choice["logprobs"].is_null()) continue;
    for (const Json& entry : choice["logprobs"]["content"]) out.second.push_back(entry);
  }
  return out;
}

// B115: a slow reader gets many tokens in one event; each keeps its own alternatives, and no text
// is lost.
TEST(ServerFailureCases, MergedEventsKeepTheLogprobsOfEachToken) {
  ServerOptions options;
  options.limits.socket_send_buffer_bytes = 8 << 10;
  options.limits.max_unsent_bytes = 8 << 10;
  options.limits.max_held_bytes = 64 << 20;
  FakeServer server({}, {}, options);
  const Json request = {{"messages", {{{"role", "user"}, {"content", "hi"}}}},
                        {"max_tokens", 900},
                        {"ignore_eos", true},
                        {"seed", 5},
                        {"logprobs", true},
                        {"top_logprobs", 5}};
  const auto whole = chat_output(server.post("/v1/chat/completions", request).body, false);
  ASSERT_EQ(whole.second.size(), 900u);
  Json streamed = request;
  streamed["stream"] = true;
  RawClient client(server.port(), 4096);
  client.send(post_text("/v1/chat/completions", streamed.dump()));
  ASSERT_TRUE(eventually([&] { return server.engine().stats().requests_finished[1] == 2; }));
  const auto response = client.read_response(milliseconds(60'000));
  EXPECT_LT(sse_events(response.body).size(), 900u);  // some were merged
  const auto pieces = chat_output(response.body, true);
  EXPECT_EQ(pieces.first, whole.first);
  EXPECT_EQ(pieces.second, whole.second);
}

// B120, B121: too long a prompt is the client's error, told with both numbers and no inside words.
TEST(ServerFailureCases, AnOverlongPromptIsAnInvalidRequestWithBothNumbers) {
  engine::FakeModelOptions model;
  model.max_model_len = 160;
  FakeServer server(model);
  for (const bool stream : {false, true}) {
    for (const size_t length : {160u, 260u, 26'000u}) {
      const auto response = server.post(
          "/v1/completions", {{"prompt", std::vector<int>(length, 97)}, {"stream", stream}});
      EXPECT_EQ(response.status, 400);
      const Json error = parse(response)["error"];
      EXPECT_EQ(error["type"], "invalid_request_error");
      EXPECT_EQ(error["code"], "context_length_exceeded");
      const std::string message = error["message"];
      EXPECT_THAT(message, HasSubstr("160"));
      EXPECT_THAT(message, HasSubstr(std::to_string(length)));
      EXPECT_EQ(message.find("-"), std::string::npos) << message;  // no negative number
    }
  }
}

// B128: the caller's id is only repeated, so two requests may have the same at the same time.
TEST(ServerFailureCases, TwoRequestsMayCarryTheSameIdAtOnce) {
  engine::FakeModelOptions model;
  model.step_delay = std::chrono::microseconds(500);
  FakeServer server(model);
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 4; ++i) {
    clients.push_back(std::make_unique<RawClient>(server.port()));
    clients.back()->send(
        post_text("/v1/completions",
                  R"({"prompt":"x","max_tokens":40,"ignore_eos":true,"request_id":"twin"})",
                  "X-Request-Id: twin\r\n"));
  }
  std::set<std::string> ids;
  for (auto& client : clients) {
    const auto response = client->read_response();
    EXPECT_EQ(response.status, 200) << response.body;
    EXPECT_EQ(response.fields.at("x-request-id"), "twin");
    ids.insert(parse(response)["id"]);
  }
  EXPECT_EQ(ids.size(), 4u);
  EXPECT_TRUE(eventually([&] { return server.idle(); }));
}

// B136: gauges are read from the live state, also after everything was cancelled at once.
TEST(ServerFailureCases, GaugesAreZeroAfterAllRequestsWereCancelled) {
  engine::FakeModelOptions model;
  model.step_delay = std::chrono::microseconds(1000);
  EngineOptions engine_options;
  engine_options.max_num_seqs = 8;
  FakeServer server(model, engine_options);
  const std::string request = post_text(
      "/v1/completions", R"({"prompt":"x","max_tokens":4000,"ignore_eos":true,"stream":true})");
  const auto gauge = [&](const std::string& name) {
    const std::string body = testing::fetch(server.port(), get_text("/metrics")).body;
    const std::string line = "\nspin:" + name + "{model_name=\"fake\"} ";
    const size_t at = body.find(line);
    EXPECT_NE(at, std::string::npos) << name;
    return at == std::string::npos ? -1 : std::atof(body.c_str() + at + line.size());
  };
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<RawClient>(server.port()));
    clients.back()->send(request);
  }
  ASSERT_TRUE(eventually([&] { return gauge("num_requests_running") == 8; }));
  EXPECT_TRUE(eventually([&] { return gauge("num_requests_waiting") == 12; }));
  EXPECT_GT(gauge("kv_cache_usage_perc"), 0);
  for (auto& client : clients) client->reset();
  EXPECT_TRUE(eventually([&] { return gauge("num_requests_running") == 0; }));
  EXPECT_EQ(gauge("num_requests_waiting"), 0);
  EXPECT_EQ(gauge("kv_cache_usage_perc"), 0);
}

// B135: a step that hangs turns /health to 503 although the server answers, and back.
TEST(ServerFailureCases, AHangingStepIsSeenInTheHealthRoute) {
  std::atomic<bool> hang{false};
  engine::FakeModelOptions model;
  model.before_step = [&hang](uint64_t) {
    while (hang.load()) std::this_thread::sleep_for(milliseconds(1));
    return ok_status();
  };
  model.step_delay = std::chrono::microseconds(200);
  ServerOptions options;
  options.stall_limit = std::chrono::duration<double>(0.2);
  FakeServer server(model, {}, options);
  const auto health = [&] {
    const auto response = testing::fetch(server.port(), get_text("/health"));
    return std::to_string(response.status) + " " + parse(response)["status"].get<std::string>();
  };
  RawClient client(server.port());
  hang = true;
  client.send(post_text("/v1/completions", R"({"prompt":"x","max_tokens":5,"ignore_eos":true})"));
  EXPECT_TRUE(eventually([&] { return health() == "503 stalled"; }));
  hang = false;
  EXPECT_EQ(client.read_response().status, 200);
  EXPECT_TRUE(eventually([&] { return health() == "200 ready"; }));
}

}  // namespace
}  // namespace spin::server
