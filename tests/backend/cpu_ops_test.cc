// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>

#include "backend/cpu/cpu_device.h"
#include "tests/backend/attention_conformance.h"
#include "tests/backend/cpu_backends.h"
#include "tests/backend/ops_conformance.h"
#include "tests/backend/sketch_conformance.h"

namespace spin::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Cpu, OpsConformance, ::testing::ValuesIn(cpu_backends()), backend_name);
INSTANTIATE_TEST_SUITE_P(Cpu,
                         AttentionConformance,
                         ::testing::ValuesIn(cpu_backends()),
                         backend_name);
INSTANTIATE_TEST_SUITE_P(Cpu, SketchConformance, ::testing::ValuesIn(cpu_backends()), backend_name);

// Attention of three tokens whose pages of one token lie in these slots of a pool at `base`.
std::vector<float> attend_in_slots(char* base, const std::vector<uint32_t>& slots) {
  const auto device = backend::cpu::create_cpu_device({.threads = 1});
  EXPECT_TRUE(device.ok());
  const auto stream = (*device)->create_stream("far");
  EXPECT_TRUE(stream.ok());
  Matrix q = random_matrix(3, 512, 1);
  Matrix k = random_matrix(3, 512, 2);
  Matrix v = random_matrix(3, 512, 3);
  std::vector<float> out(q.values.size());
  const auto view = [](std::vector<float>& values) {
    return backend::TensorRef{values.data(), layout::DType::kF32, 3, 512, 512};
  };
  const backend::KvPoolRef pool{base,
                                {.layers = 1, .kv_heads = 1, .head_dim = 512, .page_tokens = 1}};
  const layout::SequenceSlice slice{.first_row = 0,
                                    .query_tokens = 3,
                                    .context_tokens = 3,
                                    .slots = slots.data(),
                                    .slot_stride = slots.size()};
  backend::Ops& ops = (*device)->ops();
  ops.enqueue_kv_append(view(k.values), view(v.values), {&slice, 1}, pool, **stream);
  ops.enqueue_paged_attention(view(q.values), {&slice, 1}, pool, 0.05f, view(out), **stream);
  EXPECT_TRUE((*stream)->wait_idle().ok());
  return out;
}

TEST(CpuOps, PagesFarBeyondTwoGigaElementsAreAddressedRightly) {
  // 4 KiB a page: the last slot begins at 16 GiB, element 2^32. The pool is address space only.
  const std::vector<uint32_t> far = {(1u << 22) + 1, 1u << 21, 3};
  const size_t bytes = (size_t{far[0]} + 1) * 4096;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) GTEST_SKIP() << "no address space for a pool of 16 GiB";
  std::vector<char> small(3 * 4096);
  EXPECT_EQ(attend_in_slots(static_cast<char*>(base), far),
            attend_in_slots(small.data(), {0, 1, 2}));
  ASSERT_EQ(munmap(base, bytes), 0);
}

}  // namespace
}  // namespace spin::testing
