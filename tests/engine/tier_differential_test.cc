// SPDX-License-Identifier: Apache-2.0
// Random traces of requests give the same tokens, with the same bits of their log-probabilities,
// whatever the engine's memory is: without a host tier, or with one and fast memory for all, a
// fifth or a twentieth of the need; in any batches and chunks, suspended or not; whether or not the
// host can touch fast memory. A trace is a pure function of its number; SPIN_TIER_TRACES sets how
// many run, SPIN_TIER_FIRST with which to begin.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "base/parse_number.h"
#include "engine/create_engine.h"
#include "tests/engine/fake_support.h"
#include "tests/engine/recording_sink.h"
#include "tests/engine/sparse_support.h"

namespace spin {
namespace {

using testing::expect_clean;
using testing::greedy;
using testing::kReducedCounts;
using testing::Outcome;
using testing::prompt_of;
using testing::RecordingSink;
using testing::run_request;
using testing::Scored;
using testing::scored;

// Small, so that short prompts select and short outputs form clusters anew.
const std::vector<std::string>& algorithms() {
  static const std::vector<std::string> list = {
      "oracle:budget=32,local=16",     "quest:budget=32,local=16,dense_layers=1",
      "shadowkv:budget=32,outliers=4", "retroinfer:budget=32,cluster=8,update=16",
      "streaming:sinks=8,budget=48",   "sketch:budget=32",
  };
  return list;
}

struct TraceRequest {
  std::string sparse;
  std::vector<TokenId> prompt;
  uint64_t max_tokens = 0;
  std::optional<uint64_t> abort_at;  // output tokens; 0: while it waits or its prompt is read
};

// Share of the trace's need that fast memory is given; none: there is no host tier.
constexpr std::array<std::optional<double>, 4> kShares = {std::nullopt, 1.0, 0.2, 0.05};
constexpr std::array<uint32_t, 3> kChunks = {16, 64, 512};
constexpr std::array<uint32_t, 2> kSequences = {1, 8};
constexpr uint64_t kSettings = 48;  // of all that can be combined

struct Setting {
  uint64_t number = 0;  // below kSettings
  std::optional<double> share;
  uint32_t chunk = 0;
  uint32_t sequences = 0;
  bool is_preemptive = false;

  std::string to_string() const {
    return fmt::format("fast memory {}, {} tokens a step, {} sequences, {}",
                       share ? fmt::format("{} % beside a host tier", *share * 100) : "alone",
                       chunk, sequences, is_preemptive ? "suspended at once" : "never suspended");
  }
};

Setting setting_of(uint64_t number) {
  return {number, kShares[number % 4], kChunks[number / 4 % 3], kSequences[number / 12 % 2],
          number / 24 == 1};
}

// 4 to 6; those of ten traces one after the other are all that there are.
std::vector<Setting> settings_of(uint64_t trace) {
  std::vector<Setting> settings;
  for (uint64_t i = 0; i < 5 + (trace * 7 / 3) % 2; ++i) {
    settings.push_back(setting_of((trace * 5 + i) * 11 % kSettings));
  }
  return settings;
}

uint64_t variable(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  const auto number = base::parse_decimal(text);
  EXPECT_TRUE(number.has_value()) << name << " is not a number";
  return number.value_or(otherwise);
}

// What happened over all runs.
struct Totals {
  uint64_t runs = 0, requests = 0, tokens = 0, aborted = 0, fallbacks = 0;
  uint64_t fetches = 0, evictions = 0, resizes = 0, suspensions = 0;
  uint64_t bytes_offloaded = 0, bytes_written_through = 0;
  std::set<uint64_t> settings;
};

class TierDifferential : public ::testing::Test {
 protected:
  TierDifferential() : device_(std::move(*backend::cpu::create_cpu_device({.threads = 1}))) {
    engine::DecoderRunnerOptions options;
    options.kv_pages = testing::kTinyColumns;
    options.max_logit_rows = 8;
    options.sparse = true;
    options.max_prompt_tokens = 64;
    options.index_bytes = 16 << 20;
    flat_ = testing::make_tiny_runner(*device_, algorithms(), options);
    options.host_bytes = 32 << 20;
    tiered_ = testing::make_tiny_runner(*device_, algorithms(), options);
  }

