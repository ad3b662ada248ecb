// SPDX-License-Identifier: Apache-2.0
#include "tests/kv/store_rig.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "base/checked_math.h"
#include "base/counter_rng.h"
#include "kv/lease_tables.h"

namespace spin::testing {

StoreRig::StoreRig(const RigOptions& options, backend::Device* device) : options_(options) {
  static_assert(sizeof(float) == 4);
  SPIN_CHECK(options.geometry.dtype == layout::DType::kF32);
  if (device == nullptr) {
    own_device_ = std::move(*backend::cpu::create_cpu_device({.threads = 1}));
    device = own_device_.get();
  }
  device_ = device;
  kv::PageStoreOptions store;
  store.geometry = options.geometry;
  store.fast_pages = options.fast_pages;
  store.host_bytes = host_bytes();
  store.extent_pages = options.extent_pages;
  store_ = std::move(*kv::PageStore::create(*device, store));
  stream_ = std::move(*device->create_stream("steps"));
}

std::span<const std::byte> StoreRig::slots() {
  const kv::PagePool& pool = store_->fast();
  if (device_->properties().unified_memory) return {pool.page_address(0), pool.size_bytes()};
  slots_.resize(pool.size_bytes());
  const Status copied =
      kv::copy_now(slots_.data(), pool.page_address(0), slots_.size(), store_->table_stream());
  EXPECT_TRUE(copied.ok()) << copied.to_string();
  return slots_;
}

uint64_t StoreRig::host_bytes() const {
  return options_.host_extents *
         layout::HostExtentLayout{options_.extent_pages, options_.geometry.page_bytes()}.bytes();
}

void StoreRig::fill_row(
    uint64_t seed, uint32_t layer, uint32_t head, bool value, uint64_t token, float* row) const {
  const uint64_t place = ((uint64_t{layer} * 64 + head) * 2 + (value ? 1 : 0)) << 40;
  uint64_t bits = base::mix64(seed ^ base::mix64(place + token));
  for (uint32_t i = 0; i < options_.geometry.head_dim; ++i) {
    row[i] = static_cast<float>(bits >> 40);
    bits = bits * 0x9E3779B97F4A7C15u + 1;
  }
}

uint32_t most_mapped_ids(const layout::KvGeometry& geometry, uint64_t tokens) {
  return static_cast<uint32_t>(
      base::ceil_div<uint64_t>(tokens, std::max(geometry.page_tokens / 2, 1u)));
}

RigShape range_shape(const layout::KvGeometry& geometry, uint64_t max_tokens) {
  RigShape shape;
  shape.shape.max_tokens = max_tokens;
  shape.shape.max_page_ids = geometry.pages_per_head(max_tokens);
  shape.shape.sink_pages = 1;
  shape.shape.zone_pages = 2;
  shape.shape.tail_pages = shape.window_pages + 2;
  shape.shape.selected_pages = 3;
  return shape;
}

RigShape cluster_shape(const layout::KvGeometry& geometry, uint64_t max_tokens) {
  RigShape shape = range_shape(geometry, max_tokens);
  shape.mapped = true;
  shape.shape.zone_pages = 0;
  shape.shape.tail_pages = shape.window_pages + shape.repack_pages + 1;
  // Every chunk that is dealt out may end with a page that is less than half full.
  const uint64_t chunks = max_tokens / (uint64_t{shape.repack_pages} * geometry.page_tokens) + 1;
  shape.shape.max_page_ids = shape.shape.sink_pages + most_mapped_ids(geometry, max_tokens) +
                             chunks + geometry.pages_per_head(max_tokens);
  return shape;
}

std::unique_ptr<RigSequence> RigSequence::open(StoreRig& rig,
                                               const RigShape& shape,
                                               uint64_t lease_pages,
                                               uint64_t seed) {
  std::unique_ptr<RigSequence> sequence(new RigSequence(rig, shape, seed));
  auto kv = kv::TieredSequence::open(rig.store(), shape.shape, lease_pages);
  if (!kv.ok()) {
    EXPECT_EQ(kv.status().code(), StatusCode::kResourceExhausted) << kv.status().to_string();
    return nullptr;
  }
  sequence->kv_ = std::move(*kv);
  return sequence;
}

RigSequence::RigSequence(StoreRig& rig, const RigShape& shape, uint64_t seed)
    : rig_(rig), shape_(shape), seed_(seed) {
  const layout::KvGeometry& geometry = rig.geometry();
  sealed_.resize(index(geometry.layers, 0));
  zone_.resize(sealed_.size());
  // Where kernels would write maps and pinned pages; room for the largest.
  maps_.resize(geometry.layers);
  const size_t map_entries = size_t{geometry.kv_heads} * (shape.shape.max_tokens + 2);
  kernel_map_.counts = FastArray<uint32_t>(rig, geometry.kv_heads);
  kernel_map_.starts = FastArray<uint32_t>(rig, map_entries);
  kernel_map_.tokens = FastArray<uint32_t>(rig, map_entries);
  const size_t pins = size_t{geometry.kv_heads} * shape.shape.zone_pages;
  pin_counts_ = FastArray<uint32_t>(rig, geometry.kv_heads);
  pin_ids_ = FastArray<uint32_t>(rig, pins);
  pin_tokens_ = FastArray<uint8_t>(rig, pins);
  layers_.resize(geometry.layers);
  for (uint32_t layer = 0; layer < geometry.layers; ++layer) {
    LayerBuffers& buffers = layers_[layer];
    const kv::SequenceShape& needs = shape.shape;
    buffers.stride = static_cast<uint32_t>(
        is_dense(layer) ? geometry.pages_per_head(needs.max_tokens)
                        : uint64_t{needs.pinned_pages()} + needs.selected_pages);
    const size_t entries = size_t{geometry.kv_heads} * buffers.stride;
    const size_t width = size_t{geometry.kv_heads} * geometry.head_dim;
    buffers.k = FastArray<float>(rig, width);
    buffers.v = FastArray<float>(rig, width);
    buffers.pages = FastArray<uint32_t>(rig, entries);
    buffers.slots = FastArray<uint32_t>(rig, entries);
    buffers.page_tokens = FastArray<uint8_t>(rig, entries);
    buffers.counts = FastArray<uint32_t>(rig, geometry.kv_heads);
    buffers.wanted.resize(geometry.kv_heads);
    buffers.found_slots.resize(entries);
  }
}

template <typename T>
void RigSequence::enqueue_write(const FastArray<T>& to, std::vector<T> values) {
  SPIN_CHECK(values.size() <= to.size());
  if (values.empty()) return;
  auto kept = std::make_shared<const std::vector<T>>(std::move(values));
  rig_.stream().enqueue_copy(to.data(), kept->data(), kept->size() * sizeof(T));
  kept_.push_back(std::move(kept));
}

Status RigSequence::wait_for_work() {
  Status ran = rig_.stream().wait_idle();
  kept_.clear();
  return ran;
}

// ---- Prompt.

void RigSequence::stage(uint32_t layer, uint64_t tokens) {
  const layout::KvGeometry& geometry = rig_.geometry();
  const uint64_t pages = geometry.pages_per_head(tokens);
  if (staging_slots_.size() == 0) {
    std::vector<uint32_t> slots(geometry.kv_heads * pages);
    std::iota(slots.begin(), slots.end(), 0u);
    staging_slots_ = FastArray<uint32_t>(rig_, slots.size());
    staging_ = FastArray<float>(rig_, slots.size() * geometry.page_bytes() / sizeof(float));
    enqueue_write(staging_slots_, std::move(slots));
  }
  std::vector<float> rows(staging_.size());
  for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
    for (uint64_t token = 0; token < tokens; ++token) {
      const uint64_t slot = head * pages + token / geometry.page_tokens;
      float* page = rows.data() + slot * geometry.page_bytes() / sizeof(float);
      float* key = page + token % geometry.page_tokens * geometry.head_dim;
      rig_.fill_row(seed_, layer, head, false, token, key);
      rig_.fill_row(seed_, layer, head, true, token,
                    key + geometry.page_tokens * geometry.head_dim);
    }
  }
  enqueue_write(staging_, std::move(rows));
}

