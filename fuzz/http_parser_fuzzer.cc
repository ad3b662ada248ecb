// SPDX-License-Identifier: Apache-2.0
// Any bytes as HTTP requests on one connection. The first byte seeds how the rest is cut: reading
// it whole and reading it in pieces must give the same requests and the same refusal.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "server/http_parser.h"

namespace {

using spin::server::RequestParser;

constexpr uint64_t kMaxBody = 4096;

// What a connection makes of the bytes.
struct Reading {
  std::vector<std::string> requests;
  int refused = 0;
  RequestParser::State last = RequestParser::State::kHead;
};

Reading read_all(std::string_view bytes, uint64_t seed, bool cut) {
  Reading out;
  auto parser = std::make_unique<RequestParser>(kMaxBody);
  while (!bytes.empty() || parser->state() == RequestParser::State::kHeadDone) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    const size_t size = cut ? std::min<size_t>(bytes.size(), 1 + (seed >> 33) % 13) : bytes.size();
    std::string_view piece = bytes.substr(0, size);
    do {
      const size_t used = parser->feed(piece);
      if (used > piece.size()) std::abort();
      piece.remove_prefix(used);
      if (parser->body_bytes() > kMaxBody) std::abort();
      if (parser->state() == RequestParser::State::kFailed) {
        out.refused = parser->error().status;
        if (out.refused < 400 || out.refused > 505 || out.refused == 500) std::abort();
        return out;
      }
      if (parser->state() == RequestParser::State::kComplete) {
        const auto request = parser->take_request();
        std::string text = request.head.method + ' ' + request.head.path + '\n';
        for (const auto& [name, value] : request.head.fields) text += name + ':' + value + '\n';
        out.requests.push_back(text + request.body);
        parser = std::make_unique<RequestParser>(kMaxBody);
      }
    } while (!piece.empty() || parser->state() == RequestParser::State::kHeadDone);
    bytes.remove_prefix(size);
  }
  out.last = parser->state();
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const Reading whole = read_all(bytes, data[0], false);
  const Reading pieces = read_all(bytes, data[0], true);
  if (whole.requests != pieces.requests) std::abort();
  if (whole.refused != pieces.refused) std::abort();
  if (whole.last != pieces.last) std::abort();
  return 0;
}
