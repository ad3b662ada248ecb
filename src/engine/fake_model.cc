// SPDX-License-Identifier: Apache-2.0
#include "engine/fake_model.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/counter_rng.h"
#include "engine/sequence_table.h"
#include "kv/page_pool.h"
#include "text/tokenizer_parts.h"

namespace spin::engine {
namespace {

// Two layers of two heads: enough that a mix-up of either shows.
constexpr uint32_t kLayers = 2;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kHeadDim = 8;  // 32-bit words of a record, stored as the pool's f32

struct Record {
  uint32_t token = 0;
  uint32_t position = 0;
  uint64_t hash = 0;
  uint64_t filler[2] = {};
};
static_assert(sizeof(Record) == kHeadDim * sizeof(float));

Record make_record(TokenId token, uint64_t position, uint32_t layer, uint32_t head, bool value) {
  Record record;
  record.token = token;
  record.position = static_cast<uint32_t>(position);
  const uint64_t place = (uint64_t{layer} * kHeads + head) * 2 + (value ? 1 : 0);
  record.hash = base::mix64(base::mix64(token ^ (position << 24)) + place);
  record.filler[0] = ~record.hash;
  record.filler[1] = base::mix64(record.hash);
  return record;
}

// Plain memory of the process.
class HeapMemory final : public backend::MemoryResource {
 public:
  Result<void*> allocate(size_t bytes, size_t alignment) override {
    void* pointer = ::operator new(bytes, std::align_val_t(alignment), std::nothrow);
    if (pointer == nullptr) {
      return Status(StatusCode::kResourceExhausted,
                    "cannot allocate " + std::to_string(bytes) + " bytes");
    }
    bytes_in_use_ += bytes;
    return pointer;
  }
  void deallocate(void* pointer, size_t bytes, size_t alignment) override {
    bytes_in_use_ -= bytes;
    ::operator delete(pointer, std::align_val_t(alignment));
  }
  uint64_t bytes_in_use() const override { return bytes_in_use_; }

 private:
  std::atomic<uint64_t> bytes_in_use_{0};
};

// What the pages of a sequence say up to some token.
struct ReadBack {
  std::vector<TokenId> tokens;
  std::vector<uint64_t> states;  // hash of everything read up to and including a token
};

struct Wish {
  TokenId token = 0;
  bool not_a_number = false;
};

bool ends_with(std::span<const TokenId> tokens, std::initializer_list<TokenId> tail) {
  return tokens.size() >= tail.size() &&
         std::equal(tail.begin(), tail.end(), tokens.end() - static_cast<ptrdiff_t>(tail.size()));
}

Wish free_speech(std::span<const TokenId> tokens, uint64_t state, uint32_t end_percent) {
  static constexpr std::string_view kLetters = "etaoin shrdlu\ncm fwyp";
  static constexpr TokenId kWords[] = {kFakeWordStop, kFakeWordUser, kFakeEmojiFront,
                                       kFakeEmojiBack};
  if (ends_with(tokens, {0xF0, 0x9F, 0x98})) return {static_cast<TokenId>(0x80 + state % 64)};
  if (ends_with(tokens, {0xF0, 0x9F})) return {0x98};
  if (ends_with(tokens, {0xF0})) return {0x9F};
  const auto dice = static_cast<uint32_t>(state % 100);
  const uint64_t more = base::mix64(state);
  if (dice < end_percent) return {more % 2 == 0 ? kFakeEos : kFakeTurnEnd};
  if (dice >= 92) return {0xF0};
  if (dice >= 89) return {static_cast<TokenId>(0x80 + more % 64)};
  if (dice >= 80) return {kWords[more % 4]};
  return {static_cast<TokenId>(static_cast<unsigned char>(kLetters[more % kLetters.size()]))};
}

// The token that the model wants after `tokens`.
Wish wish_after(std::span<const TokenId> tokens, uint64_t state, uint32_t end_percent) {
  size_t say = tokens.size();
  for (size_t i = 0; i < tokens.size() && say == tokens.size(); ++i) {
    if (tokens[i] == kFakeSay) say = i;
  }
  size_t end = say;
  while (end < tokens.size() && tokens[end] != kFakeEnd) ++end;
  if (end >= tokens.size()) return free_speech(tokens, state, end_percent);
  const size_t index = tokens.size() - end - 1;  // of the token to come
  if (index >= end - say - 1) return {kFakeEos};
  const TokenId wanted = tokens[say + 1 + index];
  return {wanted, wanted == kFakeNan};
}

void fill_logits(const Wish& wish, uint64_t state, float* row) {
  for (uint32_t id = 0; id < kFakeLogitColumns; ++id) {
    row[id] = static_cast<float>(base::mix64(state + id) >> 40) * 0x1.0p-22f;  // [0, 4)
  }
  // What scripts are made of is never said by chance: a draw of `say`, `nan` and `end` would be
  // one.
  for (const TokenId id : {kFakeSay, kFakeEnd, kFakeNan}) row[id] -= 60.0f;
  row[wish.token] = 8.0f + std::max(row[wish.token], 0.0f);
  // Padding beats everything: choosing it would be noticed.
  for (uint32_t id = kFakeVocabulary; id < kFakeLogitColumns; ++id) row[id] = 50.0f;
  if (wish.not_a_number) row[state % kFakeVocabulary] = std::numeric_limits<float>::quiet_NaN();
}

class FakeRunner final : public ModelRunner {
 public:
  FakeRunner(FakeModelOptions options, uint32_t max_step_tokens, uint32_t max_logit_rows)
      : options_(std::move(options)),
        max_step_tokens_(max_step_tokens),
        max_logit_rows_(max_logit_rows) {}

