// SPDX-License-Identifier: Apache-2.0
// What a client gets for a completion or a chat: shapes, streams, usage, errors.
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/server/fake_server.h"
#include "tests/server/server_fixture.h"
#include "tests/server/stream_readers.h"

namespace spin::server {
namespace {

using ::testing::HasSubstr;
using testing::RawResponse;
using testing::sse_events;
using ::testing::StartsWith;
using Json = nlohmann::json;

Json user(const std::string& text) { return {{{"role", "user"}, {"content", text}}}; }

TEST(Completions, WholeResponseHasTextUsageAndReason) {
  ServerFixture fixture;
  const auto response = fixture.post("/v1/completions", {{"prompt", "hello"}, {"max_tokens", 9}});
  ASSERT_EQ(response.status, 200) << response.body;
  const Json body = parse(response);
  EXPECT_THAT(body["id"].get<std::string>(), StartsWith("cmpl-"));
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["model"], "scripted");
  EXPECT_GT(body["created"], 1600000000);
  EXPECT_EQ(body["choices"].size(), 1u);
  EXPECT_EQ(body["choices"][0]["text"], ScriptedEngine::expected_text("hello", 0, 9));
  EXPECT_EQ(body["choices"][0]["index"], 0);
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["choices"][0]["logprobs"], nullptr);
  EXPECT_EQ(body["usage"],
            Json({{"prompt_tokens", 5}, {"completion_tokens", 9}, {"total_tokens", 14}}));
}

TEST(Completions, AbsentMaxTokensIsSixteenAndChatHasNoLimit) {
  ServerFixture fixture;
  EXPECT_EQ(parse(fixture.post("/v1/completions", {{"prompt", "a"}}))["usage"]["completion_tokens"],
            16);
  fixture.post("/v1/chat/completions", {{"messages", user("a")}});
  EXPECT_FALSE(fixture.engine().last_sampling().max_tokens.has_value());
}

TEST(Completions, TheChoiceOfSparseAttentionReachesTheEngine) {
  ServerFixture fixture;
  const auto spec_of = [&](const Json& sparse) {
    EXPECT_EQ(fixture.post("/v1/completions", {{"prompt", "a"}, {"sparse", sparse}}).status, 200);
    return fixture.engine().last_sparse();
  };
  EXPECT_EQ(spec_of(nullptr), std::nullopt);
  EXPECT_EQ(spec_of({{"algorithm", "dense"}}), "dense");
  EXPECT_EQ(spec_of({{"algorithm", "quest"}, {"budget", 64}, {"aggregate", "max"}}),
            "quest:aggregate=max,budget=64");
  EXPECT_EQ(spec_of({{"algorithm", "a-b"}, {"x", -1}, {"y", 0.25}, {"z", true}, {"w", "1.5%"}}),
            "a-b:w=1.5%,x=-1,y=0.25,z=true");
  fixture.post("/v1/chat/completions",
               {{"messages", user("a")}, {"sparse", {{"algorithm", "quest"}}}});
  EXPECT_EQ(fixture.engine().last_sparse(), "quest");
}

TEST(Completions, AnEngineWithoutSparseAttentionRefusesItByName) {
  FakeServer server;
  const auto ask = [&](const Json& sparse) {
    return server.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 2}, {"sparse", sparse}});
  };
  EXPECT_EQ(ask({{"algorithm", "dense"}}).status, 200);
  for (const Json& sparse :
       {Json({{"algorithm", "quest"}}), Json({{"algorithm", "dense"}, {"x", 1}}),
        Json({{"algorithm", "%"}})}) {
    const auto refused = ask(sparse);
    EXPECT_EQ(refused.status, 400);
    EXPECT_EQ(parse(refused)["error"]["param"], "sparse") << refused.body;
  }
}

