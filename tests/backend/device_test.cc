// SPDX-License-Identifier: Apache-2.0
// The CPU device as such: memory, streams, events, errors and the decorators.
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/cpu_device.h"
#include "backend/device_decorators.h"
#include "backend/memory_decorators.h"
#include "backend/ops.h"

namespace spin::backend {
namespace {

std::unique_ptr<Device> make_device(uint32_t threads = 2, uint64_t fast_bytes = 0) {
  auto device = cpu::create_cpu_device({.threads = threads, .fast_memory_bytes = fast_bytes});
  EXPECT_TRUE(device.ok()) << device.status().to_string();
  return std::move(device).value();
}

std::unique_ptr<Stream> make_stream(Device& device, const char* name = "test") {
  auto stream = device.create_stream(name);
  EXPECT_TRUE(stream.ok()) << stream.status().to_string();
  return std::move(stream).value();
}

TEST(CpuDevice, SaysWhatItIs) {
  const auto device = make_device(3);
  EXPECT_EQ(device->properties().threads, 3u);
  EXPECT_NE(device->properties().name.find("3 threads"), std::string::npos);
  EXPECT_GT(device->properties().memory_bytes, uint64_t{64} << 20);
  EXPECT_EQ(device->properties().fast_bf16, cpu::cpu_has_fast_bf16());
}

TEST(CpuDevice, ChoosesAThreadCountByItself) {
  EXPECT_GE(make_device(0)->properties().threads, 1u);
}

TEST(CpuDevice, RefusesAbsurdThreadCounts) {
  EXPECT_EQ(cpu::create_cpu_device({.threads = 1u << 30}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(CpuDevice, PortableKernelsExistEverywhere) {
  const auto device = cpu::create_cpu_device({.threads = 1, .isa = cpu::CpuIsa::kPortable});
  ASSERT_TRUE(device.ok());
  EXPECT_FALSE((*device)->properties().fast_bf16);
}

TEST(CpuStream, MemoryThatRunsOutInATaskIsTheStreamsError) {
  const auto device = make_device(1);
  const auto stream = make_stream(*device);
  bool ran_later = false;
  stream->enqueue_task([]() -> Status { throw std::bad_alloc(); });
  stream->enqueue_host([&] { ran_later = true; });
  EXPECT_EQ(stream->wait_idle().code(), StatusCode::kResourceExhausted);
  EXPECT_FALSE(ran_later);
}

TEST(CpuMemory, FastArenaIsBoundedAndSaysWhatIsLeft) {
  const auto device = make_device(1, 1 << 20);
  MemoryResource& fast = device->memory(MemoryKind::kFast);
  auto half = Buffer::allocate(fast, 600000);
  ASSERT_TRUE(half.ok());
  const Status refused = Buffer::allocate(fast, 600000).status();
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("448576 of 1048576"), std::string::npos) << refused.message();
  EXPECT_EQ(fast.bytes_in_use(), 600000u);
  *half = Buffer();
  EXPECT_EQ(fast.bytes_in_use(), 0u);
  EXPECT_TRUE(Buffer::allocate(fast, 1 << 20).ok());
  EXPECT_TRUE(Buffer::allocate(device->memory(MemoryKind::kHost), 2 << 20).ok());
}

TEST(CpuMemory, AddressesAreAlignedAlsoForNoBytes) {
  const auto device = make_device(1);
  for (const size_t alignment : {1, 64, 4096}) {
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100}, size_t{8} << 20}) {
      auto buffer = Buffer::allocate(device->memory(MemoryKind::kHost), bytes, alignment);
      ASSERT_TRUE(buffer.ok());
      ASSERT_NE(buffer->data(), nullptr);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % alignment, 0u);
    }
  }
}

TEST(CpuMemory, SizesNearTheEndOfTheAddressSpaceAreRefused) {
  const auto device = make_device(1);
  for (const MemoryKind kind : {MemoryKind::kFast, MemoryKind::kHost}) {
    EXPECT_EQ(Buffer::allocate(device->memory(kind), SIZE_MAX).status().code(),
              StatusCode::kResourceExhausted);
    EXPECT_EQ(device->memory(kind).bytes_in_use(), 0u);
  }
}