  Status prepare(uint32_t page_tokens) {
    const layout::KvGeometry geometry{kLayers, kHeads, kHeadDim, page_tokens, layout::DType::kF32};
    const uint64_t tokens = options_.kv_capacity_tokens != 0 ? options_.kv_capacity_tokens
                                                             : 16 * options_.max_model_len;
    kv::PagePoolOptions pool;
    pool.pages = geometry.pages_for(tokens);
    pool.poison = true;
    SPIN_ASSIGN_OR_RETURN(pool_, kv::PagePool::create(memory_, geometry, pool));
    sequences_.emplace(*pool_);
    logits_.resize(uint64_t{max_logit_rows_} * kFakeLogitColumns);
    return ok_status();
  }

  uint64_t vocab_size() const override { return kFakeVocabulary; }
  uint32_t max_step_tokens() const override { return max_step_tokens_; }
  uint32_t max_logit_rows() const override { return max_logit_rows_; }
  uint64_t pages_total() const override { return pool_->counts().total; }
  uint64_t pages_in_use() const override { return sequences_->pages_in_use(); }
  SequenceNeed need(const SequenceRequest& request) const override {
    SequenceNeed need;
    need.memory.pages = pool_->geometry().pages_for(request.max_tokens);
    return need;
  }
  MemoryNeed total_memory() const override { return {pages_total(), 0, 0}; }
  MemoryNeed free_memory() const override { return {pages_total() - pages_in_use(), 0, 0}; }
  Result<SequenceHandle> open_sequence(const SequenceRequest& request) override {
    return sequences_->open(request.max_tokens);
  }
  void add_stats(EngineStats& stats) const override {
    const uint64_t page = pool_->geometry().page_bytes();
    stats.kv_tiers = {
        {"fast", pages_total(), pages_in_use(), pages_total() * page, pages_in_use() * page}};
  }
  void close_sequence(SequenceHandle sequence) override { sequences_->close(sequence); }
  Status audit() const override { return sequences_->audit(); }

  Result<StepOutput> run(const StepBatch& batch, const StepProgress& progress) override {
    if (options_.before_step) SPIN_RETURN_IF_ERROR(options_.before_step(step_));
    ++step_;
    if (options_.step_delay.count() > 0) std::this_thread::sleep_for(options_.step_delay);
    uint64_t row = 0;
    for (const SequenceStep& step : batch.sequences) {
      kv::SequenceKv& sequence = sequences_->at(step.sequence);
      sequence.begin_step(step.tokens.size());
      for (uint32_t layer = 0; layer < kLayers; ++layer) write_layer(sequence, layer, step.tokens);
      write_logits(sequence, step, row);
      sequence.commit_step();
    }
    progress();
    return StepOutput{{logits_.data(), row, kFakeLogitColumns, kFakeLogitColumns}, {}};
  }

 private:
  std::byte* record_address(const layout::SequenceSlice& slice,
                            uint32_t head,
                            uint64_t position,
                            bool value) const {
    const layout::KvGeometry& geometry = pool_->geometry();
    const uint32_t slot = slice.slots[head * slice.slot_stride + position / geometry.page_tokens];
    return pool_->page_address(slot) + (value ? geometry.plane_bytes() : 0) +
           position % geometry.page_tokens * geometry.row_bytes();
  }

