// SPDX-License-Identifier: Apache-2.0
// Every field of the request table times a list of values that parsers and ranges trip over: the
// answer is 200 or a 400 that names the field, never a 500 and never a lost server.
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "server/openai_request.h"
#include "tests/server/server_fixture.h"

namespace spin::server {
namespace {

using testing::cat;
using testing::post_text;
using testing::RawClient;
using testing::RawResponse;
using Json = nlohmann::json;

struct Target {
  Api api;
  const char* path;
  std::vector<std::pair<std::string, std::string>> base;  // field, JSON text
};

std::vector<Target> targets() {
  return {
      {kCompletions, "/v1/completions", {{"prompt", "\"a\""}, {"max_tokens", "2"}}},
      {kChat,
       "/v1/chat/completions",
       {{"messages", R"([{"role":"user","content":"a"}])"}, {"max_tokens", "2"}}},
      {kTokenize, "/tokenize", {{"prompt", "\"a\""}}},
      {kDetokenize, "/detokenize", {{"tokens", "[97]"}}},
  };
}

// Base fields with one replaced or added; "" leaves a field out.
std::string body_with(const Target& target,
                      const std::vector<std::pair<std::string, std::string>>& changes) {
  auto fields = target.base;
  for (const auto& change : changes) {
    bool found = false;
    for (auto& field : fields) {
      if (field.first == change.first) {
        field.second = change.second;
        found = true;
      }
    }
    if (!found) fields.push_back(change);
  }
  std::string out = "{";
  for (const auto& [name, value] : fields) {
    if (value.empty()) continue;
    out += cat({out.size() > 1 ? "," : "", "\"", name, "\":", value});
  }
  return out + "}";
}

std::string number_text(double value) {
  return value == std::trunc(value) && std::fabs(value) < 1e17
             ? std::to_string(static_cast<int64_t>(value))
             : std::to_string(value);
}

std::vector<std::string> values_for(const FieldInfo& field) {
  std::vector<std::string> out = {"",
                                  "null",
                                  "true",
                                  "false",
                                  "\"1\"",
                                  "\"\"",
                                  "[]",
                                  "{}",
                                  "[1]",
                                  "[\"a\"]",
                                  "{\"a\":1}",
                                  "[null]",
                                  "[{}]",
                                  "-1",
                                  "0",
                                  "1",
                                  "-0",
                                  "-0.0",
                                  "0.5",
                                  "1.0",
                                  "2147483648",
                                  "4294967296",
                                  "9007199254740993",
                                  "9223372036854775808",
                                  "1e18",
                                  "1e300",
                                  "1e999",
                                  "-1e999",
                                  "NaN",
                                  "Infinity",
                                  "1e-50",
                                  "-1e-50",
                                  "18446744073709551615",
                                  "18446744073709551616",
                                  "01",
                                  "+1",
                                  "0x10"};
  if (field.kind == FieldKind::kInteger || field.kind == FieldKind::kNumber) {
    for (const double value : {field.min - 1, field.min, field.max, field.max + 1}) {
      out.push_back(number_text(value));
    }
  }
  return out;
}

// One connection for the whole matrix; a lost server shows as a failed answer.
class Asker {
 public:
  explicit Asker(uint16_t port) : port_(port) {}

  RawResponse ask(const char* path, const std::string& body) {
    if (!client_) client_.emplace(port_);
    client_->send(post_text(path, body));
    RawResponse response = client_->read_response();
    if (response.fields.count("connection") != 0 || response.status == 0) client_.reset();
    return response;
  }

