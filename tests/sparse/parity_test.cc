// SPDX-License-Identifier: Apache-2.0
// What holds for every algorithm, whatever its partitions are: a budget that covers the context
// gives dense attention; where pages lie, how they moved and when never changes a bit; a prompt and
// the same tokens one by one give the same index; every token is attended to at most once, those of
// the zones always.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/device_decorators.h"
#include "base/counter_rng.h"
#include "kv/tiered_sequence.h"
#include "sparse/registry.h"
#include "tests/backend/reference_ops.h"
#include "tests/sparse/parity_rig.h"
#include "tests/sparse/parity_rows.h"

namespace spin::testing {
namespace {

using sparse::SparseCounters;
using sparse::SparseSequence;

constexpr uint64_t kSteps = 14;

backend::Device& device() {
  static const std::unique_ptr<backend::Device> device =
      std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  return *device;
}

// Long enough for several partitions of any page size, and five tokens short of a multiple of 64,
// so that pages of every size are sealed within the steps.
uint64_t prompt_tokens(const ParityRow& row, const ParityShape& shape) {
  const uint64_t pages = shape.page_tokens <= 16 ? 384 : 12 * shape.page_tokens;
  return std::max((row.least_tokens + 127) / 64 * 64, pages) - 5;
}

struct Outcome {
  Outputs outputs;                              // of the steps
  std::vector<std::vector<uint64_t>> attended;  // [steps * kv_heads], of numbered conversations
  SparseCounters counters;
};

// What happens between steps.
enum class Between : uint8_t { kNothing, kDemotions, kResizes };

class Parity {
 public:
  Parity(const ParityShape& shape, backend::Device& on = device()) : device_(on), shape_(shape) {}

  // Gives `conversation` to the algorithm: so many tokens as a prompt, the others step by step.
  Outcome run(const std::string& spec,
              const Conversation& conversation,
              uint64_t prompt,
              const Lease& lease,
              Between between = Between::kNothing,
              bool read_pages = false) {
    ParityRig rig(device_, shape_, rig_options(shape_, conversation.tokens()));
    Outcome outcome;
    const auto algorithm = rig.algorithm(spec);
    if (algorithm == nullptr) return outcome;
    const uint64_t pages = lease_pages(*algorithm, rig.model(), conversation.tokens(), lease);
    auto opened = rig.open(algorithm, conversation.tokens(), pages);
    EXPECT_TRUE(opened.ok()) << opened.status().to_string();
    if (!opened.ok()) return outcome;
    SparseSequence& sequence = **opened;
    rig.prompt(sequence, conversation, prompt);
    for (uint64_t token = prompt; token < conversation.tokens(); ++token) {
      std::vector<float> out;
      ParityRig::Row row{&sequence, &conversation, &out, ok_status()};
      rig.step({&row, 1});
      for (uint32_t head = 0; read_pages && head < shape_.kv_heads; ++head) {
        outcome.attended.push_back(rig.attended(sequence, head));
      }
      EXPECT_TRUE(row.status.ok()) << row.status.to_string();
      outcome.outputs.push_back(std::move(out));
      disturb(rig, sequence, pages, token, between);
    }
    outcome.counters = sequence.counters();
    const kv::TieredSequence* live[] = {&sequence.kv()};
    const Status audit = rig.store().audit(live);
    EXPECT_TRUE(audit.ok()) << audit.to_string();
    return outcome;
  }

 private:
  void disturb(
      ParityRig& rig, SparseSequence& sequence, uint64_t pages, uint64_t token, Between between) {
    if (between == Between::kDemotions && token % 4 == 1) {
      const Status demoted = sequence.kv().demote(kv::WriterEvent::after(rig.stream()));
      ASSERT_TRUE(demoted.ok()) << demoted.to_string();
      EXPECT_EQ(sequence.kv().fast_pages(), 0u);
      const Status resumed = sequence.kv().resume(pages);
      ASSERT_TRUE(resumed.ok()) << resumed.to_string();
    }
    if (between == Between::kResizes && token % 3 == 1) {
      kv::TieredSequence& kv = sequence.kv();
      if (kv.residence() == kv::Residence::kResident) {
        // Everything must be on the host before a lease shrinks below all pages.
        auto written = kv.write_through(UINT64_MAX, kv::WriterEvent::after(rig.stream()));
        ASSERT_TRUE(written.ok()) << written.status().to_string();
        rig.store().mover().wait_idle();
        ASSERT_TRUE(kv.is_written_through());
      }
      // Mandatory only, a few more, everything, and so on.
      const uint64_t leases[] = {pages, pages + 1 + base::mix64(token) % 7,
                                 kv.shape().max_page_ids};
      const uint64_t wanted = std::min(leases[token / 3 % 3], kv.shape().max_page_ids);
      const Status resized = kv.resize(wanted, rig.stream());
      ASSERT_TRUE(resized.ok()) << resized.to_string();
      ASSERT_TRUE(rig.stream().wait_idle().ok());
    }
  }

