// SPDX-License-Identifier: Apache-2.0
#include "kv/page_mover.h"

#include <atomic>
#include <deque>
#include <string>

#include <fmt/format.h>

#include "base/check.h"
#include "base/memory_guard.h"

namespace spin::kv {

struct Transfer::State {
  MoverCore* core = nullptr;  // not used once settled
  Direction direction = Direction::kToHost;
  std::vector<PageCopy> pages;
  backend::Event written;  // what the copies wait for
  backend::Event done;     // behind the last of them, whether they ran or not
  // Written by the stream, in its order; `finished` comes last and says that all of it ran.
  Status tags;
  std::atomic<bool> finished = false;
  // Engine thread.
  bool settled = false;
  Status result;
};

struct MoverCore {
  backend::Device& device;
  uint64_t page_bytes = 0;
  std::unique_ptr<backend::Stream> stream;
  std::deque<std::shared_ptr<Transfer::State>> in_flight;  // in stream order
  MoverCounters counters;
};

namespace {

using State = Transfer::State;

bool holds(const layout::HostPageTag* tag, const layout::HostPageTag& expected) {
  return __atomic_load_n(&tag->page, __ATOMIC_ACQUIRE) == expected.page &&
         tag->owner == expected.owner && tag->tokens == expected.tokens;
}

void clear_tags(const State& state) {
  for (const PageCopy& page : state.pages) {
    __atomic_store_n(&page.tag->page, layout::kNoPage, __ATOMIC_RELEASE);
  }
}

void write_tags(const State& state) {
  for (const PageCopy& page : state.pages) {
    page.tag->owner = page.expected.owner;
    page.tag->tokens = page.expected.tokens;
    __atomic_store_n(&page.tag->page, page.expected.page, __ATOMIC_RELEASE);
  }
}

// The first wrong tag becomes the transfer's error.
void check_tags(State& state) {
  for (const PageCopy& page : state.pages) {
    if (!state.tags.ok() || holds(page.tag, page.expected)) continue;
    state.tags =
        Status(StatusCode::kCorrupt,
               fmt::format("host page {} is not the page that was written", page.expected.page));
  }
}

// Queues the whole batch. The tasks own the state, so addresses in it live as long as they run.
void queue(MoverCore& core, const std::shared_ptr<State>& state) {
  backend::Stream& stream = *core.stream;
  const bool to_host = state->direction == Direction::kToHost;
  stream.enqueue_wait(state->written);
  stream.enqueue_host([state, to_host] { to_host ? clear_tags(*state) : check_tags(*state); });
  for (const PageCopy& page : state->pages) {
    stream.enqueue_copy(to_host ? page.host : page.slot, to_host ? page.slot : page.host,
                        core.page_bytes);
  }
  // Checked again after the copy: a page that changed meanwhile is not the page.
  stream.enqueue_host([state, to_host] {
    to_host ? write_tags(*state) : check_tags(*state);
    state->finished.store(true, std::memory_order_release);
  });
  state->done = stream.record_event();
}

void settle(MoverCore& core, State& state, Status result) {
  MoverCounters& counters = core.counters;
  const uint64_t pages = state.pages.size();
  counters.in_flight -= pages;
  counters.settled += pages;
  if (!result.ok()) {
    counters.failed_pages += pages;
  } else if (state.direction == Direction::kToHost) {
    counters.pages_to_host += pages;
    counters.bytes_to_host += pages * core.page_bytes;
  } else {
    counters.pages_to_fast += pages;
    counters.bytes_to_fast += pages * core.page_bytes;
  }
  state.result = std::move(result);
  state.settled = true;
  state.core = nullptr;
}

void settle_front(MoverCore& core, Status result) {
  const std::shared_ptr<State> state = std::move(core.in_flight.front());
  core.in_flight.pop_front();
  settle(core, *state, std::move(result));
}

bool is_finished(const State& state) { return state.finished.load(std::memory_order_acquire); }

// The stream has an error: it struck the first batch that did not finish, those behind it never
// ran. They go on on a new stream.
void replace_stream(MoverCore& core) {
  Status error = core.stream->wait_idle();
  if (error.ok()) error = Status(StatusCode::kInternal, "a copy of KV pages did not run");
  while (!core.in_flight.empty() && is_finished(*core.in_flight.front())) {
    settle_front(core, core.in_flight.front()->tags);
  }
  if (!core.in_flight.empty()) settle_front(core, error.with_context("copy of KV pages"));
  auto stream = core.device.create_stream("kv-mover");
  if (!stream.ok()) {
    while (!core.in_flight.empty()) settle_front(core, stream.status());
    return;
  }
  core.stream = std::move(*stream);
  for (const auto& state : core.in_flight) queue(core, state);
}

// Settles what has come to its end, in order.
void poll(MoverCore& core) {
  while (!core.in_flight.empty() && backend::is_complete(core.in_flight.front()->done)) {
    if (is_finished(*core.in_flight.front())) {
      settle_front(core, core.in_flight.front()->tags);
    } else {
      replace_stream(core);
    }
  }
}

void wait_front(MoverCore& core) {
  const backend::Event done = core.in_flight.front()->done;
  if (done.state() != nullptr) done.state()->wait_complete();
  poll(core);
}

}  // namespace

bool Transfer::is_complete() const {
  if (state_ == nullptr || state_->settled) return true;
  poll(*state_->core);
  return state_->settled;
}

Status Transfer::result() const {
  if (state_ == nullptr) return ok_status();
  SPIN_CHECK(state_->settled);
  return state_->result;
}

Status Transfer::wait_result() const {
  while (!is_complete()) wait_front(*state_->core);
  return result();
}

Result<std::unique_ptr<PageMover>> PageMover::create(backend::Device& device, uint64_t page_bytes) {
  SPIN_ASSIGN_OR_RETURN(auto stream, device.create_stream("kv-mover"));
  auto core = std::make_unique<MoverCore>(MoverCore{device, page_bytes, std::move(stream), {}, {}});
  return std::unique_ptr<PageMover>(new PageMover(std::move(core)));
}

PageMover::PageMover(std::unique_ptr<MoverCore> core) : core_(std::move(core)) {}

PageMover::~PageMover() { wait_idle(); }

Result<Transfer> PageMover::begin(Direction direction,
                                  std::vector<PageCopy> pages,
                                  const backend::Event& written) {
  if (pages.empty()) return Transfer();
  poll(*core_);
  auto begun = base::guard_memory("a copy of KV pages was prepared", [&]() -> Result<Transfer> {
    auto state = std::make_shared<State>();
    state->core = core_.get();
    state->direction = direction;
    state->pages = std::move(pages);
    state->written = written;
    core_->in_flight.push_back(state);
    ++core_->counters.transfers;
    core_->counters.dispatched += state->pages.size();
    core_->counters.in_flight += state->pages.size();
    queue(*core_, state);
    return Transfer(std::move(state));
  });
  if (!begun.ok()) poll(*core_);  // a half-queued batch has no end: it is waited for and failed
  return begun;
}

Result<Transfer> PageMover::begin_to_host(std::vector<PageCopy> pages, const WriterEvent& written) {
  return begin(Direction::kToHost, std::move(pages), written.event());
}

Result<Transfer> PageMover::begin_to_fast(std::vector<PageCopy> pages) {
  return begin(Direction::kToFast, std::move(pages), backend::Event());
}

void PageMover::wait_idle() {
  while (!core_->in_flight.empty()) wait_front(*core_);
}

MoverCounters PageMover::counters() const {
  poll(*core_);
  return core_->counters;
}

}  // namespace spin::kv
