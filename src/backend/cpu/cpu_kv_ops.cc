// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/cpu_kv_ops.h"

#include <vector>

#include "backend/cpu/list_attention.h"
#include "backend/cpu/place.h"
#include "backend/cpu/resize.h"
#include "backend/cpu/retrieve.h"
#include "backend/cpu/small_loop.h"
#include "base/check.h"

namespace spin::backend::cpu {
namespace {

void check_f32(const TensorRef& tensor) {
  SPIN_CHECK(tensor.dtype == layout::DType::kF32);
  SPIN_CHECK(tensor.rows >= 0 && tensor.cols >= 0 && tensor.row_stride >= tensor.cols);
}

template <typename Item>
std::vector<Item> copy_of(std::span<const Item> items) {
  return {items.begin(), items.end()};
}

}  // namespace

void CpuKvOps::enqueue_tail_append(TensorRef k,
                                   TensorRef v,
                                   std::span<const TailAppendItem> items,
                                   const TieredPoolRef& pool,
                                   StreamRef stream) {
  check_f32(k);
  check_f32(v);
  const int64_t width = int64_t{pool.fast.geometry.kv_heads} * pool.fast.geometry.head_dim;
  SPIN_CHECK(k.cols == width && v.cols == width && k.rows == v.rows);
  for (const TailAppendItem& item : items) {
    SPIN_CHECK(item.tokens <= static_cast<uint64_t>(k.rows));
    SPIN_CHECK(item.first_row <= static_cast<uint64_t>(k.rows) - item.tokens);
  }
  stream.enqueue_task([this, k, v, items = copy_of(items), pool] {
    return run_tail_append(k, v, items, pool, pool_);
  });
}

void CpuKvOps::enqueue_retrieve(std::span<const RetrieveItem> items,
                                const TieredPoolRef& pool,
                                StreamRef stream) {
  stream.enqueue_task(
      [this, items = copy_of(items), pool] { return run_retrieve(items, pool, pool_); });
}

void CpuKvOps::enqueue_seal(std::span<const SealItem> items,
                            const TieredPoolRef& pool,
                            StreamRef stream) {
  stream.enqueue_task(
      [this, items = copy_of(items), pool] { return run_seal(items, pool, pool_); });
}

void CpuKvOps::enqueue_place(const PlaceItem& item, const TieredPoolRef& pool, StreamRef stream) {
  const layout::KvGeometry& from = item.source.geometry;
  const layout::KvGeometry& to = pool.fast.geometry;
  SPIN_CHECK(from.head_dim == to.head_dim && from.dtype == to.dtype);
  SPIN_CHECK(from.kv_heads == to.kv_heads);
  SPIN_CHECK(item.tail_first_token % to.page_tokens == 0);
  SPIN_CHECK(item.tail_first_token + item.tail.tokens <= item.source.tokens);
  stream.enqueue_task([this, item, pool] { return run_place(item, pool, pool_); });
}

void CpuKvOps::enqueue_repack_tail(const RepackTailItem& item,
                                   const TieredPoolRef& pool,
                                   StreamRef stream) {
  SPIN_CHECK(item.map != nullptr);
  stream.enqueue_task([this, item, pool] { return run_repack_tail(item, pool, pool_); });
}

void CpuKvOps::enqueue_resize(const ResizeItem& item, const TieredPoolRef& pool, StreamRef stream) {
  stream.enqueue_task([this, item, pool] { return run_resize(item, pool, pool_); });
}

void CpuKvOps::enqueue_list_attention(TensorRef q,
                                      std::span<const ListAttentionItem> items,
                                      const KvPoolRef& pool,
                                      float scale,
                                      TensorRef out,
                                      StreamRef stream) {
  check_f32(q);
  check_f32(out);
  const layout::KvGeometry& g = pool.geometry;
  SPIN_CHECK(g.head_dim > 0 && g.head_dim % 8 == 0 && g.kv_heads > 0 && g.page_tokens > 0);
  SPIN_CHECK(q.cols == out.cols && q.rows == out.rows && q.cols > 0);
  SPIN_CHECK(q.cols % (int64_t{g.head_dim} * g.kv_heads) == 0);
  for (const ListAttentionItem& item : items) {
    SPIN_CHECK(item.row < static_cast<uint64_t>(q.rows));
  }
  stream.enqueue_task([this, q, items = copy_of(items), pool, scale, out] {
    return run_list_attention({q, out, items, pool, scale}, kernels_, pool_, workspace_);
  });
}

void CpuKvOps::enqueue_merge(std::span<const MergeItem> items,
                             int64_t q_heads,
                             int64_t head_dim,
                             TensorRef out,
                             StreamRef stream) {
  check_f32(out);
  SPIN_CHECK(q_heads > 0 && head_dim > 0 && out.cols == q_heads * head_dim);
  for (const MergeItem& item : items) SPIN_CHECK(item.row < static_cast<uint64_t>(out.rows));
  stream.enqueue_task([this, items = copy_of(items), q_heads, head_dim, out] {
    const uint64_t bytes = items.size() * static_cast<uint64_t>(q_heads * head_dim) * sizeof(float);
    loop(pool_, items.size(), bytes > kSmallBytes, [&](size_t i) {
      float* row =
          static_cast<float*>(out.data) + static_cast<int64_t>(items[i].row) * out.row_stride;
      merge_part(items[i], q_heads, head_dim, row);
    });
    return ok_status();
  });
}

}  // namespace spin::backend::cpu
