// SPDX-License-Identifier: Apache-2.0
// Requests and checks that the engine's tests share. Thread: any.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include <gtest/gtest.h>

#include "engine/engine_impl.h"
#include "engine/fake_engine.h"
#include "spin/engine.h"

namespace spin::testing {

#ifdef SPIN_SANITIZED
inline constexpr bool kReducedCounts = true;
#else
inline constexpr bool kReducedCounts = false;
#endif

inline std::unique_ptr<Engine> fake_engine(const engine::FakeModelOptions& model = {},
                                           const EngineOptions& options = {},
                                           const base::Clock* clock = nullptr) {
  auto made = engine::create_fake_engine(model, options, clock);
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  return made.ok() ? std::move(*made) : nullptr;
}

// No page is in use and the pool's books are right. Call when no new requests come.
inline void expect_clean(Engine& engine) {
  EXPECT_TRUE(engine.wait_drained(std::chrono::seconds(100)));
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.kv_pages_in_use, 0u);
  EXPECT_EQ(stats.kv_cache_usage, 0.0);
  EXPECT_EQ(stats.requests_running, 0u);
  EXPECT_EQ(stats.requests_waiting, 0u);
  const Status audit = static_cast<engine::EngineImpl&>(engine).audit();
  EXPECT_TRUE(audit.ok()) << audit.to_string();
  uint64_t ended = 0;
  for (const uint64_t count : stats.requests_finished) ended += count;
  EXPECT_EQ(ended + stats.requests_refused, stats.requests_received);
}

// A request whose answer is `text`.
inline GenerateRequest say(std::string_view text) {
  GenerateRequest request;
  request.prompt = engine::fake_say_prompt(text);
  request.sampling.temperature = 0;
  return request;
}

// One whose answer is up to the model.
inline GenerateRequest free_request(uint64_t seed, uint64_t max_tokens = 40) {
  GenerateRequest request;
  for (uint64_t i = 0; i < 3 + seed % 29; ++i) {
    request.prompt.push_back(static_cast<TokenId>((seed * 31 + i * i) % 256));
  }
  request.sampling.seed = seed;
  request.sampling.max_tokens = max_tokens;
  return request;
}

// One that goes on until it is ended or the model's length is reached.
inline GenerateRequest endless_request(uint64_t seed = 1) {
  GenerateRequest request = free_request(seed);
  request.sampling.max_tokens.reset();
  request.sampling.ignore_eos = true;
  return request;
}

}  // namespace spin::testing
