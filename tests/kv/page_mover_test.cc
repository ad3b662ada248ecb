// SPDX-License-Identifier: Apache-2.0
// PageMover: copies wait for their writers, tags come last and are checked, a failure ends one
// transfer. RELIABILITY rows B041, B048, B050, B051.
//
// The race, as a timeline; the writer's kernel is still running when the copy is queued:
//
//   writer   |== writes page =====|e|
//   mover            |.. waits e ...|= copies =|= tag =|e'|      (without the wait: a torn page)
//   next                                                  |== the slot's next owner writes ==
//
// In ShuffledDevice every interleaving of the streams that their events allow comes up sooner or
// later; with threads (ThreadSanitizer's lane) the same program runs on CpuStreams that are
// delayed.
#include "kv/page_mover.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/device_decorators.h"
#include "base/parse_number.h"
#include "tests/support/shuffled_device.h"

namespace spin::kv {
namespace {

using Random = std::mt19937_64;
using testing::ShuffledDevice;

constexpr uint64_t kPageBytes = 64;
constexpr size_t kWords = kPageBytes / sizeof(uint64_t);

// Slots and host pages with tags, and whose content is `value` in every word.
struct Pages {
  explicit Pages(size_t count) : slots(count), host(count), tags(count) {}
  struct Page {
    uint64_t words[kWords] = {};
  };

  PageCopy copy(size_t slot, size_t page, uint64_t owner) {
    return {reinterpret_cast<std::byte*>(slots[slot].words),
            reinterpret_cast<std::byte*>(host[page].words),
            &tags[page],
            {.owner = owner, .page = static_cast<uint32_t>(page), .tokens = 4}};
  }
  static void fill(Page& page, uint64_t value) {
    for (uint64_t& word : page.words) word = value;
  }
  static bool holds(const Page& page, uint64_t value) {
    for (uint64_t word : page.words) {
      if (word != value) return false;
    }
    return true;
  }

  std::vector<Page> slots;
  std::vector<Page> host;
  std::vector<layout::HostPageTag> tags;
};

std::unique_ptr<backend::Device> cpu() {
  return std::move(*backend::cpu::create_cpu_device({.threads = 1}));
}

TEST(PageMover, PagesGoToTheHostAndBack) {
  auto device = cpu();
  auto writer = std::move(*device->create_stream("writer"));
  auto mover = std::move(*PageMover::create(*device, kPageBytes));
  Pages pages(3);
  for (size_t i = 0; i < 3; ++i) Pages::fill(pages.slots[i], 100 + i);
  std::vector<PageCopy> copies;
  for (size_t i = 0; i < 3; ++i) copies.push_back(pages.copy(i, 2 - i, 7));
  auto out = mover->begin_to_host(copies, WriterEvent::after(*writer));
  ASSERT_TRUE(out.ok());
  EXPECT_TRUE(out->wait_result().ok());
  EXPECT_TRUE(out->is_complete());
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(Pages::holds(pages.host[2 - i], 100 + i));
    EXPECT_EQ(pages.tags[i].owner, 7u);
    EXPECT_EQ(pages.tags[i].page, i);
    Pages::fill(pages.slots[i], 0);
  }
  auto back = mover->begin_to_fast(copies);
  ASSERT_TRUE(back.ok());
  EXPECT_TRUE(back->wait_result().ok());
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(Pages::holds(pages.slots[i], 100 + i));
  const MoverCounters counters = mover->counters();
  EXPECT_EQ(counters.transfers, 2u);
  EXPECT_EQ(counters.pages_to_host, 3u);
  EXPECT_EQ(counters.pages_to_fast, 3u);
  EXPECT_EQ(counters.bytes_to_fast, 3 * kPageBytes);
  EXPECT_EQ(counters.dispatched, 6u);
  EXPECT_EQ(counters.settled, 6u);
  EXPECT_EQ(counters.in_flight, 0u);
}

TEST(PageMover, ATransferOfNothingIsComplete) {
  auto device = cpu();
  auto mover = std::move(*PageMover::create(*device, kPageBytes));
  const Transfer none;
  EXPECT_TRUE(none.is_complete());
  EXPECT_TRUE(none.result().ok());
  auto empty = mover->begin_to_fast({});
  ASSERT_TRUE(empty.ok());
  EXPECT_TRUE(empty->is_complete());
  EXPECT_EQ(mover->counters().transfers, 0u);
}

// B050: the error of a copy is the result of its transfer, and only of that one. B051: of a batch
// of N pages all arrive or the transfer says that they did not.
TEST(PageMover, AFailedCopyEndsItsTransferOnly) {
  auto inner = cpu();
  for (uint64_t failing = 1; failing <= 9; ++failing) {
    ShuffledDevice device(*inner, failing);
    auto writer = device.create_stream("writer");
    auto mover = std::move(*PageMover::create(device, kPageBytes));
    Pages pages(9);
    for (size_t i = 0; i < 9; ++i) Pages::fill(pages.slots[i], i + 1);
    device.fail_copy(failing);
    std::vector<Transfer> transfers;
    for (size_t batch = 0; batch < 3; ++batch) {
      std::vector<PageCopy> copies;
      for (size_t i = 0; i < 3; ++i) copies.push_back(pages.copy(3 * batch + i, 3 * batch + i, 1));
      transfers.push_back(*mover->begin_to_host(std::move(copies), WriterEvent::after(**writer)));
    }
    for (size_t batch = 0; batch < 3; ++batch) {
      const bool fails = (failing - 1) / 3 == batch;
      const Status result = transfers[batch].wait_result();
      EXPECT_EQ(result.code(), fails ? StatusCode::kIoError : StatusCode::kOk);
      for (size_t i = 3 * batch; i < 3 * batch + 3; ++i) {
        if (fails) {
          EXPECT_EQ(pages.tags[i].page, layout::kNoPage) << "nobody may take it for a page";
        } else {
          EXPECT_TRUE(Pages::holds(pages.host[i], i + 1));
          EXPECT_EQ(pages.tags[i].page, i);
        }
      }
    }
    const MoverCounters counters = mover->counters();
    EXPECT_EQ(counters.failed_pages, 3u);
    EXPECT_EQ(counters.pages_to_host, 6u);
    EXPECT_EQ(counters.dispatched, counters.settled);
  }
}

// Gives streams that fail at their first copy for ever.
class BrokenDevice final : public backend::Device {
 public:
  explicit BrokenDevice(backend::Device& inner) : inner_(inner) {}
  const backend::DeviceProperties& properties() const override { return inner_.properties(); }
  backend::MemoryResource& memory(backend::MemoryKind kind) override { return inner_.memory(kind); }
  Result<std::unique_ptr<backend::Stream>> create_stream(std::string_view name) override {
    if (refuse) return Status(StatusCode::kResourceExhausted, "no more streams");
    SPIN_ASSIGN_OR_RETURN(auto stream, inner_.create_stream(name));
    return std::unique_ptr<backend::Stream>(std::make_unique<backend::FailingStream>(
        std::move(stream), 2, Status(StatusCode::kIoError, "broken")));
  }
  backend::Ops& ops() override { return inner_.ops(); }
  backend::KvOps& kv_ops() override { return inner_.kv_ops(); }
  backend::SparseOps& sparse_ops() override { return inner_.sparse_ops(); }
  bool refuse = false;