  backend::Device& device_;
  ParityShape shape_;
};

// One algorithm at one page size; a test goes over the other parameters.
struct Case {
  const ParityRow* row = nullptr;
  uint32_t page_tokens = 0;
};

void PrintTo(const Case& test, std::ostream* out) {
  *out << test.row->test_name() << ", pages of " << test.page_tokens;
}

std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  return info.param.row->test_name() + "_page" + std::to_string(info.param.page_tokens);
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const ParityRow& row : parity_rows()) {
    for (const uint32_t page_tokens : {8u, 16u, 32u, 64u}) out.push_back({&row, page_tokens});
  }
  return out;
}

// Groups x head sizes x types: all, or of each group one, such that the page sizes together have
// each head size and type with every group.
std::vector<ParityShape> shapes(uint32_t page_tokens, bool all) {
  std::vector<ParityShape> out;
  uint32_t place = page_tokens <= 32 ? page_tokens / 16 : 3;
  for (const uint32_t group : {1u, 2u, 4u, 8u}) {
    for (uint32_t variant = 0; variant < 4; ++variant) {
      if (!all && variant != place) continue;
      ParityShape shape;
      shape.page_tokens = page_tokens;
      shape.group = group;
      shape.head_dim = variant % 2 == 0 ? 64 : 128;
      shape.dtype = variant < 2 ? layout::DType::kF32 : layout::DType::kBF16;
      out.push_back(shape);
    }
    place = (place + 1) % 4;
  }
  return out;
}

class EachAlgorithm : public ::testing::TestWithParam<Case> {
 protected:
  // Runs `check` for the shapes, up to the first fatal failure.
  void for_shapes(bool all,
                  const std::function<void(const ParityRow&, const ParityShape&)>& check) {
    for (const ParityShape& shape : shapes(GetParam().page_tokens, all)) {
      SCOPED_TRACE(shape.name());
      check(*GetParam().row, shape);
      if (HasFatalFailure()) return;
    }
  }
};

// Sanitizers are ten times slower.
#if defined(SPIN_SANITIZED)
constexpr bool kAllShapes = false;
#else
constexpr bool kAllShapes = true;
#endif

TEST(ParityRows, EveryRegisteredAlgorithmHasOne) {
  (void)parity_rows();
  for (const sparse::RegisteredAlgorithm& algorithm : sparse::algorithms()) {
    EXPECT_TRUE(std::any_of(parity_rows().begin(), parity_rows().end(), [&](const ParityRow& row) {
      return row.name == algorithm.name;
    })) << algorithm.name;
  }
}

// A conversation and what dense attention makes of it; the same for all algorithms.
struct Dense {
  Dense(const ParityShape& shape, uint64_t prompt)
      : conversation(shape, prompt + kSteps, 1),
        outputs(dense_outputs(device(), shape, conversation, prompt)) {}
  const Conversation conversation;
  const Outputs outputs;
};

const Dense& dense_of(const ParityShape& shape, uint64_t prompt) {
  static std::map<std::pair<std::string, uint64_t>, std::unique_ptr<Dense>> all;
  std::unique_ptr<Dense>& dense = all[{shape.name(), prompt}];
  if (dense == nullptr) dense = std::make_unique<Dense>(shape, prompt);
  return *dense;
}

// Rows of a TensorRef as a matrix.
Matrix matrix_of(const backend::TensorRef& tensor) {
  Matrix matrix(tensor.rows, tensor.cols);
  const auto* values = static_cast<const float*>(tensor.data);
  matrix.values.assign(values, values + tensor.rows * tensor.cols);
  return matrix;
}

