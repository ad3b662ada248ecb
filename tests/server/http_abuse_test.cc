// SPDX-License-Identifier: Apache-2.0
// The catalogue of malformed HTTP and JSON over real sockets: each row gives the status of its rule
// (or a close), and a good request is answered within a second after it. No answer is ever a 500
// or tells anything about the inside.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "server/limits.h"
#include "tests/server/server_fixture.h"

namespace spin::server {
namespace {

using testing::cat;
using testing::get_text;
using testing::post_text;
using testing::RawClient;
using testing::RawResponse;
using Json = nlohmann::json;
using std::chrono::milliseconds;

constexpr int kClosed = 0;
#ifdef SPIN_SANITIZED
constexpr size_t kManyChunks = 60'000;
constexpr int kKeepAliveRequests = 1000;
constexpr int kManyKeys = 100'000;
#else
constexpr size_t kManyChunks = 3'000'000;
constexpr int kKeepAliveRequests = 10'000;
constexpr int kManyKeys = 1'000'000;
#endif

struct Row {
  std::string name;
  std::string bytes;
  std::vector<int> statuses;  // any of them
};

std::string post_head(std::string_view fields) {
  return "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" +
         std::string(fields) + "\r\n";
}

std::string completion(std::string_view body) { return post_text("/v1/completions", body); }

std::vector<Row> head_rows() {
  const std::string get = "GET /health HTTP/1.1\r\nHost: localhost\r\n";
  std::string fields;
  for (int i = 0; i < 100; ++i) fields += "A: b\r\n";
  return {
      {"empty request line", "\r\n\r\n", {400}},
      {"garbage", "\x16\x03\x01\x02\x00\x01", {400}},
      {"64 KiB of target", "GET /" + std::string(65536, 'a') + " HTTP/1.1\r\n", {414}},
      {"bare LF", "GET /health HTTP/1.1\nHost: localhost\n\n", {400}},
      {"NUL byte", std::string("GET /he\0lth HTTP/1.1\r\n", 22), {400}},
      {"lower-case method", "get /health HTTP/1.1\r\nHost: localhost\r\n\r\n", {405}},
      {"HTTP/0.9", "GET /health\r\n", {400}},
      {"HTTP/3.7", "GET /health HTTP/3.7\r\nHost: localhost\r\n\r\n", {400}},
      {"absolute form", "GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n", {200}},
      {"absolute form of another host",
       "GET http://evil/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
       {400}},
      {"double slash", get_text("//v1/models"), {404}},
      {"encoded dots", get_text("/%2e%2e/etc/passwd"), {404}},
      {"encoded letters", get_text("/%68ealth"), {404}},
      {"dots", get_text("/../health"), {404}},
      {"TRACE", "TRACE /health HTTP/1.1\r\nHost: localhost\r\n\r\n", {405}},
      {"CONNECT", "CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n", {405}},
      {"OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", {405}},
      {"OPTIONS", "OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", {405}},
      {"PUT", "PUT /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", {405}},
      {"GET on a POST route", get_text("/v1/completions"), {405}},
      {"POST on a GET route", post_text("/health", "{}"), {405}},
      {"HTTP/2 preface", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400}},
      {"101 fields", get + fields + "\r\n", {431}},
      {"64 KiB of fields", get + "A: " + std::string(65536, 'b') + "\r\n\r\n", {431}},
      {"no colon", get + "nocolon\r\n\r\n", {400}},
      {"folded field", get + "A: b\r\n c\r\n\r\n", {400}},
      {"equal lengths", post_head("Content-Length: 2\r\nContent-Length: 2\r\n") + "{}", {400}},
      {"different lengths", post_head("Content-Length: 2\r\nContent-Length: 3\r\n") + "{}", {400}},
      {"length and coding",
       post_head("Content-Length: 2\r\nTransfer-Encoding: chunked\r\n") + "0\r\n\r\n",
       {400}},
      {"chunked, gzip", post_head("Transfer-Encoding: chunked, gzip\r\n"), {501}},
      {"gzip", post_head("Transfer-Encoding: gzip\r\n"), {501}},
      {"chunKed", post_head("Transfer-Encoding: chunKed\r\n") + "0\r\n\r\n", {400}},  // no JSON
      {"negative length", post_head("Content-Length: -1\r\n"), {400}},
      {"hexadecimal length", post_head("Content-Length: 0x10\r\n"), {400}},
      {"space in length", post_head("Content-Length: 1 2\r\n"), {400}},
      {"plus in length", post_head("Content-Length: +2\r\n"), {400}},
      {"unknown expectation", post_head("Expect: tea\r\nContent-Length: 2\r\n"), {417}},
      {"Host missing", "GET /health HTTP/1.1\r\n\r\n", {400}},
      {"two Hosts", get + "Host: localhost\r\n\r\n", {400}},
      {"foreign Host", "GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}},
      {"fields that never end", get + "A: b\r\n", {408, kClosed}},
      {"request line that never ends", "GET /heal", {408, kClosed}},
      {"nothing", "", {kClosed}},
      {"response splitting", get_text("/health", "X-Request-Id: a%0d%0aB: c\r\n"), {200}},
  };
}

std::vector<Row> body_rows() {
  const std::string chunk_head = post_head("Transfer-Encoding: chunked\r\n");
  std::string trailers = chunk_head + "0\r\n";
  for (int i = 0; i < 200; ++i) trailers += "A: b\r\n";
  auto typed = [](std::string_view type, std::string_view body) {
    return "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: " +
           std::string(type) + "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" +
           std::string(body);
  };
  const std::string good = R"({"prompt":"a","max_tokens":1})";
  std::string utf16;
  for (const char c : good) utf16 += std::string(1, c) + std::string(1, '\0');
  std::string nested = R"({"prompt":)" + std::string(1'000'000, '[');
  std::string depth65 = R"({"metadata":)" + std::string(64, '[') + std::string(64, ']') + "}";
  return {
      {"chunk size -2", chunk_head + "-2\r\n", {400}},
      {"chunk size 0x10", chunk_head + "0x10\r\n", {400}},
      {"chunk size of 17 digits", chunk_head + "10000000000000000\r\n", {400}},
      {"chunk without CRLF", chunk_head + "2\r\n{}X0\r\n\r\n", {400}},
      {"trailer flood", trailers + "\r\n", {400, 431}},
      {"no last chunk", chunk_head + "2\r\n{}\r\n", {408, kClosed}},
      {"chunk extension of 1 MiB", chunk_head + "2;" + std::string(1 << 20, 'a'), {400}},
      {"body longer than said", completion(good) + "trailing garbage\r\n\r\n", {200}},
      {"body shorter than said", post_head("Content-Length: 100\r\n") + "{}", {408, kClosed}},
      {"no body", post_head(""), {400}},
      {"empty body", completion(""), {400}},
      {"gzip", post_head("Content-Encoding: gzip\r\nContent-Length: 2\r\n") + "\x1f\x8b", {415}},
      {"multipart", typed("multipart/form-data; boundary=" + std::string(4000, 'b'), "x"), {415}},
      {"form", typed("application/x-www-form-urlencoded", "a=b"), {415}},
      {"text", typed("text/plain", good), {415}},
      {"charset UTF-16", typed("application/json; charset=utf-16", utf16), {415}},
      {"charset UTF-8", typed("Application/JSON; Charset=\"UTF-8\"", good), {200}},
      {"UTF-16 as UTF-8", completion(utf16), {400}},
      {"GBK", completion("{\"prompt\":\"\xC4\xE3\xBA\xC3\"}"), {400}},
      {"invalid UTF-8", completion("{\"prompt\":\"\xFF\"}"), {400}},
      {"overlong UTF-8", completion("{\"prompt\":\"\xC0\xAF\"}"), {400}},
      {"lone surrogate", completion(R"({"prompt":"\ud800"})"), {400}},
      {"byte order mark", completion("\xEF\xBB\xBF" + good), {400}},
      {"NaN", completion(R"({"prompt":"a","temperature":NaN})"), {400}},
      {"Infinity", completion(R"({"prompt":"a","temperature":Infinity})"), {400}},
      {"1e999", completion(R"({"prompt":"a","temperature":1e999})"), {400}},
      {"duplicate key", completion(R"({"prompt":"a","prompt":"b"})"), {400}},
      {"depth 65", completion(depth65), {400}},
      {"depth of a million", completion(nested), {400}},
      {"two values", completion(good + good), {400}},
      {"array", completion("[]"), {400}},
      {"string", completion("\"a\""), {400}},
      {"truncated", completion(good.substr(0, 10)), {400}},
      {"comment", completion("{/**/}"), {400}},
      {"single quotes", completion("{'prompt':'a'}"), {400}},
      {"empty list of prompts", completion(R"({"prompt":[]})"), {400}},
      {"empty prompt", completion(R"({"prompt":""})"), {400}},
      {"nested token lists", completion(R"({"prompt":[[[1]]]})"), {400}},
      {"token beyond 64 bits", completion(R"({"prompt":[5000000000000000000]})"), {400}},
      {"stream as text", completion(R"({"prompt":"a","stream":"true"})"), {400}},
      {"129 prompts",
       completion(Json{{"prompt", std::vector<std::string>(129, "a")}}.dump()),
       {400}},
      {"65 prompts twice",
       completion(Json{{"prompt", std::vector<std::string>(65, "a")}, {"n", 2}}.dump()),
       {400}},
  };
}

// Fast time limits, so that rows that wait for one are quick.
ServerOptions quick_options() {
  ServerOptions options;
  options.limits.head_timeout = milliseconds(250);
  options.limits.body_timeout = milliseconds(250);
  options.limits.linger_timeout = milliseconds(300);
  options.limits.max_body_bytes = 8u << 20;
  return options;
}

// `0x` and at least six hexadecimal digits.
bool has_address(std::string_view text) {
  for (size_t at = text.find("0x"); at != std::string_view::npos; at = text.find("0x", at + 2)) {
    const std::string_view rest = text.substr(at + 2);
    if (std::min(rest.find_first_not_of("0123456789abcdefABCDEF"), rest.size()) >= 6) return true;
  }
  return false;
}

void expect_clean(const std::string& body, const std::string& name) {
  EXPECT_FALSE(has_address(body)) << name << ": " << body;
  for (const char* word : {"/home", "/root", ".cpp:", ".cc:", "std::", "nlohmann", "boost"}) {
    EXPECT_EQ(body.find(word), std::string::npos) << name << ": " << body;
  }
}

void run_row(const ServerFixture& fixture, const Row& row) {
  {
    RawClient client(fixture.port());
    ASSERT_TRUE(client.connected()) << row.name;
    client.send(row.bytes);  // the server may close in the middle of it
    const RawResponse response = client.read_response(milliseconds(10'000));
    EXPECT_NE(std::find(row.statuses.begin(), row.statuses.end(), response.status),
              row.statuses.end())
        << row.name << " gave " << response.status << " " << response.body;
    if (response.status >= 400) {
      const Json error = parse(response);
      EXPECT_TRUE(error.is_object() && error["error"]["message"].is_string() &&
                  error["error"].contains("type") && error["error"].contains("param") &&
                  error["error"].contains("code"))
          << row.name << ": " << response.body;
      expect_clean(response.body, row.name);
    }
  }
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(fixture.get("/health").status, 200) << "after " << row.name;
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(1)) << row.name;
}

TEST(HttpAbuse, MalformedHeadsGetTheirStatusAndDoNoHarm) {
  ServerFixture fixture({}, quick_options());
  for (const Row& row : head_rows()) run_row(fixture, row);
}

TEST(HttpAbuse, MalformedBodiesGetTheirStatusAndDoNoHarm) {
  ServerFixture fixture({}, quick_options());
  for (const Row& row : body_rows()) run_row(fixture, row);
}

TEST(HttpAbuse, TheBodyLimitIsExact) {
  ServerOptions options = quick_options();
  options.limits.max_body_bytes = 100'000;
  ServerFixture fixture({}, options);
  std::string body = R"({"prompt":"a","max_tokens":1,"user":")";
  body += std::string(100'000 - body.size() - 2, 'u') + "\"}";
  ASSERT_EQ(body.size(), 100'000u);
  EXPECT_EQ(fixture.post_raw("/v1/completions", body).status, 200);
  EXPECT_EQ(fixture.post_raw("/v1/completions", body + " ").status, 413);
  const std::string head = post_head("Transfer-Encoding: chunked\r\n");
  auto chunk = [](std::string_view text) {
    char size[20];
    std::snprintf(size, sizeof(size), "%zx\r\n", text.size());
    return cat({size, text, "\r\n"});
  };
  EXPECT_EQ(testing::fetch(fixture.port(), head + chunk(body) + "0\r\n\r\n").status, 200);
  EXPECT_EQ(testing::fetch(fixture.port(), head + chunk(body) + chunk(" ") + "0\r\n\r\n").status,
            413);
}

TEST(HttpAbuse, AllBodiesTogetherAreLimited) {
  ServerOptions options;
  options.limits.max_total_body_bytes = 50'000;
  ServerFixture fixture({}, options);
  const std::string part(40'000, ' ');
  RawClient first(fixture.port());
  first.send(post_head("Content-Length: 60000\r\n") + part);
  testing::sleep_ms(50);
  RawClient second(fixture.port());
  second.send(post_head("Content-Length: 60000\r\n") + part);
  EXPECT_EQ(second.read_response().status, 429);
  first.close();
  EXPECT_TRUE(testing::eventually([&] {
    return fixture.post("/v1/completions", {{"prompt", "a"}, {"user", part}}).status == 200;
  }));
}

// The value of a metric by its name and the label that comes after model_name; -1: not there.
double metric(const ServerFixture& fixture, std::string_view name, std::string_view label = "") {
  const std::string start = cat({"\nspin:", name, "{model_name=\"scripted\"", label, "} "});
  const std::string text = fixture.get("/metrics").body;
  const size_t at = text.find(start);
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + start.size());
}

// Lines with a text in them, counted on the log's thread.
class LineCounter {
 public:
  explicit LineCounter(std::string_view text) : text_(text) {}
  void operator()(std::string_view line) { count_ += line.find(text_) != std::string::npos; }
  int count() const { return count_; }

 private:
  const std::string text_;
  std::atomic<int> count_{0};
};

// Large answers cost their sender little to ask for; those that wait for slow clients are limited.
TEST(HttpAbuse, AnswersThatWaitForTheirClientsAreLimitedTogether) {
  LineCounter logged("path=/tokenize status=429 ");
  ServerOptions options;
  options.limits.max_total_answer_bytes = 30u << 20;
  options.limits.write_stall_timeout = std::chrono::seconds(60);
  options.access_log = [&logged](std::string_view line) { logged(line); };
  ServerFixture fixture({}, options);
  EXPECT_EQ(metric(fixture, "http_pending_response_bytes"), 0);
  // An answer of about 7.3 MB.
  const std::string body =
      R"({"return_token_strs":true,"prompt":")" + std::string(1u << 20, 'a') + "\"}";
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 6; ++i) {
    clients.push_back(std::make_unique<RawClient>(fixture.port(), 4096));
    clients.back()->send(testing::post_text("/tokenize", body));
  }
  int refused = 0;
  RawResponse answer;
  EXPECT_TRUE(testing::eventually([&] {
    answer = fixture.post_raw("/tokenize", body);
    refused += answer.status == 429;
    return answer.status == 429;
  }));
  EXPECT_EQ(answer.fields["retry-after"], "1");
  EXPECT_EQ(answer.fields["x-request-id"].size(), 32u);
  // Small ones still go through.
  EXPECT_EQ(fixture.post_raw("/tokenize", R"({"prompt":"a"})").status, 200);
  // Four answers wait, and no fifth.
  EXPECT_TRUE(testing::eventually([&] {
    const double waiting = metric(fixture, "http_pending_response_bytes");
    return waiting > (24u << 20) && waiting <= (30u << 20);
  }));
  int served = 0;
  for (auto& client : clients) {
    const int status = client->read_response(milliseconds(20'000)).status;
    served += status == 200;
    refused += status == 429;
  }
  EXPECT_GE(served, 2);
  EXPECT_LT(served, 6);
  EXPECT_EQ(served + refused, 7);
  EXPECT_TRUE(
      testing::eventually([&] { return metric(fixture, "http_pending_response_bytes") == 0; }));
  // Counted and logged as what was sent.
  EXPECT_EQ(metric(fixture, "http_responses_total", ",class=\"4xx\""), refused);
  EXPECT_TRUE(testing::eventually([&] { return logged.count() == refused; }));
  EXPECT_TRUE(
      testing::eventually([&] { return fixture.post_raw("/tokenize", body).status == 200; }));
  // Answers that nobody will ever take do not count any more.
  for (auto& client : clients) {
    client = std::make_unique<RawClient>(fixture.port(), 4096);
    client->send(testing::post_text("/tokenize", body));
  }
  testing::sleep_ms(100);
  clients.clear();
  EXPECT_TRUE(
      testing::eventually([&] { return fixture.post_raw("/tokenize", body).status == 200; }));
}

// What was refused waits for nobody, also behind answers of its connection that do wait.
TEST(HttpAbuse, RefusedAnswersDoNotCountAmongTheWaitingOnes) {
  ServerOptions options;
  options.limits.max_total_answer_bytes = 3u << 20;
  options.limits.max_unsent_bytes = 64u << 20;
  options.limits.write_stall_timeout = std::chrono::seconds(60);
  ServerFixture fixture({}, options);
  // An answer of about 1.8 MB.
  const std::string request = post_text(
      "/tokenize", R"({"return_token_strs":true,"prompt":")" + std::string(1u << 18, 'a') + "\"}");
  RawClient client(fixture.port(), 4096);
  for (int i = 0; i < 4; ++i) client.send(request);
  EXPECT_TRUE(testing::eventually(
      [&] { return metric(fixture, "http_responses_total", ",class=\"4xx\"") == 3; }));
  const double waiting = metric(fixture, "http_pending_response_bytes");
  const RawResponse first = client.read_response();
  EXPECT_EQ(first.status, 200);
  EXPECT_EQ(waiting, static_cast<double>(first.body.size()));
  for (int i = 0; i < 3; ++i) EXPECT_EQ(client.read_response().status, 429);
  EXPECT_TRUE(
      testing::eventually([&] { return metric(fixture, "http_pending_response_bytes") == 0; }));
}

// A client may leave as soon as its body is complete, and the next one with it; what waits for a
// worker must count all the same, or a flood of them takes memory without limit.
TEST(HttpAbuse, BodiesCountUntilTheyAreReadThoughTheirClientsHaveLeft) {
  const std::string part(40'000, ' ');
  for (const char* path : {"/v1/completions", "/tokenize"}) {
    ServerOptions options;
    options.limits.max_total_body_bytes = 50'000;
    options.worker_threads = 1;
    ServerFixture fixture({}, options);
    fixture.engine().slow_tokenizer(0.6);
    RawClient busy(fixture.port());
    busy.send(testing::post_text("/tokenize", R"({"prompt":"q"})"));
    testing::sleep_ms(50);
    RawClient leaves(fixture.port());
    leaves.send(testing::post_text(path, R"({"prompt":"q"})" + part));
    testing::sleep_ms(50);
    leaves.close();
    EXPECT_TRUE(testing::eventually([&] {
      return fixture.get("/metrics")
                 .body.find("spin:http_worker_queue{model_name=\"scripted\"} 1") !=
             std::string::npos;
    })) << path;
    RawClient next(fixture.port());
    next.send(testing::post_text(path, R"({"prompt":"q"})" + part));
    EXPECT_EQ(next.read_response().status, 429) << path;
    EXPECT_EQ(busy.read_response().status, 200) << path;
    fixture.engine().slow_tokenizer(0);
    EXPECT_TRUE(testing::eventually([&] {
      return fixture.post_raw("/tokenize", R"({"prompt":"q"})" + part).status == 200;
    })) << path;
  }
}

TEST(HttpAbuse, NoWorkIsDoneForClientsThatLeftBeforeIt) {
  ServerOptions options;
  options.worker_threads = 1;
  ServerFixture fixture({}, options);
  fixture.engine().slow_tokenizer(0.3);
  RawClient busy(fixture.port());
  busy.send(testing::post_text("/tokenize", R"({"prompt":"q"})"));
  testing::sleep_ms(50);
  for (int i = 0; i < 20; ++i) {
    RawClient leaves(fixture.port());
    leaves.send(
        testing::post_text(i % 2 == 0 ? "/v1/completions" : "/tokenize", R"({"prompt":"q"})"));
  }
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(fixture.post_raw("/tokenize", R"({"prompt":"q"})").status, 200);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(3));  // not 20 x 0.3 s
  EXPECT_EQ(busy.read_response().status, 200);
}

#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(__clang__)
uint64_t anonymous_memory() {
  std::ifstream status("/proc/self/status");
  std::string word;
  uint64_t kilobytes = 0;
  while (status >> word) {
    if (word == "RssAnon:") status >> kilobytes;
  }
  return kilobytes << 10;
}

TEST(HttpAbuse, MemoryOfLargeBodiesIsGivenBack) {
  ServerOptions options;
  options.worker_threads = 1;
  ServerFixture fixture({}, options);
  // About 200 MB as a tree of values that all have a block of their own.
  std::string body = R"({"user":[{})";
  for (int i = 0; i < 3'000'000; ++i) body += ",{}";
  body += "]}";
  const uint64_t before = anonymous_memory();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(fixture.post_raw("/v1/completions", body).status, 400);
  // The answer may be out before the worker has put everything away. glibc keeps up to 64 MiB at
  // the end of the worker's heap.
  const uint64_t bound = before + (64u + 32u) * (1u << 20);
  EXPECT_TRUE(testing::eventually([&] { return anonymous_memory() < bound; }, milliseconds(3000)))
      << anonymous_memory() << " after " << before;
}
#endif

TEST(HttpAbuse, MillionsOfOneByteChunksAreReadInLinearTime) {
  ServerFixture fixture({}, {});
  std::string text = post_head("Transfer-Encoding: chunked\r\n");
  const std::string json_front = R"({"prompt":")";
  for (const char c : json_front) text += cat({"1\r\n", {&c, 1}, "\r\n"});
  text.reserve(text.size() + kManyChunks * 6);
  for (size_t i = 0; i < kManyChunks; ++i) text += "1\r\na\r\n";
  for (const char c : std::string("\"}")) text += cat({"1\r\n", {&c, 1}, "\r\n"});
  text += "0\r\n\r\n";
  const auto began = std::chrono::steady_clock::now();
  const auto response = testing::fetch(fixture.port(), text);
  EXPECT_EQ(response.status, 400);  // more tokens than the model's context
  EXPECT_EQ(parse(response)["error"]["code"], "context_length_exceeded");
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(15));
}

TEST(HttpAbuse, AMillionTokensAndAMillionKeysAreRefusedByTheirRules) {
  ServerFixture fixture;
  std::string tokens = R"({"prompt":[1)";
  for (int i = 1; i < kManyKeys; ++i) tokens += ",1";
  const auto long_prompt = fixture.post_raw("/v1/completions", tokens + "]}");
  EXPECT_EQ(parse(long_prompt)["error"]["code"], "context_length_exceeded");
  std::string keys = R"({"prompt":"a")";
  for (int i = 0; i < kManyKeys; ++i) keys += cat({",\"k", std::to_string(i), "\":1"});
  EXPECT_EQ(fixture.post_raw("/v1/completions", keys + "}").status, 400);
}

TEST(HttpAbuse, UnknownFieldsAreNamedOnlyWhereTheNameIsHarmless) {
  ServerFixture fixture;
  auto message = [&](const std::string& field) {
    const auto response = fixture.post("/v1/completions", {{"prompt", "a"}, {field, 1}});
    EXPECT_EQ(response.status, 400);
    return parse(response)["error"]["message"].get<std::string>();
  };
  EXPECT_EQ(message("top_q"), "unknown field `top_q`");
  for (const std::string field : {"<script>", "\x1b[31m", "a b", "\xc3\xa9", ""}) {
    EXPECT_EQ(message(field), "unknown field");
  }
  EXPECT_EQ(message(std::string(kMaxFieldNameEchoBytes + 1, 'a')), "unknown field");
}

TEST(HttpAbuse, ExpectContinueIsAnsweredBeforeTheBody) {
  ServerFixture fixture;
  RawClient client(fixture.port());
  const std::string body = R"({"prompt":"a","max_tokens":1})";
  client.send(post_head(
      cat({"Expect: 100-continue\r\nContent-Length: ", std::to_string(body.size()), "\r\n"})));
  EXPECT_EQ(client.read_response(milliseconds(5000), false, true).status, 100);
  client.send(body);
  EXPECT_EQ(client.read_response().status, 200);
  // A request that will be refused is refused instead, so the body is never sent.
  client.send(
      "POST /nothing HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
      "Content-Length: 1000000\r\n\r\n");
  EXPECT_EQ(client.read_response(milliseconds(5000), false, true).status, 404);
  EXPECT_TRUE(client.wait_closed(milliseconds(5000)));
}

TEST(HttpAbuse, ARefusedBodyIsReadAwayForAMomentSoTheAnswerArrives) {
  ServerFixture fixture;
  RawClient client(fixture.port());
  client.send(post_head("Content-Length: 70000000\r\n"));
  const std::string block(1 << 20, ' ');
  for (int i = 0; i < 8; ++i) client.send(block);
  EXPECT_EQ(client.read_response().status, 413);
}

TEST(HttpAbuse, PipelinedRequestsAreAnsweredInOrder) {
  ServerFixture fixture;
  RawClient client(fixture.port());
  std::string text;
  for (int i = 0; i < 100; ++i) {
    const std::string id = cat({"X-Request-Id: r", std::to_string(i), "\r\n"});
    text += i % 3 == 0 ? post_text("/v1/completions",
                                   R"({"prompt":"p","max_tokens":2,"stream":)" +
                                       std::string(i % 2 == 0 ? "true}" : "false}"),
                                   id)
                       : get_text("/health", id);
  }
  ASSERT_TRUE(client.send(text));
  for (int i = 0; i < 100; ++i) {
    const auto response = client.read_response();
    ASSERT_EQ(response.status, 200) << i;
    EXPECT_EQ(response.fields.at("x-request-id"), cat({"r", std::to_string(i)}));
  }
}

TEST(HttpAbuse, AFloodOfPipelinedRequestsFromADeafClientIsHeldBack) {
  ServerOptions options;
  options.limits.max_unsent_bytes = 64 << 10;
  options.limits.socket_send_buffer_bytes = 16 << 10;
  options.limits.write_stall_timeout = milliseconds(400);
  ServerFixture fixture({}, options);
  RawClient client(fixture.port(), 4096);
  std::string block;
  for (int i = 0; i < 500; ++i) block += get_text("/metrics");
  // The server stops reading, so not all of it can be sent; then it gives up on the client.
  bool sent_all = true;
  for (int i = 0; i < 1000 && sent_all; ++i) sent_all = client.send(block, milliseconds(300));
  EXPECT_FALSE(sent_all);
  EXPECT_TRUE(testing::eventually([&] { return fixture.server().stats().connections_open == 0; }));
  EXPECT_EQ(fixture.get("/health").status, 200);
}

TEST(HttpAbuse, KeepAliveServesThousandsOfRequestsOnOneConnection) {
  ServerFixture fixture;
  RawClient client(fixture.port());
  client.send(get_text("/health"));
  ASSERT_EQ(client.read_response().status, 200);  // the server has its end of the connection now
  const size_t before = testing::open_descriptors();
  for (int i = 0; i < kKeepAliveRequests; ++i) {
    client.send(get_text("/health"));
    ASSERT_EQ(client.read_response().status, 200) << i;
  }
  EXPECT_EQ(testing::open_descriptors(), before);
}

TEST(HttpAbuse, HalfAThousandIdleConnectionsAreHeldAndThenClosed) {
  ServerOptions options;
  options.limits.head_timeout = milliseconds(1500);
  ServerFixture fixture({}, options);
  const size_t before = testing::open_descriptors();
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 450; ++i) clients.push_back(std::make_unique<RawClient>(fixture.port()));
  EXPECT_TRUE(
      testing::eventually([&] { return fixture.server().stats().connections_open == 450; }));
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(fixture.get("/health").status, 200);
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(1));
  EXPECT_TRUE(testing::eventually([&] { return fixture.server().stats().connections_open == 0; }));
  clients.clear();
  EXPECT_TRUE(testing::eventually([&] { return testing::open_descriptors() == before; }));
}

