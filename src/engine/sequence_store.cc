// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence_store.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"
#include "kv/table_bytes.h"

namespace spin::engine {
namespace {

// Free slots are dealt out anew every so many steps, and when a sequence has ended.
constexpr uint32_t kStepsPerPlan = 32;
// Pages of one sequence that are written to the host ahead of need after one step.
constexpr uint64_t kWriteAheadPages = 1024;

void add_counters(const sparse::SparseCounters& from, SparseStats& to) {
  to.selections += from.selections;
  to.dense_reads += from.dense;
  to.attended_tokens += from.attended_tokens;
  to.selected_partitions += from.selected_partitions;
  to.page_hits += from.retrieve.hits;
  to.page_misses += from.retrieve.misses;
  to.page_evictions += from.retrieve.evictions;
  to.page_faults += from.retrieve.faults;
  to.bytes_fetched += from.retrieve.bytes;
  to.fetch_stall_s += static_cast<double>(from.retrieve.stall_ns) * 1e-9;
  to.overflows += from.overflows;
}

}  // namespace

SequenceStore::SequenceStore(kv::PageStore& store, const SequenceStoreOptions& options)
    : store_(store), options_(options) {
  policy_.fixed_ratio = options.buffer_ratio.value_or(-1);
  {
    base::MutexLock lock(stats_mutex_);
    tiers_[0].name = "fast";
    tiers_[1].name = "host";
  }
  publish();
}

uint64_t SequenceStore::least_lease(const kv::SequenceShape& shape) const {
  const bool all_dense = shape.dense_layers >= options_.shape.geometry.layers;
  const bool must_be_flat = all_dense || store_.host() == nullptr;
  if (must_be_flat) return shape.max_page_ids;
  return std::min(shape.mandatory_pages(shape.dense_layers), shape.max_page_ids);
}

uint64_t SequenceStore::slots(const kv::SequenceShape& shape, uint64_t lease) const {
  const layout::KvGeometry& geometry = options_.shape.geometry;
  const uint64_t sparse_layers = geometry.layers - std::min(shape.dense_layers, geometry.layers);
  return dense_layer_slots(shape) +
         sparse_layers * geometry.kv_heads * std::min(lease, shape.max_page_ids);
}

uint64_t SequenceStore::dense_layer_slots(const kv::SequenceShape& shape) const {
  const layout::KvGeometry& geometry = options_.shape.geometry;
  return uint64_t{std::min(shape.dense_layers, geometry.layers)} * geometry.kv_heads *
         shape.max_page_ids;
}

SequenceNeed SequenceStore::need(const SequenceRequest& request) const {
  const layout::KvGeometry& geometry = options_.shape.geometry;
  const auto& algorithm = request.algorithm;
  SequenceNeed need;
  need.is_sparse = algorithm != nullptr && !request.wants_prompt_logits &&
                   request.prompt.size() >= algorithm->descriptor().minimum_tokens;
  if (!need.is_sparse) {
    need.memory.pages = geometry.pages_for(request.max_tokens);
    return need;
  }
  need.exclusive_prefill = true;
  const kv::SequenceShape shape =
      sparse::sequence_shape(*algorithm, options_.shape, request.max_tokens);
  const kv::HostPool* host = store_.host();
  uint64_t lease = least_lease(shape);
  if (host != nullptr) {
    const uint64_t heads = uint64_t{geometry.layers} * geometry.kv_heads;
    const uint64_t extents =
        heads * base::ceil_div<uint64_t>(shape.max_page_ids, host->layout().pages);
    // One that the host tier cannot hold may still stay in fast memory as a whole.
    const bool fits_fast = slots(shape, shape.max_page_ids) <= store_.fast().counts().total;
    if (extents > host->counts().total && fits_fast) {
      lease = shape.max_page_ids;
    } else {
      need.memory.host_extents = extents;
    }
  }
  need.memory.pages = slots(shape, lease);
  const uint32_t extent_pages = host != nullptr ? host->layout().pages : 1;
  const auto tables = [&](uint64_t of_lease) {
    return kv::table_bytes(geometry, shape, of_lease, extent_pages, host != nullptr).total();
  };
  // Tables of the larger form: a lease may grow to just below all pages.
  need.memory.index_bytes =
      algorithm->needs(request.max_tokens).index_bytes +
      std::max(tables(shape.max_page_ids),
               lease < shape.max_page_ids ? tables(shape.max_page_ids - 1) : uint64_t{0});
  return need;
}

MemoryNeed SequenceStore::total() const {
  return {store_.fast().counts().total,
          store_.host() != nullptr ? store_.host()->counts().total : 0, options_.index_bytes};
}

MemoryNeed SequenceStore::free() const {
  MemoryNeed free;
  free.pages = store_.fast().counts().free;
  sequences_.for_each([&](const OpenSequence& sequence) { free.pages += spare_slots(sequence); });
  if (store_.host() != nullptr) free.host_extents = store_.host()->counts().free;
  free.index_bytes = options_.index_bytes - std::min(options_.index_bytes, index_bytes_in_use_);
  return free;
}

// Only what the host tier can take over.
bool SequenceStore::can_resize(const OpenSequence& sequence) const {
  return sequence.sparse != nullptr && sequence.prompt_committed && sequence.fault.ok() &&
         store_.host() != nullptr && sequence.need.memory.host_extents > 0 &&
         sequence.sparse->kv().residence() != kv::Residence::kDemoted;
}

uint64_t SequenceStore::spare_slots(const OpenSequence& sequence) const {
  if (!can_resize(sequence)) return 0;
  const kv::TieredSequence& kv = sequence.sparse->kv();
  const uint64_t least = slots(kv.shape(), least_lease(kv.shape()));
  return kv.fast_pages() - std::min(kv.fast_pages(), least);
}

Result<SequenceHandle> SequenceStore::open(const SequenceRequest& request,
                                           backend::StreamRef stream) {
  const SequenceNeed need = this->need(request);
  if (request.algorithm != nullptr && !need.is_sparse) ++closed_.dense_fallbacks;
  Result<SequenceHandle> opened =
      need.is_sparse ? open_sparse(request, need, stream) : open_dense(request, need, stream);
  publish();
  return opened;
}

SequenceHandle SequenceStore::insert(OpenSequence sequence) {
  const uint64_t index_bytes = sequence.need.memory.index_bytes;
  const SequenceHandle handle = sequences_.insert(std::move(sequence));
  index_bytes_in_use_ += index_bytes;
  return handle;
}

Result<SequenceHandle> SequenceStore::open_dense(const SequenceRequest& request,
                                                 const SequenceNeed& need,
                                                 backend::StreamRef stream) {
  if (need.memory.pages > store_.fast().counts().free) {
    apply(plan(need.memory.pages, nullptr), /*grow=*/false, stream);
  }
  OpenSequence sequence;
  sequence.need = need;
  sequence.prompt_tokens = request.prompt.size();
  SPIN_ASSIGN_OR_RETURN(sequence.dense, kv::SequenceKv::reserve(store_.fast(), request.max_tokens));
  return insert(std::move(sequence));
}

Result<SequenceHandle> SequenceStore::open_sparse(const SequenceRequest& request,
                                                  const SequenceNeed& need,
                                                  backend::StreamRef stream) {
  const kv::SequenceShape shape =
      sparse::sequence_shape(*request.algorithm, options_.shape, request.max_tokens);
  const uint64_t lease =
      make_room(shape, need.memory.host_extents > 0, request.promised_pages, stream);
  OpenSequence sequence;
  sequence.need = need;
  sequence.prompt_tokens = request.prompt.size();
  SPIN_ASSIGN_OR_RETURN(sequence.sparse,
                        sparse::SparseSequence::open(store_, request.algorithm, options_.shape,
                                                     request.max_tokens, lease));
  ++closed_.sequences;
  return insert(std::move(sequence));
}

uint64_t SequenceStore::make_room(const kv::SequenceShape& shape,
                                  bool may_tier,
                                  uint64_t promised,
                                  backend::StreamRef stream) {
  const uint64_t free = store_.fast().counts().free;
  const uint64_t all = shape.max_page_ids;
  const uint64_t not_promised = free - std::min(free, promised);
  if (may_tier && (options_.buffer_ratio || slots(shape, all) > not_promised)) {
    const LeasePlan plan = this->plan(promised, &shape);
    if (slots(shape, plan.leases.back()) > free) apply(plan, /*grow=*/false, stream);
    return plan.leases.back();
  }
  if (slots(shape, all) > free) {
    apply(plan(slots(shape, all), nullptr), /*grow=*/false, stream);
  }
  return all;
}

uint64_t SequenceStore::suspend_pages(SequenceHandle handle) {
  const OpenSequence& sequence = sequences_.at(handle);
  if (!can_resize(sequence)) return 0;
  return sequence.sparse->kv().fast_pages() - spare_slots(sequence);
}

Status SequenceStore::suspend(SequenceHandle handle, backend::StreamRef stream) {
  OpenSequence& sequence = sequences_.at(handle);
  kv::TieredSequence& kv = sequence.sparse->kv();
  if (kv.has_transfer_in_flight()) store_.mover().wait_idle();
  const Status status = kv.demote(kv::WriterEvent::after(stream));
  slots_came_free_ = true;
  publish();
  return status;
}

MemoryNeed SequenceStore::resume_need(SequenceHandle handle) {
  MemoryNeed need;
  need.pages = sequences_.at(handle).need.memory.pages;
  return need;
}

Status SequenceStore::resume(SequenceHandle handle,
                             uint64_t promised_pages,
                             backend::StreamRef stream) {
  OpenSequence& sequence = sequences_.at(handle);
  kv::TieredSequence& kv = sequence.sparse->kv();
  const Status status = kv.resume(make_room(kv.shape(), /*may_tier=*/true, promised_pages, stream));
  publish();
  if (status.ok() || status.code() == StatusCode::kResourceExhausted) return status;
  return Status(
      StatusCode::kInternal,
      "a part of the request's KV cache in host memory was lost or damaged: " + status.message());
}

void SequenceStore::close(SequenceHandle handle) {
  OpenSequence& sequence = sequences_.at(handle);
  if (sequence.sparse != nullptr) add_counters(sequence.sparse->counters(), closed_);
  index_bytes_in_use_ -= sequence.need.memory.index_bytes;
  sequences_.erase(handle);
  slots_came_free_ = true;
  publish();
}

void SequenceStore::commit_prompt(OpenSequence& sequence) {
  sequence.sparse->commit_prompt(sequence.prompt_tokens);
  sequence.prompt_committed = true;
  const kv::TieredSequence& kv = sequence.sparse->kv();
  if (kv.residence() != kv::Residence::kTiered) return;
  const layout::KvGeometry& geometry = options_.shape.geometry;
  for (uint32_t layer = kv.shape().dense_layers; layer < geometry.layers; ++layer) {
    closed_.bytes_offloaded += geometry.pages_per_head(kv.tail_first_token(layer)) *
                               geometry.kv_heads * geometry.page_bytes();
  }
}

Status SequenceStore::commit_step(OpenSequence& sequence) {
  const Status status = sequence.sparse->commit_step();
  if (!status.ok()) {
    sequence.fault = Status(
        StatusCode::kInternal,
        "a part of the request's KV cache in host memory was lost or damaged: " + status.message());
    return sequence.fault;
  }
  const uint64_t sealed = sequence.sparse->counters().sealed_pages;
  if (sequence.sparse->kv().residence() == kv::Residence::kTiered) {
    closed_.bytes_offloaded +=
        (sealed - sequence.sealed_pages) * options_.shape.geometry.page_bytes();
  }
  sequence.sealed_pages = sealed;
  return ok_status();
}

kv::LeaseRequest SequenceStore::lease_request(const kv::SequenceShape& shape,
                                              uint64_t current) const {
  const layout::KvGeometry& geometry = options_.shape.geometry;
  kv::LeaseRequest request;
  request.heads =
      uint64_t{geometry.layers - std::min(shape.dense_layers, geometry.layers)} * geometry.kv_heads;
  request.mandatory = least_lease(shape);
  request.largest = shape.max_page_ids;
  request.current = std::min(current, shape.max_page_ids);
  return request;
}

SequenceStore::LeasePlan SequenceStore::plan(uint64_t taken, const kv::SequenceShape* opening) {
  LeasePlan plan;
  std::vector<kv::LeaseRequest> requests;
  uint64_t pages = store_.fast().counts().free;
  sequences_.for_each([&](OpenSequence& sequence) {
    if (!can_resize(sequence)) return;
    const kv::TieredSequence& kv = sequence.sparse->kv();
    const uint64_t held = kv.fast_pages();
    // A flat one gives the slots of dead ids back, so that all its pages may be fewer than a step
    // of the tiered form could need: it has nothing to gain, and nothing to give up.
    if (held < slots(kv.shape(), least_lease(kv.shape()))) return;
    plan.sequences.push_back(&sequence);
    requests.push_back(lease_request(kv.shape(), kv.lease_pages()));
    requests.back().curve = kv.gain_curve();
    pages += held - dense_layer_slots(kv.shape());
  });
  if (opening != nullptr) {
    requests.push_back(lease_request(*opening, 0));
    taken += dense_layer_slots(*opening);
  }
  plan.leases = kv::plan_leases(requests, pages - std::min(pages, taken), policy_);
  return plan;
}

void SequenceStore::apply(const LeasePlan& plan, bool grow, backend::StreamRef stream) {
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    OpenSequence& sequence = *plan.sequences[i];
    if (plan.leases[i] < sequence.sparse->kv().lease_pages()) {
      resize(sequence, plan.leases[i], stream);
    }
  }
  if (!grow) return;
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    OpenSequence& sequence = *plan.sequences[i];
    if (sequence.fault.ok() && plan.leases[i] > sequence.sparse->kv().lease_pages()) {
      resize(sequence, plan.leases[i], stream);
    }
  }
}