 private:
  uint16_t port_;
  std::optional<RawClient> client_;
};

void check_answer(const RawResponse& response, const std::string& body, const std::string& field) {
  ASSERT_TRUE(response.status == 200 || response.status == 400 ||
              (response.status == 404 && field == "model"))
      << body << " gave " << response.status << " " << response.body;
  if (response.status == 200) return;
  const Json error = parse(response)["error"];
  ASSERT_TRUE(error.is_object()) << body;
  // Text that is not JSON has no field at fault; everything else has.
  if (Json::accept(body)) {
    EXPECT_TRUE(error["param"].is_string()) << body << " " << response.body;
  }
}

TEST(RequestMatrix, EveryFieldTimesEveryValueIsAcceptedOrRefusedByName) {
  ServerFixture fixture;
  Asker asker(fixture.port());
  size_t asked = 0;
  for (const Target& target : targets()) {
    for (const FieldInfo& field : request_fields()) {
      if ((field.apis & target.api) == 0) continue;
      const std::string name(field.name);
      for (const std::string& value : values_for(field)) {
        const std::string body = body_with(target, {{name, value}});
        check_answer(asker.ask(target.path, body), body, name);
        ++asked;
      }
    }
  }
  EXPECT_GT(asked, 5000u);
}

TEST(RequestMatrix, FieldsTogetherWithStreamChoicesLogprobsAndEcho) {
  ServerFixture fixture;
  Asker asker(fixture.port());
  const std::vector<std::pair<std::string, std::string>> partners = {
      {"stream", "true"}, {"n", "3"}, {"logprobs", "2"}, {"logprobs", "true"}, {"echo", "true"}};
  for (const Target& target : targets()) {
    if (target.api != kCompletions && target.api != kChat) continue;
    for (const FieldInfo& field : request_fields()) {
      if ((field.apis & target.api) == 0 || field.kind == FieldKind::kOff) continue;
      const std::string name(field.name);
      for (const auto& partner : partners) {
        if (partner.first == name) continue;
        for (const char* value : {"null", "0", "1", "-1", "true", "[]", "{}", "\"a\"", "1e18"}) {
          const std::string body = body_with(target, {partner, {name, value}});
          const RawResponse response = asker.ask(target.path, body);
          check_answer(response, body, name);
        }
      }
    }
  }
}

TEST(RequestMatrix, RangesHoldAtTheirEnds) {
  ServerFixture fixture;
  Asker asker(fixture.port());
  for (const Target& target : targets()) {
    for (const FieldInfo& field : request_fields()) {
      if ((field.apis & target.api) == 0) continue;
      if (field.kind != FieldKind::kInteger && field.kind != FieldKind::kNumber) continue;
      const std::string name(field.name);
      auto status = [&](double value) {
        const std::string body = body_with(target, {{name, number_text(value)}});
        return asker.ask(target.path, body).status;
      };
      const double step = field.kind == FieldKind::kInteger ? 1 : 0.001;
      EXPECT_EQ(status(field.min - step), 400) << name;
      EXPECT_EQ(status(field.max + (field.max > 1e15 ? 4 : step)), 400) << name;
      if (field.min_open) {
        EXPECT_EQ(status(field.min), 400) << name;
      }
      // Fields that other fields bound are left to the tests of their rules.
      if (name.find("tokens") != std::string::npos || name == "best_of" || name == "top_logprobs") {
        continue;
      }
      if (!field.min_open) {
        EXPECT_EQ(status(field.min), 200) << name;
      }
      EXPECT_EQ(status(field.max), 200) << name;
    }
  }
}

TEST(RequestMatrix, WhatIsNotSupportedIsRefusedByNameAndItsOffValueTaken) {
  ServerFixture fixture;
  Asker asker(fixture.port());
  for (const Target& target : targets()) {
    for (const FieldInfo& field : request_fields()) {
      if ((field.apis & target.api) == 0 || field.kind != FieldKind::kOff) continue;
      const std::string name(field.name);
      const auto refused = asker.ask(target.path, body_with(target, {{name, R"([{"x":1}])"}}));
      EXPECT_EQ(refused.status, 400) << name;
      EXPECT_EQ(parse(refused)["error"]["param"], name);
      EXPECT_EQ(asker.ask(target.path, body_with(target, {{name, "null"}})).status, 200) << name;
      if (field.range.empty()) continue;
      const std::string off(field.range.substr(0, field.range.find(' ')));
      EXPECT_EQ(asker.ask(target.path, body_with(target, {{name, off}})).status, 200) << name;
    }
  }
}

struct Case {
  const char* path;
  const char* body;
  const char* param;  // null: accepted
};

TEST(RequestMatrix, RulesBetweenFieldsAndInsideThem) {
  ServerFixture fixture;
  Asker asker(fixture.port());
  const std::vector<Case> cases = {
      {"/v1/completions", R"({"prompt":"a","nonsense":1})", "nonsense"},
      {"/v1/completions", R"({"prompt":"a","best_of":2})", "best_of"},
      {"/v1/completions", R"({"prompt":"a","best_of":2,"n":2})", nullptr},
      {"/v1/completions", R"({"prompt":"a","best_of":1})", nullptr},
      {"/v1/completions", R"({"prompt":"a","stream_options":{"include_usage":true}})",
       "stream_options"},
      {"/v1/completions", R"({"prompt":"a","stream":true,"stream_options":{"x":true}})",
       "stream_options.x"},
      {"/v1/completions", R"({"prompt":"a","max_tokens":0})", "max_tokens"},
      {"/v1/completions", R"({"prompt":"a","max_tokens":0,"echo":true})", nullptr},
      {"/v1/completions", R"({"prompt":"a","min_tokens":5,"max_tokens":4})", "min_tokens"},
      {"/v1/completions", R"({"prompt":"a","min_tokens":4,"max_tokens":4})", nullptr},
      {"/v1/completions", R"({"prompt":"a","max_completion_tokens":3,"max_tokens":5000})", nullptr},
      {"/v1/completions", R"({"prompt":["a",1]})", "prompt"},
      {"/v1/completions", R"({"prompt":[1,"a"]})", "prompt"},
      {"/v1/completions", R"({"prompt":[300]})", "prompt"},
      {"/v1/completions", R"({"prompt":[1.5]})", "prompt"},
      {"/v1/completions", R"({"prompt":[[]]})", "prompt"},
      {"/v1/completions", R"({"prompt":"a","stop":["a","b","c"]})", nullptr},
      {"/v1/completions", R"({"prompt":"a","stop":""})", "stop"},
      {"/v1/completions", R"({"prompt":"a","stop":[1]})", "stop"},
      {"/v1/completions",
       R"({"prompt":"a","stop":["1","2","3","4","5","6","7","8","9","a","b","c","d","e","f","g","h"]})",
       "stop"},
      {"/v1/completions", R"({"prompt":"a","logit_bias":{"5":100,"6":-100}})", nullptr},
      {"/v1/completions", R"({"prompt":"a","logit_bias":{"191222":-100}})", "logit_bias"},
      {"/v1/completions", R"({"prompt":"a","logit_bias":{"-1":0}})", "logit_bias"},
      {"/v1/completions", R"({"prompt":"a","logit_bias":{"5":100.5}})", "logit_bias"},
      {"/v1/completions", R"({"prompt":"a","logit_bias":{"5":"1"}})", "logit_bias"},
      {"/v1/completions", R"({"prompt":"a","seed":-9223372036854775808})", nullptr},
      {"/v1/completions", R"({"prompt":"a","seed":18446744073709551615})", nullptr},
      {"/v1/completions", R"({"prompt":"a","seed":1.5})", "seed"},
      {"/v1/completions", R"({"prompt":"a","n":2.0})", nullptr},
      {"/v1/completions", R"({"prompt":"a","user":"u","metadata":{"a":1}})", nullptr},
      {"/v1/completions", R"({"prompt":"a","response_format":{"type":"json_object"}})",
       "response_format"},
      {"/v1/completions", R"({"prompt":"a","response_format":{"type":"text"}})", nullptr},
      {"/v1/completions", R"({"max_tokens":1})", "prompt"},
      {"/v1/chat/completions", R"({"max_tokens":1})", "messages"},
      {"/v1/chat/completions", R"({"messages":[]})", "messages"},
      {"/v1/chat/completions", R"({"messages":[{"role":"tool","content":"x"}]})",
       "messages[0].role"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user"}]})", "messages[0].content"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":null}]})",
       "messages[0].content"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"a","x":1}]})",
       "messages[0].x"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"a","tool_calls":[{}]}]})",
       "messages[0].tool_calls"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x"}}]}]})",
       "messages[0].content"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":[{"type":"input_audio","input_audio":{}}]}]})",
       "messages[0].content"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"}],"top_logprobs":3})",
       "top_logprobs"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"a"}],"top_logprobs":3,"logprobs":true})", nullptr},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"a"}],"chat_template":"{{x}}"})", "chat_template"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"tokenize":true}})",
       "chat_template_kwargs.tokenize"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"enable_thinking":false}})",
       nullptr},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"a"}],"tools":[{"type":"function"}]})", "tools"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"a"}],"tools":[],"tool_choice":"none"})", nullptr},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"a"}],"tool_choice":"required"})", "tool_choice"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"a"}],"prompt":"a"})",
       "prompt"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"dense"}})", nullptr},
      {"/v1/completions",
       R"({"prompt":"a","sparse":{"algorithm":"quest","budget":64,"share":0.5,"on":true,"of":null}})",
       nullptr},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"a"}],"sparse":{"algorithm":"quest","budget":"5%"}})",
       nullptr},
      {"/v1/completions", R"({"prompt":"a","sparse":"dense"})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"budget":1}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":1}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"quest:budget"}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"seer","gates":"a/b"}})",
       "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"seer","gates":"model:x"}})",
       "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"a","b":"c,d"}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"a","b":"c=d"}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"a","b=c":1}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"a","":1}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"a","b":[1]}})", "sparse"},
      {"/v1/completions", R"({"prompt":"a","sparse":{"algorithm":"a","b":{"c":1}}})", "sparse"},
      {"/tokenize", R"({"prompt":"a","sparse":{"algorithm":"dense"}})", "sparse"},
      {"/tokenize", R"({"prompt":"a","messages":[{"role":"user","content":"a"}]})", "prompt"},
      {"/tokenize", R"({"prompt":["a"]})", "prompt"},
  };
  for (const Case& row : cases) {
    const auto response = asker.ask(row.path, row.body);
    if (row.param == nullptr) {
      EXPECT_EQ(response.status, 200) << row.body << " " << response.body;
    } else {
      EXPECT_EQ(response.status, 400) << row.body << " " << response.body;
      EXPECT_EQ(parse(response)["error"]["param"], row.param) << row.body;
    }
  }
}

