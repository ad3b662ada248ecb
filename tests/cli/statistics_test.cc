// SPDX-License-Identifier: Apache-2.0
#include "cli/statistics.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace spin::cli {
namespace {

using ::testing::HasSubstr;

ModelInfo model_info(std::string name = "m") {
  ModelInfo info;
  info.name = std::move(name);
  info.dtype = "float32";
  info.threads = 2;
  info.kv_cache_bytes = 64000;
  info.kv_capacity_tokens = 1000;
  info.weight_bytes = 5;
  return info;
}

RequestResult result(uint64_t prompt, uint64_t completion) {
  RequestResult r;
  r.usage = {prompt, completion};
  r.timing = {0.5, 2.5, 6.5};
  return r;
}

TEST(Statistics, RatesFollowFromTheTimes) {
  const Statistics s = make_statistics(model_info(), result(100, 9), FinishReason::kStop);
  EXPECT_DOUBLE_EQ(s.ttft_s, 2.5);
  EXPECT_DOUBLE_EQ(s.prefill_tokens_per_s, 50);  // 100 tokens in 2.5 - 0.5 s
  EXPECT_DOUBLE_EQ(s.decode_tokens_per_s, 2);    // 8 further tokens in 4 s
  EXPECT_EQ(s.kv_used_bytes, 109u * 64);
  EXPECT_EQ(s.kv_reserved_bytes, 64000u);
}

TEST(Statistics, OneTokenHasNoDecodeRateAndNoneHasNoRates) {
  RequestResult r = result(100, 1);
  r.timing.finished = r.timing.first_token;
  EXPECT_EQ(make_statistics(model_info(), r, FinishReason::kLength).decode_tokens_per_s, 0);
  const Statistics none = make_statistics(model_info(), result(100, 0), FinishReason::kAborted);
  EXPECT_EQ(none.ttft_s, 0);
  EXPECT_EQ(none.prefill_tokens_per_s, 0);
  EXPECT_EQ(none.decode_tokens_per_s, 0);
}

TEST(Statistics, AModelWithoutKvCapacityIsNoDivisionByZero) {
  EXPECT_EQ(make_statistics({}, result(1, 1), FinishReason::kStop).kv_used_bytes, 0u);
}

TEST(Statistics, JsonIsOneLineAndParses) {
  const Statistics s =
      make_statistics(model_info("bad \xff name\n"), result(100, 9), FinishReason::kStop);
  const std::string text = statistics_json(s);
  ASSERT_EQ(text.find('\n'), text.size() - 1);
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["prompt_tokens"], 100);
  EXPECT_EQ(json["completion_tokens"], 9);
  EXPECT_EQ(json["finish_reason"], "stop");
  EXPECT_EQ(json["prefill_tokens_per_s"], 50.0);
  EXPECT_EQ(json["model"], "bad \xEF\xBF\xBD name\n");
}

TEST(Statistics, TextNamesEveryFigure) {
  Statistics s = make_statistics(model_info(), result(100, 9), FinishReason::kLength);
  s.peak_anonymous_bytes = 3ull << 20;
  const std::string text = statistics_text(s);
  EXPECT_THAT(text, HasSubstr("100 tokens, 50.0 tokens/s"));
  EXPECT_THAT(text, HasSubstr("9 tokens, 2.0 tokens/s, ended by length"));
  EXPECT_THAT(text, HasSubstr("peak 3.0 MiB anonymous"));
  EXPECT_EQ(statistics_line(s), "9 tokens, 2.0 tokens/s, first token after 2.50 s");
}

