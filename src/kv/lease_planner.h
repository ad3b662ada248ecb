// SPDX-License-Identifier: Apache-2.0
// How many slots every running sequence leases: a pure function from what they need and gain to
// lease sizes. Shrinking comes before preemption; nobody falls below mandatory.
//
// Water-filling by marginal hit gain: starting from mandatory, slots go step by step to the
// sequence whose next buffer slots save most fetches per slot, by its measured miss-ratio curve
// (kv/gain_curve.h: hits for smaller buffers, sampled ghosts for larger ones); without one the
// curve is that of a buffer of 4 x mandatory. Thread: pure function.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/head_pages.h"

namespace spin::kv {

// Expected fetches per step as a function of buffer size, piecewise linear and decreasing.
struct GainCurve {
  // misses[i]: pages fetched per head and step with a buffer of i/2 x mandatory, i = 0 .. 16.
  std::array<float, 17> misses{};
  bool measured = false;
};

struct LeaseRequest {
  uint64_t heads = 0;      // (layer, KV head) pairs that lease
  uint64_t mandatory = 0;  // pages per head
  uint64_t largest = 0;    // pages per head beyond which nothing is gained (all pages)
  uint64_t current = 0;    // pages per head now
  GainCurve curve;
};

struct LeasePolicy {
  // Buffer as a multiple of mandatory; unset: by gain.
  double fixed_ratio = -1;
  double start_ratio = 4.0;
  // Slots are dealt out in steps of so many pages per head; changes below one step are not made.
  uint64_t granule = 8;
};

// Lease per head of each request. Requires: the mandatory pages of all fit `fast_pages`.
// Ensures: sum(heads * lease) <= fast_pages; mandatory <= lease <= max(largest, mandatory);
// deterministic; a request that gains nothing keeps what it has unless another needs it.
std::vector<uint64_t> plan_leases(std::span<const LeaseRequest> requests,
                                  uint64_t fast_pages,
                                  const LeasePolicy& policy);

}  // namespace spin::kv