TEST(RequestMatrix, AnEmptyListIsCalledEmptyNotAWrongType) {
  ServerFixture fixture;
  Asker asker(fixture.port());
  const auto message = [&](const char* path, const char* body) {
    return parse(asker.ask(path, body))["error"]["message"];
  };
  EXPECT_EQ(message("/v1/chat/completions", R"({"messages":[]})"),
            "`messages` must not be an empty array");
  EXPECT_EQ(message("/v1/completions", R"({"prompt":[]})"), "`prompt` must not be an empty array");
  EXPECT_EQ(message("/v1/chat/completions", R"({"messages":"a"})"),
            "`messages` must be an array of messages, found a string");
}

TEST(RequestMatrix, ForeignTextNeverComesBackInAnError) {
  ServerFixture fixture;
  Asker asker(fixture.port());
  for (const char* body :
       {R"({"prompt":"a","evil<script>":1})", R"({"prompt":"a","temperature":"evil<script>"})",
        R"({"prompt":"a","stop":[{"evil<script>":1}]})", R"({"evil<script>)",
        R"({"prompt":"a","stream":true,"stream_options":{"evil<script>":1}})",
        R"({"prompt":"a","model":"evil<script>"})",
        R"({"prompt":"a","logit_bias":{"evil<script>":1}})"}) {
    const auto response = asker.ask("/v1/completions", body);
    EXPECT_GE(response.status, 400);
    EXPECT_EQ(response.body.find("evil"), std::string::npos) << response.body;
  }
}

