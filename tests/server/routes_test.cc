// SPDX-License-Identifier: Apache-2.0
// The routes that do not generate, and who may ask.
#include "server/routes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/auth.h"
#include "tests/server/server_fixture.h"

namespace spin::server {
namespace {

using testing::fetch;
using testing::get_text;
using ::testing::HasSubstr;
using Json = nlohmann::json;

TEST(Routes, HealthIsReadyAndCostsNoKey) {
  ServerOptions options;
  options.api_keys = {"secret-a", "secret-b"};
  ServerFixture fixture({}, options);
  const auto response = fixture.get("/health");
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(parse(response)["status"], "ready");
}

TEST(Routes, HealthFollowsTheEngine) {
  ServerFixture fixture;
  for (const auto& [state, name] :
       {std::pair{HealthState::kStalled, "stalled"}, std::pair{HealthState::kFailed, "failed"},
        std::pair{HealthState::kDraining, "draining"},
        std::pair{HealthState::kLoading, "loading"}}) {
    fixture.engine().set_health(state);
    const auto response = fixture.get("/health");
    EXPECT_EQ(response.status, 503);
    EXPECT_EQ(response.fields.count("retry-after"), 1u);
    EXPECT_EQ(parse(response)["status"], name);
  }
  fixture.engine().set_health(HealthState::kReady);
  EXPECT_EQ(fixture.get("/health").status, 200);
}

TEST(Routes, WithoutEngineEverythingButTheFrontEndIsUnavailable) {
  ServerOptions options;
  options.port = 0;
  auto server = Server::start(options);
  ASSERT_TRUE(server.ok());
  const uint16_t port = (*server)->port();
  EXPECT_EQ(fetch(port, get_text("/health")).status, 503);
  EXPECT_EQ(fetch(port, get_text("/v1/models")).status, 503);
  const auto refused = fetch(port, testing::post_text("/v1/completions", "{}"));
  EXPECT_EQ(refused.status, 503);
  EXPECT_EQ(refused.fields.count("retry-after"), 1u);
  EXPECT_EQ(fetch(port, get_text("/version")).status, 200);
  EXPECT_EQ(fetch(port, get_text("/metrics")).status, 200);
}

TEST(Routes, ModelsHasWhatBenchmarkClientsRead) {
  ServerFixture fixture;
  const Json list = parse(fixture.get("/v1/models"));
  EXPECT_EQ(list["object"], "list");
  const Json& model = list["data"][0];
  EXPECT_EQ(model["id"], "scripted");
  EXPECT_EQ(model["root"], "scripted");
  EXPECT_EQ(model["object"], "model");
  EXPECT_EQ(model["max_model_len"], 4096);
  EXPECT_EQ(parse(fixture.get("/v1/models/scripted")), model);
  EXPECT_EQ(parse(fixture.get("/v1/models/%73cripted")), model);
  EXPECT_EQ(fixture.get("/v1/models/other").status, 404);
  EXPECT_EQ(fixture.get("/v1/models/%7").status, 404);
}

TEST(Routes, HeadGivesTheHeadOnly) {
  ServerFixture fixture;
  testing::RawClient client(fixture.port());
  client.send("HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n");
  const auto response = client.read_response(std::chrono::milliseconds(5000), true);
  EXPECT_EQ(response.status, 200);
  EXPECT_NE(response.fields.at("content-length"), "0");
  client.send(get_text("/version"));
  EXPECT_EQ(client.read_response().status, 200);  // no body bytes were in between
}

TEST(Routes, TokenizeAndDetokenizeAreInverse) {
  ServerFixture fixture;
  const auto tokens = parse(fixture.post("/tokenize", {{"prompt", "h\u00e9"}}));
  EXPECT_EQ(tokens["count"], 3);
  EXPECT_EQ(tokens["max_model_len"], 4096);
  EXPECT_EQ(tokens["token_strs"], nullptr);
  const auto text = parse(fixture.post("/detokenize", {{"tokens", tokens["tokens"]}}));
  EXPECT_EQ(text["prompt"], "h\u00e9");
  const Json chat = {{"messages", {{{"role", "user"}, {"content", "ab"}}}},
                     {"return_token_strs", true}};
  EXPECT_EQ(parse(fixture.post("/tokenize", chat))["token_strs"], Json({"a", "b"}));
  EXPECT_EQ(fixture.post("/tokenize", Json::object()).status, 400);
  EXPECT_EQ(fixture.post("/tokenize", {{"prompt", "a"}, {"model", "other"}}).status, 404);
  EXPECT_EQ(fixture.post("/detokenize", {{"tokens", {300}}}).status, 400);
  EXPECT_EQ(fixture.post("/detokenize", {{"tokens", {-1}}}).status, 400);
}

TEST(Routes, MetricsHaveVllmNamesAndCumulativeBuckets) {
  ServerFixture fixture;
  fixture.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 2}});
  const auto response = fixture.get("/metrics");
  EXPECT_EQ(response.status, 200);
  EXPECT_THAT(response.fields.at("content-type"), HasSubstr("text/plain"));
  for (const char* line :
       {"spin:num_requests_running{model_name=\"scripted\"} 0",
        "spin:time_to_first_token_seconds_bucket{model_name=\"scripted\",le=\"0.1\"} 2",
        "spin:time_to_first_token_seconds_bucket{model_name=\"scripted\",le=\"1\"} 3",
        "spin:time_to_first_token_seconds_bucket{model_name=\"scripted\",le=\"+Inf\"} 4",
        "spin:time_to_first_token_seconds_count{model_name=\"scripted\"} 4",
        "spin:time_to_first_token_seconds_sum{model_name=\"scripted\"} 5.5",
        "spin:request_success_total{model_name=\"scripted\",finished_reason=\"length\"} 1",
        "spin:http_responses_total{model_name=\"scripted\",class=\"2xx\"} 1",
        "spin:kv_tier_pages{model_name=\"scripted\",tier=\"fast\"} 100",
        "spin:kv_tier_bytes_in_use{model_name=\"scripted\",tier=\"host\"} 262144",
        "spin:sparse_sequences{model_name=\"scripted\",residence=\"tiered\"} 3",
        "spin:kv_page_hits_total{model_name=\"scripted\"} 700",
        "spin:kv_page_misses_total{model_name=\"scripted\"} 30",
        "spin:sparse_attended_tokens_total{model_name=\"scripted\"} 5000000000",
        "# TYPE spin:kv_page_hits_total counter", "# TYPE spin:kv_tier_pages gauge",
        "# TYPE spin:e2e_request_latency_seconds histogram"}) {
    EXPECT_THAT(response.body, HasSubstr(line));
  }
}