// What cannot be done now (no slots, no extents) is left as it is; whoever needs the slots finds
// them missing.
void SequenceStore::resize(OpenSequence& sequence, uint64_t lease, backend::StreamRef stream) {
  kv::TieredSequence& kv = sequence.sparse->kv();
  if (kv.has_transfer_in_flight()) store_.mover().wait_idle();
  if (kv.residence() == kv::Residence::kResident && !kv.is_written_through()) {
    auto written =
        kv.write_through(std::numeric_limits<uint64_t>::max(), kv::WriterEvent::after(stream));
    if (!written.ok() || !written->wait_result().ok()) return;
  }
  const Status status = kv.resize(lease, stream);
  if (status.ok()) {
    ++closed_.lease_resizes;
    return;
  }
  const bool ordinary =
      status.code() == StatusCode::kResourceExhausted || status.code() == StatusCode::kUnavailable;
  // A lease that should become whole may have lost its slots on the way.
  if (ordinary && kv.residence() != kv::Residence::kDemoted) return;
  sequence.fault = Status(StatusCode::kInternal,
                          "the request's KV cache could not be moved: " + status.message());
}

void SequenceStore::write_ahead(bool requests_wait, backend::StreamRef stream) {
  if (store_.host() == nullptr || !store_.wants_write_through(requests_wait)) return;
  sequences_.for_each([&](OpenSequence& sequence) {
    if (!can_resize(sequence)) return;
    kv::TieredSequence& kv = sequence.sparse->kv();
    if (kv.residence() != kv::Residence::kResident || kv.has_transfer_in_flight() ||
        kv.is_written_through()) {
      return;
    }
    // A failure leaves the pages in fast memory, where they are safe.
    static_cast<void>(kv.write_through(kWriteAheadPages, kv::WriterEvent::after(stream)).ok());
  });
}