  void write_layer(const kv::SequenceKv& sequence,
                   uint32_t layer,
                   std::span<const TokenId> tokens) const {
    const layout::SequenceSlice slice = sequence.slice(layer, 0);
    const uint64_t first = slice.context_tokens - tokens.size();
    for (size_t i = 0; i < tokens.size(); ++i) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        for (const bool value : {false, true}) {
          const Record record = make_record(tokens[i], first + i, layer, head, value);
          std::memcpy(record_address(slice, head, first + i, value), &record, sizeof(record));
        }
      }
    }
  }

  // Folds one layer's records of all tokens into read.states (one entry per token).
  void read_layer(const kv::SequenceKv& sequence, uint32_t layer, ReadBack& read) const {
    const layout::SequenceSlice slice = sequence.slice(layer, 0);
    uint64_t state = layer;
    for (uint64_t position = 0; position < slice.context_tokens; ++position) {
      for (uint32_t head = 0; head < kHeads; ++head) {
        for (const bool value : {false, true}) {
          uint64_t words[sizeof(Record) / sizeof(uint64_t)];
          std::memcpy(words, record_address(slice, head, position, value), sizeof(words));
          for (const uint64_t word : words) state = (state ^ word) * 0x9E3779B97F4A7C15u + 1;
          state ^= state >> 29;
          if (layer == 0 && head == 0 && !value) {
            read.tokens.push_back(static_cast<TokenId>(words[0]));
          }
        }
      }
      read.states[position] = base::mix64(read.states[position] ^ state);
    }
  }

  void write_logits(const kv::SequenceKv& sequence, const SequenceStep& step, uint64_t& row) {
    if (step.logit_rows == 0) return;
    ReadBack read;
    const uint64_t context = sequence.committed_tokens() + sequence.in_flight_tokens();
    read.states.assign(context, 0);
    for (uint32_t layer = 0; layer < kLayers; ++layer) read_layer(sequence, layer, read);
    for (uint64_t end = context - step.logit_rows + 1; end <= context; ++end) {
      SPIN_CHECK(row < max_logit_rows_);
      const uint64_t state = read.states[end - 1];
      const auto tokens = std::span<const TokenId>(read.tokens).first(end);
      fill_logits(wish_after(tokens, state, options_.end_percent), state,
                  logits_.data() + row * kFakeLogitColumns);
      ++row;
    }
  }

  FakeModelOptions options_;
  uint32_t max_step_tokens_;
  uint32_t max_logit_rows_;
  HeapMemory memory_;
  std::unique_ptr<kv::PagePool> pool_;
  std::optional<SequenceTable> sequences_;
  std::vector<float> logits_;  // [max_logit_rows, kFakeLogitColumns]
  uint64_t step_ = 0;
};

}  // namespace

std::vector<TokenId> fake_say_prompt(std::span<const TokenId> tokens) {
  std::vector<TokenId> prompt{kFakeSay};
  prompt.insert(prompt.end(), tokens.begin(), tokens.end());
  prompt.push_back(kFakeEnd);
  return prompt;
}

std::vector<TokenId> fake_say_prompt(std::string_view text) {
  std::vector<TokenId> tokens;
  for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  return fake_say_prompt(tokens);
}

Result<std::unique_ptr<text::Tokenizer>> make_fake_tokenizer() {
  text::TokenizerParts parts;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    parts.tokens.emplace_back(1, static_cast<char>(byte));
    parts.byte_tokens[byte] = byte;
  }
  for (const char* word : {"stop", "\nUser", "ab\xF0\x9F", "\x98\x80!"}) {
    parts.tokens.emplace_back(word);
  }
  parts.ordinary.assign(parts.tokens.size(), true);
  TokenId id = kFakeBos;
  for (const char* control : {"<|bos|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>",
                              "<|fake:say|>", "<|fake:end|>", "<|fake:nan|>"}) {
    parts.tokens.emplace_back(control);
    parts.ordinary.push_back(false);
    parts.added.push_back({id++, control, true, false});
  }
  parts.bos = kFakeBos;
  parts.eos = kFakeEos;
  parts.prefix = {kFakeBos};
  return text::Tokenizer::create(std::move(parts));
}

Result<std::unique_ptr<ModelRunner>> make_fake_runner(const FakeModelOptions& options,
                                                      const EngineOptions& engine,
                                                      uint32_t max_logit_rows) {
  auto runner =
      std::make_unique<FakeRunner>(options, engine.max_num_batched_tokens, max_logit_rows);
  SPIN_RETURN_IF_ERROR(runner->prepare(engine.page_tokens));
  return std::unique_ptr<ModelRunner>(std::move(runner));
}

}  // namespace spin::engine
