// SPDX-License-Identifier: Apache-2.0
// Any bytes as a request body; the first byte chooses the route. What is accepted must keep every
// limit, and what is said about it must be one line of well-formed JSON.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/utf8.h"
#include "io/json.h"
#include "server/api_error.h"
#include "server/json_writer.h"
#include "server/limits.h"
#include "server/openai_request.h"
#include "server/openai_response.h"
#include "spin/sampling_limits.h"

namespace {

using namespace spin;          // NOLINT(google-build-using-namespace): a program of one file
using namespace spin::server;  // NOLINT(google-build-using-namespace)

void require(bool holds) {
  if (!holds) std::abort();
}

void check_json(const std::string& text) {
  require(text.find('\n') == std::string::npos);
  require(io::parse_json(text).ok());
}

void check_accepted(const ApiRequest& request) {
  namespace limits = spin::sampling_limits;
  const SamplingParams& sampling = request.sampling;
  for (const float value :
       {sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty,
        sampling.presence_penalty, sampling.frequency_penalty}) {
    require(std::isfinite(value));
  }
  require(sampling.temperature >= 0 && sampling.temperature <= limits::kMaxTemperature);
  require(sampling.top_p > 0 && sampling.top_p <= 1);
  require(sampling.n >= 1 && sampling.n <= limits::kMaxChoices);
  require(request.prompts.size() * sampling.n <= kMaxTotalChoices);
  require(!sampling.logprobs || *sampling.logprobs <= limits::kMaxTopLogprobs);
  require(sampling.stop.size() <= limits::kMaxStopStrings);
  require(sampling.stop_token_ids.size() <= limits::kMaxStopTokenIds);
  require(sampling.logit_bias.size() <= limits::kMaxLogitBiasEntries);
  require(request.messages.size() <= kMaxMessages);
  for (const std::string& stop : sampling.stop) require(!stop.empty());
  for (const PromptInput& prompt : request.prompts) {
    for (const TokenId id : prompt.ids) require(id < 1000);
  }
}

// The same bytes as output text: the writers must cope with anything.
void check_writers(std::string_view bytes, bool chat) {
  ResponseIdentity identity{chat, std::string(bytes), 1, "m"};
  TokenLogprob token{1, -0.25f, std::string(bytes), {{2, -1.0f, std::string(bytes.substr(0, 3))}}};
  ChoiceView choice;
  choice.text = bytes;
  choice.with_logprobs = choice.with_top = choice.first = true;
  choice.logprobs = {&token, 1};
  const std::string event = stream_chunk(identity, choice, Usage{1, 2});
  require(event.starts_with("data: ") && event.ends_with("\n\n"));
  check_json(event.substr(6, event.size() - 8));
  check_json(full_response(identity, {&choice, 1}, Usage{1, 2}));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const Api api = static_cast<Api>(1u << (data[0] % 4));
  const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
  RequestContext context;
  context.vocab_size = 1000;
  const auto request = parse_api_request(api, body, context);
  if (request.ok()) {
    check_accepted(*request);
  } else {
    const ApiError error = api_error(request.status());
    require(error.status == 400);
    check_json(error_json(error));
  }
  check_writers(body.substr(0, 512), api == kChat);
  return 0;
}