TEST(CpuMemory, PackingIntoAFullArenaIsAnErrorAndLeavesNothing) {
  const auto device = make_device(1, 1000);
  const auto zeros = [](int64_t, int64_t, std::span<float> out) {
    std::fill(out.begin(), out.end(), 0.0f);
    return ok_status();
  };
  EXPECT_EQ(device->ops().pack_matrix(100, 100, layout::DType::kF32, zeros).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(device->memory(MemoryKind::kFast).bytes_in_use(), 0u);
}

TEST(CpuStream, WorkRunsInOrderOnAnotherThread) {
  const auto device = make_device();
  const auto stream = make_stream(*device);
  std::vector<int> order;
  std::thread::id worker;
  for (int i = 0; i < 100; ++i) {
    stream->enqueue_host([&, i] {
      order.push_back(i);
      worker = std::this_thread::get_id();
    });
  }
  EXPECT_TRUE(stream->wait_idle().ok());
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_NE(worker, std::this_thread::get_id());
}

TEST(CpuStream, EnqueueingDoesNotWait) {
  const auto device = make_device();
  const auto stream = make_stream(*device);
  std::atomic<bool> released = false;
  stream->enqueue_host([&] {
    while (!released) std::this_thread::yield();
  });
  const Event event = stream->record_event();
  EXPECT_FALSE(is_complete(event));
  released = true;
  event.state()->wait_complete();
  EXPECT_TRUE(is_complete(event));
}

TEST(CpuStream, EventOrdersTwoStreams) {
  const auto device = make_device();
  const auto first = make_stream(*device, "first");
  const auto second = make_stream(*device, "second");
  int value = 0;  // TSan sees a race if the event does not order the two
  int seen = 0;
  first->enqueue_host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    value = 42;
  });
  second->enqueue_wait(first->record_event());
  second->enqueue_host([&] { seen = value; });
  EXPECT_TRUE(second->wait_idle().ok());
  EXPECT_EQ(seen, 42);
}

TEST(CpuStream, DefaultEventIsComplete) {
  const auto device = make_device();
  const auto stream = make_stream(*device);
  EXPECT_TRUE(is_complete(Event()));
  stream->enqueue_wait(Event());
  EXPECT_TRUE(stream->wait_idle().ok());
}

TEST(CpuStream, FirstErrorSticksAndLaterWorkIsSkippedButEventsComplete) {
  const auto device = make_device();
  const auto stream = make_stream(*device);
  bool ran_after = false;
  stream->enqueue_task([] { return Status(StatusCode::kInternal, "first"); });
  stream->enqueue_task([] { return Status(StatusCode::kInternal, "second"); });
  stream->enqueue_host([&] { ran_after = true; });
  const Event event = stream->record_event();
  EXPECT_EQ(stream->wait_idle().message(), "first");
  EXPECT_EQ(stream->wait_idle().message(), "first");
  EXPECT_FALSE(ran_after);
  EXPECT_TRUE(is_complete(event));
}

TEST(CpuStream, DestructionRunsWhatIsQueued) {
  const auto device = make_device();
  int ran = 0;
  Event event;
  {
    const auto stream = make_stream(*device);
    for (int i = 0; i < 10; ++i) stream->enqueue_host([&] { ++ran; });
    event = stream->record_event();
  }
  EXPECT_EQ(ran, 10);
  EXPECT_TRUE(is_complete(event));
}

TEST(CpuStream, TwoStreamsComputeAtOnceWithOnePool) {
  const auto device = make_device(3);
  const int64_t n = 96;
  const auto ones = [](int64_t, int64_t, std::span<float> out) {
    std::fill(out.begin(), out.end(), 1.0f);
    return ok_status();
  };
  const auto packed = device->ops().pack_matrix(n, n, layout::DType::kF32, ones);
  ASSERT_TRUE(packed.ok());
  const auto first = make_stream(*device, "first");
  const auto second = make_stream(*device, "second");
  std::vector<float> x(static_cast<size_t>(64 * n), 1.0f);
  std::vector<float> outs[2] = {std::vector<float>(x.size()), std::vector<float>(x.size())};
  for (int round = 0; round < 20; ++round) {
    for (int s = 0; s < 2; ++s) {
      device->ops().enqueue_matmul({x.data(), layout::DType::kF32, 64, n, n}, **packed, nullptr,
                                   round > 0, {outs[s].data(), layout::DType::kF32, 64, n, n},
                                   s == 0 ? *first : *second);
    }
  }
  EXPECT_TRUE(first->wait_idle().ok());
  EXPECT_TRUE(second->wait_idle().ok());
  for (const auto& out : outs) {
    for (const float value : out) ASSERT_EQ(value, 20.0f * static_cast<float>(n));
  }
}

