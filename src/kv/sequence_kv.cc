// SPDX-License-Identifier: Apache-2.0
#include "kv/sequence_kv.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"

namespace spin::kv {
namespace {

Status broken(std::string what) {
  return Status(StatusCode::kInternal, "sequence KV audit: " + std::move(what));
}

// Consecutive pages of one head that get neighbouring slots. Runs this long read like one stream
// (64 KiB and more), and the first tokens of all layers and heads still lie together, so a short
// sequence touches little of what it reserved, also where memory comes in huge pages.
constexpr uint64_t kRunPages = 32;

}  // namespace

Result<SequenceKv> SequenceKv::reserve(PagePool& pool, uint64_t max_tokens) {
  SPIN_CHECK(max_tokens > 0);
  const layout::KvGeometry& geometry = pool.geometry();
  const uint64_t per_head = geometry.pages_per_head(max_tokens);
  const auto pages =
      base::checked_mul<uint64_t>(per_head, uint64_t{geometry.layers} * geometry.kv_heads);
  const PageCounts& counts = pool.counts();
  // Compared before anything of that size is allocated: max_tokens may come from a request.
  if (!pages || *pages > counts.free) {
    return Status(
        StatusCode::kResourceExhausted,
        fmt::format("{} tokens need {} KV pages; {} of {} are free", max_tokens,
                    pages ? fmt::to_string(*pages) : "more than 2^64", counts.free, counts.total));
  }
  std::vector<PageHandle> handles(*pages);
  SequenceKv sequence(pool, per_head);  // what needs memory comes before the pages are taken
  const bool allocated = pool.allocate(handles);
  SPIN_CHECK(allocated);
  sequence.place(handles);
  if (pool.table_memory() != nullptr) {
    SPIN_RETURN_IF_ERROR(sequence.table_.publish(*pool.table_memory(), *pool.table_stream()));
  }
  return sequence;
}

void SequenceKv::place(std::span<const PageHandle> handles) {
  const layout::KvGeometry& geometry = pool_->geometry();
  const uint64_t per_head = table_.pages_per_head();
  auto next = handles.begin();
  for (uint64_t run = 0; run < per_head; run += kRunPages) {
    const uint64_t length = std::min(kRunPages, per_head - run);
    for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
      for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
        std::copy_n(next, length, pages_.begin() + table_.index(layer, head, run));
        next += length;
      }
    }
  }
  const std::span<uint32_t> slots = table_.slots();
  for (size_t i = 0; i < slots.size(); ++i) slots[i] = pages_[i].slot;
}

SequenceKv::SequenceKv(PagePool& pool, uint64_t pages_per_head)
    : pool_(&pool),
      table_(pool.geometry().layers, pool.geometry().kv_heads, pages_per_head),
      pages_(table_.slots().size()) {}

SequenceKv::SequenceKv(SequenceKv&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)),
      table_(std::move(other.table_)),
      pages_(std::move(other.pages_)),
      committed_tokens_(std::exchange(other.committed_tokens_, 0)),
      in_flight_tokens_(std::exchange(other.in_flight_tokens_, 0)) {}

SequenceKv& SequenceKv::operator=(SequenceKv&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::exchange(other.pool_, nullptr);
    table_ = std::move(other.table_);
    pages_ = std::move(other.pages_);
    committed_tokens_ = std::exchange(other.committed_tokens_, 0);
    in_flight_tokens_ = std::exchange(other.in_flight_tokens_, 0);
  }
  return *this;
}

SequenceKv::~SequenceKv() { release(); }

void SequenceKv::release() {
  if (pool_ != nullptr) pool_->release(pages_);
  pool_ = nullptr;
}

uint64_t SequenceKv::capacity_tokens() const {
  SPIN_CHECK(pool_ != nullptr);
  return table_.pages_per_head() * pool_->geometry().page_tokens;
}

void SequenceKv::begin_step(uint64_t tokens) {
  SPIN_CHECK(in_flight_tokens_ == 0 && tokens > 0);
  SPIN_CHECK(tokens <= capacity_tokens() - committed_tokens_);
  in_flight_tokens_ = tokens;
}

layout::SequenceSlice SequenceKv::slice(uint32_t layer, uint64_t first_row) const {
  SPIN_CHECK(pool_ != nullptr && layer < pool_->geometry().layers);
  SPIN_CHECK(in_flight_tokens_ > 0);
  layout::SequenceSlice slice;
  slice.first_row = first_row;
  slice.query_tokens = in_flight_tokens_;
  slice.context_tokens = committed_tokens_ + in_flight_tokens_;
  slice.slots = table_.layer_slots(layer);
  slice.slot_stride = table_.pages_per_head();
  return slice;
}

void SequenceKv::commit_step() {
  SPIN_CHECK(in_flight_tokens_ > 0);
  const uint64_t page_tokens = pool_->geometry().page_tokens;
  const uint64_t first_page = committed_tokens_ / page_tokens;
  committed_tokens_ += std::exchange(in_flight_tokens_, 0);
  seal_pages(first_page, committed_tokens_ / page_tokens);
}

void SequenceKv::drop_step() {
  SPIN_CHECK(in_flight_tokens_ > 0);
  in_flight_tokens_ = 0;
}

void SequenceKv::seal_pages(uint64_t first_page, uint64_t end_page) {
  const layout::KvGeometry& geometry = pool_->geometry();
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
      for (uint64_t page = first_page; page < end_page; ++page) {
        pool_->seal(pages_[table_.index(layer, head, page)]);
      }
    }
  }
}

Status audit_pages(const PagePool& pool, const SequenceKv& sequence, std::vector<bool>& held) {
  const std::span<const PageHandle> pages = sequence.pages();
  const uint64_t per_head = sequence.capacity_tokens() / pool.geometry().page_tokens;
  const uint64_t full = sequence.committed_tokens() / pool.geometry().page_tokens;
  for (uint64_t i = 0; i < pages.size(); ++i) {
    const PageHandle page = pages[i];
    if (!pool.is_current(page)) {
      return broken(fmt::format("slot {} is held by a stale handle", page.slot));
    }
    if (held[page.slot]) return broken(fmt::format("slot {} is held twice", page.slot));
    held[page.slot] = true;
    const PageState expected = i % per_head < full ? PageState::kSealed : PageState::kFilling;
    if (pool.state(page.slot) != expected) {
      return broken(fmt::format("logical page {} of a sequence with {} full pages is {}",
                                i % per_head, full,
                                expected == PageState::kSealed ? "not sealed" : "sealed"));
    }
  }
  return ok_status();
}

Status audit(const PagePool& pool, std::span<const SequenceKv* const> live) {
  SPIN_RETURN_IF_ERROR(pool.audit());
  std::vector<bool> held(pool.counts().total);
  uint64_t count = 0;
  for (const SequenceKv* sequence : live) {
    SPIN_RETURN_IF_ERROR(audit_pages(pool, *sequence, held));
    count += sequence->pages().size();
  }
  if (count != pool.counts().in_use()) {
    return broken(fmt::format("{} pages are in use, {} sequences hold {}", pool.counts().in_use(),
                              live.size(), count));
  }
  return ok_status();
}

}  // namespace spin::kv
