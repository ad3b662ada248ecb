// SPDX-License-Identifier: Apache-2.0
// Every copy of pages outside a step: write-through and demotion (fast to host), resumption (host
// to fast). Copies run on a stream of their own.
//
// A copy to the host waits for the work that wrote the page: the WriterEvent is a mandatory
// argument and can only be made from the stream that ran the writer. Both ends are held until the
// copy has completed: a slot or an extent cannot be released meanwhile (the holder's Transfer is
// asked first). A copy that fails, or a host page whose tag is not the one expected, makes its
// Transfer fail, and so ends one request; nobody else's copy is affected.
//
// An error of the stream is the error of the transfer that it struck: the mover goes on with
// another stream, and transfers queued behind are queued again there.
//
// Thread: engine thread. Stream: its own; begin_* queue and return.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backend/device.h"
#include "layout/head_pages.h"
#include "spin/status.h"

namespace spin::kv {

// A point after which the pages to be copied are final. Only a stream can give it.
class WriterEvent {
 public:
  static WriterEvent after(backend::Stream& writer) { return WriterEvent(writer.record_event()); }
  const backend::Event& event() const { return event_; }

 private:
  explicit WriterEvent(backend::Event event) : event_(std::move(event)) {}
  backend::Event event_;
};

// One page and its record. Addresses stay valid until the transfer has completed.
struct PageCopy {
  std::byte* slot = nullptr;  // fast memory
  std::byte* host = nullptr;
  layout::HostPageTag* tag = nullptr;  // written after the page, or checked before it is read
  layout::HostPageTag expected;        // its owner, page id and valid tokens
};

enum class Direction : uint8_t { kToHost, kToFast };

struct MoverCore;

// A batch of copies in flight or done. Copies of the handle refer to the same batch.
// Thread: engine thread. Lifetime: may outlive the mover, which completes it.
class Transfer {
 public:
  struct State;
  Transfer() = default;  // complete, nothing moved
  explicit Transfer(std::shared_ptr<State> state) : state_(std::move(state)) {}

  bool is_complete() const;
  // Requires: is_complete(). ok, or why these pages must not be used.
  Status result() const;
  // Blocks until it is complete.
  Status wait_result() const;

 private:
  std::shared_ptr<State> state_;
};

struct MoverCounters {
  uint64_t transfers = 0;
  uint64_t pages_to_host = 0;  // arrived
  uint64_t pages_to_fast = 0;
  uint64_t bytes_to_host = 0;
  uint64_t bytes_to_fast = 0;
  uint64_t failed_pages = 0;  // of transfers that failed
  // dispatched == settled + in_flight; settled == to_host + to_fast + failed.
  uint64_t dispatched = 0;
  uint64_t settled = 0;
  uint64_t in_flight = 0;
};

class PageMover {
 public:
  // Errors: those of creating a stream.
  static Result<std::unique_ptr<PageMover>> create(backend::Device& device, uint64_t page_bytes);
  // Waits for what is in flight.
  ~PageMover();
  PageMover(const PageMover&) = delete;
  PageMover& operator=(const PageMover&) = delete;

  // Copies queued now run after `written`. Errors: kResourceExhausted (bookkeeping); nothing is
  // queued then.
  Result<Transfer> begin_to_host(std::vector<PageCopy> pages, const WriterEvent& written);
  // Requires: the slots are not read or written by queued work.
  Result<Transfer> begin_to_fast(std::vector<PageCopy> pages);

  // Blocks until everything in flight is settled.
  void wait_idle();
  MoverCounters counters() const;

 private:
  explicit PageMover(std::unique_ptr<MoverCore> core);
  Result<Transfer> begin(Direction direction,
                         std::vector<PageCopy> pages,
                         const backend::Event& written);

  std::unique_ptr<MoverCore> core_;
};

}  // namespace spin::kv