  EngineOptions options() const {
    EngineOptions options;
    options.model = checkpoint_.dir().path().string();
    options.dtype = DTypeChoice::kFloat32;
    options.sparse = algorithms();
    options.max_model_len = 512;
    options.max_num_seqs = 8;
    options.kv_cache_memory_bytes = 32 << 20;
    options.threads = 1;
    return options;
  }

  std::vector<TraceRequest> trace_of(uint64_t number) const;
  uint64_t pages_of(const testing::TinyRunner& runner, const TraceRequest& request) const;
  EngineOptions options_of(const std::vector<TraceRequest>& trace,
                           const Setting& setting,
                           std::mt19937& random) const;
  void run(const std::vector<TraceRequest>& trace,
           const std::vector<Scored>& expected,
           const Setting& setting,
           uint32_t seed);
  void count(const EngineStats& stats, const EngineOptions& options, const Setting& setting);

  testing::LongTinyCheckpoint checkpoint_;
  std::unique_ptr<backend::Device> device_;
  testing::TinyRunner flat_, tiered_;  // they say what requests need
  Totals totals_;
};

// Near the limits where something changes: pages, chunks, the least length of the algorithm.
size_t length_of(uint64_t minimum, std::mt19937& random) {
  const uint64_t near = random() % 3;  // 1 below to 1 above
  switch (random() % 4) {
    case 0:
      return minimum + near > 1 ? minimum + near - 1 : 1;
    case 1:
      return (size_t{8} << (random() % 6)) + near - 1;
    case 2:
      return 8 * (1 + random() % 40) + near - 1;
    default:
      return minimum + 1 + random() % 200;
  }
}

std::vector<TraceRequest> TierDifferential::trace_of(uint64_t number) const {
  std::mt19937 random(static_cast<uint32_t>(number));
  std::vector<TraceRequest> trace(3 + random() % 6);
  for (TraceRequest& request : trace) {
    const uint64_t which = random() % (algorithms().size() + 1);
    uint64_t minimum = 0;
    if (which == algorithms().size()) {
      request.sparse = "dense";
    } else {
      const std::string& spec = algorithms()[which];
      request.sparse = spec.substr(0, spec.find(':'));
      minimum = flat_.algorithms->started()[which]->descriptor().minimum_tokens;
    }
    request.prompt = prompt_of(length_of(minimum, random), random());
    request.max_tokens = 1 + random() % 40;
    if (random() % 4 == 0) request.abort_at = random() % (request.max_tokens + 1);
  }
  return trace;
}

uint64_t TierDifferential::pages_of(const testing::TinyRunner& runner,
                                    const TraceRequest& request) const {
  engine::SequenceRequest sequence;
  sequence.prompt = request.prompt;
  sequence.max_tokens = request.prompt.size() + request.max_tokens;
  if (request.sparse != "dense") {
    auto algorithm = runner.algorithms->resolve(request.sparse);
    EXPECT_TRUE(algorithm.ok()) << algorithm.status().to_string();
    if (algorithm.ok()) sequence.algorithm = *algorithm;
  }
  return runner.runner->need(sequence).memory.pages;
}

EngineOptions TierDifferential::options_of(const std::vector<TraceRequest>& trace,
                                           const Setting& setting,
                                           std::mt19937& random) const {
  EngineOptions options = this->options();
  options.max_num_batched_tokens = setting.chunk;
  options.max_num_seqs = setting.sequences;
  options.threads = random() % 4 == 0 ? 2 : 1;
  const std::array<std::optional<double>, 3> ratios = {std::nullopt, 0.0, 1.0};
  const std::optional<double> ratio = ratios[random() % ratios.size()];
  if (!setting.share) return options;
  uint64_t need = 0;
  uint64_t least = 0;
  for (const TraceRequest& request : trace) {
    need += pages_of(flat_, request);
    least = std::max(least, pages_of(tiered_, request));
  }
  // Whole columns.
  uint64_t pages =
      std::max(static_cast<uint64_t>(*setting.share * static_cast<double>(need)), least);
  pages = (pages + testing::kTinyColumns - 1) / testing::kTinyColumns * testing::kTinyColumns;
  options.kv_cache_memory_bytes = pages * testing::kTinyPageBytes;
  options.host_memory_bytes = 32 << 20;
  options.kv_buffer_ratio = ratio;
  return options;
}

// A whole answer is the expected one, a part its beginning.
void expect_same(const Scored& found, const Scored& expected, const TraceRequest& request) {
  if (!request.abort_at) {
    EXPECT_EQ(found.size(), expected.size());
  } else {
    EXPECT_GE(found.size(), *request.abort_at);
  }
  ASSERT_LE(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i], expected[i]) << "token " << i;
  }
}

