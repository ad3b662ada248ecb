// SPDX-License-Identifier: Apache-2.0
// The page store against a trivial model: random operations on several sequences of both kinds in
// pools that are too small for them, with copies completing in random order, every retrieved row
// compared and everything audited after every operation.
//
// Operations are counted as the store sees them: open, place a layer, commit, append, seal, repack,
// retrieve, resize, write through, demote, resume, close. SPIN_MODEL_OPERATIONS and
// SPIN_MODEL_THREADED_OPERATIONS set their number; docs/testing.md records the longest runs.
//
// Which change of the sources is caught by which test is listed in tools/mutate_kv.py, which makes
// each of them and runs these tests: every event wait, hold, generation and tag check.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/device_decorators.h"
#include "base/parse_number.h"
#include "tests/kv/store_rig.h"
#include "tests/support/shuffled_device.h"

namespace spin::kv {
namespace {

using testing::below;
using testing::cluster_shape;
using testing::Random;
using testing::range_shape;
using testing::RigOptions;
using testing::RigSequence;
using testing::RigShape;
using testing::ShuffledDevice;
using testing::StoreRig;

#if defined(SPIN_SANITIZED)
constexpr uint64_t kOperations = 100'000;
#else
constexpr uint64_t kOperations = 1'000'000;
#endif

// `otherwise`, or what the environment says.
uint64_t count_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  if (text == nullptr) return otherwise;
  const auto number = base::parse_decimal(text);
  EXPECT_TRUE(number.has_value()) << variable << " is not a number";
  return number.value_or(otherwise);
}

// How often everything happened; a run in which something never happens tests nothing.
struct Happened {
  uint64_t operations = 0;
  uint64_t opened = 0, refused = 0, closed = 0, closed_in_transfer = 0;
  uint64_t steps = 0, dropped = 0, resized = 0, resize_refused = 0, became_resident = 0;
  uint64_t written_through = 0, demoted = 0, resumed = 0, resume_refused = 0;
  uint64_t hits = 0, misses = 0, evictions = 0;
};

class Model {
 public:
  // `between` runs after every operation, before the audit.
  Model(backend::Device& device, uint64_t seed, std::function<void()> between)
      : random_(seed), rig_(options(), &device), between_(std::move(between)) {}

  // Runs until `operations` are done or something is wrong, which it returns.
  std::string run(uint64_t operations) {
    std::string error;
    while (error.empty() && happened_.operations < operations) {
      error = one();
      between_();
      if (error.empty()) error = audit();
    }
    while (!sequences_.empty()) close(0);
    if (error.empty()) error = audit();
    return error;
  }

  const Happened& happened() const { return happened_; }
  StoreRig& rig() { return rig_; }

 private:
  static RigOptions options() {
    RigOptions options;
    options.fast_pages = 230;
    options.host_extents = 90;
    return options;
  }

  std::string audit() {
    std::vector<const TieredSequence*> live;
    for (const auto& sequence : sequences_) live.push_back(&sequence->kv());
    const Status status = rig_.store().audit(live);
    return status.ok() ? "" : status.to_string();
  }

  uint64_t any_lease(const RigShape& shape) {
    const uint64_t least = shape.shape.mandatory_pages(shape.shape.dense_layers);
    if (below(random_, 3) == 0) return shape.shape.max_page_ids;
    return least + below(random_, 12);
  }

  std::string open() {
    const uint64_t max_tokens = 1 + below(random_, 90);
    RigShape shape = below(random_, 2) == 0 ? range_shape(rig_.geometry(), max_tokens)
                                            : cluster_shape(rig_.geometry(), max_tokens);
    shape.shape.dense_layers = static_cast<uint32_t>(below(random_, 4) == 0);
    shape.shape.selected_pages = static_cast<uint32_t>(1 + below(random_, 4));
    auto sequence = RigSequence::open(rig_, shape, any_lease(shape), random_());
    ++happened_.operations;
    if (sequence == nullptr) {
      ++happened_.refused;
      return "";
    }
    ++happened_.opened;
    happened_.operations += rig_.geometry().layers + 1;
    const std::string error = sequence->prompt(1 + below(random_, max_tokens), random_);
    sequences_.push_back(std::move(sequence));
    return error;
  }

