// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/kernels.h"

#include "backend/cpu/highway_targets.h"
#include "hwy/targets.h"

namespace spin::backend::cpu {
namespace {

struct IsaRow {
  CpuIsa isa;
  int64_t target;  // Highway's bit
  const char* name;
};

// Best first.
constexpr IsaRow kIsaRows[] = {
#if defined(__x86_64__)
    {CpuIsa::kAvx512Bf16, HWY_AVX3, "avx512_bf16"},
    {CpuIsa::kAvx512, HWY_AVX3, "avx512"},
    {CpuIsa::kAvx2, HWY_AVX2, "avx2"},
    {CpuIsa::kSse4, HWY_SSE4, "sse4"},
#endif
    {CpuIsa::kPortable, HWY_STATIC_TARGET, "portable"},
};

bool is_supported(const IsaRow& row) {
  if (row.isa == CpuIsa::kPortable) return true;
  if (row.isa == CpuIsa::kAvx512Bf16 && !cpu_has_fast_bf16()) return false;
  return (static_cast<int64_t>(hwy::SupportedTargets()) & row.target) != 0;
}

}  // namespace

Result<KernelSet> select_kernels(CpuIsa isa) {
  for (const IsaRow& row : kIsaRows) {
    if (isa != CpuIsa::kBest && isa != row.isa) continue;
    if (!is_supported(row)) continue;
    KernelSet set;
    set.name = row.name;
    fill_elementwise_kernels(row.target, set);
    fill_matmul_kernels(row.target, set);
    fill_attention_kernels(row.target, set);
    fill_cluster_kernels(row.target, set.cluster);
    fill_select_kernels(row.target, set);
    fill_sketch_kernels(row.target, set.sketch);
    if (row.isa == CpuIsa::kAvx512Bf16) fill_avx512_bf16_kernels(set);
    return set;
  }
  return Status(StatusCode::kUnsupported, "this processor lacks the instruction set asked for");
}

}  // namespace spin::backend::cpu