// UBSan, which comes with ASan here, opens a pipe to look at an object before it trusts it, and
// reports the object when there is no descriptor left for the pipe. TSan runs this test.
#ifndef __SANITIZE_ADDRESS__

// Sets the number of descriptors that this process may have open, for a scope.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(size_t limit) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    rlimit lower = before_;
    lower.rlim_cur = limit;
    ::setrlimit(RLIMIT_NOFILE, &lower);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_{};
};

TEST(HttpAbuse, OutOfDescriptorsConnectionsWaitAndOthersAreServed) {
  ServerFixture fixture;
  RawClient early(fixture.port());
  early.send(get_text("/health"));
  EXPECT_EQ(early.read_response().status, 200);
  std::optional<RawClient> late;
  {
    // Holds descriptors until the next one would be above the limit.
    std::vector<std::unique_ptr<RawClient>> fill;
    fill.push_back(std::make_unique<RawClient>(fixture.port()));
    ASSERT_TRUE(
        testing::eventually([&] { return fixture.server().stats().connections_open == 2; }));
    const int lowest_free = ::dup(0);
    ASSERT_GE(lowest_free, 0);
    ::close(lowest_free);
    DescriptorLimit limit(static_cast<size_t>(lowest_free) + 1);  // room for the client's own end
    late.emplace(fixture.port());
    ASSERT_TRUE(late->connected());  // by the system; the server cannot accept it
    late->send(get_text("/health"));
    EXPECT_EQ(late->read_response(milliseconds(300)).status, 0);
    early.send(get_text("/metrics"));
    const auto metrics = early.read_response();
    EXPECT_EQ(metrics.status, 200);
    EXPECT_THAT(metrics.body,
                ::testing::ContainsRegex("spin:http_accept_errors_total\\{[^}]*\\} [1-9]"));
  }
  EXPECT_EQ(late->read_response().status, 200);
}

