// SPDX-License-Identifier: Apache-2.0
// Replays selections of pages against caches of one KV head: bucketed LRU by the very functions
// that kernels call (layout/residency.h), exact LRU and FIFO. For bench/locality_bench.cc and its
// test. Thread: plain functions and values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "layout/head_pages.h"
#include "layout/residency.h"
#include "sparse/selection_trace.h"

namespace spin::bench {

// Pages of one head, step by step; each step's once.
using HeadSteps = std::vector<std::vector<uint32_t>>;

struct HitCounts {
  uint64_t hits = 0;
  uint64_t misses = 0;
  double ratio() const {
    return hits + misses == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(hits + misses);
  }
};

enum class CachePolicy : uint8_t { kBucketedLru, kExactLru, kFifo };

inline constexpr std::pair<CachePolicy, const char*> kCachePolicies[] = {
    {CachePolicy::kBucketedLru, "bucketed"},
    {CachePolicy::kExactLru, "exact"},
    {CachePolicy::kFifo, "fifo"},
};

// Most pages that one step wants: what a head's lease holds without a buffer.
inline uint64_t mandatory_pages(const HeadSteps& steps) {
  size_t most = 1;
  for (const auto& pages : steps) most = std::max(most, pages.size());
  return most;
}

// The cache of Retrieve, without the pages.
class BucketedCache {
 public:
  explicit BucketedCache(uint64_t pages)
      : slots_(pages), pages_(pages), stamps_(pages), table_(layout::residency_table_size(pages)) {
    head_.slots = slots_.data();
    head_.pages = pages_.data();
    head_.stamps = stamps_.data();
    head_.table = table_.data();
    head_.lease_pages = static_cast<uint32_t>(pages);
    head_.table_size = static_cast<uint32_t>(table_.size());
    layout::clear_residency(head_, 0);
  }

  HitCounts step(const std::vector<uint32_t>& wanted) {
    ++epoch_;
    layout::sweep_if_due(head_, epoch_);
    std::vector<uint32_t> missing;
    for (const uint32_t page : wanted) {
      const uint32_t entry = layout::find_entry(head_, page);
      if (entry == layout::kNoEntry) {
        missing.push_back(page);
      } else {
        head_.stamps[entry] = epoch_;
      }
    }
    std::vector<uint32_t> victims(missing.size());
    layout::choose_victims(head_, epoch_, static_cast<uint32_t>(missing.size()), victims.data());
    for (size_t i = 0; i < missing.size(); ++i) {
      layout::set_entry(head_, victims[i], missing[i]);
      head_.stamps[victims[i]] = epoch_;
    }
    return {wanted.size() - missing.size(), missing.size()};
  }

 private:
  std::vector<uint32_t> slots_;
  std::vector<uint32_t> pages_;
  std::vector<uint8_t> stamps_;
  std::vector<uint32_t> table_;
  layout::HeadPages head_;
  uint8_t epoch_ = 0;
};

// Evicts the page used (or, with FIFO, fetched) longest ago that this step does not want; among
// those of one step the lower id.
class OrderedCache {
 public:
  OrderedCache(uint64_t pages, bool refreshed_by_use)
      : capacity_(pages), refreshed_by_use_(refreshed_by_use) {}

  HitCounts step(const std::vector<uint32_t>& wanted) {
    ++time_;
    HitCounts counts;
    const std::set<uint32_t> protected_pages(wanted.begin(), wanted.end());
    std::vector<uint32_t> missing;
    for (const uint32_t page : wanted) {
      const auto found = time_of_.find(page);
      if (found == time_of_.end()) {
        missing.push_back(page);
        continue;
      }
      ++counts.hits;
      if (!refreshed_by_use_) continue;
      order_.erase({found->second, page});
      found->second = time_;
      order_.insert({time_, page});
    }
    for (const uint32_t page : missing) {
      ++counts.misses;
      if (time_of_.size() >= capacity_) evict(protected_pages);
      time_of_[page] = time_;
      order_.insert({time_, page});
    }
    return counts;
  }

 private:
  void evict(const std::set<uint32_t>& protected_pages) {
    for (auto at = order_.begin(); at != order_.end(); ++at) {
      if (protected_pages.contains(at->second)) continue;
      time_of_.erase(at->second);
      order_.erase(at);
      return;
    }
  }