const layout::PageMap* RigSequence::deal_out(uint32_t layer,
                                             uint64_t count,
                                             uint64_t first_position,
                                             uint64_t first_token_id,
                                             uint32_t first_page,
                                             Random& random) {
  const layout::KvGeometry& geometry = rig_.geometry();
  const uint32_t page_stride = most_mapped_ids(geometry, count) + 2;
  std::vector<uint32_t> counts(geometry.kv_heads);
  std::vector<uint32_t> all_starts(size_t{geometry.kv_heads} * page_stride);
  std::vector<uint32_t> token_ids(geometry.kv_heads * count);
  for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
    uint32_t* ids = token_ids.data() + head * count;
    for (uint64_t i = 0; i < count; ++i) ids[i] = static_cast<uint32_t>(first_token_id + i);
    std::shuffle(ids, ids + count, random);
    uint32_t* starts = all_starts.data() + size_t{head} * page_stride;
    uint32_t at = 0;
    uint32_t pages = 0;
    while (at < count) {
      const uint32_t least = std::max(geometry.page_tokens / 2, 1u);
      const auto tokens = static_cast<uint32_t>(
          std::min<uint64_t>(least + below(random, geometry.page_tokens - least + 1), count - at));
      Tokens& model = sealed_[index(layer, head)][first_page + pages];
      for (uint32_t i = 0; i < tokens; ++i) {
        model.push_back(first_position + ids[at + i] - first_token_id);
      }
      starts[pages++] = at;
      at += tokens;
    }
    starts[pages] = at;
    counts[head] = pages;
  }
  layout::PageMap& view = maps_[layer];
  view.counts = kernel_map_.counts.data();
  view.starts = kernel_map_.starts.data();
  view.token_ids = kernel_map_.tokens.data();
  view.page_stride = page_stride;
  view.token_stride = count;
  enqueue_write(kernel_map_.counts, std::move(counts));
  enqueue_write(kernel_map_.starts, std::move(all_starts));
  enqueue_write(kernel_map_.tokens, std::move(token_ids));
  return &view;
}

