// SPDX-License-Identifier: Apache-2.0
#include "engine/teacher_forcing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "base/check.h"
#include "base/checked_math.h"
#include "engine/decoder_runner.h"
#include "engine/memory_budget.h"

namespace spin::engine {
namespace {

using backend::Buffer;
using backend::MemoryKind;

constexpr uint32_t kExtentPages = kv::PageStoreOptions{}.extent_pages;
// Share of the device's memory that settings may take together.
constexpr double kMemoryShare = 0.7;

const StepProgress kNoProgress = [] {};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

Result<std::unique_ptr<TeacherForcing>> TeacherForcing::create(
    backend::Device& device,
    std::unique_ptr<model::Decoder> decoder,
    const layout::KvGeometry& geometry,
    uint32_t max_settings) {
  std::unique_ptr<TeacherForcing> made(new TeacherForcing(device, std::move(decoder), geometry));
  SPIN_RETURN_IF_ERROR(made->allocate(max_settings));
  return made;
}

TeacherForcing::TeacherForcing(backend::Device& device,
                               std::unique_ptr<model::Decoder> decoder,
                               const layout::KvGeometry& geometry)
    : device_(device),
      decoder_(std::move(decoder)),
      geometry_(geometry),
      shape_(model_shape(*decoder_, geometry)) {}

TeacherForcing::~TeacherForcing() {
  if (stream_) static_cast<void>(stream_->wait_idle());
}

Status TeacherForcing::allocate(uint32_t max_settings) {
  SPIN_ASSIGN_OR_RETURN(stream_, device_.create_stream("evaluation"));
  const size_t bytes = 3 * static_cast<size_t>(decoder_->max_rows()) * sizeof(uint32_t);
  SPIN_ASSIGN_OR_RETURN(host_inputs_, Buffer::allocate(device_.memory(MemoryKind::kHost), bytes));
  SPIN_ASSIGN_OR_RETURN(inputs_, Buffer::allocate(device_.memory(MemoryKind::kFast), bytes));
  logit_rows_ = std::min<uint64_t>(max_settings, static_cast<uint64_t>(decoder_->max_rows()));
  const size_t logit_bytes = logit_rows_ * decoder_->config().vocab_size * sizeof(float);
  SPIN_ASSIGN_OR_RETURN(logits_, Buffer::allocate(device_.memory(MemoryKind::kFast), logit_bytes));
  SPIN_ASSIGN_OR_RETURN(host_logits_,
                        Buffer::allocate(device_.memory(MemoryKind::kHost), logit_bytes));
  return ok_status();
}

Status TeacherForcing::report_progress(uint64_t tokens) {
  done_ += tokens;
  if (*progress_ && !(*progress_)(done_, total_)) {
    return Status(StatusCode::kCancelled, "the evaluation was cancelled");
  }
  return ok_status();
}

Status TeacherForcing::run(std::span<const TokenId> tokens,
                           uint64_t prompt_tokens,
                           std::span<const AlgorithmRef> settings,
                           double fast_fraction,
                           std::span<SettingUse> uses,
                           const LogitsSink& sink,
                           const ForcingProgress& progress) {
  SPIN_CHECK(prompt_tokens >= 2 && prompt_tokens < tokens.size());
  SPIN_CHECK(settings.size() == uses.size());
  sink_ = &sink;
  progress_ = &progress;
  done_ = 0;
  std::vector<Row> rows;
  std::vector<size_t> dense = {0};  // settings that get the dense rows
  for (size_t i = 0; i < settings.size(); ++i) {
    ++uses[i].prompts;
    if (prompt_tokens - 1 < settings[i]->descriptor().minimum_tokens) {
      ++uses[i].dense_prompts;
      dense.push_back(i + 1);
      continue;
    }
    rows.push_back(plan_row(*settings[i], i, tokens.size(), fast_fraction));
  }
  const uint64_t steps = tokens.size() - prompt_tokens;
  total_ = prompt_tokens - 1 + steps * (1 + rows.size());
  auto begin = std::chrono::steady_clock::now();
  SPIN_RETURN_IF_ERROR(prefill(tokens.first(prompt_tokens - 1), tokens.size()));
  times_.prefill_s += seconds_since(begin);
  begin = std::chrono::steady_clock::now();
  const LogitsSink to_all = [&](size_t, uint64_t step, std::span<const float> logits) {
    for (const size_t setting : dense) sink(setting, step, logits);
  };
  sink_ = &to_all;
  SPIN_RETURN_IF_ERROR(decode_dense(tokens, prompt_tokens));
  sink_ = &sink;
  for (size_t first = 0; first < rows.size();) {
    const std::span<Row> rest = std::span(rows).subspan(first);
    const size_t count = rows_that_fit(rest);
    SPIN_RETURN_IF_ERROR(decode_rows(rest.first(count), tokens, prompt_tokens, settings, uses));
    first += count;
  }
  times_.decode_s += seconds_since(begin);
  dense_.reset();
  dense_store_.reset();
  return ok_status();
}

Status TeacherForcing::forward(std::span<const TokenId> ids,
                               uint64_t first_position,
                               bool same_position,
                               bool logits,
                               SparseAttention& attention) {
  const auto most = static_cast<uint64_t>(decoder_->max_rows());
  uint32_t* host = host_inputs_.as<uint32_t>();
  for (size_t i = 0; i < ids.size(); ++i) {
    host[i] = ids[i];
    host[most + i] = static_cast<uint32_t>(first_position + (same_position ? 0 : i));
    host[2 * most + i] = static_cast<uint32_t>(i);
  }
  stream_->enqueue_copy(inputs_.data(), host_inputs_.data(), inputs_.size_bytes());
  const auto vocab = static_cast<int64_t>(decoder_->config().vocab_size);
  model::ForwardInputs in;
  in.token_ids = inputs_.as<uint32_t>();
  in.positions = in.token_ids + most;
  in.rows = static_cast<int64_t>(ids.size());
  in.logit_rows = in.positions + most;
  in.logit_count = logits ? in.rows : 0;
  in.logits = {logits_.data(), layout::DType::kF32, in.logit_count, vocab, vocab};
  decoder_->enqueue_forward(in, attention, *stream_);
  if (logits) {
    stream_->enqueue_copy(host_logits_.data(), logits_.data(),
                          ids.size() * static_cast<size_t>(vocab) * sizeof(float));
  }
  return stream_->wait_idle();
}

Status TeacherForcing::prefill(std::span<const TokenId> tokens, uint64_t total) {
  dense_.reset();
  kv::PageStoreOptions options;
  options.geometry = geometry_;
  options.fast_pages = geometry_.pages_for(total);
  SPIN_ASSIGN_OR_RETURN(dense_store_, kv::PageStore::create(device_, options));
  SPIN_ASSIGN_OR_RETURN(kv::SequenceKv reserved,
                        kv::SequenceKv::reserve(dense_store_->fast(), total));
  dense_.emplace(std::move(reserved));
  SparseAttention attention(*dense_store_, shape_);
  const auto most = static_cast<uint64_t>(decoder_->max_rows());
  for (uint64_t first = 0; first < tokens.size(); first += most) {
    const uint64_t count = std::min<uint64_t>(most, tokens.size() - first);
    dense_->begin_step(count);
    const DenseRows rows{&*dense_, 0};
    attention.begin_step({&rows, 1}, {}, kNoProgress);
    const Status ran = forward(tokens.subspan(first, count), first, false, false, attention);
    if (!ran.ok()) {
      dense_->drop_step();
      return ran;
    }
    dense_->commit_step();
    SPIN_RETURN_IF_ERROR(report_progress(count));
  }
  return ok_status();
}

Status TeacherForcing::decode_dense(std::span<const TokenId> tokens, uint64_t prompt_tokens) {
  SparseAttention attention(*dense_store_, shape_);
  const uint64_t vocab = decoder_->config().vocab_size;
  for (uint64_t at = prompt_tokens - 1; at + 1 < tokens.size(); ++at) {
    dense_->begin_step(1);
    const DenseRows rows{&*dense_, 0};
    attention.begin_step({&rows, 1}, {}, kNoProgress);
    const Status ran = forward(tokens.subspan(at, 1), at, true, true, attention);
    if (!ran.ok()) {
      dense_->drop_step();
      return ran;
    }
    dense_->commit_step();
    (*sink_)(0, at + 1 - prompt_tokens, {host_logits_.as<float>(), vocab});
    SPIN_RETURN_IF_ERROR(report_progress(1));
  }
  return ok_status();
}

TeacherForcing::Row TeacherForcing::plan_row(const sparse::SparseAlgorithm& algorithm,
                                             size_t setting,
                                             uint64_t max_tokens,
                                             double fast_fraction) const {
  const kv::SequenceShape shape = sparse::sequence_shape(algorithm, shape_, max_tokens);
  const uint64_t heads = geometry_.kv_heads;
  const uint64_t dense_layers = std::min(shape.dense_layers, geometry_.layers);
  const auto wanted = static_cast<uint64_t>(
      std::ceil(fast_fraction * static_cast<double>(geometry_.pages_per_head(max_tokens))));
  Row row;
  row.setting = setting;
  row.lease_pages =
      fast_fraction >= 1
          ? shape.max_page_ids
          : std::min<uint64_t>(shape.max_page_ids,
                               std::max(wanted, shape.mandatory_pages(geometry_.layers - 1)));
  row.fast_pages = heads * (dense_layers * shape.max_page_ids +
                            (geometry_.layers - dense_layers) * row.lease_pages);
  row.tiered = row.lease_pages < shape.max_page_ids;
  const layout::HostExtentLayout extent{kExtentPages, geometry_.page_bytes()};
  row.host_bytes = heads * geometry_.layers *
                   base::ceil_div<uint64_t>(shape.max_page_ids, kExtentPages) * extent.bytes();
  row.index_bytes = algorithm.needs(max_tokens).index_bytes;
  return row;
}

size_t TeacherForcing::rows_that_fit(std::span<const Row> rows) const {
  MemoryBytes taken{device_.memory(MemoryKind::kFast).bytes_in_use(),
                    device_.memory(MemoryKind::kHost).bytes_in_use()};
  // The kept store is used again or given back.
  if (store_) {
    taken.fast -= std::min(taken.fast, store_options_.fast_pages * geometry_.page_bytes());
    taken.host -= std::min(taken.host, store_options_.host_bytes);
  }
  size_t count = 0;
  while (count < rows.size() && count < logit_rows_) {
    const Row& row = rows[count];
    taken.fast += row.fast_pages * geometry_.page_bytes() + row.index_bytes;
    taken.host += row.host_bytes;
    if (count > 0 && !fits_share(taken, kMemoryShare, device_.properties())) break;
    ++count;
  }
  return count;
}

layout::PagedTokens TeacherForcing::prompt_layer(uint32_t layer, uint64_t tokens) const {
  const layout::SequenceSlice slice = dense_->slice(layer, 0);
  return {.base = static_cast<const std::byte*>(dense_store_->fast().ref().base),
          .geometry = geometry_,
          .slots = slice.slots,
          .slot_stride = slice.slot_stride,
          .tokens = tokens};
}

Result<layout::PagedTokens> TeacherForcing::copied(uint32_t layer,
                                                   const layout::PagedTokens& source) {
  const uint64_t pages = geometry_.pages_per_head(source.tokens);
  const uint64_t bytes = pages * geometry_.kv_heads * geometry_.page_bytes();
  if (copy_.size_bytes() < bytes) {
    std::vector<uint32_t> slots(pages * geometry_.kv_heads);
    std::iota(slots.begin(), slots.end(), 0u);
    const uint64_t slot_bytes = slots.size() * sizeof(uint32_t);
    backend::MemoryResource& fast = device_.memory(MemoryKind::kFast);
    SPIN_ASSIGN_OR_RETURN(copy_, Buffer::allocate(fast, bytes));
    SPIN_ASSIGN_OR_RETURN(copy_slots_, Buffer::allocate(fast, slot_bytes));
    stream_->enqueue_copy(copy_slots_.data(), slots.data(), slot_bytes);
    SPIN_RETURN_IF_ERROR(stream_->wait_idle());
  }
  layout::PagedTokens copy = source;
  copy.base = copy_.as<std::byte>();
  copy.slots = copy_slots_.as<uint32_t>();
  copy.slot_stride = pages;
  for (uint32_t head = 0; head < geometry_.kv_heads; ++head) {
    for (uint64_t page = 0; page < pages; ++page) {
      const uint32_t slot = dense_->page(layer, head, page).slot;
      stream_->enqueue_copy(copy_.as<std::byte>() + (head * pages + page) * geometry_.page_bytes(),
                            dense_store_->fast().page_address(slot), geometry_.page_bytes());
    }
  }
  return copy;
}

Status TeacherForcing::provide_store(const kv::PageStoreOptions& options) {
  // A resident sequence reserves host memory if the store has any.
  const bool fits = store_ && options.fast_pages <= store_options_.fast_pages &&
                    options.host_bytes <= store_options_.host_bytes &&
                    (options.host_bytes == 0) == (store_options_.host_bytes == 0);
  if (fits) return ok_status();
  store_.reset();
  SPIN_ASSIGN_OR_RETURN(store_, kv::PageStore::create(device_, options));
  store_options_ = options;
  return ok_status();
}

Status TeacherForcing::open_rows(std::span<Row> rows,
                                 kv::PageStore& store,
                                 uint64_t prompt_tokens,
                                 uint64_t max_tokens,
                                 std::span<const AlgorithmRef> settings) {
  for (Row& row : rows) {
    SPIN_ASSIGN_OR_RETURN(
        row.sequence, sparse::SparseSequence::open(store, settings[row.setting], shape_, max_tokens,
                                                   row.lease_pages));
  }
  const uint64_t given = prompt_tokens - 1;
  dense_->begin_step(1);  // its pages can be asked for in a step only
  Status status = ok_status();
  for (uint32_t layer = 0; layer < geometry_.layers && status.ok(); ++layer) {
    const layout::PagedTokens source = prompt_layer(layer, given);
    for (size_t i = 0; i < rows.size(); ++i) {
      Row& row = rows[i];
      const auto copied_from = [&](const Row& earlier) {
        return row.sequence->enqueue_copy_prompt_layer(*earlier.sequence, layer, source, *stream_);
      };
      if (std::any_of(rows.begin(), rows.begin() + static_cast<ptrdiff_t>(i), copied_from)) {
        continue;
      }
      layout::PagedTokens prompt = source;
      // Such an algorithm writes rebuilt keys into the prompt.
      if (settings[row.setting]->descriptor().planes == layout::Planes::kValuesOnly) {
        auto copy = copied(layer, source);
        status = copy.status();
        if (!status.ok()) break;
        prompt = *copy;
      }
      row.sequence->enqueue_prompt_chunk(layer, prompt, 0, given, *stream_);
      row.sequence->enqueue_finish_prompt_layer(layer, prompt, *stream_);
    }
    const Status ran = stream_->wait_idle();
    if (status.ok()) status = ran;
  }
  dense_->drop_step();
  if (!status.ok()) return status;
  for (Row& row : rows) row.sequence->commit_prompt(given);
  return ok_status();
}

Status TeacherForcing::decode_rows(std::span<Row> rows,
                                   std::span<const TokenId> tokens,
                                   uint64_t prompt_tokens,
                                   std::span<const AlgorithmRef> settings,
                                   std::span<SettingUse> uses) {
  kv::PageStoreOptions options;
  options.geometry = geometry_;
  options.extent_pages = kExtentPages;
  // Where there is a host tier, resident sequences reserve their share of it, too.
  const bool tiered =
      std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.tiered; });
  for (const Row& row : rows) {
    options.fast_pages += row.fast_pages;
    if (tiered) options.host_bytes += row.host_bytes;
  }
  SPIN_RETURN_IF_ERROR(provide_store(options));
  Status status = open_rows(rows, *store_, prompt_tokens, tokens.size(), settings);
  SparseAttention attention(*store_, shape_);
  std::vector<sparse::DecodeRow> batch;
  for (const Row& row : rows) batch.push_back({row.sequence.get(), batch.size()});
  const uint64_t vocab = decoder_->config().vocab_size;
  for (uint64_t at = prompt_tokens - 1; at + 1 < tokens.size() && status.ok(); ++at) {
    for (Row& row : rows) row.sequence->begin_step();
    attention.begin_step({}, batch, kNoProgress);
    const std::vector<TokenId> ids(rows.size(), tokens[at]);
    status = forward(ids, at, true, true, attention);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!status.ok()) {
        rows[i].sequence->drop_step();
        continue;
      }
      const Status committed = rows[i].sequence->commit_step();
      if (!committed.ok()) return committed;
      (*sink_)(rows[i].setting + 1, at + 1 - prompt_tokens,
               {host_logits_.as<float>() + i * vocab, vocab});
    }
    if (status.ok()) status = report_progress(rows.size());
  }
  for (Row& row : rows) {
    if (row.sequence == nullptr) continue;
    if (status.ok()) add_use(row, tokens.size(), uses[row.setting]);
    row.sequence.reset();
  }
  return status;
}

void TeacherForcing::add_use(const Row& row, uint64_t max_tokens, SettingUse& use) const {
  const sparse::SparseCounters& counters = row.sequence->counters();
  const kv::SequenceShape& shape = row.sequence->kv().shape();
  use.steps += counters.steps;
  use.selections += counters.selections;
  use.dense_lists += counters.dense;
  use.attended_tokens += counters.attended_tokens;
  use.hits += counters.retrieve.hits;
  use.misses += counters.retrieve.misses;
  use.evictions += counters.retrieve.evictions;
  use.fetched_bytes += counters.retrieve.bytes;
  use.index_bytes = std::max(use.index_bytes, row.index_bytes);
  use.mandatory_pages = std::max(use.mandatory_pages, shape.mandatory_pages(geometry_.layers - 1));
  use.leased_pages = std::max(use.leased_pages, row.lease_pages);
  // A running mean over the prompts that were not dense.
  const double all = static_cast<double>(geometry_.pages_for(max_tokens));
  const auto served = static_cast<double>(use.prompts - use.dense_prompts);
  use.fast_share += (static_cast<double>(row.fast_pages) / all - use.fast_share) / served;
}

}  // namespace spin::engine