struct Live {
  const TraceRequest* request = nullptr;
  std::shared_ptr<RecordingSink> sink;
  std::promise<RequestId> id;
};

void submit(Engine& engine, Live& live, std::mt19937& random) {
  live.sink = std::make_shared<RecordingSink>();
  const std::optional<uint64_t> abort_at = live.request->abort_at;
  if (abort_at && *abort_at > 0) {
    const std::shared_future<RequestId> id = live.id.get_future().share();
    live.sink->on_delta_hook = [&engine, id, limit = *abort_at,
                                tokens = uint64_t{0}](const OutputDelta& delta) mutable {
      tokens += delta.token_ids.size();
      // Waits at most until submit() has returned.
      if (tokens >= limit) engine.cancel(id.get());
    };
  }
  GenerateRequest request = greedy(live.request->prompt, live.request->max_tokens);
  request.sparse = live.request->sparse;
  const auto id = engine.submit(std::move(request), live.sink);
  ASSERT_TRUE(id.ok()) << id.status().to_string();
  live.id.set_value(*id);
  switch (random() % 3) {
    case 0:
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      break;
    case 1:
      if (!abort_at) live.sink->wait_for_delta();
      break;
    default:
      break;
  }
  if (abort_at && *abort_at == 0) engine.cancel(*id);
}

void TierDifferential::count(const EngineStats& stats,
                             const EngineOptions& options,
                             const Setting& setting) {
  ++totals_.runs;
  totals_.settings.insert(setting.number);
  totals_.tokens += stats.generation_tokens;
  totals_.fallbacks += stats.sparse.dense_fallbacks;
  totals_.fetches += stats.sparse.page_misses;
  totals_.evictions += stats.sparse.page_evictions;
  totals_.resizes += stats.sparse.lease_resizes;
  totals_.suspensions += stats.preemptions;
  totals_.bytes_offloaded += stats.sparse.bytes_offloaded;
  if (!setting.share) {
    EXPECT_EQ(stats.sparse.page_misses + stats.sparse.bytes_offloaded + stats.preemptions, 0u);
    return;
  }
  if (!setting.is_preemptive) {
    EXPECT_EQ(stats.preemptions, 0u);
  }
  // All of it stays in fast memory: what reached the host was written ahead of need.
  if (*setting.share == 1.0 && !options.kv_buffer_ratio) {
    EXPECT_EQ(stats.sparse.page_misses + stats.sparse.lease_resizes + stats.preemptions, 0u);
    totals_.bytes_written_through += stats.sparse.bytes_offloaded;
  }
}

