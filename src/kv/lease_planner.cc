// SPDX-License-Identifier: Apache-2.0
#include "kv/lease_planner.h"

#include <algorithm>
#include <queue>

#include "base/check.h"

namespace spin::kv {
namespace {

constexpr size_t kPoints = std::tuple_size_v<decltype(GainCurve::misses)>;

// Slots go to the largest value first. Values of one request never rise as it is given more, so the
// order in which slots are dealt out does not depend on how many there are: more of them take
// nothing from anybody.
class Value {
 public:
  Value(const LeaseRequest& request, const LeasePolicy& policy)
      : mandatory_(static_cast<double>(request.mandatory)), fixed_ratio_(policy.fixed_ratio) {
    for (size_t i = 0; i < kPoints; ++i) {
      misses_[i] = request.curve.measured ? static_cast<double>(request.curve.misses[i])
                                          : assumed_misses(i, policy.start_ratio);
    }
    make_convex();
  }

  // Of `pages` more slots per head beside a buffer of `buffer`; 0: nothing is gained.
  double of(uint64_t buffer, uint64_t pages) const {
    const auto from = static_cast<double>(buffer);
    if (fixed_ratio_ >= 0) {
      // Everybody grows at the same pace, in multiples of mandatory, up to the ratio.
      return from < fixed_ratio_ * mandatory_ ? 1.0 / (1.0 + from / mandatory_) : 0.0;
    }
    return (at(from) - at(from + static_cast<double>(pages))) / static_cast<double>(pages);
  }

  // Where the value becomes 0 for certain.
  double end() const {
    return mandatory_ * (fixed_ratio_ >= 0 ? fixed_ratio_ : static_cast<double>(kPoints - 1) / 2);
  }

 private:
  double assumed_misses(size_t i, double start_ratio) const {
    const double buffer = static_cast<double>(i) / 2;
    return buffer < start_ratio ? mandatory_ * (1.0 - buffer / start_ratio) : 0.0;
  }

  // The largest convex curve below the points: a plateau before a steep part is worth crossing.
  void make_convex() {
    for (size_t i = 1; i < kPoints; ++i) misses_[i] = std::min(misses_[i], misses_[i - 1]);
    for (size_t first = 0; first + 1 < kPoints;) {
      size_t next = first + 1;
      double steepest = misses_[next] - misses_[first];
      for (size_t i = first + 2; i < kPoints; ++i) {
        const double slope = (misses_[i] - misses_[first]) / static_cast<double>(i - first);
        if (slope <= steepest) {
          steepest = slope;
          next = i;
        }
      }
      for (size_t i = first + 1; i < next; ++i) {
        misses_[i] = misses_[first] + steepest * static_cast<double>(i - first);
      }
      first = next;
    }
  }

  double at(double buffer) const {
    const double point = 2 * buffer / mandatory_;
    if (!(point < static_cast<double>(kPoints - 1))) return misses_[kPoints - 1];
    const auto i = static_cast<size_t>(point);
    return misses_[i] + (misses_[i + 1] - misses_[i]) * (point - static_cast<double>(i));
  }

  double mandatory_;
  double fixed_ratio_;
  std::array<double, kPoints> misses_{};
};

struct Bid {
  double value = 0;
  size_t request = 0;
  // The queue's top: the largest value, then the first request.
  friend bool operator<(const Bid& a, const Bid& b) {
    return a.value != b.value ? a.value < b.value : a.request > b.request;
  }
};

uint64_t most_pages(const LeaseRequest& request) {
  return std::max(request.largest, request.mandatory);
}

// Deals out `left` slots by value, in steps; returns what nobody gains from.
uint64_t deal_out(std::span<const LeaseRequest> requests,
                  const LeasePolicy& policy,
                  uint64_t left,
                  std::vector<uint64_t>& leases) {
  std::vector<Value> values;
  std::priority_queue<Bid> bids;
  const auto step_of = [&](size_t i) {
    uint64_t step = std::min(policy.granule, most_pages(requests[i]) - leases[i]);
    if (policy.fixed_ratio >= 0) {
      const auto buffer = static_cast<double>(leases[i] - requests[i].mandatory);
      const double missing = std::max(values[i].end() - buffer, 0.0);
      step = std::min<uint64_t>(step, static_cast<uint64_t>(missing));
    }
    return step;
  };
  const auto bid = [&](size_t i) {
    const uint64_t step = step_of(i);
    if (step == 0 || requests[i].heads == 0 || requests[i].mandatory == 0) return;
    const double value = values[i].of(leases[i] - requests[i].mandatory, step);
    if (value > 0) bids.push({value, i});
  };
  for (const LeaseRequest& request : requests) values.emplace_back(request, policy);
  for (size_t i = 0; i < requests.size(); ++i) bid(i);
  while (!bids.empty()) {
    const size_t i = bids.top().request;
    bids.pop();
    // The last step is cut short; going on with smaller requests would let them lose slots when
    // there are more.
    const uint64_t pages = std::min(step_of(i), left / requests[i].heads);
    leases[i] += pages;
    left -= pages * requests[i].heads;
    if (pages < step_of(i) && left < requests[i].heads) break;
    bid(i);
  }
  return left;
}

}  // namespace

std::vector<uint64_t> plan_leases(std::span<const LeaseRequest> requests,
                                  uint64_t fast_pages,
                                  const LeasePolicy& policy) {
  SPIN_CHECK(policy.granule > 0);
  std::vector<uint64_t> leases;
  uint64_t left = fast_pages;
  for (const LeaseRequest& request : requests) {
    leases.push_back(request.mandatory);
    const uint64_t slots = request.mandatory * request.heads;
    SPIN_CHECK(slots <= left);
    left -= slots;
  }
  left = deal_out(requests, policy, left, leases);
  // What nobody gains from stays where it is; a change of less than a step is not made.
  for (size_t i = 0; i < requests.size(); ++i) {
    const LeaseRequest& request = requests[i];
    const uint64_t current = std::min(request.current, most_pages(request));
    if (request.heads == 0 || current < request.mandatory) continue;
    if (current > leases[i]) {
      const uint64_t more = std::min(current - leases[i], left / request.heads);
      leases[i] += more;
      left -= more * request.heads;
    } else if (leases[i] - current < policy.granule && leases[i] < most_pages(request)) {
      left += (leases[i] - current) * request.heads;
      leases[i] = current;
    }
  }
  return leases;
}

}  // namespace spin::kv
