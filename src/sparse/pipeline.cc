// SPDX-License-Identifier: Apache-2.0
#include "sparse/pipeline.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <vector>

#include "backend/kv_ops.h"
#include "backend/sparse_ops.h"
#include "base/check.h"

namespace spin::sparse {
namespace {

// Whether the layer attends to all of the sequence's tokens, by token order of its pages.
bool attends_to_all(const Descriptor& descriptor,
                    const layout::Tail& tail,
                    uint64_t tail_first_token,
                    uint32_t page_tokens,
                    uint32_t layer) {
  if (layer < descriptor.dense_layers) return true;
  const bool token_order = uint64_t{tail.first_page} * page_tokens == tail_first_token;
  return token_order && tail_first_token + tail.tokens < descriptor.minimum_tokens;
}

// A list in the process's memory.
struct ListCopy {
  std::vector<uint32_t> pages;
  std::vector<uint8_t> tokens;
  std::vector<uint32_t> counts;
  layout::PageList list;  // of these
};

// The copy is whole once what is queued on `stream` has run.
std::shared_ptr<ListCopy> enqueue_list_copy(const layout::PageList& from,
                                            uint32_t kv_heads,
                                            backend::StreamRef stream) {
  auto copy = std::make_shared<ListCopy>();
  const uint64_t entries = uint64_t{kv_heads} * from.stride;
  copy->pages.resize(entries);
  copy->tokens.resize(entries);
  copy->counts.resize(kv_heads);
  copy->list = {copy->pages.data(), copy->tokens.data(), copy->counts.data(), from.stride};
  stream.enqueue_copy(copy->list.pages, from.pages, entries * sizeof(uint32_t));
  stream.enqueue_copy(copy->list.tokens, from.tokens, entries);
  stream.enqueue_copy(copy->list.counts, from.counts, kv_heads * sizeof(uint32_t));
  return copy;
}

}  // namespace

Pipeline::Pipeline(kv::PageStore& store, const ModelShape& model, SelectionRecorder* trace)
    : store_(store), model_(model), trace_(trace) {}

void Pipeline::enqueue_layer(const LayerCall& call,
                             std::span<const DecodeRow> rows,
                             backend::StreamRef stream) {
  // One segment per algorithm, in order of their first rows.
  std::vector<const SparseAlgorithm*> done;
  std::vector<DecodeRow> segment;
  for (const DecodeRow& first : rows) {
    const SparseAlgorithm* algorithm = &first.sequence->algorithm();
    if (std::find(done.begin(), done.end(), algorithm) != done.end()) continue;
    done.push_back(algorithm);
    segment.clear();
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(segment),
                 [&](const DecodeRow& row) { return &row.sequence->algorithm() == algorithm; });
    enqueue_segment(call, segment, stream);
  }
}

void Pipeline::enqueue_segment(const LayerCall& call,
                               std::span<const DecodeRow> rows,
                               backend::StreamRef stream) {
  enqueue_index(call, rows, stream);
  enqueue_selection(call, rows, stream);
  if (trace_ != nullptr) enqueue_trace(call, rows, stream);
  enqueue_retrieval(call, rows, stream);
  enqueue_attention(call, rows, stream);
}

void Pipeline::enqueue_index(const LayerCall& call,
                             std::span<const DecodeRow> rows,
                             backend::StreamRef stream) {
  const SparseAlgorithm& algorithm = rows.front().sequence->algorithm();
  backend::KvOps& kv_ops = store_.device().kv_ops();
  std::vector<backend::TailAppendItem> appended;
  std::vector<AppendItem> indexed;
  for (const DecodeRow& row : rows) {
    kv::TieredSequence& kv = row.sequence->kv();
    appended.push_back(kv.append_item(call.layer, row.row));
    indexed.push_back(
        {&row.sequence->index(), kv.tail_tokens(call.layer), kv.tail_first_token(call.layer), 1});
  }
  kv_ops.enqueue_tail_append(call.k, call.v, appended, store_.ref(), stream);
  algorithm.enqueue_append(indexed, call.layer, stream);

  std::vector<backend::SealItem> sealed;
  for (size_t i = 0; i < rows.size(); ++i) {
    SparseSequence& sequence = *rows[i].sequence;
    kv::TieredSequence& kv = sequence.kv();
    const layout::Tail tail = kv.tail(call.layer);
    const SealPlan plan = algorithm.plan_seal(sequence.index(), call.layer, tail);
    SealItem item{&sequence.index(), indexed[i].tail, indexed[i].first_token, 0, tail.first_page};
    if (plan.pages > 0) {
      item.tokens = plan.pages * model_.geometry.page_tokens;
      SPIN_CHECK(item.tokens <= tail.tokens && plan.repack_tokens == 0);
      const layout::PageMap* map = algorithm.enqueue_seal(item, call.layer, stream);
      SPIN_CHECK(map == nullptr);
      sealed.push_back(kv.seal_item(call.layer, plan.pages, stream));
      sequence.step_.sealed_pages += uint64_t{plan.pages} * model_.geometry.kv_heads;
    } else if (plan.repack_tokens > 0) {
      SPIN_CHECK(call.layer >= algorithm.descriptor().dense_layers);
      item.tokens = plan.repack_tokens;
      item.first_page_id = kv.next_page_id(call.layer);
      const layout::PageMap* map = algorithm.enqueue_seal(item, call.layer, stream);
      const backend::RepackTailItem repack =
          kv.repack_item(call.layer, plan.repack_tokens, map,
                         algorithm.repacked_page_ids(plan.repack_tokens), stream);
      SPIN_CHECK(repack.first_mapped_page == item.first_page_id);
      // At once: what is queued after it may change the map.
      kv_ops.enqueue_repack_tail(repack, store_.ref(), stream);
      ++sequence.step_.repacks;
    }
  }
  if (!sealed.empty()) kv_ops.enqueue_seal(sealed, store_.ref(), stream);
}

