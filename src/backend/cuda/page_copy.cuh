// SPDX-License-Identifier: Apache-2.0
// Addresses and copies of KV pages in both tiers. A host page and its tag are written and read here
// only, so that their order is right everywhere. What copies is a warp: pages are 512 bytes to
// 64 KiB, all addresses and sizes are multiples of 16 (a row is a multiple of 8 elements).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cuda/kernel_support.cuh"
#include "backend/kv_ops.h"
#include "base/check.h"
#include "layout/head_pages.h"

namespace spin::backend::cuda {

// 16-byte loads of one lane that are under way at a time: with 8, eight blocks of 512 threads
// saturate the bus, and a page of 4 KiB is one round.
inline constexpr uint32_t kLoadsInFlight = 8;

inline void check_pages(const layout::KvGeometry& geometry) {
  SPIN_CHECK(geometry.kv_heads > 0 && geometry.page_tokens > 0);
  SPIN_CHECK(geometry.row_bytes() > 0 && geometry.row_bytes() % sizeof(uint4) == 0);
}

__device__ inline unsigned lane_index() { return threadIdx.x % kWarp; }
__device__ inline unsigned warp_index() { return threadIdx.x / kWarp; }

__device__ inline std::byte* slot_address(const KvPoolRef& pool, uint32_t slot) {
  return static_cast<std::byte*>(pool.base) + uint64_t{slot} * pool.geometry.page_bytes();
}

// ---- Host pages.

// A page's place on the host.
struct HostPage {
  std::byte* bytes = nullptr;
  layout::HostPageTag* tag = nullptr;

  __device__ explicit operator bool() const { return bytes != nullptr; }
};

// Nothing where there is no extent for it.
__device__ inline HostPage host_page(const layout::HeadPages& head,
                                     const layout::HostExtentLayout& host,
                                     uint32_t page) {
  const uint32_t index = page / host.pages;
  if (head.extents == nullptr || index >= head.extent_count) return {};
  const uint64_t extent = head.extents[index];
  if (extent == 0) return {};
  return {host.page(extent, page), host.tag(extent, page)};
}

// One read over the bus, so that the fields are of one moment.
__device__ inline layout::HostPageTag load_tag(const HostPage& from) {
  static_assert(sizeof(layout::HostPageTag) == sizeof(uint4));
  const uint4 words = __ldcv(reinterpret_cast<const uint4*>(from.tag));
  layout::HostPageTag tag;
  tag.owner = words.x | uint64_t{words.y} << 32;
  tag.page = words.z;
  tag.tokens = words.w;
  return tag;
}

// Whether the host holds `page` of this head, whatever its number of tokens.
__device__ inline bool host_holds(const HostPage& from,
                                  const layout::HeadPages& head,
                                  uint32_t page) {
  if (!from) return false;
  const layout::HostPageTag tag = load_tag(from);
  return tag.page == page && tag.owner == head.owner;
}

// A warp writes a host page between these two: the tag names no page while the bytes change, and
// its page field comes last.
__device__ inline void begin_host_page(const HostPage& to) {
  if (lane_index() == 0) {
    *reinterpret_cast<volatile uint32_t*>(&to.tag->page) = layout::kNoPage;
    __threadfence_system();
  }
  __syncwarp();
}

__device__ inline void end_host_page(const HostPage& to,
                                     uint64_t owner,
                                     uint32_t page,
                                     uint32_t tokens) {
  if (lane_index() == 0) {
    to.tag->owner = owner;
    to.tag->tokens = tokens;
  }
  __threadfence_system();  // each lane's bytes
  __syncwarp();
  if (lane_index() == 0) *reinterpret_cast<volatile uint32_t*>(&to.tag->page) = page;
}

// ---- Copies by a warp.

__device__ inline void warp_copy(std::byte* to, const std::byte* from, uint64_t bytes) {
  auto* const out = reinterpret_cast<uint4*>(to);
  const auto* const in = reinterpret_cast<const uint4*>(from);
  const auto count = static_cast<uint32_t>(bytes / sizeof(uint4));
  for (uint32_t first = lane_index(); first < count; first += kWarp * kLoadsInFlight) {
    uint4 loaded[kLoadsInFlight];
#pragma unroll
    for (uint32_t k = 0; k < kLoadsInFlight; ++k) {
      if (first + k * kWarp < count) loaded[k] = __ldcs(in + first + k * kWarp);
    }
#pragma unroll
    for (uint32_t k = 0; k < kLoadsInFlight; ++k) {
      if (first + k * kWarp < count) out[first + k * kWarp] = loaded[k];
    }
  }
}

__device__ inline void warp_zero(std::byte* to, uint64_t bytes) {
  auto* const out = reinterpret_cast<uint4*>(to);
  const auto count = static_cast<uint32_t>(bytes / sizeof(uint4));
  for (uint32_t i = lane_index(); i < count; i += kWarp) out[i] = make_uint4(0, 0, 0, 0);
}

// Fills the first `rows` rows of a page with tokens from anywhere. row_of(i): address of token i's
// key, whose value lies `from_plane_bytes` behind. Each of the two places may be null.
template <typename RowOf>
__device__ void warp_copy_rows(uint32_t rows,
                               uint64_t from_plane_bytes,
                               const layout::KvGeometry& to_geometry,
                               const RowOf& row_of,
                               std::byte* to,
                               std::byte* also_to) {
  constexpr uint32_t kRows = kLoadsInFlight / 2;  // a key and a value each
  const auto per_row = static_cast<uint32_t>(to_geometry.row_bytes() / sizeof(uint4));
  const uint64_t plane = to_geometry.plane_bytes() / sizeof(uint4);
  const uint32_t count = rows * per_row;
  const auto store = [&](std::byte* page, uint32_t i, const uint4& key, const uint4& value) {
    if (page == nullptr) return;
    reinterpret_cast<uint4*>(page)[i] = key;
    reinterpret_cast<uint4*>(page)[plane + i] = value;
  };
  for (uint32_t first = lane_index(); first < count; first += kWarp * kRows) {
    uint4 keys[kRows];
    uint4 values[kRows];
#pragma unroll
    for (uint32_t k = 0; k < kRows; ++k) {
      const uint32_t i = first + k * kWarp;
      if (i >= count) continue;
      const std::byte* from = row_of(i / per_row) + uint64_t{i % per_row} * sizeof(uint4);
      keys[k] = __ldcs(reinterpret_cast<const uint4*>(from));
      values[k] = __ldcs(reinterpret_cast<const uint4*>(from + from_plane_bytes));
    }
#pragma unroll
    for (uint32_t k = 0; k < kRows; ++k) {
      const uint32_t i = first + k * kWarp;
      if (i >= count) continue;
      store(to, i, keys[k], values[k]);
      store(also_to, i, keys[k], values[k]);
    }
  }
}

}  // namespace spin::backend::cuda