TEST(MemoryDecorators, LimitRefusesBeyondAndReleasesOnReturn) {
  const auto device = make_device(1);
  LimitingMemoryResource limited(device->memory(MemoryKind::kHost), 100);
  auto buffer = Buffer::allocate(limited, 60);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(Buffer::allocate(limited, 41).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(Buffer::allocate(limited, SIZE_MAX).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(Buffer::allocate(limited, 40).ok());
  *buffer = Buffer();
  EXPECT_EQ(limited.bytes_in_use(), 0u);
  EXPECT_TRUE(Buffer::allocate(limited, 100).ok());
}

TEST(MemoryDecorators, LimitDoesNotCountWhatUpstreamRefused) {
  const auto device = make_device(1, 50);
  LimitingMemoryResource limited(device->memory(MemoryKind::kFast), 100);
  EXPECT_FALSE(Buffer::allocate(limited, 80).ok());
  EXPECT_EQ(limited.bytes_in_use(), 0u);
}

TEST(MemoryDecorators, CountKeepsPeakAndNumbers) {
  const auto device = make_device(1);
  CountingMemoryResource counted(device->memory(MemoryKind::kHost));
  {
    const auto first = Buffer::allocate(counted, 10);
    const auto second = Buffer::allocate(counted, 30);
    EXPECT_EQ(counted.live_allocations(), 2u);
  }
  const auto third = Buffer::allocate(counted, 20);
  EXPECT_EQ(counted.peak_bytes(), 40u);
  EXPECT_EQ(counted.bytes_in_use(), 20u);
  EXPECT_EQ(counted.allocations(), 3u);
  EXPECT_EQ(counted.live_allocations(), 1u);
}

TEST(MemoryDecorators, FailureHitsTheNthAllocationOnly) {
  const auto device = make_device(1);
  FailingMemoryResource failing(device->memory(MemoryKind::kHost), 2);
  EXPECT_TRUE(Buffer::allocate(failing, 1).ok());
  EXPECT_FALSE(failing.has_failed());
  EXPECT_EQ(Buffer::allocate(failing, 1).status().code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(failing.has_failed());
  EXPECT_TRUE(Buffer::allocate(failing, 1).ok());
  failing.fail_at(1);
  EXPECT_FALSE(Buffer::allocate(failing, 1).ok());
}

// Timeline of the two tests below: "producer" sets the value late; "consumer" copies it at once
// unless it waits for the producer's event.
//   producer: |--- delay ---|value = round|
//   consumer:                             |copy|   (with the wait)
//   consumer: |copy|                               (without)
// Returns how many of `rounds` copies saw an old value.
int stale_copies(bool wait, uint64_t seed) {
  const auto plain = make_device(1);
  DelayingDevice device(*plain, seed, std::chrono::microseconds(300));
  const auto producer = make_stream(device, "producer");
  const auto consumer = make_stream(device, "consumer");
  std::atomic<int> value = 0;
  int stale = 0;
  for (int round = 1; round <= 30; ++round) {
    int copied = 0;
    producer->enqueue_host([&value, round] { value = round; });
    if (wait) consumer->enqueue_wait(producer->record_event());
    consumer->enqueue_host([&] { copied = value; });
    EXPECT_TRUE(consumer->wait_idle().ok());
    EXPECT_TRUE(producer->wait_idle().ok());
    if (copied != round) ++stale;
  }
  return stale;
}

TEST(DeviceDecorators, DelaysExposeAMissingWait) { EXPECT_GT(stale_copies(false, 1), 0); }

TEST(DeviceDecorators, DelaysDoNotDisturbProperOrder) { EXPECT_EQ(stale_copies(true, 1), 0); }

TEST(DeviceDecorators, FailingStreamFailsTheNthOperationForGood) {
  const auto device = make_device(1);
  FailingStream stream(make_stream(*device), 3, Status(StatusCode::kInternal, "injected"));
  int ran = 0;
  char from[4] = "abc";
  char to[4] = "";
  stream.enqueue_host([&] { ++ran; });
  stream.enqueue_copy(to, from, 4);
  EXPECT_TRUE(stream.wait_idle().ok());
  stream.enqueue_host([&] { ++ran; });
  stream.enqueue_host([&] { ++ran; });
  EXPECT_EQ(stream.wait_idle().message(), "injected");
  EXPECT_EQ(ran, 1);
  EXPECT_STREQ(to, "abc");
}

TEST(DeviceDecorators, FailingStreamFailsCopiesAndOperationsOfOps) {
  const auto device = make_device(1);
  std::vector<float> x(8, 1.0f);
  std::vector<float> out(4, 7.0f);
  for (const bool copy : {false, true}) {
    FailingStream stream(make_stream(*device), 1, Status(StatusCode::kInternal, "injected"));
    if (copy) {
      stream.enqueue_copy(out.data(), x.data(), 16);
    } else {
      device->ops().enqueue_silu_mul({x.data(), layout::DType::kF32, 1, 8, 8},
                                     {out.data(), layout::DType::kF32, 1, 4, 4}, stream);
    }
    EXPECT_EQ(stream.wait_idle().message(), "injected");
    EXPECT_EQ(out, std::vector<float>(4, 7.0f));
  }
}

}  // namespace
}  // namespace spin::backend
