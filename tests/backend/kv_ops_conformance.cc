// SPDX-License-Identifier: Apache-2.0
// The fixture; the tests are in kv_page_ops_, kv_place_ and kv_resize_conformance.cc.
#include "tests/backend/kv_ops_conformance.h"

#include "base/bf16.h"
#include "base/checked_math.h"
#include "base/counter_rng.h"
#include "layout/residency.h"

namespace spin::testing {

using layout::kNoPage;

layout::HeadPages TieredHeads::view(uint32_t h) {
  layout::HeadPages head = heads.host[h];
  head.slots = &slots.host[h * shape.lease];
  head.extents = extents.host.empty() ? nullptr : &extents.host[h * extent_count];
  if (!shape.is_flat) {
    head.pages = &pages.host[h * shape.lease];
    head.stamps = &stamps.host[h * shape.lease];
    head.table = &table.host[h * table_size];
  }
  return head;
}

void KvOpsConformance::make_pool(const layout::KvGeometry& geometry,
                                 uint32_t slots,
                                 uint32_t extent_pages) {
  geometry_ = geometry;
  pool_bytes_.assign(slots * geometry.page_bytes(), 0xFF);
  pool_buffer_ = upload<unsigned char>(pool_bytes_);
  tiers_.fast = {pool_buffer_.data(), geometry};
  tiers_.host = {extent_pages, geometry.page_bytes()};
  pool_ = tiers_.fast;
  free_slots_.resize(slots);
  std::iota(free_slots_.begin(), free_slots_.end(), 0u);
  std::shuffle(free_slots_.begin(), free_slots_.end(), std::mt19937(5));
  host_buffers_.clear();
}

std::vector<uint32_t> KvOpsConformance::take_slots(uint32_t count) {
  EXPECT_LE(count, free_slots_.size());
  const auto first = free_slots_.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<uint32_t> taken(first, free_slots_.end());
  free_slots_.erase(first, free_slots_.end());
  return taken;
}

TieredHeads KvOpsConformance::make_heads(const LeaseShape& shape,
                                         uint32_t page_ids,
                                         bool has_host) {
  const uint32_t kv_heads = geometry_.kv_heads;
  TieredHeads heads;
  heads.shape = shape;
  heads.owner = 1000 + host_buffers_.size();
  heads.slots.host = take_slots(kv_heads * shape.lease);
  if (!shape.is_flat) {
    heads.table_size = static_cast<uint32_t>(layout::residency_table_size(shape.lease));
    heads.pages.host.assign(kv_heads * shape.lease, kNoPage);
    heads.stamps.host.assign(kv_heads * shape.lease, 0);
    heads.table.host.assign(kv_heads * heads.table_size, 0);
  }
  if (has_host) {
    heads.extent_count = base::ceil_div(page_ids, tiers_.host.pages);
    for (uint32_t i = 0; i < kv_heads * heads.extent_count; ++i) {
      auto buffer = backend::Buffer::allocate(device_->memory(backend::MemoryKind::kHost),
                                              tiers_.host.bytes());
      EXPECT_TRUE(buffer.ok());
      heads.extents.host.push_back(reinterpret_cast<uint64_t>(buffer->data()));
      const std::vector<unsigned char> nothing(tiers_.host.bytes(), 0xFF);  // tags of no page
      stream().enqueue_copy(buffer->data(), nothing.data(), nothing.size());
      EXPECT_TRUE(stream().wait_idle().ok());
      host_buffers_.push_back(std::move(buffer).value());
    }
  }
  heads.heads.host.resize(kv_heads);
  heads.slots.device = upload<uint32_t>(heads.slots.host);
  if (!shape.is_flat) {
    heads.pages.device = upload<uint32_t>(heads.pages.host);
    heads.stamps.device = upload<uint8_t>(heads.stamps.host);
    heads.table.device = upload<uint32_t>(heads.table.host);
  }
  if (has_host) heads.extents.device = upload<uint64_t>(heads.extents.host);
  for (uint32_t h = 0; h < kv_heads; ++h) {
    layout::HeadPages& head = heads.heads.host[h];
    head.slots = heads.slots.device.as<uint32_t>() + h * shape.lease;
    if (has_host) head.extents = heads.extents.device.as<uint64_t>() + h * heads.extent_count;
    head.owner = heads.owner;
    head.lease_pages = shape.lease;
    head.pinned_entries = shape.pinned;
    head.extent_count = heads.extent_count;
    if (shape.is_flat) continue;
    head.pages = heads.pages.device.as<uint32_t>() + h * shape.lease;
    head.stamps = heads.stamps.device.as<uint8_t>() + h * shape.lease;
    head.table = heads.table.device.as<uint32_t>() + h * heads.table_size;
    head.table_size = heads.table_size;
  }
  heads.heads.device = upload<layout::HeadPages>(heads.heads.host);
  return heads;
}

void KvOpsConformance::download(TieredHeads& heads) {
  const auto get = [&](auto& mirror) {
    if (mirror.host.empty()) return;
    stream().enqueue_copy(mirror.host.data(), mirror.device.data(),
                          mirror.host.size() * sizeof(mirror.host[0]));
  };
  get(heads.slots);
  get(heads.pages);
  get(heads.stamps);
  get(heads.table);
  get(heads.heads);
  const Status status = stream().wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
}

void KvOpsConformance::download_pool() {
  stream().enqueue_copy(pool_bytes_.data(), tiers_.fast.base, pool_bytes_.size());
  const Status status = stream().wait_idle();
  EXPECT_TRUE(status.ok()) << status.to_string();
}

float KvOpsConformance::element(uint32_t h, uint64_t token, uint32_t plane, uint32_t d) {
  // A multiple of 1/64 below 2: exact in bf16.
  const uint64_t bits = base::mix64((token * 64 + h) * 2048 + plane * 1024 + d);
  return (static_cast<float>(bits % 255) - 127.0f) / 64.0f;
}

std::vector<unsigned char> KvOpsConformance::row_bytes(uint32_t h,
                                                       uint64_t token,
                                                       uint32_t plane) const {
  std::vector<unsigned char> out(geometry_.row_bytes());
  for (uint32_t d = 0; d < geometry_.head_dim; ++d) {
    const float value = element(h, token, plane, d);
    const base::Bf16 narrow = base::to_bf16(value);
    if (geometry_.dtype == layout::DType::kF32) std::memcpy(&out[4 * d], &value, 4);
    if (geometry_.dtype == layout::DType::kBF16) std::memcpy(&out[2 * d], &narrow, 2);
  }
  return out;
}

Matrix KvOpsConformance::token_rows(uint64_t first, int64_t count, uint32_t plane) const {
  Matrix out(count, int64_t{geometry_.kv_heads} * geometry_.head_dim);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t c = 0; c < out.cols; ++c) {
      out.at(r, c) =
          element(static_cast<uint32_t>(c / geometry_.head_dim), first + static_cast<uint64_t>(r),
                  plane, static_cast<uint32_t>(c % geometry_.head_dim));
    }
  }
  return out;
}

