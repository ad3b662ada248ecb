// SPDX-License-Identifier: Apache-2.0
// The tail of a sequence's layer: appending to it, sealing its oldest pages, and dealing its oldest
// tokens out to new pages.
#include <vector>

#include "backend/cuda/cuda_kv_ops.h"
#include "backend/cuda/head_tables.cuh"
#include "backend/cuda/kernel_support.cuh"
#include "backend/cuda/page_copy.cuh"

namespace spin::backend::cuda {
namespace {

using layout::HeadPages;
using layout::kNoPage;
using layout::kNoSlot;

constexpr unsigned kAppendThreads = 128;
constexpr unsigned kAppendWarps = kAppendThreads / kWarp;
// Per head; with 8 heads 512 warps write to the host, whose fences take most of a page's time.
constexpr unsigned kRepackBlocks = 4;

void check_f32(const TensorRef& tensor) {
  SPIN_CHECK(tensor.dtype == layout::DType::kF32);
  SPIN_CHECK(tensor.rows >= 0 && tensor.cols >= 0 && tensor.row_stride >= tensor.cols);
}

// Slot of page `t` of a tail; kNoSlot if its lease has none.
__device__ uint32_t tail_slot(const HeadPages& head, const layout::Tail& tail, uint32_t t) {
  const uint32_t entry = layout::tail_entry(head, tail, t);
  return entry < head.lease_pages ? head.slots[entry] : kNoSlot;
}

// ---- Append.

struct Rows {
  const float* data = nullptr;
  int64_t stride = 0;
};

// Block (h, i): head h of item i, a warp per row of k or v. Bytes: each row once read as f32 and
// once written in the pool's type; a few words of the table for each page begun.
__global__ void __launch_bounds__(kAppendThreads)
    tail_append_kernel(const __grid_constant__ ItemPack<TailAppendItem> items,
                       const Rows k,
                       const Rows v,
                       const KvPoolRef pool,
                       uint32_t* fault) {
  const TailAppendItem& item = items[blockIdx.y];
  const uint32_t h = blockIdx.x;
  const layout::KvGeometry& geometry = pool.geometry;
  HeadPages head = item.heads[h];
  for (uint64_t r = warp_index(); r < uint64_t{item.tokens} * 2; r += kAppendWarps) {
    const auto i = static_cast<uint32_t>(r / 2);
    const uint32_t token = item.tail.tokens + i;
    const uint32_t slot = tail_slot(head, item.tail, token / geometry.page_tokens);
    if (slot == kNoSlot) {
      if (lane_index() == 0) report_fault(fault, KernelFault::kTooManyPages);
      continue;
    }
    const Rows& rows = r % 2 == 0 ? k : v;
    const float* from = rows.data + static_cast<int64_t>(item.first_row + i) * rows.stride +
                        uint64_t{h} * geometry.head_dim;
    std::byte* to = slot_address(pool, slot) +
                    (token % geometry.page_tokens) * geometry.row_bytes() +
                    (r % 2) * geometry.plane_bytes();
    for (uint32_t d = lane_index(); d < geometry.head_dim; d += kWarp) {
      store_element(to, geometry.dtype, d, from[d]);
    }
  }
  if (head.is_flat()) return;
  for (uint32_t t = threadIdx.x; item.tail_slots != nullptr && t < item.tail.ring;
       t += kAppendThreads) {
    item.tail_slots[uint64_t{h} * item.tail.ring + t] = tail_slot(head, item.tail, t);
  }
  if (item.tokens == 0 || threadIdx.x > 0) return;
  const uint32_t last = (item.tail.tokens + item.tokens - 1) / geometry.page_tokens;
  for (uint32_t t = item.tail.tokens / geometry.page_tokens; t <= last; ++t) {
    const uint32_t entry = layout::tail_entry(head, item.tail, t);
    if (entry < head.lease_pages) layout::set_entry(head, entry, item.tail.first_page + t);
  }
}

// ---- Seal.

struct SealWork {
  SealItem item;
  uint64_t first_victim = 0;  // of head 0 in SealScratch::victims
  uint64_t first_ghost = 0;   // of head 0 in SealScratch::ghosts
};

struct SealScratch {
  uint32_t* victims = nullptr;
  uint32_t* ghosts = nullptr;
};

// The sealed pages and their tags go to the host, a warp per page.
__device__ void write_sealed(const SealItem& item,
                             const HeadPages& head,
                             const TieredPoolRef& pool,
                             uint32_t* fault) {
  const layout::KvGeometry& geometry = pool.fast.geometry;
  for (uint32_t t = warp_index(); t < item.pages; t += kHeadWarps) {
    const uint32_t page = item.tail.first_page + t;
    const HostPage host = host_page(head, pool.host, page);
    const uint32_t slot = tail_slot(head, item.tail, t);
    if (!host || slot == kNoSlot) {
      if (lane_index() == 0) report_fault(fault, KernelFault::kTooManyPages);
      continue;
    }
    begin_host_page(host);
    warp_copy(host.bytes, slot_address(pool.fast, slot), geometry.page_bytes());
    end_host_page(host, head.owner, page, geometry.page_tokens);
  }
}

// Pages leave the tail; those for which there is a victim change places with it. One thread: they
// are few, and the table depends on their order.
__device__ void give_to_cache(const SealItem& item,
                              HeadPages& head,
                              const uint32_t* victims,
                              uint32_t cached) {
  for (uint32_t t = 0; t < item.pages; ++t) {
    const uint32_t from = layout::tail_entry(head, item.tail, t);
    if (from >= head.lease_pages) return;
    layout::set_entry(head, from, kNoPage);
    // With too few entries the newest pages are cached.
    if (t < item.pages - cached) continue;
    const uint32_t entry = victims[t - (item.pages - cached)];
    layout::set_entry(head, entry, item.tail.first_page + t);
    head.stamps[entry] = layout::unused_stamp(item.epoch);
    const uint32_t slot = head.slots[from];
    head.slots[from] = head.slots[entry];
    head.slots[entry] = slot;
  }
}

// Block (h, i): head h of item i. Bytes: each page once read and once written over the bus; 5 bytes
// for each cache entry, twice.
__global__ void __launch_bounds__(kHeadThreads)
    seal_kernel(const __grid_constant__ ItemPack<SealWork> items,
                const TieredPoolRef pool,
                const SealScratch scratch,
                uint32_t* fault) {
  __shared__ VictimRoom room;
  __shared__ RankRoom ranks;
  const SealWork& work = items[blockIdx.y];
  const SealItem& item = work.item;
  const uint32_t h = blockIdx.x;
  HeadPages head = item.heads[h];
  if (head.is_flat()) return;
  write_sealed(item, head, pool, fault);
  block_sweep_if_due(head, item.heads + h, item.epoch);
  uint32_t* const victims = scratch.victims + work.first_victim + uint64_t{h} * item.pages;
  const uint32_t cached = block_choose_victims(head, item.epoch, item.pages, victims, room, ranks);
  if (uint32_t* ghosts = layout::ghosts_of(item.reuse, h); ghosts != nullptr) {
    uint32_t* const ghost_room = scratch.ghosts + work.first_ghost + ghost_words(item.reuse, h);
    block_give_up(head, victims, cached, ghosts, item.reuse.ghost_pages, ghost_room, ranks);
  }
  if (threadIdx.x == 0) give_to_cache(item, head, victims, cached);
}

// ---- Repack.

struct RepackWork {
  layout::HeadPages* heads = nullptr;
  layout::Tail tail;
  layout::PageMap map;
  uint32_t first_mapped_page = 0;
};

// Page i of the map: its tokens' rows in the map's order, on the host or in the flat entry.
__device__ void repack_page(const RepackWork& work,
                            const HeadPages& head,
                            const TieredPoolRef& pool,
                            uint32_t i,
                            uint32_t* fault) {
  const layout::KvGeometry& geometry = pool.fast.geometry;
  const uint32_t* starts = work.map.starts + uint64_t{blockIdx.y} * work.map.page_stride;
  const uint32_t* token_ids = work.map.token_ids + blockIdx.y * work.map.token_stride + starts[i];
  const uint32_t count = min(starts[i + 1] - starts[i], geometry.page_tokens);
  if (count == 0) return;
  const uint32_t page = work.first_mapped_page + i;
  const auto row_of = [&](uint32_t r) {
    const uint32_t token = token_ids[r];
    const uint32_t entry = layout::tail_entry(head, work.tail, token / geometry.page_tokens);
    return slot_address(pool.fast, head.slots[entry]) +
           (token % geometry.page_tokens) * geometry.row_bytes();
  };
  const bool is_flat = head.is_flat();
  const uint32_t slot = is_flat && page < head.lease_pages ? head.slots[page] : kNoSlot;
  const HostPage host = is_flat ? HostPage{} : host_page(head, pool.host, page);
  if (slot == kNoSlot && !host) {
    if (lane_index() == 0) report_fault(fault, KernelFault::kTooManyPages);
    return;
  }
  std::byte* const to = is_flat ? slot_address(pool.fast, slot) : host.bytes;
  if (!is_flat) begin_host_page(host);
  warp_copy_rows(count, geometry.plane_bytes(), geometry, row_of, to, nullptr);
  if (!is_flat) end_host_page(host, head.owner, page, count);
}

// The tail's pages whose tokens left are not resident any more; their slots stay in the ring.
__device__ void leave_tail(const RepackWork& work,
                           const HeadPages& head,
                           uint32_t tokens,
                           uint32_t page_tokens,
                           uint32_t* stage) {
  HeadPages staged = stage_tables(head, stage);
  if (threadIdx.x == 0) {
    for (uint32_t t = 0; t < tokens / page_tokens; ++t) {
      layout::set_entry(staged, layout::tail_entry(staged, work.tail, t), kNoPage);
    }
  }
  unstage_tables(staged, head);
}

// Blocks ([0, kRepackBlocks), h) fill the pages of head h, a warp each; the last one changes the
// table, which the others do not look at. Bytes: each token's rows once read and once written (over
// the bus when tiered).
__global__ void __launch_bounds__(kHeadThreads)
    repack_kernel(const RepackWork work, const TieredPoolRef pool, uint32_t* fault) {
  extern __shared__ uint32_t stage[];
  const uint32_t h = blockIdx.y;
  const HeadPages head = work.heads[h];
  const uint32_t* starts = work.map.starts + uint64_t{h} * work.map.page_stride;
  uint32_t count = work.map.counts[h];
  if (count >= work.map.page_stride) {
    if (threadIdx.x == 0) report_fault(fault, KernelFault::kTooManyPages);
    count = work.map.page_stride - 1;
  }
  if (blockIdx.x < kRepackBlocks) {
    for (uint32_t i = warp_index() * kRepackBlocks + blockIdx.x; i < count;
         i += kRepackBlocks * kHeadWarps) {
      repack_page(work, head, pool, i, fault);
    }
  } else if (!head.is_flat()) {
    leave_tail(work, head, starts[count] - starts[0], pool.fast.geometry.page_tokens, stage);
  }
}

}  // namespace

void CudaKvOps::enqueue_tail_append(TensorRef k,
                                    TensorRef v,
                                    std::span<const TailAppendItem> items,
                                    const TieredPoolRef& pool,
                                    StreamRef stream_ref) {
  check_f32(k);
  check_f32(v);
  const layout::KvGeometry& geometry = pool.fast.geometry;
  check_pages(geometry);
  const int64_t width = int64_t{geometry.kv_heads} * geometry.head_dim;
  SPIN_CHECK(k.cols == width && v.cols == width && k.rows == v.rows);
  for (const TailAppendItem& item : items) {
    SPIN_CHECK(item.tokens <= static_cast<uint64_t>(k.rows));
    SPIN_CHECK(item.first_row <= static_cast<uint64_t>(k.rows) - item.tokens);
  }
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  const Rows keys{static_cast<const float*>(k.data), k.row_stride};
  const Rows values{static_cast<const float*>(v.data), v.row_stride};
  launch_packs(items, [&](const ItemPack<TailAppendItem>& pack, uint32_t count, size_t) {
    tail_append_kernel<<<dim3(geometry.kv_heads, count), kAppendThreads, 0, stream.handle()>>>(
        pack, keys, values, pool.fast, stream.fault());
    stream.end("tail_append");
  });
}

void CudaKvOps::enqueue_seal(std::span<const SealItem> items,
                             const TieredPoolRef& pool,
                             StreamRef stream_ref) {
  check_pages(pool.fast.geometry);
  CudaStream& stream = cuda_stream(stream_ref);
  if (items.empty() || !stream.begin()) return;
  const uint32_t kv_heads = pool.fast.geometry.kv_heads;
  std::vector<SealWork> work;
  work.reserve(items.size());
  uint64_t pages = 0;
  uint64_t ghosts = 0;
  for (const SealItem& item : items) {
    work.push_back({item, pages, ghosts});
    pages += uint64_t{kv_heads} * item.pages;
    ghosts += ghost_words(item.reuse, kv_heads);
  }
  ScratchPlan plan;
  const uint64_t victims_at = plan.add((pages + 1) * sizeof(uint32_t));  // never nothing
  const uint64_t ghosts_at = plan.add(ghosts * sizeof(uint32_t));
  auto* const memory = static_cast<std::byte*>(stream.scratch(plan.bytes()));
  if (memory == nullptr) return;
  const SealScratch scratch{reinterpret_cast<uint32_t*>(memory + victims_at),
                            reinterpret_cast<uint32_t*>(memory + ghosts_at)};
  launch_packs(std::span<const SealWork>(work),
               [&](const ItemPack<SealWork>& pack, uint32_t count, size_t) {
                 seal_kernel<<<dim3(kv_heads, count), kHeadThreads, 0, stream.handle()>>>(
                     pack, pool, scratch, stream.fault());
                 stream.end("seal");
               });
}

void CudaKvOps::enqueue_repack_tail(const RepackTailItem& item,
                                    const TieredPoolRef& pool,
                                    StreamRef stream_ref) {
  SPIN_CHECK(item.map != nullptr && item.map->page_stride > 0);
  check_pages(pool.fast.geometry);
  CudaStream& stream = cuda_stream(stream_ref);
  if (!stream.begin()) return;
  const RepackWork work{item.heads, item.tail, *item.map, item.first_mapped_page};
  const dim3 grid(kRepackBlocks + 1, pool.fast.geometry.kv_heads);
  repack_kernel<<<grid, kHeadThreads, kStageBytes, stream.handle()>>>(work, pool, stream.fault());
  stream.end("repack_tail");
}

}  // namespace spin::backend::cuda