layout::PageList RigSequence::pin_pages(uint32_t layer,
                                        uint32_t first,
                                        uint32_t end,
                                        Random& random) {
  const layout::KvGeometry& geometry = rig_.geometry();
  const uint32_t stride = shape_.shape.zone_pages;
  if (stride == 0 || first >= end) return {};
  std::vector<uint32_t> counts(geometry.kv_heads);
  std::vector<uint32_t> ids(size_t{geometry.kv_heads} * stride);
  for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
    std::vector<uint32_t>& zone = zone_[index(layer, head)];
    for (uint32_t i = 0; i < stride; ++i) {
      zone.push_back(first + static_cast<uint32_t>(below(random, end - first)));
    }
    std::sort(zone.begin(), zone.end());
    zone.erase(std::unique(zone.begin(), zone.end()), zone.end());
    counts[head] = static_cast<uint32_t>(zone.size());
    std::copy(zone.begin(), zone.end(), ids.begin() + size_t{head} * stride);
  }
  const std::vector<uint8_t> full(pin_tokens_.size(), static_cast<uint8_t>(geometry.page_tokens));
  enqueue_write(pin_tokens_, full);
  enqueue_write(pin_counts_, std::move(counts));
  enqueue_write(pin_ids_, std::move(ids));
  return {pin_ids_.data(), pin_tokens_.data(), pin_counts_.data(), stride};
}