TEST(Completions, BothBenchmarkClientsReadTheStream) {
  ServerFixture fixture;
  // The fields each of them sends.
  const Json vllm = {{"model", "scripted"}, {"prompt", "bench"},
                     {"max_tokens", 20},    {"repetition_penalty", 1.0},
                     {"logprobs", nullptr}, {"stream", true},
                     {"ignore_eos", true},  {"stream_options", {{"include_usage", true}}}};
  const auto first = fixture.post("/v1/completions", vllm);
  ASSERT_EQ(first.status, 200) << first.body;
  EXPECT_THAT(first.fields.at("content-type"), StartsWith("text/event-stream"));
  const ClientView a = read_like_vllm(first.body, false);
  EXPECT_TRUE(a.success && a.saw_done);
  EXPECT_EQ(a.text, ScriptedEngine::expected_text("bench", 0, 20));
  EXPECT_EQ(a.token_events, 20u);  // one event per engine step
  EXPECT_EQ(a.completion_tokens, 20u);
  EXPECT_EQ(a.prompt_tokens, 5u);

  const Json sglang = {{"model", "scripted"}, {"prompt", "bench"}, {"temperature", 0.0},
                       {"best_of", 1},        {"max_tokens", 20},  {"stream", true},
                       {"ignore_eos", true}};
  const ClientView b = read_like_sglang(fixture.post("/v1/completions", sglang).body, false);
  EXPECT_TRUE(b.success);
  EXPECT_EQ(b.text, a.text);
  EXPECT_FALSE(b.completion_tokens);

  Json continuous = sglang;
  continuous["stream_options"] = {{"continuous_usage_stats", true}};
  const ClientView c = read_like_sglang(fixture.post("/v1/completions", continuous).body, false);
  EXPECT_TRUE(c.success);
  EXPECT_EQ(c.completion_tokens, 20u);
}

TEST(Completions, ChatStreamsCarryTheRoleWithTheFirstToken) {
  ServerFixture fixture;
  Json request = {
      {"model", "scripted"},
      {"messages", {{{"role", "user"}, {"content", {{{"type", "text"}, {"text", "hi"}}}}}}},
      {"max_completion_tokens", 7},
      {"stream", true},
      {"stream_options", {{"include_usage", true}}}};
  const auto response = fixture.post("/v1/chat/completions", request);
  ASSERT_EQ(response.status, 200) << response.body;
  const ClientView view = read_like_vllm(response.body, true);
  EXPECT_EQ(view.text, ScriptedEngine::expected_text("hi", 0, 7));
  EXPECT_EQ(view.token_events, 7u);
  EXPECT_EQ(view.completion_tokens, 7u);
  const auto events = sse_events(response.body);
  ASSERT_EQ(events.size(), 9u);  // tokens, usage, [DONE]
  const Json first = Json::parse(events[0]);
  EXPECT_EQ(first["object"], "chat.completion.chunk");
  EXPECT_EQ(first["choices"][0]["delta"]["role"], "assistant");
  EXPECT_FALSE(first["choices"][0]["delta"]["content"].get<std::string>().empty());
  EXPECT_FALSE(Json::parse(events[1])["choices"][0]["delta"].contains("role"));
  EXPECT_EQ(Json::parse(events[6])["choices"][0]["finish_reason"], "length");
  const Json usage = Json::parse(events[7]);
  EXPECT_EQ(usage["choices"], Json::array());
  EXPECT_EQ(events[8], "[DONE]");

  request.erase("stream_options");
  EXPECT_TRUE(read_like_sglang(fixture.post("/v1/chat/completions", request).body, true).success);
}