  void close(size_t i) {
    ++happened_.operations;
    ++happened_.closed;
    happened_.closed_in_transfer += sequences_[i]->kv().has_transfer_in_flight();
    happened_.hits += sequences_[i]->hits();
    happened_.misses += sequences_[i]->misses();
    happened_.evictions += sequences_[i]->evictions();
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  std::string step(RigSequence& sequence) {
    if (sequence.is_full() || sequence.kv().residence() == Residence::kDemoted) return "";
    if (below(random_, 20) == 0) {
      ++happened_.dropped;
      const std::string error = sequence.dropped_step(random_);
      if (!error.empty() || below(random_, 2) == 0) return error;  // or it is done again
    }
    ++happened_.steps;
    happened_.operations += 2 + 2 * rig_.geometry().layers;  // append and retrieve; begin, commit
    const uint64_t before = sequence.left_tail();
    std::string error = sequence.step(random_);
    happened_.operations += sequence.left_tail() - before;
    return error;
  }

  std::string resize(RigSequence& sequence) {
    TieredSequence& kv = sequence.kv();
    if (kv.residence() == Residence::kDemoted || kv.has_transfer_in_flight()) return "";
    ++happened_.operations;
    const uint64_t lease = any_lease(sequence.shape());
    const Residence before = kv.residence();
    const uint64_t slots = kv.fast_pages();
    const uint64_t lease_before = kv.lease_pages();
    const Status status = kv.resize(lease, rig_.stream());
    if (status.ok()) {
      ++happened_.resized;
      happened_.became_resident +=
          before == Residence::kTiered && kv.residence() == Residence::kResident;
      return kv.lease_pages() == std::min(lease, sequence.shape().shape.max_page_ids) ||
                     before == Residence::kResident
                 ? ""
                 : "a resize gave another lease";
    }
    ++happened_.resize_refused;
    if (kv.residence() != before || kv.fast_pages() != slots || kv.lease_pages() != lease_before) {
      return "a refused resize changed something";
    }
    const bool ordinary = status.code() == StatusCode::kResourceExhausted ||
                          status.code() == StatusCode::kUnavailable;
    return ordinary ? "" : status.to_string();
  }

  std::string write_through(RigSequence& sequence) {
    TieredSequence& kv = sequence.kv();
    if (kv.residence() == Residence::kDemoted || kv.has_transfer_in_flight()) return "";
    ++happened_.operations;
    const auto begun = kv.write_through(1 + below(random_, 30), WriterEvent::after(rig_.stream()));
    happened_.written_through += begun.ok() && !begun->is_complete();
    if (begun.ok() || begun.status().code() == StatusCode::kResourceExhausted) return "";
    return begun.status().to_string();
  }

  std::string demote_or_resume(RigSequence& sequence) {
    TieredSequence& kv = sequence.kv();
    ++happened_.operations;
    Status status;
    if (kv.residence() != Residence::kDemoted) {
      status = kv.demote(WriterEvent::after(rig_.stream()));
      happened_.demoted += status.ok();
    } else {
      status = kv.resume(any_lease(sequence.shape()));
      happened_.resumed += status.ok();
      happened_.resume_refused += !status.ok();
    }
    if (status.ok() || status.code() == StatusCode::kResourceExhausted) return "";
    return status.code() == StatusCode::kUnavailable ? "" : status.to_string();
  }

  std::string one() {
    const uint64_t what = below(random_, 100);
    if (sequences_.empty() || (what < 8 && sequences_.size() < 6)) return open();
    const size_t i = below(random_, sequences_.size());
    RigSequence& sequence = *sequences_[i];
    if (what < 11 || (sequence.is_full() && what < 30)) {
      close(i);
      return "";
    }
    if (what < 18) return resize(sequence);
    if (what < 25) return write_through(sequence);
    if (what < 33) return demote_or_resume(sequence);
    return step(sequence);
  }

  Random random_;
  StoreRig rig_;
  std::function<void()> between_;
  std::vector<std::unique_ptr<RigSequence>> sequences_;
  Happened happened_;
};

TEST(PageStoreModel, AgreesWithATrivialModelOverAMillionOperations) {
  auto inner = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
  const uint64_t total = count_from("SPIN_MODEL_OPERATIONS", kOperations);
  // Several short lives and one long one, each with its own seed.
  Happened sum;
  const uint64_t part = total / 4;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    ShuffledDevice device(*inner, seed);
    Model model(device, seed, [&] { device.run_some(6); });
    ASSERT_EQ(model.run(part), "")
        << "seed " << seed << ", operation " << model.happened().operations;
    const Happened& happened = model.happened();
    EXPECT_EQ(model.rig().store().fast().counts().in_use(), 0u);
    EXPECT_EQ(model.rig().store().host()->counts().free,
              model.rig().store().host()->counts().total);
    EXPECT_EQ(model.rig().store().table_memory().bytes_in_use(), 0u);
    sum.operations += happened.operations;
    const uint64_t all[] = {happened.refused,
                            happened.closed_in_transfer,
                            happened.dropped,
                            happened.resized,
                            happened.resize_refused,
                            happened.became_resident,
                            happened.written_through,
                            happened.demoted,
                            happened.resumed,
                            happened.resume_refused,
                            happened.hits,
                            happened.misses,
                            happened.evictions};
    for (size_t i = 0; i < std::size(all); ++i) {
      EXPECT_GT(all[i], 0u) << "seed " << seed << ": number " << i << " never happened";
    }
  }
  EXPECT_GE(sum.operations, part * 4);
}

// The same on threads, with streams that sleep at random: what ThreadSanitizer looks at.
TEST(PageStoreModel, AgreesWhenItsStreamsAreDelayedThreads) {
  auto inner = std::move(*backend::cpu::create_cpu_device({.threads = 2}));
  backend::DelayingDevice device(*inner, 1, std::chrono::microseconds(5));
  Model model(device, 1, [] {});
  ASSERT_EQ(model.run(count_from("SPIN_MODEL_THREADED_OPERATIONS", 3000)), "")
      << "operation " << model.happened().operations;
  EXPECT_GT(model.happened().evictions, 0u);
  EXPECT_GT(model.happened().written_through, 0u);
}

}  // namespace
}  // namespace spin::kv