TEST(Auth, OnlyAKnownBearerTokenOpensARoute) {
  ServerOptions options;
  options.api_keys = {"secret-a", "secret-b"};
  ServerFixture fixture({}, options);
  auto status = [&](std::string_view fields, std::string_view path = "/v1/models") {
    return fixture.get(path, fields).status;
  };
  EXPECT_EQ(status("Authorization: Bearer secret-a\r\n"), 200);
  EXPECT_EQ(status("Authorization: bearer secret-b\r\n"), 200);
  for (const char* fields :
       {"", "Authorization: Bearer secret-\r\n", "Authorization: Bearer secret-aa\r\n",
        "Authorization: Bearer \r\n", "Authorization: Basic secret-a\r\n",
        "Authorization: secret-a\r\n", "Authorization: Bearer  secret-a\r\n",
        "Authorization: Bearer x\r\nAuthorization: Bearer secret-a\r\n",
        "Authorization: Bearer secret-a\r\nAuthorization: Bearer secret-a\r\n",
        "X-Api-Key: secret-a\r\n", "Proxy-Authorization: Bearer secret-a\r\n",
        "X-Original-URL: /health\r\n", "X-Forwarded-For: 127.0.0.1\r\n"}) {
    EXPECT_EQ(status(fields), 401) << fields;
  }
  // Spellings of a path that some server might take for the open route or for the closed one.
  for (const char* path : {"//v1/models", "/health/../v1/models", "/v1/models/", "/V1/models",
                           "/v1/models%00", "/v1%2Fmodels", "/health/", "/./v1/models"}) {
    const int got = status("", path);
    EXPECT_TRUE(got == 404 || got == 401) << path << " " << got;
  }
  EXPECT_EQ(status("", "/v1/models?x=/health"), 401);
  EXPECT_EQ(status("", "/metrics"), 401);
  EXPECT_EQ(status("", "/version"), 401);
  const auto refused = fixture.get("/v1/models");
  EXPECT_EQ(refused.fields.at("www-authenticate"), "Bearer");
  EXPECT_EQ(parse(refused)["error"]["code"], "invalid_api_key");
}

TEST(Auth, AKeyWithoutACharacterIsRefusedAtStart) {
  ServerOptions options;
  options.port = 0;
  options.api_keys = {""};
  EXPECT_EQ(Server::start(options).status().param(), "api_key");
}