void RigSequence::place_layer(uint32_t layer, uint64_t tokens, Random& random) {
  const layout::KvGeometry& geometry = rig_.geometry();
  const uint64_t p = geometry.page_tokens;
  const uint64_t sinks = shape_.shape.sink_pages;
  stage(layer, tokens);
  // The open page and the window stay in the tail; what is before is placed.
  const uint64_t pages = tokens / p;
  const uint64_t placed = pages > shape_.window_pages ? pages - shape_.window_pages : 0;
  const uint64_t tail_first = placed * p;
  const bool mapped = is_mapped(layer) && placed >= sinks;
  const layout::PageMap* map = nullptr;
  layout::PageList pinned;
  for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
    for (uint64_t page = 0; page < (mapped ? sinks : placed); ++page) {
      Tokens& model = sealed_[index(layer, head)][static_cast<uint32_t>(page)];
      for (uint64_t i = 0; i < p; ++i) model.push_back(page * p + i);
    }
  }
  uint32_t ids = 0;
  if (mapped) {
    const uint64_t count = tail_first - sinks * p;
    ids = most_mapped_ids(geometry, count) + 1;
    map = deal_out(layer, count, sinks * p, sinks * p, static_cast<uint32_t>(sinks), random);
  } else if (!is_dense(layer)) {
    pinned = pin_pages(layer, static_cast<uint32_t>(sinks), static_cast<uint32_t>(placed), random);
  }
  layout::PagedTokens source;
  source.base = reinterpret_cast<const std::byte*>(staging_.data());
  source.geometry = geometry;
  source.slots = staging_slots_.data();
  source.slot_stride = geometry.pages_per_head(tokens);
  source.tokens = tokens;
  const backend::PlaceItem item =
      kv_->place_item(layer, source, tail_first, map, ids, pinned, rig_.stream());
  rig_.device().kv_ops().enqueue_place(item, rig_.store().ref(), rig_.stream());
  // Nothing may need these any more.
  enqueue_write(staging_, std::vector(staging_.size(), -1.0f));
  enqueue_write(kernel_map_.counts, std::vector<uint32_t>(kernel_map_.counts.size()));
  enqueue_write(kernel_map_.starts, std::vector<uint32_t>(kernel_map_.starts.size()));
  enqueue_write(pin_ids_, std::vector<uint32_t>(pin_ids_.size()));
}

std::string RigSequence::prompt(uint64_t tokens, Random& random) {
  for (uint32_t layer = 0; layer < rig_.geometry().layers; ++layer) {
    place_layer(layer, tokens, random);
  }
  const Status ran = wait_for_work();
  if (!ran.ok()) return ran.to_string();
  kv_->commit_prompt(tokens);
  return "";
}

// ---- Steps.

void RigSequence::enqueue_check_tail(uint32_t layer) {
  const layout::PagedTokens tail = kv_->tail_tokens(layer);
  const uint64_t first = kv_->tail_first_token(layer);
  if (rig_.device().properties().unified_memory) {
    rig_.stream().enqueue_host(
        [this, layer, tail, first] { check_tail(layer, tail, first, tail.slots, tail.base); });
    return;
  }
  const uint64_t pages = base::ceil_div<uint64_t>(tail.tokens, tail.geometry.page_tokens);
  std::vector<uint32_t> slots((tail.geometry.kv_heads - 1) * tail.slot_stride + pages);
  const Status ran =
      kv::copy_now(slots.data(), tail.slots, slots.size() * sizeof(uint32_t), rig_.stream());
  if (!ran.ok()) {
    tail_error_ = ran.to_string();
    return;
  }
  check_tail(layer, tail, first, slots.data(), rig_.slots().data());
}

void RigSequence::check_tail(uint32_t layer,
                             const layout::PagedTokens& tail,
                             uint64_t first,
                             const uint32_t* slots,
                             const std::byte* pool) {
  layout::PagedTokens seen = tail;
  seen.slots = slots;
  seen.base = pool;
  std::vector<float> row(tail.geometry.head_dim);
  for (uint32_t head = 0; head < tail.geometry.kv_heads; ++head) {
    for (uint64_t token = 0; token < tail.tokens; ++token) {
      for (const bool value : {false, true}) {
        rig_.fill_row(seed_, layer, head, value, first + token, row.data());
        const std::byte* found = value ? seen.value(head, token) : seen.key(head, token);
        if (std::memcmp(found, row.data(), tail.geometry.row_bytes()) == 0) continue;
        tail_error_ = fmt::format("token {} of layer {} head {} is not what the tail's view shows",
                                  first + token, layer, head);
      }
    }
  }
}