TEST(RequestMatrix, ValuesReachTheEngine) {
  ServerFixture fixture;
  Asker asker(fixture.port());
  const char* body = R"({"prompt":"a","temperature":0.25,"top_k":7,"top_p":0.5,"min_p":0.125,
      "repetition_penalty":1.5,"presence_penalty":-1,"frequency_penalty":2,"seed":42,"n":2,
      "logprobs":3,"stop":["x","yz"],"stop_token_ids":[1,2],"include_stop_str_in_output":true,
      "min_tokens":1,"max_tokens":2,"ignore_eos":true,"skip_special_tokens":false,
      "logit_bias":{"9":-2.5}})";
  ASSERT_EQ(asker.ask("/v1/completions", body).status, 200);
  const SamplingParams got = fixture.engine().last_sampling();
  EXPECT_EQ(got.temperature, 0.25f);
  EXPECT_EQ(got.top_k, 7);
  EXPECT_EQ(got.top_p, 0.5f);
  EXPECT_EQ(got.min_p, 0.125f);
  EXPECT_EQ(got.repetition_penalty, 1.5f);
  EXPECT_EQ(got.presence_penalty, -1.0f);
  EXPECT_EQ(got.frequency_penalty, 2.0f);
  EXPECT_EQ(got.seed, 42u);
  EXPECT_EQ(got.n, 2u);
  EXPECT_EQ(got.logprobs, 3u);
  EXPECT_EQ(got.stop, (std::vector<std::string>{"x", "yz"}));
  EXPECT_EQ(got.stop_token_ids, (std::vector<TokenId>{1, 2}));
  EXPECT_TRUE(got.include_stop_str_in_output);
  EXPECT_EQ(got.min_tokens, 1u);
  EXPECT_EQ(got.max_tokens, 2u);
  EXPECT_TRUE(got.ignore_eos);
  EXPECT_FALSE(got.skip_special_tokens);
  ASSERT_EQ(got.logit_bias.size(), 1u);
  EXPECT_EQ(got.logit_bias[0], (std::pair<TokenId, float>(9, -2.5f)));
}

}  // namespace
}  // namespace spin::server