bool KvOpsConformance::holds(const unsigned char* page,
                             uint32_t h,
                             const std::vector<uint32_t>& tokens) const {
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (uint32_t plane = 0; plane < 2; ++plane) {
      const unsigned char* row = page + plane * geometry_.plane_bytes() + i * geometry_.row_bytes();
      const std::vector<unsigned char> expected = row_bytes(h, tokens[i], plane);
      if (std::memcmp(row, expected.data(), expected.size()) != 0) return false;
    }
  }
  return true;
}

void KvOpsConformance::write_host_page(const TieredHeads& heads,
                                       uint32_t h,
                                       uint32_t page,
                                       const std::vector<uint32_t>& tokens) {
  std::vector<unsigned char> bytes(geometry_.page_bytes(), 0xFF);
  for (size_t i = 0; i < tokens.size(); ++i) {
    for (uint32_t plane = 0; plane < 2; ++plane) {
      const std::vector<unsigned char> row = row_bytes(h, tokens[i], plane);
      std::copy(row.begin(), row.end(),
                bytes.begin() + static_cast<std::ptrdiff_t>(plane * geometry_.plane_bytes() +
                                                            i * geometry_.row_bytes()));
    }
  }
  const uint64_t extent = heads.extents.host[h * heads.extent_count + page / tiers_.host.pages];
  stream().enqueue_copy(tiers_.host.page(extent, page), bytes.data(), bytes.size());
  EXPECT_TRUE(stream().wait_idle().ok());
  write_tag(heads, h, page, {heads.owner, page, static_cast<uint32_t>(tokens.size())});
}

