// SPDX-License-Identifier: Apache-2.0
// The request parser alone: what it accepts, what it refuses with which status, and that the way
// the bytes were cut never matters.
#include "server/http_parser.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "server/limits.h"

namespace spin::server {
namespace {

constexpr uint64_t kBodyLimit = 1000;

struct Outcome {
  RequestParser::State state = RequestParser::State::kHead;
  int status = 0;
  std::string method, path, body;
  size_t fields = 0;
  size_t used = 0;

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// Feeds `bytes` in pieces of the given sizes (the last one repeats).
Outcome parse(std::string_view bytes, const std::vector<size_t>& pieces) {
  RequestParser parser(kBodyLimit);
  Outcome out;
  size_t next = 0;
  auto over = [&parser] {
    return parser.state() == RequestParser::State::kComplete ||
           parser.state() == RequestParser::State::kFailed;
  };
  while (!bytes.empty() && !over()) {
    const size_t size = std::min(bytes.size(), pieces[std::min(next++, pieces.size() - 1)]);
    std::string_view piece = bytes.substr(0, size);
    while (!piece.empty() && !over()) {
      const size_t used = parser.feed(piece);
      piece.remove_prefix(used);
      out.used += used;
    }
    bytes.remove_prefix(size);
  }
  if (parser.state() == RequestParser::State::kHeadDone) parser.feed({});
  out.state = parser.state();
  if (out.state == RequestParser::State::kFailed) {
    out.status = parser.error().status;
    out.used = 0;  // after a refusal the rest is never looked at
    return out;
  }
  out.method = parser.head().method;
  out.path = parser.head().path;
  out.fields = parser.head().fields.size();
  if (out.state == RequestParser::State::kComplete) out.body = parser.take_request().body;
  return out;
}

Outcome parse(std::string_view bytes) { return parse(bytes, {bytes.size()}); }

std::string head(std::string_view fields) {
  return "POST /p HTTP/1.1\r\nHost: h\r\n" + std::string(fields) + "\r\n";
}

std::string chunked(std::string_view body) {
  return head("Transfer-Encoding: chunked\r\n") + std::string(body);
}

TEST(HttpParser, ReadsARequestAndLeavesTheNext) {
  const std::string first = head("Content-Length: 3\r\nA: b\r\n") + "abc";
  const Outcome out = parse(first + "GET / HTTP");
  EXPECT_EQ(out.state, RequestParser::State::kComplete);
  EXPECT_EQ(out.method, "POST");
  EXPECT_EQ(out.path, "/p");
  EXPECT_EQ(out.body, "abc");
  EXPECT_EQ(out.fields, 3u);
  EXPECT_EQ(out.used, first.size());
}

TEST(HttpParser, StopsBetweenHeadAndBody) {
  RequestParser parser(kBodyLimit);
  const std::string text = head("Content-Length: 3\r\nExpect: 100-continue\r\n") + "abc";
  const size_t used = parser.feed(text);
  EXPECT_EQ(used, text.size() - 3);
  EXPECT_EQ(parser.state(), RequestParser::State::kHeadDone);
  EXPECT_TRUE(parser.head().expect_continue);
  EXPECT_EQ(parser.feed("abc"), 3u);
  EXPECT_EQ(parser.state(), RequestParser::State::kComplete);
}

TEST(HttpParser, KeepAliveFollowsVersionAndConnectionField) {
  auto keep_alive = [](const std::string& text) {
    RequestParser parser(kBodyLimit);
    parser.feed(text);
    return parser.head().keep_alive;
  };
  EXPECT_TRUE(keep_alive("GET / HTTP/1.1\r\nHost: h\r\n\r\n"));
  EXPECT_FALSE(keep_alive("GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
  EXPECT_FALSE(keep_alive("GET / HTTP/1.0\r\n\r\n"));
  EXPECT_TRUE(keep_alive("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
}

TEST(HttpParser, ReadsChunksAndIgnoresTrailers) {
  const Outcome out = parse(
      chunked("3\r\nabc\r\n2;x=\"y\"\r\nde\r\n0\r\nContent-Type: z\r\nConnection: close\r\n\r\n"));
  EXPECT_EQ(out.state, RequestParser::State::kComplete);
  EXPECT_EQ(out.body, "abcde");
  EXPECT_EQ(out.fields, 2u);  // no trailer among them
}

TEST(HttpParser, AbsoluteTargetsMustNameTheHostOfTheField) {
  EXPECT_EQ(parse("GET http://h/a?b HTTP/1.1\r\nHost: H\r\n\r\n").path, "/a");
  EXPECT_EQ(parse("GET http://h HTTP/1.1\r\nHost: h\r\n\r\n").path, "/");
  EXPECT_EQ(parse("GET http://other/a HTTP/1.1\r\nHost: h\r\n\r\n").status, 400);
  EXPECT_EQ(parse("GET ftp://h/a HTTP/1.1\r\nHost: h\r\n\r\n").status, 400);
  EXPECT_EQ(parse("GET a HTTP/1.1\r\nHost: h\r\n\r\n").status, 400);
}

struct Refusal {
  const char* name;
  std::string text;
  int status;
};

std::vector<Refusal> refusals() {
  const std::string long_value(kMaxHeadBytes, 'v');
  std::string many_fields;
  for (size_t i = 0; i < kMaxHeaderFields; ++i) many_fields += "a: b\r\n";
  std::string trailers = "0\r\n";
  for (size_t i = 0; i <= kMaxHeaderFields; ++i) trailers += "a: b\r\n";
  const std::string get = "GET / HTTP/1.1\r\nHost: h\r\n";
  return {
      {"empty line", "\r\n", 400},
      {"no version", "GET /\r\n", 400},
      {"version 0.9", "GET / HTTP/0.9\r\n", 400},
      {"version 3.7", "GET / HTTP/3.7\r\n", 400},
      {"version 2", "GET / HTTP/2\r\n", 400},
      {"lower-case http", "GET / http/1.1\r\n", 400},
      {"two spaces", "GET  / HTTP/1.1\r\nHost: h\r\n\r\n", 400},
      {"tab as separator", "GET\t/ HTTP/1.1\r\n", 400},
      {"space in target", "GET /a b HTTP/1.1\r\nHost: h\r\n\r\n", 400},
      {"bare line feed", "GET / HTTP/1.1\nHost: h\n\n", 400},
      {"bare line feed in a field", "GET / HTTP/1.1\r\nHost: h\nA: b\r\n\r\n", 400},
      {"bare carriage return", "GET / HTTP/1.1\r\nHost: h\rA: b\r\n\r\n", 400},
      {"NUL in target", std::string("GET /\0 HTTP/1.1\r\n", 17), 400},
      {"NUL in a value", std::string("GET / HTTP/1.1\r\nHost: \0h\r\n", 26), 400},
      {"target not ASCII", "GET /\xC3\xA9 HTTP/1.1\r\nHost: h\r\n\r\n", 400},
      {"fragment", "GET /a#b HTTP/1.1\r\nHost: h\r\n\r\n", 400},
      {"target too long",
       "GET /" + std::string(kMaxTargetBytes, 'a') + " HTTP/1.1\r\nHost: h\r\n\r\n", 414},
      {"target without end", "GET /" + std::string(65536, 'a'), 414},
      {"method too long", std::string(kMaxMethodBytes + 1, 'M') + " / HTTP/1.1\r\nHost: h\r\n\r\n",
       400},
      {"one field too many", get + many_fields + "\r\n", 431},
      {"fields without end", get + many_fields + "a: b\r\n", 431},
      {"head too large", get + "a: " + long_value, 431},
      {"no colon", get + "abc\r\n\r\n", 400},
      {"empty name", get + ": b\r\n\r\n", 400},
      {"space before colon", get + "a : b\r\n\r\n", 400},
      {"folded line", get + "a: b\r\n c\r\n\r\n", 400},
      {"folded with tab", get + "a: b\r\n\tc\r\n\r\n", 400},
      {"fold right after the request line", "GET / HTTP/1.1\r\n Host: h\r\n\r\n", 400},
      {"no Host", "GET / HTTP/1.1\r\n\r\n", 400},
      {"two Hosts", get + "Host: h\r\n\r\n", 400},
      {"two Hosts in 1.0", "GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400},
      {"Host with a path", "GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400},
      {"Host with a user", "GET / HTTP/1.1\r\nHost: u@h\r\n\r\n", 400},
      {"empty Host", "GET / HTTP/1.1\r\nHost:\r\n\r\n", 400},
      {"two equal lengths", head("Content-Length: 3\r\nContent-Length: 3\r\n"), 400},
      {"two lengths", head("Content-Length: 3\r\nContent-Length: 4\r\n"), 400},
      {"list of lengths", head("Content-Length: 3, 3\r\n"), 400},
      {"length and coding", head("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n"), 400},
      {"coding and length", head("Transfer-Encoding: chunked\r\nContent-Length: 3\r\n"), 400},
      {"unknown coding and length", head("Transfer-Encoding: x\r\nContent-Length: 3\r\n"), 501},
      {"two codings", head("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), 400},
      {"chunked not last", head("Transfer-Encoding: chunked, gzip\r\n"), 501},
      {"gzip and chunked", head("Transfer-Encoding: gzip, chunked\r\n"), 501},
      {"identity", head("Transfer-Encoding: identity\r\n"), 501},
      {"quoted coding", head("Transfer-Encoding: \"chunked\"\r\n"), 501},
      {"coding in 1.0", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
      {"negative length", head("Content-Length: -1\r\n"), 400},
      {"hex length", head("Content-Length: 0x10\r\n"), 400},
      {"plus in length", head("Content-Length: +5\r\n"), 400},
      {"space in length", head("Content-Length: 1 0\r\n"), 400},
      {"no length", head("Content-Length:\r\n"), 400},
      {"length beyond 64 bits", head("Content-Length: 18446744073709551616\r\n"), 400},
      {"body above the limit", head("Content-Length: 1001\r\n"), 413},
      {"unknown expectation", head("Expect: 200-ok\r\n"), 417},
      {"bad Connection", head("Connection: ,;\r\n"), 400},
      {"chunk size -2", chunked("-2\r\n"), 400},
      {"chunk size 0x10", chunked("0x10\r\n"), 400},
      {"chunk size of 17 digits", chunked("10000000000000000\r\n"), 400},
      {"chunk size too large and malformed", chunked("100000000000000}00\r\n"), 413},
      {"no chunk size", chunked("\r\n"), 400},
      {"chunk size with space in front", chunked(" 3\r\nabc\r\n"), 400},
      {"chunk line with bare line feed", chunked("3\nabc\r\n0\r\n\r\n"), 400},
      {"chunk above the limit", chunked("3e9\r\n"), 413},
      {"chunks above the limit", chunked("3e8\r\n" + std::string(1000, 'a') + "\r\n1\r\n"), 413},
      {"chunk without its line end", chunked("3\r\nabcX\r\n0\r\n\r\n"), 400},
      {"chunk extension of control bytes", chunked("3;a=\x01\r\nabc\r\n"), 400},
      {"chunk extension quoted beyond its line", chunked("3;a=\"x\r\ny\"\r\nabc\r\n"), 400},
      {"chunk extension whose quote never ends", chunked("3;a=\"x\r\nabc\r\n0\r\n\r\n"), 400},
      {"last chunk with a quote beyond its line", chunked("0;a=\"x\r\ny\"\r\n\r\n"), 400},
      {"last chunk whose quote never ends", chunked("0;a=\"x\r\n\r\n"), 400},
      {"chunk extension too long", chunked("3;" + std::string(1 << 20, 'a')), 400},
      {"trailer flood", chunked(trailers + "\r\n"), 431},
      {"trailer too long", chunked("0\r\na: " + std::string(kMaxChunkLineBytes, 'b')), 400},
      {"trailer with a length", chunked("0\r\nContent-Length: 3\r\n\r\n"), 400},
  };
}

TEST(HttpParser, RefusesMalformedRequestsWithTheStatusOfTheRule) {
  for (const Refusal& row : refusals()) {
    const Outcome out = parse(row.text);
    EXPECT_EQ(out.state, RequestParser::State::kFailed) << row.name;
    EXPECT_EQ(out.status, row.status) << row.name;
  }
}

TEST(HttpParser, LimitsAreReachedExactly) {
  std::string fields;
  for (size_t i = 0; i + 1 < kMaxHeaderFields; ++i) fields += "a: b\r\n";  // and Host
  EXPECT_EQ(parse(head(fields)).state, RequestParser::State::kComplete);
  std::string large = head("a: \r\n");
  const std::string fits = head("a: " + std::string(kMaxHeadBytes - large.size(), 'v') + "\r\n");
  ASSERT_EQ(fits.size(), kMaxHeadBytes);
  EXPECT_EQ(parse(fits).state, RequestParser::State::kComplete);
  const std::string target = "/" + std::string(kMaxTargetBytes - 1, 'a');
  EXPECT_EQ(parse("GET " + target + " HTTP/1.1\r\nHost: h\r\n\r\n").path, target);
  const std::string body(kBodyLimit, 'x');
  EXPECT_EQ(parse(head("Content-Length: 1000\r\n") + body).body, body);
  EXPECT_EQ(parse(chunked("3e8\r\n" + body + "\r\n0\r\n\r\n")).body, body);
  EXPECT_EQ(parse(head("Transfer-Encoding: chunKed\r\n") + "0\r\n\r\n").state,
            RequestParser::State::kComplete);
}

TEST(HttpParser, CutsOfTheInputNeverMatter) {
  std::vector<std::string> inputs = {
      head("Content-Length: 11\r\n") + "hello world" + "GET / HTTP/1.1\r\n",
      chunked("1\r\na\r\n10;ext=1;b=\"q;\"\r\n0123456789abcdef\r\n00\r\nT: v\r\nU: w\r\n\r\nrest"),
      chunked("0\r\n\r\n"),
      chunked("00\r\n\r\nrest"),
      chunked("0;a=b\r\nT: v\r\n\r\n"),
      "GET /v1/models?x=1 HTTP/1.1\r\nHost: localhost:1\r\nAccept: */*\r\n\r\n",
  };
  for (const Refusal& row : refusals()) {
    if (row.text.size() < 3000) inputs.push_back(row.text);
  }
  uint64_t state = 1;
  for (const std::string& input : inputs) {
    const Outcome whole = parse(input);
    EXPECT_EQ(parse(input, {1}), whole) << input;
    for (size_t cut = 1; cut < input.size(); ++cut) {
      EXPECT_EQ(parse(input, {cut, input.size()}), whole) << input << " cut at " << cut;
    }
    for (int round = 0; round < 50; ++round) {
      std::vector<size_t> pieces;
      for (int i = 0; i < 200; ++i) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        pieces.push_back(1 + (state >> 33) % 9);
      }
      EXPECT_EQ(parse(input, pieces), whole) << input;
    }
  }
}

}  // namespace
}  // namespace spin::server
