// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <algorithm>
#include <numeric>

namespace spin::engine {
namespace {

struct Prefill {
  uint32_t sequence = 0;
  uint64_t remaining = 0;
  uint32_t given = 0;
  bool wants_prompt_logits = false;
  bool whole = false;  // in one step or not at all
};

Prefill make_prefill(uint32_t sequence,
                     uint64_t remaining,
                     bool wants_prompt_logits,
                     const SchedulerOptions& options) {
  return {sequence, remaining, 0, wants_prompt_logits,
          !options.chunked_prefill && !wants_prompt_logits};
}

bool is_prefilling(const RunningSequence& sequence) {
  return sequence.prefilled_tokens < sequence.prompt_tokens;
}

// Fast pages that the first one lacks which needs nothing else; 0: nobody does.
uint64_t admit_waiting(const SchedulerState& state,
                       const SchedulerOptions& options,
                       StepPlan& plan) {
  uint64_t lack = 0;
  bool closed = false;  // to all but suspended ones
  MemoryNeed free = state.free;
  size_t running = state.running.size();
  bool staging_taken =
      std::any_of(state.running.begin(), state.running.end(), [](const RunningSequence& sequence) {
        return sequence.exclusive_prefill && is_prefilling(sequence);
      });
  for (uint32_t i = 0; i < state.waiting.size(); ++i) {
    if (running >= options.max_num_seqs) return lack;
    const WaitingSequence& waiting = state.waiting[i];
    const bool whole = !options.chunked_prefill && !waiting.wants_prompt_logits;
    const bool fits_step = !whole || waiting.prompt_tokens <= options.max_num_batched_tokens;
    if (!waiting.need.fits(state.total) || !fits_step) {
      plan.reject.push_back(i);
      continue;
    }
    if (closed && !waiting.is_suspended) continue;
    // Whoever holds the staging buffer moves in every step, so this ends without holding back
    // those behind it.
    if (waiting.exclusive_prefill && staging_taken) continue;
    if (!waiting.need.fits(free)) {
      MemoryNeed others = waiting.need;
      others.pages = 0;
      if (lack == 0 && others.fits(free)) lack = waiting.need.pages - free.pages;
      if (waiting.passed < options.max_passes) continue;
      // It has waited long enough: nobody passes. But what it lacks beside pages may be held by
      // suspended ones, which give it back only when they have ended.
      if (others.fits(free)) return lack;
      closed = true;
      continue;
    }
    plan.admit.push_back(i);
    free -= waiting.need;
    staging_taken = staging_taken || waiting.exclusive_prefill;
    ++running;
  }
  return lack;
}

// Those that have decoded longest, as many as cover `lack`; none if all together do not.
void suspend_running(const SchedulerState& state,
                     const SchedulerOptions& options,
                     uint64_t lack,
                     StepPlan& plan) {
  if (lack == 0) return;
  std::vector<uint32_t> candidates;
  for (uint32_t i = 0; i < state.running.size(); ++i) {
    const RunningSequence& sequence = state.running[i];
    if (!is_prefilling(sequence) && sequence.pages_if_suspended > 0 &&
        sequence.decoded_tokens >= options.min_decoded_tokens) {
      candidates.push_back(i);
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), [&](uint32_t a, uint32_t b) {
    return state.running[a].decoded_tokens > state.running[b].decoded_tokens;
  });
  uint64_t pages = 0;
  size_t count = 0;
  while (count < candidates.size() && pages < lack) {
    pages += state.running[candidates[count++]].pages_if_suspended;
  }
  if (pages < lack) return;
  plan.suspend.assign(candidates.begin(), candidates.begin() + static_cast<ptrdiff_t>(count));
  std::sort(plan.suspend.begin(), plan.suspend.end());
}

// Tokens that may go to `prefill` out of `budget`, given the logit rows that are left. The step
// that ends a prompt needs one row to sample from.
uint32_t chunk_size(const Prefill& prefill, uint32_t budget, uint32_t rows_left) {
  if (prefill.whole) {
    return prefill.remaining <= budget ? static_cast<uint32_t>(prefill.remaining) : 0;
  }
  const uint64_t most = std::min<uint64_t>(prefill.remaining, budget);
  return static_cast<uint32_t>(prefill.wants_prompt_logits ? std::min<uint64_t>(most, rows_left)
                                                           : most);
}

// Rows that the sequences other than the one at hand need at worst: one each.
class RowBudget {
 public:
  RowBudget(uint32_t rows, size_t sequences) : spare_(rows > sequences ? rows - sequences : 0) {}
  // Rows for one sequence: its own one and what is spare.
  uint32_t available() const { return 1 + static_cast<uint32_t>(spare_); }
  void take(uint32_t rows) { spare_ -= std::min<uint64_t>(spare_, rows > 1 ? rows - 1 : 0); }