layout::HostPageTag KvOpsConformance::read_tag(const TieredHeads& heads,
                                               uint32_t h,
                                               uint32_t page) {
  const uint64_t extent = heads.extents.host[h * heads.extent_count + page / tiers_.host.pages];
  layout::HostPageTag tag;
  stream().enqueue_copy(&tag, tiers_.host.tag(extent, page), sizeof(tag));
  EXPECT_TRUE(stream().wait_idle().ok());
  return tag;
}

void KvOpsConformance::write_tag(const TieredHeads& heads,
                                 uint32_t h,
                                 uint32_t page,
                                 const layout::HostPageTag& tag) {
  const uint64_t extent = heads.extents.host[h * heads.extent_count + page / tiers_.host.pages];
  stream().enqueue_copy(tiers_.host.tag(extent, page), &tag, sizeof(tag));
  EXPECT_TRUE(stream().wait_idle().ok());
}

std::vector<unsigned char> KvOpsConformance::host_bytes(const TieredHeads& heads,
                                                        uint32_t h,
                                                        uint32_t page) {
  const uint64_t extent = heads.extents.host[h * heads.extent_count + page / tiers_.host.pages];
  std::vector<unsigned char> bytes(geometry_.page_bytes());
  stream().enqueue_copy(bytes.data(), tiers_.host.page(extent, page), bytes.size());
  EXPECT_TRUE(stream().wait_idle().ok());
  return bytes;
}

PageContents KvOpsConformance::fill_host(TieredHeads& heads, uint32_t count) {
  PageContents contents = ordered_contents(count * geometry_.page_tokens);
  for (uint32_t h = 0; h < geometry_.kv_heads; ++h) {
    for (const auto& [page, tokens] : contents[h]) write_host_page(heads, h, page, tokens);
  }
  return contents;
}

PageContents KvOpsConformance::ordered_contents(uint32_t tokens) const {
  PageContents contents(geometry_.kv_heads);
  for (auto& pages : contents) {
    for (uint32_t t = 0; t < tokens; ++t) pages[t / geometry_.page_tokens].push_back(t);
  }
  return contents;
}

void KvOpsConformance::expect_on_host(const TieredHeads& heads,
                                      uint32_t h,
                                      uint32_t page,
                                      const std::vector<uint32_t>& tokens) {
  const layout::HostPageTag tag = read_tag(heads, h, page);
  EXPECT_EQ(tag.page, page);
  EXPECT_EQ(tag.owner, heads.owner);
  EXPECT_EQ(tag.tokens, tokens.size());
  EXPECT_TRUE(holds(host_bytes(heads, h, page).data(), h, tokens))
      << "host page " << page << " of head " << h;
}