TEST(Statistics, SparseAttentionIsToldWhereItIsOn) {
  Statistics s = make_statistics(model_info(), result(100, 9), FinishReason::kLength);
  EXPECT_EQ(statistics_text(s).find("attention"), std::string::npos);
  EXPECT_FALSE(nlohmann::json::parse(statistics_json(s)).contains("sparse"));
  EXPECT_EQ(sparse_text(model_info()), "");
  ModelInfo info = model_info();
  info.sparse = {"quest:budget=64", "dense"};
  info.host_cache_bytes = 2 << 20;
  info.kv_buffer_ratio = "auto";
  info.index_bytes = 3 << 20;
  info.staging_bytes = 5 << 20;
  const std::string lines = sparse_text(info);
  for (const char* part :
       {"quest:budget=64; dense", "62.5 KiB of KV cache (1000 tokens)", "5.0 MiB to stage",
        "3.0 MiB for summaries", "host memory: 2.0 MiB", "buffer ratio auto"}) {
    EXPECT_THAT(lines, HasSubstr(part));
  }
  info.host_cache_bytes = 0;
  EXPECT_THAT(sparse_text(info), HasSubstr("host memory: none"));

  s = make_statistics(info, result(100, 9), FinishReason::kLength);
  s.tiers = {{"fast", 10, 0, 40960, 0, 8192}, {"host", 100, 0, 409600, 0, 16384}};
  s.sparse.sequences = 1;
  s.sparse.dense_fallbacks = 2;
  s.sparse.selections = 30;
  s.sparse.dense_reads = 10;
  s.sparse.attended_tokens = 5000;
  s.sparse.page_hits = 7;
  s.sparse.page_misses = 3;
  s.sparse.fetch_stall_s = 0.25;
  s.sparse.overflows = 4;
  const std::string text = statistics_text(s);
  for (const char* part :
       {"quest:budget=64", "dense for 2 of 3 sequences", "125.0 tokens attended", "30 selections",
        "fast tier    8.0 KiB of 40.0 KiB", "host tier    16.0 KiB of 400.0 KiB",
        "7 hits, 3 misses", "fetched in 0.250 s", "4 selected partitions did not fit"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  const auto json = nlohmann::json::parse(statistics_json(s))["sparse"];
  EXPECT_EQ(json["attended_tokens_per_head_and_step"], 125.0);
  EXPECT_EQ(json["tiers"]["host"]["bytes_peak"], 16384);
  EXPECT_EQ(json["fetch_stall_s"], 0.25);
  EXPECT_EQ(json["overflows"], 4);
  EXPECT_EQ(json["algorithms"][1], "dense");
}

TEST(Statistics, BytesHaveBinaryUnits) {
  EXPECT_EQ(bytes_text(0), "0 B");
  EXPECT_EQ(bytes_text(1023), "1023 B");
  EXPECT_EQ(bytes_text(1024), "1.0 KiB");
  EXPECT_EQ(bytes_text(1536ull << 20), "1.5 GiB");
  EXPECT_EQ(bytes_text(5ull << 50), "5120.0 TiB");
}

TEST(Statistics, ReadsTheKernelsStatusText) {
  const ProcessMemory memory = parse_process_status(
      "Name:\tspin\nVmHWM:\t  123456 kB\nRssAnon:\t    4096 kB\nRssFile:\t 1 kB\n");
  EXPECT_EQ(memory.peak_resident_bytes, 123456u * 1024);
  EXPECT_EQ(memory.anonymous_bytes, 4096u * 1024);
  EXPECT_EQ(parse_process_status("").anonymous_bytes, 0u);
  EXPECT_EQ(parse_process_status("RssAnon:").anonymous_bytes, 0u);
}

TEST(MemorySampler, SeesMemoryThatIsHeld) {
  MemorySampler sampler;
  const uint64_t before = sampler.peak().anonymous_bytes;
  ASSERT_GT(before, 0u);
  constexpr size_t kBytes = 64u << 20;
  {
    std::vector<char> block(kBytes);
    std::memset(block.data(), 1, block.size());
    EXPECT_GE(sampler.peak().anonymous_bytes, before + kBytes / 2);
  }
  // A peak stays one when the memory has gone.
  EXPECT_GE(sampler.peak().anonymous_bytes, before + kBytes / 2);
  EXPECT_GE(sampler.peak().resident_bytes, before);
}

}  // namespace
}  // namespace spin::cli