// How far a score can be off because keys were rebuilt from factors of full rank. With a the keys
// of a token over all heads, W orthonormal and u = a W, a key element is a sum of products u w:
// rounding both to the type adds at most 2 e |a|, float sums over n elements at most n u |a| in u,
// in W and in the product of the two, sqrt(n) times that where W's own error meets |u|; then the
// key is rounded.
double rebuilt_score_error(const ParityShape& shape, const Matrix& keys, std::span<const float> q) {
  const double roundoff = shape.dtype == layout::DType::kF32 ? kFloatRoundoff : 1.0 / (1 << 9);
  double largest = 0;
  for (int64_t t = 0; t < keys.rows; ++t) {
    double squares = 0;
    for (int64_t c = 0; c < keys.cols; ++c) squares += double{keys.at(t, c)} * keys.at(t, c);
    largest = std::max(largest, std::sqrt(squares));
  }
  const auto n = static_cast<double>(keys.cols);
  const double products = (n + 1) * (1 + std::sqrt(n)) + 2 * std::sqrt(n) + 16;
  const double element = largest * (products * kFloatRoundoff + 2 * roundoff * (1 + roundoff)) +
                         2 * roundoff;  // keys are below 2
  double sum = 0;
  for (const float value : q) sum += std::abs(value);
  return sum * element / std::sqrt(static_cast<double>(shape.head_dim));
}

// The same tokens in another order or with rebuilt keys: each result within its own bound of the
// exact one.
void expect_close(const ParityRow& row,
                  const ParityShape& shape,
                  const Conversation& conversation,
                  uint64_t token,
                  const std::vector<float>& found) {
  Matrix q(1, int64_t{shape.q_heads()} * shape.head_dim);
  q.values = conversation.query(0, token);
  const Matrix keys = matrix_of(conversation.keys(0, 0, token + 1));
  const BoundedMatrix exact = reference_attention(
      q, keys, matrix_of(conversation.values(0, 0, token + 1)), shape.kv_heads, shape.head_dim,
      shape.dtype, 1.0f / std::sqrt(static_cast<float>(shape.head_dim)));
  for (uint32_t head = 0; head < shape.q_heads(); ++head) {
    const std::span<const float> query(&q.values[head * shape.head_dim], shape.head_dim);
    // Weights are off by e^(2 error) at most; values are in [-1, 1).
    const double rebuilt = row.full_budget == FullBudget::kRebuilt
                               ? std::expm1(2 * rebuilt_score_error(shape, keys, query))
                               : 0;
    for (uint32_t d = 0; d < shape.head_dim; ++d) {
      const size_t i = size_t{head} * shape.head_dim + d;
      ASSERT_NEAR(found[i], exact.values[i].value, exact.values[i].tolerance + rebuilt) << i;
    }
  }
}

void check_full_budget(const ParityRow& row, const ParityShape& shape) {
  if (row.full_budget == FullBudget::kZones) return;
  const uint64_t prompt = prompt_tokens(row, shape);
  const auto& [conversation, dense] = dense_of(shape, prompt);
  const Outcome sparse = Parity(shape).run(row.full_spec(), conversation, prompt, {});
  EXPECT_GT(sparse.counters.selections, 0u);
  EXPECT_GT(sparse.counters.selected_partitions, 0u);
  EXPECT_EQ(sparse.counters.overflows, 0u);
  EXPECT_EQ(sparse.counters.attended_tokens,
            shape.kv_heads * (kSteps * prompt + kSteps * (kSteps + 1) / 2));
  ASSERT_EQ(sparse.outputs.size(), dense.size());
  for (uint64_t step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(step);
    if (row.full_budget == FullBudget::kBits) {
      ASSERT_EQ(sparse.outputs[step], dense[step]);
    } else if (step == 0 || step == kSteps - 1) {
      expect_close(row, shape, conversation, prompt + step, sparse.outputs[step]);
    }
  }
}

void check_residency(const ParityRow& row, const ParityShape& shape) {
  const uint64_t prompt = prompt_tokens(row, shape);
  const Conversation conversation(shape, prompt + kSteps, 2);
  const std::string spec = row.small_spec();
  const Outcome resident = Parity(shape).run(spec, conversation, prompt, {});
  EXPECT_EQ(resident.counters.retrieve.misses, 0u);
  EXPECT_GT(resident.counters.selections, 0u);
  EXPECT_GT(resident.counters.sealed_pages + resident.counters.repacks, 0u);

  const auto expect_same = [&](const Outcome& other, const char* what) {
    SCOPED_TRACE(what);
    EXPECT_EQ(other.outputs, resident.outputs);
    EXPECT_EQ(other.counters.attended_tokens, resident.counters.attended_tokens);
    EXPECT_EQ(other.counters.selected_partitions, resident.counters.selected_partitions);
    EXPECT_EQ(other.counters.selections, resident.counters.selections);
  };
  const Outcome tiered = Parity(shape).run(spec, conversation, prompt, {false, 0});
  expect_same(tiered, "mandatory pages only");
  if (row.retrieves) {
    EXPECT_GT(tiered.counters.selected_partitions, 0u);
    EXPECT_GT(tiered.counters.retrieve.misses, 0u);
    EXPECT_GT(tiered.counters.retrieve.evictions, 0u);
    EXPECT_GT(tiered.counters.retrieve.bytes, 0u);
  }
  const uint64_t extra = 1 + base::mix64(shape.page_tokens + shape.group) % 9;
  const Outcome buffered = Parity(shape).run(spec, conversation, prompt, {false, extra});
  expect_same(buffered, "with a buffer");
  EXPECT_LE(buffered.counters.retrieve.misses, tiered.counters.retrieve.misses);
  expect_same(Parity(shape).run(spec, conversation, prompt, {false, extra}, Between::kDemotions),
              "demoted and resumed");
  expect_same(Parity(shape).run(spec, conversation, prompt, {false, 0}, Between::kResizes),
              "resized");
  expect_same(Parity(shape).run(spec, conversation, prompt, {}, Between::kDemotions),
              "resident, demoted and resumed");
  backend::DelayingDevice delaying(device(), shape.group, std::chrono::microseconds(20));
  expect_same(
      Parity(shape, delaying).run(spec, conversation, prompt, {false, 2}, Between::kDemotions),
      "delayed streams");
}