void KvOpsConformance::expect_sound(TieredHeads& heads, const PageContents& contents) {
  download(heads);
  download_pool();
  std::set<uint32_t> seen;
  for (uint32_t h = 0; h < geometry_.kv_heads; ++h) {
    const layout::HeadPages head = heads.view(h);
    uint32_t held = 0;
    for (uint32_t entry = 0; entry < head.lease_pages; ++entry) {
      const uint32_t slot = head.slots[entry];
      if (heads.shape.is_flat && slot == layout::kNoSlot) continue;
      ASSERT_LT(slot * geometry_.page_bytes(), pool_bytes_.size());
      EXPECT_TRUE(seen.insert(slot).second) << "slot " << slot << " twice";
      const uint32_t page = heads.shape.is_flat ? entry : head.pages[entry];
      if (page == kNoPage) continue;
      ++held;
      const auto found = contents[h].find(page);
      if (heads.shape.is_flat && found == contents[h].end()) continue;
      ASSERT_NE(found, contents[h].end()) << "page " << page << " of head " << h;
      EXPECT_TRUE(holds(slot_bytes(slot), h, found->second)) << "page " << page << ", head " << h;
      if (!heads.shape.is_flat) {
        EXPECT_EQ(layout::find_entry(head, page), entry);
      }
    }
    if (heads.shape.is_flat) continue;
    const auto used = std::count_if(head.table, head.table + heads.table_size,
                                    [](uint32_t value) { return value != 0; });
    EXPECT_EQ(static_cast<uint32_t>(used), held);
  }
}

std::set<uint32_t> KvOpsConformance::resident(TieredHeads& heads, uint32_t h) {
  download(heads);
  const layout::HeadPages head = heads.view(h);
  std::set<uint32_t> pages(head.pages, head.pages + head.lease_pages);
  pages.erase(kNoPage);
  return pages;
}

WantedList KvOpsConformance::wanted_of(const std::vector<uint32_t>& pages,
                                       const PageContents& contents,
                                       uint32_t h) {
  WantedList list;
  for (const uint32_t page : pages) {
    list.pages.push_back(page);
    list.tokens.push_back(static_cast<uint8_t>(contents[h].at(page).size()));
  }
  return list;
}

KvOpsConformance::List KvOpsConformance::make_list(const std::vector<WantedList>& lists) {
  size_t stride = 1;
  for (const WantedList& list : lists) stride = std::max(stride, list.pages.size() + 2);
  std::vector<uint32_t> pages(lists.size() * stride, kNoPage);
  std::vector<uint8_t> tokens(lists.size() * stride, 0xEE);
  std::vector<uint32_t> counts;
  for (size_t h = 0; h < lists.size(); ++h) {
    std::copy(lists[h].pages.begin(), lists[h].pages.end(), pages.begin() + h * stride);
    std::copy(lists[h].tokens.begin(), lists[h].tokens.end(), tokens.begin() + h * stride);
    counts.push_back(static_cast<uint32_t>(lists[h].pages.size()));
  }
  List out{upload<uint32_t>(pages), upload<uint8_t>(tokens), upload<uint32_t>(counts), {}};
  out.view = {out.pages.as<uint32_t>(), out.tokens.as<uint8_t>(), out.counts.as<uint32_t>(),
              static_cast<uint32_t>(stride)};
  return out;
}