#endif  // __SANITIZE_ADDRESS__

TEST(HttpAbuse, ConnectionsAboveTheLimitAreTurnedAway) {
  ServerOptions options;
  options.limits.max_connections = 3;
  options.limits.linger_timeout = milliseconds(100);
  ServerFixture fixture({}, options);
  std::vector<std::unique_ptr<RawClient>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<RawClient>(fixture.port()));
    clients.back()->send(get_text("/health"));
    EXPECT_EQ(clients.back()->read_response().status, 200);
  }
  RawClient extra(fixture.port());
  const auto response = extra.read_response();
  EXPECT_EQ(response.status, 429);
  EXPECT_EQ(response.fields.count("retry-after"), 1u);
  clients.pop_back();
  EXPECT_TRUE(testing::eventually([&] { return fixture.get("/health").status == 200; }));
}

TEST(HttpAbuse, ClientsThatHalfCloseOrResetLeaveNothingBehind) {
  ScriptedOptions slow;
  slow.step_delay = std::chrono::microseconds(1000);
  ServerFixture fixture(slow, {});
  const std::string request = completion(R"({"prompt":"a","max_tokens":3000})");
  for (int i = 0; i < 10; ++i) {
    RawClient half(fixture.port());
    half.send(request);
    half.shutdown_send();
    EXPECT_TRUE(half.wait_closed(milliseconds(5000)));
    RawClient reset(fixture.port());
    reset.send(request);
    if (i % 2 == 0) testing::sleep_ms(5);
    reset.reset();
    RawClient middle(fixture.port());
    middle.send(request.substr(0, request.size() - 5));
    middle.reset();
  }
  EXPECT_TRUE(testing::eventually([&] { return fixture.engine().active() == 0; }));
  // A short answer still reaches a client that has finished sending.
  RawClient half(fixture.port());
  half.send(get_text("/health"));
  half.shutdown_send();
  EXPECT_EQ(half.read_response().status, 200);
}

}  // namespace
}  // namespace spin::server