void Pipeline::enqueue_selection(const LayerCall& call,
                                 std::span<const DecodeRow> rows,
                                 backend::StreamRef stream) {
  const SparseAlgorithm& algorithm = rows.front().sequence->algorithm();
  std::vector<backend::BuildListItem> dense;
  std::vector<SelectItem> selects;
  for (const DecodeRow& row : rows) {
    SparseSequence& sequence = *row.sequence;
    const layout::Tail tail = sequence.kv().tail(call.layer);
    const uint64_t first_token = sequence.kv().tail_first_token(call.layer);
    if (attends_to_all(algorithm.descriptor(), tail, first_token, model_.geometry.page_tokens,
                       call.layer)) {
      backend::BuildListItem item;
      item.sink_pages = tail.first_page;
      item.tail_first_page = tail.first_page;
      item.tail_tokens = tail.tokens;
      item.list = sequence.list_;
      item.attended = sequence.attended_;
      dense.push_back(item);
      sequence.step_.dense += model_.geometry.kv_heads;
    } else {
      SelectItem item;
      item.index = &sequence.index();
      item.row = row.row;
      item.context_tokens = sequence.kv().committed_tokens() + 1;
      item.tail_first_page = tail.first_page;
      item.tail_first_token = first_token;
      item.list = sequence.list_;
      item.attended = sequence.attended_;
      item.selected = sequence.selected_;
      item.overflows = sequence.overflows_;
      selects.push_back(item);
      sequence.step_.selections += model_.geometry.kv_heads;
    }
  }
  if (!dense.empty()) {
    store_.device().sparse_ops().enqueue_build_lists(dense, model_.geometry, stream);
  }
  if (!selects.empty()) algorithm.enqueue_select(call.q, selects, call.layer, stream);
}

void Pipeline::enqueue_trace(const LayerCall& call,
                             std::span<const DecodeRow> rows,
                             backend::StreamRef stream) {
  for (const DecodeRow& row : rows) {
    SparseSequence& sequence = *row.sequence;
    if (sequence.trace_id_ == 0) sequence.trace_id_ = ++traced_sequences_;
    const auto list = enqueue_list_copy(sequence.list_, model_.geometry.kv_heads, stream);
    stream.enqueue_host([trace = trace_, id = sequence.trace_id_, layer = call.layer,
                         step = static_cast<uint32_t>(sequence.counters_.steps), list,
                         first = sequence.kv().shape().sink_pages,
                         end = sequence.kv().tail(call.layer).first_page] {
      trace->record(id, step, layer, list->list, first, end);
    });
  }
}

void Pipeline::enqueue_retrieval(const LayerCall& call,
                                 std::span<const DecodeRow> rows,
                                 backend::StreamRef stream) {
  const SparseAlgorithm& algorithm = rows.front().sequence->algorithm();
  const layout::Planes planes = algorithm.descriptor().planes;
  std::vector<backend::RetrieveItem> retrieves;
  std::vector<ReconstructItem> rebuilt;
  for (const DecodeRow& row : rows) {
    SparseSequence& sequence = *row.sequence;
    backend::RetrieveItem item = sequence.kv().retrieve_item(call.layer);
    item.wanted = sequence.list_;
    item.slots = sequence.slots_;
    item.fetched = sequence.fetched_;
    item.fetched_counts = sequence.fetched_counts_;
    item.planes = planes;
    item.planes_end = algorithm.keyless_end(sequence.index());
    retrieves.push_back(item);
    rebuilt.push_back({&sequence.index(), sequence.list_, sequence.slots_, sequence.fetched_,
                       sequence.fetched_counts_});
  }
  store_.device().kv_ops().enqueue_retrieve(retrieves, store_.ref(), stream);
  if (planes == layout::Planes::kValuesOnly) {
    algorithm.enqueue_reconstruct(rebuilt, call.layer, store_.ref(), stream);
  }
}

void Pipeline::enqueue_attention(const LayerCall& call,
                                 std::span<const DecodeRow> rows,
                                 backend::StreamRef stream) {
  const SparseAlgorithm& algorithm = rows.front().sequence->algorithm();
  backend::KvOps& kv_ops = store_.device().kv_ops();
  std::vector<backend::ListAttentionItem> exact;
  std::vector<EstimateItem> estimates;
  std::vector<backend::MergeItem> merges;
  for (const DecodeRow& row : rows) {
    SparseSequence& sequence = *row.sequence;
    const layout::Tail tail = sequence.kv().tail(call.layer);
    const bool estimated =
        algorithm.descriptor().estimates &&
        !attends_to_all(algorithm.descriptor(), tail, sequence.kv().tail_first_token(call.layer),
                        model_.geometry.page_tokens, call.layer);
    exact.push_back(
        {row.row, sequence.slots_, sequence.list_, estimated ? sequence.log_sum_exp_ : nullptr});
    if (!estimated) continue;
    estimates.push_back({&sequence.index(), row.row, sequence.list_, sequence.part_,
                         sequence.part_log_sum_exp_, sequence.kv().tail_first_token(call.layer)});
    merges.push_back({row.row, sequence.log_sum_exp_, sequence.part_, sequence.part_log_sum_exp_});
  }
  kv_ops.enqueue_list_attention(call.q, exact, store_.ref().fast, model_.scale, call.out, stream);
  if (estimates.empty()) return;
  algorithm.enqueue_estimate(call.q, estimates, call.layer, stream);
  kv_ops.enqueue_merge(merges, model_.q_heads, model_.geometry.head_dim, call.out, stream);
}

}  // namespace spin::sparse
