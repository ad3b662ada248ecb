// SPDX-License-Identifier: Apache-2.0
// Random operations on several sequences of both kinds in pools that are too small for them, every
// retrieved row compared with a trivial model and everything audited after every operation. On any
// device. Thread: the test's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/kv/store_rig.h"

namespace spin::testing {

// How often everything happened; a run in which something never happens tests nothing.
struct Happened {
  uint64_t operations = 0;
  uint64_t opened = 0, refused = 0, closed = 0, closed_in_transfer = 0;
  uint64_t steps = 0, dropped = 0, resized = 0, resize_refused = 0, became_resident = 0;
  uint64_t written_through = 0, demoted = 0, resumed = 0, resume_refused = 0;
  uint64_t hits = 0, misses = 0, evictions = 0;
};

class StoreModel {
 public:
  // `between` runs after every operation, before the audit.
  StoreModel(backend::Device& device, uint64_t seed, std::function<void()> between)
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
    std::vector<const kv::TieredSequence*> live;
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
    if (sequence.is_full() || sequence.kv().residence() == kv::Residence::kDemoted) return "";
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
    kv::TieredSequence& kv = sequence.kv();
    if (kv.residence() == kv::Residence::kDemoted || kv.has_transfer_in_flight()) return "";
    ++happened_.operations;
    const uint64_t lease = any_lease(sequence.shape());
    const kv::Residence before = kv.residence();
    const uint64_t slots = kv.fast_pages();
    const uint64_t lease_before = kv.lease_pages();
    const Status status = kv.resize(lease, rig_.stream());
    if (status.ok()) {
      ++happened_.resized;
      happened_.became_resident +=
          before == kv::Residence::kTiered && kv.residence() == kv::Residence::kResident;
      return kv.lease_pages() == std::min(lease, sequence.shape().shape.max_page_ids) ||
                     before == kv::Residence::kResident
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
    kv::TieredSequence& kv = sequence.kv();
    if (kv.residence() == kv::Residence::kDemoted || kv.has_transfer_in_flight()) return "";
    ++happened_.operations;
    const auto begun =
        kv.write_through(1 + below(random_, 30), kv::WriterEvent::after(rig_.stream()));
    happened_.written_through += begun.ok() && !begun->is_complete();
    if (begun.ok() || begun.status().code() == StatusCode::kResourceExhausted) return "";
    return begun.status().to_string();
  }

  std::string demote_or_resume(RigSequence& sequence) {
    kv::TieredSequence& kv = sequence.kv();
    ++happened_.operations;
    Status status;
    if (kv.residence() != kv::Residence::kDemoted) {
      status = kv.demote(kv::WriterEvent::after(rig_.stream()));
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
      // Now and then with copies under way.
      std::string error;
      if (below(random_, 3) == 0) error = write_through(sequence);
      close(i);
      return error;
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

}  // namespace spin::testing