  uint64_t capacity_;
  bool refreshed_by_use_;
  uint64_t time_ = 0;
  std::unordered_map<uint32_t, uint64_t> time_of_;
  std::set<std::pair<uint64_t, uint32_t>> order_;
};

// Requires: capacity >= mandatory_pages(steps).
inline HitCounts replay(const HeadSteps& steps, CachePolicy policy, uint64_t capacity) {
  BucketedCache bucketed(capacity);
  OrderedCache ordered(capacity, policy == CachePolicy::kExactLru);
  HitCounts sum;
  for (const auto& wanted : steps) {
    const HitCounts counts =
        policy == CachePolicy::kBucketedLru ? bucketed.step(wanted) : ordered.step(wanted);
    sum.hits += counts.hits;
    sum.misses += counts.misses;
  }
  return sum;
}

// Hits of all heads with a buffer of `ratio` times each head's mandatory pages.
inline HitCounts replay_all(const std::vector<HeadSteps>& heads, CachePolicy policy, double ratio) {
  HitCounts sum;
  for (const HeadSteps& steps : heads) {
    const auto mandatory = static_cast<double>(mandatory_pages(steps));
    const auto capacity = static_cast<uint64_t>(std::ceil(mandatory * (1 + ratio)));
    const HitCounts counts = replay(steps, policy, capacity);
    sum.hits += counts.hits;
    sum.misses += counts.misses;
  }
  return sum;
}

// Drops the pages that every step wants: zones are pinned, and what is always wanted is never
// evicted; neither tells policies or sizes apart, and both would only raise all ratios.
inline void drop_constant_pages(HeadSteps& steps) {
  if (steps.size() < 2) return;
  std::vector<uint32_t> constant = steps.front();
  for (const auto& pages : steps) {
    std::vector<uint32_t> both;
    std::set_intersection(constant.begin(), constant.end(), pages.begin(), pages.end(),
                          std::back_inserter(both));
    constant = std::move(both);
  }
  for (auto& pages : steps) {
    std::vector<uint32_t> left;
    std::set_difference(pages.begin(), pages.end(), constant.begin(), constant.end(),
                        std::back_inserter(left));
    pages = std::move(left);
  }
}

// The heads of a trace, each with its steps in order, without constant pages.
inline std::vector<HeadSteps> heads_of(const sparse::SelectionTrace& trace) {
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::map<uint32_t, std::vector<uint32_t>>> all;
  for (const sparse::SelectionRecord& record : trace.records) {
    all[{record.sequence, record.layer, record.kv_head}][record.step] = record.pages;
  }
  std::vector<HeadSteps> heads;
  for (auto& [key, steps] : all) {
    HeadSteps& head = heads.emplace_back();
    for (auto& [step, pages] : steps) head.push_back(std::move(pages));
    drop_constant_pages(head);
  }
  return heads;
}

struct ZipfSettings {
  uint32_t pages = 2000;   // of the context
  uint32_t per_step = 32;  // selected in a step
  uint32_t steps = 600;
  double exponent = 0.9;  // of the popularity of ranks
  double drift = 0.02;    // share of ranks that change their pages from step to step
  uint64_t seed = 1;
};

// Selections with popular pages, whose popularity wanders.
inline HeadSteps zipf_steps(const ZipfSettings& settings) {
  std::mt19937_64 random(settings.seed);
  std::vector<double> sums(settings.pages);
  double sum = 0;
  for (uint32_t rank = 0; rank < settings.pages; ++rank) {
    sum += std::pow(rank + 1.0, -settings.exponent);
    sums[rank] = sum;
  }
  std::vector<uint32_t> page_of(settings.pages);
  for (uint32_t i = 0; i < settings.pages; ++i) page_of[i] = i;
  std::shuffle(page_of.begin(), page_of.end(), random);
  std::uniform_real_distribution<double> uniform(0, sum);
  const auto changes = static_cast<uint32_t>(settings.drift * settings.pages);
  HeadSteps steps;
  for (uint32_t step = 0; step < settings.steps; ++step) {
    std::set<uint32_t> wanted;
    while (wanted.size() < settings.per_step) {
      const auto rank = std::lower_bound(sums.begin(), sums.end(), uniform(random)) - sums.begin();
      wanted.insert(page_of[std::min<size_t>(static_cast<size_t>(rank), page_of.size() - 1)]);
    }
    steps.emplace_back(wanted.begin(), wanted.end());
    for (uint32_t i = 0; i < changes; ++i) {
      std::swap(page_of[random() % settings.pages], page_of[random() % settings.pages]);
    }
  }
  return steps;
}

}  // namespace spin::bench