 private:
  uint64_t spare_;
};

uint32_t rows_of(const Prefill& prefill, uint32_t tokens) {
  if (tokens == 0) return 0;
  if (prefill.wants_prompt_logits) return tokens;
  return tokens == prefill.remaining ? 1 : 0;
}

void give(Prefill& prefill, uint32_t tokens, RowBudget& rows, uint32_t& budget) {
  prefill.given = tokens;
  rows.take(rows_of(prefill, tokens));
  budget -= tokens;
}

void share_budget(std::vector<Prefill>& prefills, uint32_t budget, RowBudget rows) {
  if (prefills.empty()) return;
  // The oldest first with at least half; a whole prompt is all or nothing.
  Prefill& oldest = prefills[0];
  const uint32_t first_share = oldest.whole ? budget : budget - budget / 2;
  give(oldest, chunk_size(oldest, first_share, rows.available()), rows, budget);
  std::vector<uint32_t> order(prefills.size() - 1);
  std::iota(order.begin(), order.end(), 1u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return prefills[a].remaining < prefills[b].remaining;
  });
  for (const uint32_t i : order) {
    if (budget == 0) return;
    give(prefills[i], chunk_size(prefills[i], budget, rows.available()), rows, budget);
  }
  // What the others did not need goes back to the oldest (with prompt logits its rows are spent).
  if (!oldest.whole && !oldest.wants_prompt_logits && budget > 0) {
    oldest.given +=
        static_cast<uint32_t>(std::min<uint64_t>(budget, oldest.remaining - oldest.given));
  }
}

void append_work(StepPlan& plan, uint32_t sequence, uint32_t tokens, uint32_t logit_rows) {
  if (tokens == 0) return;
  plan.work.push_back({sequence, tokens, logit_rows});
  plan.tokens += tokens;
  plan.logit_rows += logit_rows;
}

}  // namespace

StepPlan plan_step(const SchedulerState& state, const SchedulerOptions& options) {
  StepPlan plan;
  suspend_running(state, options, admit_waiting(state, options, plan), plan);
  const auto is_suspended = [&](uint32_t i) {
    return std::binary_search(plan.suspend.begin(), plan.suspend.end(), i);
  };

  std::vector<Prefill> prefills;
  uint32_t decodes = 0;
  const auto running = static_cast<uint32_t>(state.running.size());
  for (uint32_t i = 0; i < running; ++i) {
    const RunningSequence& sequence = state.running[i];
    if (is_prefilling(sequence)) {
      prefills.push_back(make_prefill(i, sequence.prompt_tokens - sequence.prefilled_tokens,
                                      sequence.wants_prompt_logits, options));
    } else if (!is_suspended(i)) {
      ++decodes;
    }
  }
  std::vector<uint32_t> resumed;
  for (uint32_t i = 0; i < plan.admit.size(); ++i) {
    const WaitingSequence& waiting = state.waiting[plan.admit[i]];
    if (waiting.is_suspended) {
      resumed.push_back(running + i);
      ++decodes;
      continue;
    }
    prefills.push_back(
        make_prefill(running + i, waiting.prompt_tokens, waiting.wants_prompt_logits, options));
  }

  // Without chunks the oldest prompt may not fit beside the decodes: then it gets the step alone,
  // else a steady supply of decodes would keep it out for ever.
  const uint32_t all = options.max_num_batched_tokens;
  const uint32_t beside = all - std::min(all, decodes);
  const bool prompts_only =
      !prefills.empty() && prefills[0].whole && prefills[0].remaining > beside;
  if (prompts_only) decodes = 0;
  share_budget(prefills, prompts_only ? all : beside,
               RowBudget(options.max_logit_rows, decodes + prefills.size()));

  if (!prompts_only) {
    for (uint32_t i = 0; i < running; ++i) {
      const RunningSequence& sequence = state.running[i];
      if (!is_prefilling(sequence) && !is_suspended(i)) append_work(plan, i, 1, 1);
    }
    for (const uint32_t sequence : resumed) append_work(plan, sequence, 1, 1);
  }
  for (const Prefill& prefill : prefills) {
    append_work(plan, prefill.sequence, prefill.given, rows_of(prefill, prefill.given));
  }
  return plan;
}

}  // namespace spin::engine