TEST(Completions, ChatWholeResponseHasAMessage) {
  ServerFixture fixture;
  const Json body =
      parse(fixture.post("/v1/chat/completions", {{"messages", user("hi")}, {"max_tokens", 3}}));
  EXPECT_THAT(body["id"].get<std::string>(), StartsWith("chatcmpl-"));
  EXPECT_EQ(body["object"], "chat.completion");
  EXPECT_EQ(body["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(body["choices"][0]["message"]["content"], ScriptedEngine::expected_text("hi", 0, 3));
}

TEST(Completions, EveryPromptAndChoiceHasItsIndex) {
  ServerFixture fixture;
  const Json request = {{"prompt", {"one", "two"}}, {"n", 3}, {"max_tokens", 5}};
  const Json body = parse(fixture.post("/v1/completions", request));
  ASSERT_EQ(body["choices"].size(), 6u);
  for (uint32_t i = 0; i < 6; ++i) {
    EXPECT_EQ(body["choices"][i]["index"], i);
    EXPECT_EQ(body["choices"][i]["text"],
              ScriptedEngine::expected_text(i < 3 ? "one" : "two", i % 3, 5));
  }
  EXPECT_EQ(body["usage"]["prompt_tokens"], 6);
  EXPECT_EQ(body["usage"]["completion_tokens"], 30);

  Json streamed = request;
  streamed["stream"] = true;
  std::map<int, std::string> texts;
  std::map<int, int> finished;
  for (const std::string& event : sse_events(fixture.post("/v1/completions", streamed).body)) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"][0];
    texts[choice["index"]] += choice["text"].get<std::string>();
    if (!choice["finish_reason"].is_null()) ++finished[choice["index"]];
  }
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(texts[i], body["choices"][i]["text"]);
    EXPECT_EQ(finished[i], 1);
  }
}

TEST(Completions, PromptsOfIdsAreTakenAsTheyAre) {
  ServerFixture fixture;
  const std::string expected = ScriptedEngine::expected_text("hi", 0, 4);
  for (const Json& prompt : {Json({104, 105}), Json(Json::array({Json::array({104, 105})}))}) {
    const Json body =
        parse(fixture.post("/v1/completions", {{"prompt", prompt}, {"max_tokens", 4}}));
    EXPECT_EQ(body["choices"][0]["text"], expected);
  }
}

TEST(Completions, LogprobsAreParallelArrays) {
  ServerFixture fixture;
  const Json request = {{"prompt", "lp"}, {"max_tokens", 3}, {"logprobs", 2}};
  const Json whole = parse(fixture.post("/v1/completions", request))["choices"][0]["logprobs"];
  ASSERT_EQ(whole["tokens"].size(), 3u);
  EXPECT_EQ(whole["token_logprobs"], Json({-0.5, -0.5, -0.5}));
  EXPECT_EQ(whole["top_logprobs"][0]["A"], -0.5);
  EXPECT_EQ(whole["top_logprobs"][0]["B"], -1.5);
  EXPECT_EQ(whole["top_logprobs"][0].size(), 3u);  // the chosen token besides
  EXPECT_EQ(whole["text_offset"][0], 0);
  EXPECT_GT(whole["text_offset"][2], 1);

  Json streamed = request;
  streamed["stream"] = true;
  Json joined = {{"tokens", Json::array()},
                 {"token_logprobs", Json::array()},
                 {"top_logprobs", Json::array()},
                 {"text_offset", Json::array()}};
  for (const std::string& event : sse_events(fixture.post("/v1/completions", streamed).body)) {
    if (event == "[DONE]") continue;
    const Json logprobs = Json::parse(event)["choices"][0]["logprobs"];
    for (auto& [key, value] : joined.items()) {
      for (const auto& entry : logprobs[key]) value.push_back(entry);
    }
  }
  EXPECT_EQ(joined, whole);
  const Json zero = parse(
      fixture.post("/v1/completions", {{"prompt", "lp"}, {"max_tokens", 1}, {"logprobs", 0}}));
  EXPECT_EQ(zero["choices"][0]["logprobs"]["top_logprobs"][0].size(), 1u);
}