void TierDifferential::run(const std::vector<TraceRequest>& trace,
                           const std::vector<Scored>& expected,
                           const Setting& setting,
                           uint32_t seed) {
  std::mt19937 random(seed);
  const EngineOptions options = options_of(trace, setting, random);
  engine::EngineTuning tuning;
  tuning.min_decoded_tokens =
      setting.is_preemptive ? 1 + random() % 3 : std::numeric_limits<uint32_t>::max();
  // Every eighth run on a device whose fast memory the host cannot touch.
  if (random() % 8 == 0) {
    tuning.make_device = [threads = options.threads] {
      return testing::separate_memory_device(threads);
    };
  }
  auto engine = engine::create_tuned_engine(options, tuning);
  ASSERT_TRUE(engine.ok()) << engine.status().to_string();
  std::vector<Live> live(trace.size());
  for (size_t i = 0; i < trace.size(); ++i) live[i].request = &trace[i];
  std::shuffle(live.begin(), live.end(), random);
  for (Live& one : live) ASSERT_NO_FATAL_FAILURE(submit(**engine, one, random));
  for (Live& one : live) {
    const auto index = static_cast<size_t>(one.request - trace.data());
    SCOPED_TRACE(fmt::format("request {}: {}, {} of prompt, {} of output", index,
                             one.request->sparse, one.request->prompt.size(),
                             one.request->max_tokens));
    const Outcome outcome = one.sink->wait();
    EXPECT_EQ(outcome.ends, 1);
    if (!one.request->abort_at) {
      EXPECT_TRUE(outcome.result.status.ok()) << outcome.result.status.to_string();
    }
    const Scored found = scored(outcome);
    ++totals_.requests;
    totals_.aborted += found.size() < expected[index].size() ? 1 : 0;
    expect_same(found, expected[index], *one.request);
  }
  expect_clean(**engine);
  const EngineStats stats = (*engine)->stats();
  for (const TierStats& tier : stats.kv_tiers) EXPECT_EQ(tier.pages_in_use, 0u) << tier.name;
  EXPECT_EQ(stats.sparse.lease_pages + stats.sparse.sequences_suspended, 0u);
  count(stats, options, setting);
}

TEST_F(TierDifferential, NeitherTiersNorBatchesNorSuspensionsChangeAToken) {
  const uint64_t traces = variable("SPIN_TIER_TRACES", kReducedCounts ? 10 : 100);
  const uint64_t first = variable("SPIN_TIER_FIRST", 0);
  const auto whole = testing::open_engine(options());
  ASSERT_NE(whole, nullptr);
  for (uint64_t number = first; number < first + traces && !HasFailure(); ++number) {
    const std::vector<TraceRequest> trace = trace_of(number);
    std::vector<Scored> expected;
    for (const TraceRequest& one : trace) {
      GenerateRequest request = greedy(one.prompt, one.max_tokens);
      request.sparse = one.sparse;
      expected.push_back(scored(run_request(*whole, std::move(request))));
      ASSERT_EQ(expected.back().size(), one.max_tokens);
    }
    uint32_t seed = static_cast<uint32_t>(number) * 16;
    for (const Setting& setting : settings_of(number)) {
      SCOPED_TRACE(fmt::format("trace {}: {}", number, setting.to_string()));
      run(trace, expected, setting, ++seed);
    }
  }
  fmt::print(
      "{} runs, {} requests ({} cut short), {} tokens, {} dense fallbacks; {} fetches, {} "
      "evictions, {} resizes, {} suspensions, {} KiB offloaded, {} KiB written through\n",
      totals_.runs, totals_.requests, totals_.aborted, totals_.tokens, totals_.fallbacks,
      totals_.fetches, totals_.evictions, totals_.resizes, totals_.suspensions,
      totals_.bytes_offloaded >> 10, totals_.bytes_written_through >> 10);
  if (HasFailure()) return;
  if (traces >= 10) {
    EXPECT_EQ(totals_.settings.size(), kSettings);
  }
  if (traces < 100) return;  // what is rare may be missing, since it depends on time
  for (const uint64_t happened :
       {totals_.aborted, totals_.fallbacks, totals_.fetches, totals_.evictions, totals_.resizes,
        totals_.suspensions, totals_.bytes_offloaded, totals_.bytes_written_through}) {
    EXPECT_GT(happened, 0u);
  }
}

}  // namespace
}  // namespace spin