void RigSequence::leave_tail(uint32_t layer, Random& random) {
  const layout::KvGeometry& geometry = rig_.geometry();
  const uint64_t p = geometry.page_tokens;
  const layout::Tail tail = kv_->tail(layer);
  const uint64_t first_token = kv_->tail_first_token(layer);
  const uint64_t full = tail.tokens / p;
  backend::KvOps& ops = rig_.device().kv_ops();
  if (is_mapped(layer)) {
    const uint32_t leave = shape_.repack_pages;
    if (full < leave + shape_.window_pages) return;
    const uint64_t count = leave * p;
    const uint32_t first_page = kv_->next_page_id(layer);
    const layout::PageMap* map = deal_out(layer, count, first_token, 0, first_page, random);
    const auto item = kv_->repack_item(layer, static_cast<uint32_t>(count), map,
                                       most_mapped_ids(geometry, count) + 1, rig_.stream());
    EXPECT_EQ(item.first_mapped_page, first_page);
    ++left_tail_;
    ops.enqueue_repack_tail(item, rig_.store().ref(), rig_.stream());
    return;
  }
  // A page may stay a little longer than it must.
  const uint64_t room = shape_.shape.tail_pages - shape_.window_pages - 1;
  if (full <= shape_.window_pages) return;
  uint64_t leave = full - shape_.window_pages;
  if (leave < room && below(random, 2) == 0) return;
  for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
    for (uint64_t page = 0; page < leave; ++page) {
      Tokens& model = sealed_[index(layer, head)][tail.first_page + static_cast<uint32_t>(page)];
      for (uint64_t i = 0; i < p; ++i) model.push_back(first_token + page * p + i);
    }
  }
  ++left_tail_;
  const backend::SealItem items[] = {
      kv_->seal_item(layer, static_cast<uint32_t>(leave), rig_.stream())};
  ops.enqueue_seal(items, rig_.store().ref(), rig_.stream());
}

void RigSequence::select(uint32_t layer, Random& random) {
  const layout::KvGeometry& geometry = rig_.geometry();
  LayerBuffers& buffers = layers_[layer];
  const layout::Tail tail = kv_->tail(layer);
  const uint64_t first_token = kv_->tail_first_token(layer);
  const size_t entries = size_t{geometry.kv_heads} * buffers.stride;
  std::vector<uint32_t> pages(entries);
  std::vector<uint8_t> page_tokens(entries);
  std::vector<uint32_t> counts(geometry.kv_heads);
  for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
    const std::map<uint32_t, Tokens>& sealed = sealed_[index(layer, head)];
    const std::vector<uint32_t>& zone = zone_[index(layer, head)];
    std::map<uint32_t, Tokens> wanted;
    std::vector<uint32_t> others;
    for (const auto& [page, tokens] : sealed) {
      const bool pinned =
          page < shape_.shape.sink_pages || std::find(zone.begin(), zone.end(), page) != zone.end();
      if (pinned || is_dense(layer)) {
        wanted[page] = tokens;
      } else {
        others.push_back(page);
      }
    }
    const uint64_t most = std::min<uint64_t>(others.size(), shape_.shape.selected_pages);
    for (uint64_t i = 0; i < most; ++i) {
      const uint32_t page = others[below(random, others.size())];
      wanted[page] = sealed.at(page);
    }
    for (uint32_t at = 0; at < tail.tokens; at += geometry.page_tokens) {
      Tokens& model = wanted[tail.first_page + at / geometry.page_tokens];
      for (uint32_t i = at; i < std::min(at + geometry.page_tokens, tail.tokens); ++i) {
        model.push_back(first_token + i);
      }
    }
    SPIN_CHECK(wanted.size() <= buffers.stride);
    counts[head] = static_cast<uint32_t>(wanted.size());
    buffers.wanted[head].clear();
    size_t at = size_t{head} * buffers.stride;
    for (auto& [page, tokens] : wanted) {
      pages[at] = page;
      page_tokens[at++] = static_cast<uint8_t>(tokens.size());
      buffers.wanted[head].push_back(std::move(tokens));
    }
  }
  buffers.wanted_pages = pages;
  enqueue_write(buffers.pages, std::move(pages));
  enqueue_write(buffers.page_tokens, std::move(page_tokens));
  enqueue_write(buffers.counts, std::move(counts));
  enqueue_write(buffers.slots, std::vector(entries, layout::kNoSlot));
  backend::RetrieveItem item = kv_->retrieve_item(layer);
  item.wanted = {buffers.pages.data(), buffers.page_tokens.data(), buffers.counts.data(),
                 buffers.stride};
  item.slots = buffers.slots.data();
  const backend::RetrieveItem items[] = {item};
  rig_.device().kv_ops().enqueue_retrieve(items, rig_.store().ref(), rig_.stream());
  rig_.stream().enqueue_copy(buffers.found_slots.data(), buffers.slots.data(),
                             entries * sizeof(uint32_t));
}