void check_index(const ParityRow& row, const ParityShape& shape) {
  const uint64_t prompt = prompt_tokens(row, shape);
  ParityRig rig(device(), shape, RigOptions());
  const auto algorithm = rig.algorithm(row.small_spec());
  ASSERT_NE(algorithm, nullptr);
  if (!algorithm->descriptor().prefix_stable) return;
  const Conversation conversation(shape, prompt + kSteps, 3);
  const Outcome whole = Parity(shape).run(row.small_spec(), conversation, prompt, {});
  // A few partitions fewer, and not at their border.
  const uint64_t shorter =
      std::max(algorithm->descriptor().minimum_tokens, prompt - 2 * shape.page_tokens - 3);
  ASSERT_LT(shorter, prompt);
  Outcome appended = Parity(shape).run(row.small_spec(), conversation, shorter, {});
  appended.outputs.erase(appended.outputs.begin(),
                         appended.outputs.begin() + static_cast<ptrdiff_t>(prompt - shorter));
  EXPECT_EQ(appended.outputs, whole.outputs);
}

void check_zones(const ParityRow& row, const ParityShape& shape) {
  const uint64_t prompt = prompt_tokens(row, shape);
  const Conversation conversation(shape, prompt + kSteps, 4, Conversation::Kind::kNumbered);
  const Outcome resident =
      Parity(shape).run(row.small_spec(), conversation, prompt, {}, Between::kNothing, true);
  uint64_t total = 0;
  for (size_t i = 0; i < resident.attended.size(); ++i) {
    const uint64_t context = prompt + 1 + i / shape.kv_heads;
    std::vector<uint64_t> tokens = resident.attended[i];
    total += tokens.size();
    std::sort(tokens.begin(), tokens.end());
    EXPECT_EQ(std::adjacent_find(tokens.begin(), tokens.end()), tokens.end())
        << "token " << *std::adjacent_find(tokens.begin(), tokens.end()) << " is there twice";
    ASSERT_FALSE(tokens.empty());
    EXPECT_EQ(tokens.back(), context - 1);
    // The newest page at least is not yet sealed: all its tokens are there.
    for (uint64_t token = context - context % shape.page_tokens; token < context; ++token) {
      EXPECT_TRUE(std::binary_search(tokens.begin(), tokens.end(), token)) << token;
    }
    EXPECT_LT(tokens.size(), context);
  }
  EXPECT_EQ(total, resident.counters.attended_tokens);
  const Outcome tiered = Parity(shape).run(row.small_spec(), conversation, prompt, {false, 1},
                                           Between::kResizes, true);
  EXPECT_EQ(tiered.attended, resident.attended);
}

TEST_P(EachAlgorithm, WithAFullBudgetIsDenseAttention) {
  for_shapes(kAllShapes, check_full_budget);
}

TEST_P(EachAlgorithm, GivesTheSameBitsWhereverPagesLie) { for_shapes(false, check_residency); }

TEST_P(EachAlgorithm, HasTheSameIndexFromAPromptAsFromItsTokens) { for_shapes(false, check_index); }

TEST_P(EachAlgorithm, AttendsToATokenAtMostOnceAndToTheNewestAlways) {
  for_shapes(false, check_zones);
}

INSTANTIATE_TEST_SUITE_P(Parity, EachAlgorithm, ::testing::ValuesIn(cases()), case_name);

}  // namespace
}  // namespace spin::testing