void SequenceStore::tend(bool requests_wait, backend::StreamRef stream) {
  write_ahead(requests_wait, stream);
  if (slots_came_free_ || ++steps_since_plan_ >= kStepsPerPlan) {
    slots_came_free_ = false;
    steps_since_plan_ = 0;
    const LeasePlan plan = this->plan(0, nullptr);
    if (!plan.sequences.empty()) apply(plan, /*grow=*/true, stream);
  }
  publish();
}

Status SequenceStore::audit() const {
  std::vector<const kv::TieredSequence*> sparse;
  std::vector<const kv::SequenceKv*> dense;
  sequences_.for_each([&](const OpenSequence& sequence) {
    if (sequence.dense) {
      dense.push_back(&*sequence.dense);
    } else {
      sparse.push_back(&sequence.sparse->kv());
    }
  });
  return store_.audit(sparse, dense);
}

void SequenceStore::publish() {
  SparseStats stats = closed_;
  sequences_.for_each([&](const OpenSequence& sequence) {
    if (sequence.sparse == nullptr) return;
    const kv::TieredSequence& kv = sequence.sparse->kv();
    add_counters(sequence.sparse->counters(), stats);
    stats.sequences_resident += kv.residence() == kv::Residence::kResident ? 1 : 0;
    stats.sequences_tiered += kv.residence() == kv::Residence::kTiered ? 1 : 0;
    stats.sequences_suspended += kv.residence() == kv::Residence::kDemoted ? 1 : 0;
    stats.lease_pages += kv.fast_pages();
    stats.buffer_pages += kv.fast_pages() - std::min(kv.fast_pages(), sequence.need.memory.pages);
    stats.table_bytes += kv.table_bytes();
    stats.summary_bytes += sequence.sparse->algorithm().needs(kv.shape().max_tokens).index_bytes;
  });
  stats.bytes_offloaded += store_.mover().counters().bytes_to_host;
  const uint64_t page = options_.shape.geometry.page_bytes();
  const kv::PageCounts& fast = store_.fast().counts();
  const kv::HostPool* host = store_.host();
  pages_in_use_.store(fast.in_use(), std::memory_order_relaxed);
  base::MutexLock lock(stats_mutex_);
  closed_.table_bytes_peak = std::max(closed_.table_bytes_peak, stats.table_bytes);
  closed_.summary_bytes_peak = std::max(closed_.summary_bytes_peak, stats.summary_bytes);
  published_ = stats;
  published_.table_bytes_peak = closed_.table_bytes_peak;
  published_.summary_bytes_peak = closed_.summary_bytes_peak;
  const auto set = [](TierStats& tier, uint64_t pages, uint64_t used, uint64_t page_bytes) {
    tier.pages_total = pages;
    tier.pages_in_use = used;
    tier.bytes_total = pages * page_bytes;
    tier.bytes_in_use = used * page_bytes;
    tier.bytes_peak = std::max(tier.bytes_peak, tier.bytes_in_use);
  };
  set(tiers_[0], fast.total, fast.in_use(), page);
  if (host == nullptr) return;
  const uint64_t extent = host->layout().pages;
  const uint64_t taken = host->counts().reserved + host->counts().in_use;
  set(tiers_[1], host->counts().total * extent, taken * extent, page);
}

void SequenceStore::add_stats(EngineStats& stats) const {
  base::MutexLock lock(stats_mutex_);
  stats.sparse = published_;
  stats.kv_tiers.assign(tiers_.begin(), tiers_.begin() + (store_.host() != nullptr ? 2 : 1));
}

}  // namespace spin::engine