void RigSequence::enqueue_layer(uint32_t layer, Random& random, bool may_leave_tail) {
  const layout::KvGeometry& geometry = rig_.geometry();
  LayerBuffers& buffers = layers_[layer];
  const uint64_t token = tokens();
  std::vector<float> k(buffers.k.size());
  std::vector<float> v(buffers.v.size());
  for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
    rig_.fill_row(seed_, layer, head, false, token, &k[head * geometry.head_dim]);
    rig_.fill_row(seed_, layer, head, true, token, &v[head * geometry.head_dim]);
  }
  enqueue_write(buffers.k, std::move(k));
  enqueue_write(buffers.v, std::move(v));
  const auto tensor = [&](const FastArray<float>& rows) {
    const auto cols = static_cast<int64_t>(rows.size());
    return backend::TensorRef{.data = rows.data(),
                              .dtype = layout::DType::kF32,
                              .rows = 1,
                              .cols = cols,
                              .row_stride = cols};
  };
  const backend::TailAppendItem items[] = {kv_->append_item(layer, 0)};
  rig_.device().kv_ops().enqueue_tail_append(tensor(buffers.k), tensor(buffers.v), items,
                                             rig_.store().ref(), rig_.stream());
  enqueue_check_tail(layer);
  if (may_leave_tail) leave_tail(layer, random);
  enqueue_check_tail(layer);
  select(layer, random);
}

std::string RigSequence::compare(uint32_t layer) const {
  const layout::KvGeometry& geometry = rig_.geometry();
  const LayerBuffers& buffers = layers_[layer];
  std::vector<float> row(geometry.head_dim);
  const std::span<const std::byte> slots = rig_.slots();
  for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
    for (uint32_t i = 0; i < buffers.wanted[head].size(); ++i) {
      const size_t at = size_t{head} * buffers.stride + i;
      const uint32_t slot = buffers.found_slots[at];
      if (slot >= rig_.store().fast().counts().total) {
        return fmt::format("page {} of layer {} head {} has no slot", buffers.wanted_pages[at],
                           layer, head);
      }
      const std::byte* page = slots.data() + slot * geometry.page_bytes();
      const Tokens& tokens = buffers.wanted[head][i];
      for (size_t t = 0; t < tokens.size(); ++t) {
        for (const bool value : {false, true}) {
          rig_.fill_row(seed_, layer, head, value, tokens[t], row.data());
          const std::byte* found =
              page + (value ? geometry.plane_bytes() : 0) + t * geometry.row_bytes();
          if (std::memcmp(found, row.data(), geometry.row_bytes()) != 0) {
            return fmt::format(
                "{} of token {} (page {} of layer {} head {}) is not what was "
                "written",
                value ? "value" : "key", tokens[t], buffers.wanted_pages[at], layer, head);
          }
        }
      }
    }
  }
  return "";
}

std::string RigSequence::finish_step() {
  const Status ran = wait_for_work();
  if (!ran.ok()) return ran.to_string();
  const layout::RetrieveCounters counters = kv_->take_counters();
  hits_ += counters.hits;
  misses_ += counters.misses;
  evictions_ += counters.evictions;
  faults_ += counters.faults;
  std::string error = tail_error_;
  if (counters.faults > 0) error = fmt::format("{} pages were not on the host", counters.faults);
  for (uint32_t layer = 0; error.empty() && layer < rig_.geometry().layers; ++layer) {
    error = compare(layer);
  }
  kv_->commit_step();
  return error;
}

std::string RigSequence::dropped_step(Random& random) {
  begin_step();
  for (uint32_t layer = 0; layer < rig_.geometry().layers; ++layer) {
    enqueue_layer(layer, random, false);
  }
  const Status ran = wait_for_work();
  if (!ran.ok()) return ran.to_string();
  kv_->drop_step();
  return "";
}

std::string RigSequence::step(Random& random) {
  begin_step();
  for (uint32_t layer = 0; layer < rig_.geometry().layers; ++layer) enqueue_layer(layer, random);
  return finish_step();
}

}  // namespace spin::testing