TEST(Auth, ForeignHostNamesAreRefusedOnLoopback) {
  ServerOptions options;
  options.allowed_hosts = {"spin.example"};
  ServerFixture fixture({}, options);
  auto status = [&](std::string_view host) {
    return fetch(fixture.port(), "GET /health HTTP/1.1\r\nHost: " + std::string(host) + "\r\n\r\n")
        .status;
  };
  for (const char* host : {"localhost", "LOCALHOST:80", "127.0.0.1:8000", "127.9.9.9", "[::1]:1",
                           "spin.example", "spin.example:9000"}) {
    EXPECT_EQ(status(host), 200) << host;
  }
  for (const char* host :
       {"evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.evil",
        "127.0.0.1:80x", "[::2]", "128.0.0.1", "127.0.0.256", "localhost:", "spin.example.evil"}) {
    EXPECT_EQ(status(host), 403) << host;
  }
}

TEST(Auth, ComparesWholeStrings) {
  EXPECT_TRUE(constant_time_equal("", ""));
  EXPECT_TRUE(constant_time_equal("abc", "abc"));
  EXPECT_FALSE(constant_time_equal("abc", "abd"));
  EXPECT_FALSE(constant_time_equal("abc", "abcd"));
}

TEST(Routes, RequestIdIsEchoedOrMade) {
  ServerFixture fixture;
  EXPECT_EQ(fixture.get("/health", "X-Request-Id: abc-1:2.3_\r\n").fields.at("x-request-id"),
            "abc-1:2.3_");
  const std::string longest(128, 'a');
  EXPECT_EQ(fixture.get("/health", "x-request-id: " + longest + "\r\n").fields.at("x-request-id"),
            longest);
  for (const std::string& bad : {std::string("a b"), std::string("a%0d%0aSet-Cookie:x"),
                                 longest + "a", std::string("\xC3\xA9")}) {
    const auto response = fixture.get("/health", "X-Request-Id: " + bad + "\r\n");
    EXPECT_EQ(response.fields.at("x-request-id").size(), 32u) << bad;
    EXPECT_EQ(response.fields.count("set-cookie"), 0u);
  }
  const auto generated =
      fixture.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 1}}, "X-Request-Id: q7\r\n");
  EXPECT_EQ(generated.fields.at("x-request-id"), "q7");
  EXPECT_EQ(fixture.get("/nothing", "X-Request-Id: q8\r\n").fields.at("x-request-id"), "q8");
}

TEST(Routes, AccessLogNamesTheRouteAndNeverThePrompt) {
  base::Mutex mutex;
  std::string lines;
  ServerOptions options;
  options.access_log = [&](std::string_view line) {
    base::MutexLock lock(mutex);
    lines += line;
    lines += '\n';
  };
  {
    ServerFixture fixture({}, options);
    fixture.post("/v1/completions", {{"prompt", "my secret prompt"}, {"max_tokens", 2}},
                 "X-Request-Id: id-77\r\nAuthorization: Bearer topsecret\r\n");
    fixture.get("/unknown/path?prompt=my+secret+prompt");
  }
  base::MutexLock lock(mutex);
  EXPECT_THAT(lines, HasSubstr("method=POST path=/v1/completions status=200"));
  EXPECT_THAT(lines, HasSubstr("request_id=id-77"));
  EXPECT_THAT(lines, HasSubstr("method=GET path=- status=404"));
  EXPECT_EQ(lines.find("secret"), std::string::npos);
}

TEST(Routes, PortInUseIsAClearError) {
  ServerFixture fixture;
  ServerOptions options;
  options.port = fixture.port();
  auto second = Server::start(options);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), StatusCode::kIoError);
  EXPECT_EQ(second.status().param(), "port");
  EXPECT_THAT(second.status().message(), HasSubstr("already in use"));
  options.host = "not an address";
  EXPECT_EQ(Server::start(options).status().param(), "host");
}

TEST(Routes, TablesAnswerOneSpellingOfEachPath) {
  EXPECT_TRUE(find_route("/v1/completions")->post);
  EXPECT_FALSE(find_route("/v1/completions/"));
  EXPECT_FALSE(find_route(""));
  EXPECT_FALSE(find_route("/v1/models/"));
  EXPECT_EQ(*model_id_of("/v1/models/a%2Fb"), "a/b");
  EXPECT_FALSE(model_id_of("/v1/models/%zz"));
}

}  // namespace
}  // namespace spin::server
