// SPDX-License-Identifier: Apache-2.0
// Writes new tokens' keys and values into their sequences' pages.
#include <array>

#include "backend/cuda/cuda_ops.h"
#include "backend/cuda/cuda_stream.h"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/quads.cuh"
#include "backend/cuda/tensor_views.h"

namespace spin::backend::cuda {
namespace {

constexpr unsigned kThreads = 256;

// A slice with new tokens, and how many tokens the slices before it in the launch have.
struct AppendItem {
  layout::SequenceSlice slice;
  uint64_t first_block;
};

struct AppendCall {
  const float* k;
  uint64_t k_stride;
  const float* v;
  uint64_t v_stride;
  std::byte* base;
  layout::KvGeometry geometry;
  bool vector;
};

// The item that block `block` belongs to: the last one that begins at or before it.
const __device__ AppendItem& item_of(const ItemPack<AppendItem>& items,
                                     uint32_t count,
                                     uint64_t block) {
  uint32_t low = 0;
  uint32_t high = count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    if (items[middle].first_block <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return items[low];
}

// A block per token, four elements per thread at a time. Bytes per token: 2 * kv_heads * head_dim
// floats read, as many elements of the pool written, a slot per head read.
template <typename Element>
__global__ void __launch_bounds__(kThreads)
    kv_append_kernel(const __grid_constant__ ItemPack<AppendItem> items,
                     uint32_t count,
                     const __grid_constant__ AppendCall call) {
  const AppendItem& item = item_of(items, count, blockIdx.x);
  const layout::SequenceSlice& slice = item.slice;
  const layout::KvGeometry& g = call.geometry;
  const uint64_t r = blockIdx.x - item.first_block;
  const uint64_t row = slice.first_row + r;
  const uint64_t token = slice.context_tokens - slice.query_tokens + r;
  const uint64_t page = token / g.page_tokens;
  const uint64_t in_page = token % g.page_tokens;
  const auto quads = static_cast<uint32_t>(quads_in(g.head_dim));
  for (uint32_t u = threadIdx.x; u < 2 * g.kv_heads * quads; u += kThreads) {
    const uint32_t c = u % quads * kQuad;
    const uint32_t head = u / quads % g.kv_heads;
    const bool is_value = u / quads >= g.kv_heads;
    const float* const from =
        (is_value ? call.v + row * call.v_stride : call.k + row * call.k_stride) +
        uint64_t{head} * g.head_dim + c;
    const uint64_t slot = slice.slots[head * slice.slot_stride + page];
    std::byte* const to = call.base + slot * g.page_bytes() + (is_value ? g.plane_bytes() : 0) +
                          in_page * g.row_bytes();
    const uint32_t left = g.head_dim - c;
    store_quad(reinterpret_cast<Element*>(to) + c, load_quad(from, left, call.vector), left,
               call.vector);
  }
}

void check_slice(const layout::SequenceSlice& slice, int64_t rows) {
  SPIN_CHECK(slice.query_tokens <= slice.context_tokens);
  SPIN_CHECK(slice.query_tokens <= static_cast<uint64_t>(rows));
  SPIN_CHECK(slice.first_row <= static_cast<uint64_t>(rows) - slice.query_tokens);
}

void launch_append(std::span<const AppendItem> items,
                   uint64_t tokens,
                   const AppendCall& call,
                   CudaStream& stream) {
  launch_packs(items, [&](const ItemPack<AppendItem>& pack, uint32_t count, size_t /*first*/) {
    const auto blocks = static_cast<unsigned>(tokens);
    if (call.geometry.dtype == layout::DType::kF32) {
      kv_append_kernel<float><<<blocks, kThreads, 0, stream.handle()>>>(pack, count, call);
    } else {
      kv_append_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream.handle()>>>(pack, count, call);
    }
  });
  stream.end("kv_append");
}

}  // namespace

void CudaOps::enqueue_kv_append(TensorRef k,
                                TensorRef v,
                                std::span<const layout::SequenceSlice> slices,
                                const KvPoolRef& pool,
                                StreamRef stream_ref) {
  check_f32(k);
  check_f32(v);
  const layout::KvGeometry& g = pool.geometry;
  const int64_t width = int64_t{g.kv_heads} * g.head_dim;
  SPIN_CHECK(width > 0 && g.page_tokens > 0);
  SPIN_CHECK(k.cols == width && v.cols == width && k.rows == v.rows);
  CudaStream& stream = cuda_stream(stream_ref);
  if (!stream.begin()) return;
  const AppendCall call = {
      .k = static_cast<const float*>(k.data),
      .k_stride = static_cast<uint64_t>(k.row_stride),
      .v = static_cast<const float*>(v.data),
      .v_stride = static_cast<uint64_t>(v.row_stride),
      .base = static_cast<std::byte*>(pool.base),
      .geometry = g,
      .vector = is_aligned(k) && is_aligned(v) && is_aligned(pool.base) && g.head_dim % kQuad == 0};
  // One pack's items at a time; slices without new tokens take no place.
  std::array<AppendItem, ItemPack<AppendItem>::kMost> items;
  size_t count = 0;
  uint64_t tokens = 0;
  for (const layout::SequenceSlice& slice : slices) {
    check_slice(slice, k.rows);
    if (slice.query_tokens == 0) continue;
    if (count == items.size()) {
      launch_append({items.data(), count}, tokens, call, stream);
      count = 0;
      tokens = 0;
    }
    items[count++] = {slice, tokens};
    tokens += slice.query_tokens;
  }
  if (count > 0) launch_append({items.data(), count}, tokens, call, stream);
}

}  // namespace spin::backend::cuda
