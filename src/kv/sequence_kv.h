// SPDX-License-Identifier: Apache-2.0
// The KV cache of one sequence: its pages, how many tokens are in them, and what kernels need to
// know about that.
//
// A sequence takes all pages it can ever need when it is admitted, so a running sequence never
// lacks a page. Its tokens pass through
//
//   begin_step(n): n tokens are in flight; slice() describes them to the kernels
//   commit_step(): the step's work is done; the tokens count, pages they filled are sealed
//   drop_step():   the step failed or was called off; its tokens do not count
//
// Tokens in flight never seal a page. The destructor gives the pages back.
//
// Thread: external synchronisation (the engine thread). Lifetime: the pool outlives the sequence;
// no queued work uses a sequence's pages when it is destroyed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/block_table.h"
#include "kv/page_pool.h"
#include "layout/ragged_batch.h"
#include "spin/status.h"

namespace spin::kv {

class SequenceKv {
 public:
  // Takes the pages for `max_tokens` tokens, all or none.
  // Requires: max_tokens > 0. Errors: kResourceExhausted with the pages needed, free and in all;
  // an ordinary outcome, nothing has changed then.
  static Result<SequenceKv> reserve(PagePool& pool, uint64_t max_tokens);

  SequenceKv(SequenceKv&& other) noexcept;
  SequenceKv& operator=(SequenceKv&& other) noexcept;
  SequenceKv(const SequenceKv&) = delete;
  SequenceKv& operator=(const SequenceKv&) = delete;
  ~SequenceKv();

  uint64_t committed_tokens() const { return committed_tokens_; }
  uint64_t in_flight_tokens() const { return in_flight_tokens_; }
  // Tokens its pages hold; max_tokens rounded up to whole pages.
  uint64_t capacity_tokens() const;

  // Requires: no step is in flight; tokens > 0; committed_tokens() + tokens <= capacity_tokens().
  void begin_step(uint64_t tokens);
  // The tokens in flight for one layer's kernels; they are rows first_row.. of the step.
  // Requires: a step is in flight. Lifetime: valid until the step ends; moving the sequence keeps
  // it valid.
  layout::SequenceSlice slice(uint32_t layer, uint64_t first_row) const;
  // Requires: a step is in flight and its kernels have run.
  void commit_step();
  // Requires: a step is in flight and none of its kernels is still queued.
  void drop_step();

  // The pages it holds: [layers, kv_heads, pages_per_head] as in its block table.
  std::span<const PageHandle> pages() const { return pages_; }
  PageHandle page(uint32_t layer, uint32_t head, uint64_t page) const {
    return pages_[table_.index(layer, head, page)];
  }

 private:
  SequenceKv(PagePool& pool, uint64_t pages_per_head);
  // Deals out handles in runs of pages: run by run, layer by layer, head by head.
  void place(std::span<const PageHandle> handles);
  void seal_pages(uint64_t first_page, uint64_t end_page);
  void release();

  PagePool* pool_ = nullptr;  // null after a move
  BlockTable table_;
  std::vector<PageHandle> pages_;  // parallel to table_.slots()
  uint64_t committed_tokens_ = 0;
  uint64_t in_flight_tokens_ = 0;
};

// Checks the pool (PagePool::audit) and that its pages in use are exactly those of `live`, each
// held once, with the states that their tokens call for.
// Errors: kInternal: a leaked page, one held twice, a stale handle, a wrong state.
Status audit(const PagePool& pool, std::span<const SequenceKv* const> live);

// The part of it that is about one sequence. Marks its slots in `held` ([slots of the pool]).
Status audit_pages(const PagePool& pool, const SequenceKv& sequence, std::vector<bool>& held);

}  // namespace spin::kv