TEST(Completions, ChatLogprobsAreAListAndTopMayBeEmpty) {
  ServerFixture fixture;
  Json request = {{"messages", user("lp")}, {"max_tokens", 2}, {"logprobs", true}};
  Json content = parse(fixture.post("/v1/chat/completions", request))["choices"][0]["logprobs"];
  ASSERT_EQ(content["content"].size(), 2u);
  EXPECT_EQ(content["content"][0]["top_logprobs"], Json::array());
  EXPECT_EQ(content["content"][0]["logprob"], -0.5);
  request["top_logprobs"] = 2;
  content = parse(fixture.post("/v1/chat/completions", request))["choices"][0]["logprobs"];
  EXPECT_EQ(content["content"][0]["top_logprobs"].size(), 2u);
  EXPECT_EQ(content["content"][0]["top_logprobs"][1],
            Json({{"token", "B"}, {"logprob", -1.5}, {"bytes", {66}}}));
}

TEST(Completions, EchoPutsThePromptInFront) {
  ServerFixture fixture;
  Json request = {{"prompt", "hello"}, {"max_tokens", 2}, {"echo", true}, {"logprobs", 1}};
  const Json choice = parse(fixture.post("/v1/completions", request))["choices"][0];
  EXPECT_EQ(choice["text"], "hello" + ScriptedEngine::expected_text("hello", 0, 2));
  const Json& logprobs = choice["logprobs"];
  EXPECT_EQ(logprobs["tokens"].size(), 7u);  // prompt and output
  EXPECT_EQ(logprobs["token_logprobs"][0], nullptr);
  EXPECT_EQ(logprobs["top_logprobs"][0], nullptr);
  EXPECT_EQ(logprobs["token_logprobs"][1], -1.0);
  EXPECT_EQ(logprobs["text_offset"][5], 5);
  request["stream"] = true;
  const ClientView view = read_like_vllm(fixture.post("/v1/completions", request).body, false);
  EXPECT_EQ(view.text, choice["text"]);

  // Scoring a prompt: nothing is generated.
  request = {{"prompt", "hello"}, {"max_tokens", 0}, {"echo", true}, {"logprobs", 1}};
  const Json score = parse(fixture.post("/v1/completions", request));
  EXPECT_EQ(score["choices"][0]["text"], "hello");
  EXPECT_EQ(score["choices"][0]["logprobs"]["tokens"].size(), 5u);
  EXPECT_EQ(score["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(score["usage"]["completion_tokens"], 0);
}

TEST(Completions, ErrorsBeforeTheFirstTokenHaveTheirOwnStatus) {
  ServerFixture fixture;
  for (const bool stream : {false, true}) {
    const auto refused =
        fixture.post("/v1/completions", {{"prompt", "refuse"}, {"stream", stream}});
    EXPECT_EQ(refused.status, 400);
    EXPECT_EQ(parse(refused)["error"]["param"], "prompt");
    const auto full = fixture.post("/v1/completions", {{"prompt", "full"}, {"stream", stream}});
    EXPECT_EQ(full.status, 429);
    EXPECT_EQ(full.fields.count("retry-after"), 1u);
    EXPECT_EQ(full.body.find("0x"), std::string::npos);
    const auto memory =
        fixture.post("/v1/completions", {{"prompt", "exhaust"}, {"stream", stream}});
    EXPECT_EQ(memory.status, 429);
    // A fault of the server's own is the one case that is not the request's.
    const auto fault = fixture.post("/v1/completions", {{"prompt", "fault"}, {"stream", stream}});
    EXPECT_EQ(fault.status, 500);
    EXPECT_EQ(parse(fault)["error"]["type"], "server_error");
    EXPECT_EQ(fault.body.find("/home"), std::string::npos);
  }
  // One prompt of several is refused: all are.
  const auto mixed = fixture.post("/v1/completions", {{"prompt", {"fine", "refuse"}}});
  EXPECT_EQ(mixed.status, 400);
  EXPECT_TRUE(testing::eventually([&] { return fixture.engine().active() == 0; }));
}

TEST(Completions, AnErrorAfterTheFirstTokenIsAnEvent) {
  ServerFixture fixture;
  const auto response = fixture.post("/v1/completions", {{"prompt", "break"}, {"stream", true}});
  EXPECT_EQ(response.status, 200);
  EXPECT_TRUE(response.complete);
  const auto events = sse_events(response.body);
  ASSERT_EQ(events.size(), 5u);
  const Json error = Json::parse(events[3]);
  EXPECT_EQ(error["error"]["code"], "internal_error");
  EXPECT_EQ(events[4], "[DONE]");
  EXPECT_EQ(response.body.find("0x7"), std::string::npos);
  EXPECT_EQ(fixture.post("/v1/completions", {{"prompt", "break"}}).status, 500);
}

TEST(Completions, TheModelMustBeTheOneServed) {
  ServerFixture fixture;
  const auto response = fixture.post("/v1/completions", {{"prompt", "a"}, {"model", "gpt"}});
  EXPECT_EQ(response.status, 404);
  EXPECT_EQ(parse(response)["error"]["code"], "model_not_found");
  EXPECT_EQ(parse(response)["error"]["param"], "model");
  EXPECT_EQ(response.body.find("gpt"), std::string::npos);
}

TEST(Completions, TheContextLimitIsExactAndNamed) {
  ScriptedOptions options;
  options.max_model_len = 100;
  ServerFixture fixture(options);
  auto post = [&](size_t prompt, int tokens) {
    return fixture.post("/v1/completions",
                        {{"prompt", std::string(prompt, 'p')}, {"max_tokens", tokens}});
  };
  EXPECT_EQ(post(90, 9).status, 200);
  EXPECT_EQ(post(90, 10).status, 200);
  const auto over = post(90, 11);
  EXPECT_EQ(over.status, 400);
  EXPECT_EQ(parse(over)["error"]["code"], "context_length_exceeded");
  for (const char* number : {"100", "90", "11"}) EXPECT_THAT(over.body, HasSubstr(number));
  // Without max_tokens the default shrinks to what is left.
  const auto shrunk = fixture.post("/v1/completions", {{"prompt", std::string(95, 'p')}});
  EXPECT_EQ(parse(shrunk)["usage"]["completion_tokens"], 5);
  EXPECT_EQ(fixture.post("/v1/completions", {{"prompt", std::string(100, 'p')}}).status, 400);
  EXPECT_EQ(
      fixture.post("/v1/chat/completions", {{"messages", user(std::string(101, 'p'))}}).status,
      400);
}

TEST(Completions, OldClientsGetTheStreamUntilTheConnectionEnds) {
  ServerFixture fixture;
  const std::string body = R"({"prompt":"old","stream":true,"max_tokens":4})";
  testing::RawClient client(fixture.port());
  client.send(
      "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
      "Content-Length: " +
      std::to_string(body.size()) + "\r\n\r\n" + body);
  const auto response = client.read_response();
  EXPECT_EQ(response.fields.count("transfer-encoding"), 0u);
  const ClientView view = read_like_sglang(response.body, false);
  EXPECT_TRUE(view.success);
  EXPECT_EQ(view.text, ScriptedEngine::expected_text("old", 0, 4));
}

TEST(Completions, IdsAreDistinct) {
  ServerFixture fixture;
  std::set<std::string> ids;
  for (int i = 0; i < 50; ++i) {
    ids.insert(parse(fixture.post("/v1/completions", {{"prompt", "a"}, {"max_tokens", 1}}))["id"]);
  }
  EXPECT_EQ(ids.size(), 50u);
}

TEST(Completions, ManyAlternativesForAWholePromptAreRefused) {
  ScriptedOptions options;
  options.max_model_len = 3'000'000;
  ServerFixture fixture(options);
  const auto response = fixture.post(
      "/v1/completions", {{"prompt", "a"}, {"max_tokens", 2'000'000}, {"logprobs", 20}});
  EXPECT_EQ(response.status, 400);
  EXPECT_EQ(parse(response)["error"]["param"], "logprobs");
}

}  // namespace
}  // namespace spin::server