 private:
  backend::Device& inner_;
};

TEST(PageMover, ADeviceThatFailsEveryCopyFailsEveryTransferAndHangsNobody) {
  auto inner = cpu();
  BrokenDevice device(*inner);
  auto writer = std::move(*inner->create_stream("writer"));
  auto mover = std::move(*PageMover::create(device, kPageBytes));
  Pages pages(4);
  for (const bool refuse : {false, true}) {
    device.refuse = refuse;  // not even another stream
    std::vector<Transfer> transfers;
    for (size_t i = 0; i < 4; ++i) {
      transfers.push_back(
          *mover->begin_to_host({pages.copy(i, i, 1)}, WriterEvent::after(*writer)));
    }
    for (const Transfer& transfer : transfers) EXPECT_FALSE(transfer.wait_result().ok());
  }
  EXPECT_EQ(mover->counters().failed_pages, 8u);
  EXPECT_EQ(mover->counters().in_flight, 0u);
}

// B048, B152: a page whose tag is not the one expected (another owner, id or number of tokens, or
// still being written) is never taken for the page.
TEST(PageMover, AWrongTagFailsTheTransfer) {
  auto device = cpu();
  auto writer = std::move(*device->create_stream("writer"));
  auto mover = std::move(*PageMover::create(*device, kPageBytes));
  Pages pages(2);
  const std::vector<PageCopy> copies = {pages.copy(0, 0, 5), pages.copy(1, 1, 5)};
  EXPECT_EQ(mover->begin_to_fast(copies)->wait_result().code(), StatusCode::kCorrupt)
      << "nothing was written yet";
  ASSERT_TRUE(mover->begin_to_host(copies, WriterEvent::after(*writer))->wait_result().ok());
  ASSERT_TRUE(mover->begin_to_fast(copies)->wait_result().ok());
  const layout::HostPageTag good = pages.tags[1];
  for (int field = 0; field < 3; ++field) {
    if (field == 0) pages.tags[1].owner ^= 1;
    if (field == 1) pages.tags[1].page = layout::kNoPage;
    if (field == 2) --pages.tags[1].tokens;
    EXPECT_EQ(mover->begin_to_fast(copies)->wait_result().code(), StatusCode::kCorrupt) << field;
    pages.tags[1] = good;
  }
  EXPECT_TRUE(mover->begin_to_fast(copies)->wait_result().ok()) << "and the mover goes on";
}

// B041: who holds the ends asks the transfer first; the destructor waits.
TEST(PageMover, IsGoneOnlyWhenItsCopiesAre) {
  auto inner = cpu();
  for (uint64_t seed = 0; seed < 50; ++seed) {
    ShuffledDevice device(*inner, seed);
    auto writer = std::move(*device.create_stream("writer"));
    auto mover = std::move(*PageMover::create(device, kPageBytes));
    Pages pages(2);
    writer->enqueue_host([&] {
      Pages::fill(pages.slots[0], 3);
      Pages::fill(pages.slots[1], 4);
    });
    const Transfer transfer = *mover->begin_to_host({pages.copy(0, 1, 1), pages.copy(1, 0, 1)},
                                                    WriterEvent::after(*writer));
    EXPECT_FALSE(transfer.is_complete());
    mover.reset();
    ASSERT_TRUE(transfer.is_complete());
    EXPECT_TRUE(transfer.result().ok());
    EXPECT_TRUE(Pages::holds(pages.host[1], 3));
    EXPECT_TRUE(Pages::holds(pages.host[0], 4));
  }
}

// One slot, two host pages, two owners after each other. Returns whether all pages were right.
// `holds`: the slot is released only when its copy has completed.
bool run_order(backend::Device& device, PageMover& mover, Random& random, bool holds) {
  Pages pages(2);
  auto writer = std::move(*device.create_stream("writer"));
  const uint64_t first = random() | 1;
  const uint64_t second = first + 2;
  writer->enqueue_host([&] { Pages::fill(pages.slots[0], first); });
  Transfer transfer = *mover.begin_to_host({pages.copy(0, 0, 1)}, WriterEvent::after(*writer));
  if (holds) {
    EXPECT_TRUE(transfer.wait_result().ok());
  }
  // The slot's next owner writes.
  writer->enqueue_host([&] { Pages::fill(pages.slots[0], second); });
  Transfer next = *mover.begin_to_host({pages.copy(0, 1, 2)}, WriterEvent::after(*writer));
  EXPECT_TRUE(next.wait_result().ok());
  EXPECT_TRUE(transfer.wait_result().ok());
  return Pages::holds(pages.host[0], first) && Pages::holds(pages.host[1], second);
}

#if defined(SPIN_SANITIZED)
constexpr int kOrders = 5'000;
#else
constexpr int kOrders = 100'000;
#endif

// SPIN_MOVER_ORDERS sets the number; docs/testing.md records the longest run.
uint64_t threaded_orders() {
  const char* text = std::getenv("SPIN_MOVER_ORDERS");
  return text == nullptr ? 500 : base::parse_decimal(text).value_or(500);
}

TEST(PageMover, InAHundredThousandOrdersEveryCopyHasItsWritersBytes) {
  auto inner = cpu();
  ShuffledDevice device(*inner, 1);
  auto mover = std::move(*PageMover::create(device, kPageBytes));
  Random random(2);
  for (int order = 0; order < kOrders; ++order) {
    ASSERT_TRUE(run_order(device, *mover, random, true)) << "order " << order;
  }
}

TEST(PageMover, AMissingWaitOrHoldShowsWithinAFewOrders) {
  auto inner = cpu();
  for (const bool waits : {false, true}) {
    ShuffledDevice device(*inner, 3);
    if (!waits) device.forget_waits_of("kv-mover");
    auto mover = std::move(*PageMover::create(device, kPageBytes));
    Random random(4);
    int wrong = 0;
    for (int order = 0; order < 200; ++order) {
      wrong += !run_order(device, *mover, random, /*holds=*/!waits);
    }
    EXPECT_GT(wrong, 20) << (waits ? "without the hold" : "without the wait");
  }
}

// The same on threads, with streams that sleep at random: what ThreadSanitizer looks at.
TEST(PageMover, DelayedStreamsGiveTheWritersBytes) {
  auto inner = cpu();
  backend::DelayingDevice device(*inner, 5, std::chrono::microseconds(20));
  auto mover = std::move(*PageMover::create(device, kPageBytes));
  auto writer = std::move(*device.create_stream("writer"));
  Pages pages(4);
  for (uint64_t order = 0; order < threaded_orders(); ++order) {
    const size_t slot = order % 4;
    const uint64_t value = order + 1;
    writer->enqueue_host([&pages, slot, value] { Pages::fill(pages.slots[slot], value); });
    const Transfer out =
        *mover->begin_to_host({pages.copy(slot, slot, value)}, WriterEvent::after(*writer));
    ASSERT_TRUE(out.wait_result().ok());
    ASSERT_TRUE(Pages::holds(pages.host[slot], value));
    Pages::fill(pages.slots[slot], 0);
    ASSERT_TRUE(mover->begin_to_fast({pages.copy(slot, slot, value)})->wait_result().ok());
    ASSERT_TRUE(Pages::holds(pages.slots[slot], value));
  }
}

}  // namespace
}  // namespace spin::kv