std::vector<KvOpsConformance::Retrieved> KvOpsConformance::retrieve(
    const std::vector<RetrieveCall>& calls) {
  struct Out {
    List list;
    backend::Buffer slots;
    backend::Buffer fetched;
    backend::Buffer fetched_counts;
    backend::Buffer counters;
  };
  const uint32_t kv_heads = geometry_.kv_heads;
  std::vector<Out> outs;
  std::vector<backend::RetrieveItem> items;
  for (const RetrieveCall& call : calls) {
    Out out;
    out.list = make_list(call.wanted);
    const std::vector<uint32_t> blank(kv_heads * out.list.view.stride, 0xDDDD'DDDD);
    out.slots = upload<uint32_t>(blank);
    out.fetched = upload<uint32_t>(blank);
    out.fetched_counts = upload<uint32_t>(blank);
    out.counters =
        upload<layout::RetrieveCounters>(std::vector<layout::RetrieveCounters>(kv_heads));
    backend::RetrieveItem item;
    item.heads = device_heads(*call.heads);
    item.wanted = out.list.view;
    item.slots = out.slots.as<uint32_t>();
    item.fetched = out.fetched.as<uint32_t>();
    item.fetched_counts = out.fetched_counts.as<uint32_t>();
    item.counters = out.counters.as<layout::RetrieveCounters>();
    item.planes = call.planes;
    item.planes_end = call.planes_end;
    item.reuse = call.reuse;
    item.epoch = call.epoch;
    items.push_back(item);
    outs.push_back(std::move(out));
  }
  kv_ops().enqueue_retrieve(items, tiers_, stream());
  std::vector<Retrieved> results(calls.size());
  const Status status = stream().wait_idle();
  for (size_t i = 0; i < calls.size(); ++i) {
    results[i].status = status;
    if (!status.ok()) continue;
    const size_t stride = outs[i].list.view.stride;
    const auto slots = read_back<uint32_t>(outs[i].slots, kv_heads * stride);
    const auto fetched = read_back<uint32_t>(outs[i].fetched, kv_heads * stride);
    const auto counts = read_back<uint32_t>(outs[i].fetched_counts, kv_heads);
    results[i].counters = read_back<layout::RetrieveCounters>(outs[i].counters, kv_heads);
    for (uint32_t h = 0; h < kv_heads; ++h) {
      const auto begin = static_cast<std::ptrdiff_t>(h * stride);
      const auto wanted = static_cast<std::ptrdiff_t>(calls[i].wanted[h].pages.size());
      results[i].slots.emplace_back(slots.begin() + begin, slots.begin() + begin + wanted);
      results[i].fetched.emplace_back(fetched.begin() + begin, fetched.begin() + begin + counts[h]);
    }
  }
  return results;
}

void KvOpsConformance::append_tokens(TieredHeads& heads,
                                     const layout::Tail& tail,
                                     uint64_t first,
                                     uint32_t count) {
  // Rows that belong to nobody lie before and behind.
  const auto rows = [&](uint32_t plane) {
    return concatenated(
        {token_rows(9000, 2, plane), token_rows(first, count, plane), token_rows(9000, 1, plane)});
  };
  const Tensor k = upload_matrix(rows(0), 3);
  const Tensor v = upload_matrix(rows(1), 1);
  backend::TailAppendItem item{device_heads(heads), tail, 2, count};
  const bool flat = heads.heads.host.front().is_flat();
  const uint64_t ring = flat ? 0 : tail.ring;
  constexpr uint32_t kJunk = 0xABAB'ABAB;
  std::vector<uint32_t> expected(geometry_.kv_heads * ring + 1, kJunk);
  const backend::Buffer tail_slots = upload<uint32_t>(expected);
  if (!flat) item.tail_slots = tail_slots.as<uint32_t>();
  kv_ops().enqueue_tail_append(k.ref, v.ref, {&item, 1}, tiers_, stream());
  const Status status = stream().wait_idle();
  ASSERT_TRUE(status.ok()) << status.to_string();
  const auto slots = read_back<uint32_t>(heads.slots.device, heads.slots.host.size());
  for (uint32_t h = 0; h < geometry_.kv_heads; ++h) {
    for (uint32_t t = 0; t < ring; ++t) {
      const uint32_t entry = tail.first_entry + (tail.first_page + t) % tail.ring;
      expected[h * ring + t] = slots[uint64_t{h} * heads.shape.lease + entry];
    }
  }
  EXPECT_EQ(read_back<uint32_t>(tail_slots, expected.size()), expected);
}

void KvOpsConformance::place(const backend::PlaceItem& item) {
  kv_ops().enqueue_place(item, tiers_, stream());
  const Status status = stream().wait_idle();
  ASSERT_TRUE(status.ok()) << status.to_string();
}

void KvOpsConformance::seal(TieredHeads& heads,
                            const layout::Tail& tail,
                            uint32_t pages,
                            uint8_t epoch,
                            const layout::ReuseProbe& reuse) {
  const backend::SealItem item{device_heads(heads), tail, pages, epoch, reuse};
  kv_ops().enqueue_seal({&item, 1}, tiers_, stream());
  const Status status = stream().wait_idle();
  ASSERT_TRUE(status.ok()) << status.to_string();
}

void KvOpsConformance::repack(const backend::RepackTailItem& item) {
  kv_ops().enqueue_repack_tail(item, tiers_, stream());
  const Status status = stream().wait_idle();
  ASSERT_TRUE(status.ok()) << status.to_string();
}

TieredHeads KvOpsConformance::make_successor(const TieredHeads& heads, const LeaseShape& shape) {
  const std::vector<uint32_t> free_slots = free_slots_;
  TieredHeads after = make_heads(shape, 0, false);
  free_slots_ = free_slots;  // its slots come with the resize
  after.extents.host = heads.extents.host;
  after.extent_count = heads.extent_count;
  after.owner = heads.owner;
  const std::vector<uint32_t> junk(after.slots.host.size(), 0xABAB'ABAB);
  stream().enqueue_copy(after.slots.device.data(), junk.data(), after.slots.device.size_bytes());
  EXPECT_TRUE(stream().wait_idle().ok());
  for (uint32_t h = 0; h < geometry_.kv_heads; ++h) {
    layout::HeadPages& head = after.heads.host[h];
    head.owner = heads.owner;
    head.extents = heads.extents.device.as<uint64_t>() + h * heads.extent_count;
    head.extent_count = heads.extent_count;
  }
  after.heads.device = upload<layout::HeadPages>(after.heads.host);
  return after;
}

void KvOpsConformance::resize(TieredHeads& before,
                              TieredHeads& after,
                              const layout::Tail& tail_before,
                              const layout::Tail& tail_after,
                              const std::vector<uint32_t>& zone_pages,
                              uint8_t epoch) {
  const uint32_t kv_heads = geometry_.kv_heads;
  const uint32_t extra_count =
      after.shape.lease > before.shape.lease ? after.shape.lease - before.shape.lease : 0;
  const uint32_t released_count = before.shape.lease + extra_count - after.shape.lease;
  // One more than needed, so that no buffer is empty.
  std::vector<uint32_t> extra = take_slots(kv_heads * extra_count);
  extra.push_back(0xABAB'ABAB);
  const backend::Buffer extra_buffer = upload<uint32_t>(extra);
  const backend::Buffer released_buffer =
      upload<uint32_t>(std::vector<uint32_t>(kv_heads * released_count + 1, 0xCDCD'CDCD));
  const backend::Buffer zone_buffer = upload<uint32_t>(zone_pages);
  const backend::ResizeItem item{
      .before = device_heads(before),
      .after = device_heads(after),
      .extra = extra_buffer.as<uint32_t>(),
      .extra_count = extra_count,
      .released = released_buffer.as<uint32_t>(),
      .released_count = released_count,
      .tail_before = tail_before,
      .tail_after = tail_after,
      .zone_entries = static_cast<uint32_t>(zone_pages.size()) / kv_heads,
      .zone_pages = zone_buffer.as<uint32_t>(),
      .epoch = epoch};
  kv_ops().enqueue_resize(item, tiers_, stream());
  download(after);
  const auto released = read_back<uint32_t>(released_buffer, kv_heads * released_count + 1);
  EXPECT_EQ(released.back(), 0xCDCD'CDCD);
  for (uint32_t h = 0; h < kv_heads; ++h) {
    std::multiset<uint32_t> had;
    std::multiset<uint32_t> has;
    for (uint32_t i = 0; i < before.shape.lease; ++i) had.insert(before.slot(h, i));
    for (uint32_t i = 0; i < extra_count; ++i) had.insert(extra[h * extra_count + i]);
    for (uint32_t i = 0; i < after.shape.lease; ++i) has.insert(after.slot(h, i));
    for (uint32_t i = 0; i < released_count; ++i) has.insert(released[h * released_count + i]);
    EXPECT_EQ(had, has) << "slots of head " << h;
  }
}

void KvOpsConformance::expect_resident(TieredHeads& heads, const std::vector<uint32_t>& pages) {
  for (uint32_t h = 0; h < geometry_.kv_heads; ++h) {
    EXPECT_EQ(resident(heads, h), std::set<uint32_t>(pages.begin(), pages.end())) << "head " << h;
  }
}

void KvOpsConformance::expect_entry(TieredHeads& heads, uint32_t entry, uint32_t page) {
  download(heads);
  for (uint32_t h = 0; h < geometry_.kv_heads; ++h) {
    EXPECT_EQ(heads.view(h).pages[entry], page) << "entry " << entry << " of head " << h;
  }
}

KvOpsConformance::Prompt KvOpsConformance::make_prompt(uint32_t tokens, uint32_t page_tokens) {
  Prompt prompt;
  layout::KvGeometry geometry = geometry_;
  geometry.page_tokens = page_tokens;
  const auto pages = static_cast<uint32_t>(geometry.pages_per_head(tokens));
  std::vector<uint32_t> slots(geometry.kv_heads * (pages + 1));
  std::iota(slots.begin(), slots.end(), 0u);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(3));
  std::vector<unsigned char> bytes(slots.size() * geometry.page_bytes(), 0xFF);
  for (uint32_t h = 0; h < geometry.kv_heads; ++h) {
    for (uint32_t t = 0; t < tokens; ++t) {
      const uint64_t slot = slots[h * (pages + 1) + t / page_tokens];
      for (uint32_t plane = 0; plane < 2; ++plane) {
        const std::vector<unsigned char> row = row_bytes(h, t, plane);
        std::memcpy(&bytes[slot * geometry.page_bytes() + plane * geometry.plane_bytes() +
                           t % page_tokens * geometry.row_bytes()],
                    row.data(), row.size());
      }
    }
  }
  prompt.bytes = upload<unsigned char>(bytes);
  prompt.slots = upload<uint32_t>(slots);
  prompt.tokens = {prompt.bytes.as<std::byte>(), geometry, prompt.slots.as<uint32_t>(), pages + 1,
                   tokens};
  return prompt;
}

KvOpsConformance::Map KvOpsConformance::make_map(
    const std::vector<std::vector<std::vector<uint32_t>>>& pages) {
  size_t page_stride = 2;
  size_t token_stride = 1;
  for (const auto& head : pages) {
    size_t tokens = 0;
    for (const auto& page : head) tokens += page.size();
    page_stride = std::max(page_stride, head.size() + 3);
    token_stride = std::max(token_stride, tokens + 5);
  }
  std::vector<uint32_t> counts;
  std::vector<uint32_t> starts(pages.size() * page_stride, 0);
  std::vector<uint32_t> ids(pages.size() * token_stride, 0);
  for (size_t h = 0; h < pages.size(); ++h) {
    uint32_t at = 0;
    counts.push_back(static_cast<uint32_t>(pages[h].size()));
    for (size_t p = 0; p < pages[h].size(); ++p) {
      starts[h * page_stride + p] = at;
      for (const uint32_t token : pages[h][p]) ids[h * token_stride + at++] = token;
    }
    starts[h * page_stride + pages[h].size()] = at;
  }
  Map map{upload<uint32_t>(counts), upload<uint32_t>(starts), upload<uint32_t>(ids), {}};
  map.view = {map.counts.as<uint32_t>(), map.starts.as<uint32_t>(), map.token_ids.as<uint32_t>(),
              static_cast<uint32_t>(page_stride), token_stride};
  return map;
}

}  // namespace spin::testing
