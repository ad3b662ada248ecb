// SPDX-License-Identifier: Apache-2.0
// The engine: from token ids to token ids, with the text functions a front end needs.
//
// Thread: all members are thread-safe. The engine runs its own step thread and delivery thread.
// A request is one failure domain: whatever goes wrong in it ends it alone.
//
// A request's life: submitted -> waiting -> prefilling -> decoding -> finished; cancel() leads from
// any state before finished to finished within two steps. Every request that submit() accepted
// gets exactly one on_end().
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spin/chat.h"
#include "spin/options.h"
#include "spin/request.h"
#include "spin/stats.h"
#include "spin/status.h"

namespace spin {

class Engine {
 public:
  virtual ~Engine() = default;

  virtual const ModelInfo& model_info() const = 0;

  // The defaults of this model (generation_config.json), to be overridden field by field.
  virtual const SamplingParams& default_sampling() const = 0;

  // Text to ids; `add_special` puts the model's begin-of-sequence token in front if it has one.
  // Special-token text inside `text` is ordinary text. Blocks for the length of the work.
  // Errors: kInvalidArgument (not UTF-8, too long), kResourceExhausted (memory).
  virtual Result<std::vector<TokenId>> tokenize(std::string_view text, bool add_special) const = 0;

  // Ids to text, invalid bytes replaced by U+FFFD. Errors: kInvalidArgument (id out of range).
  virtual Result<std::string> detokenize(std::span<const TokenId> ids, bool skip_special) const = 0;

  // Raw bytes of one token; "" for ids without text. Requires: id < model_info().vocab_size.
  virtual std::string token_bytes(TokenId id) const = 0;

  // A conversation to ids in the model's chat format. Errors: kUnsupported (no chat format: the
  // message names --chat-format), kInvalidArgument (roles the format forbids).
  virtual Result<std::vector<TokenId>> encode_chat(std::span<const ChatMessage> messages,
                                                   const ChatOptions& options) const = 0;

  // Checks the request and puts it into the queue. Errors: kInvalidArgument with param();
  // kResourceExhausted when the queue is full (try later); kUnavailable when draining or failed.
  // A request that can never fit is kInvalidArgument with the numbers.
  virtual Result<RequestId> submit(GenerateRequest request, std::shared_ptr<RequestSink> sink) = 0;

  // Asks for an end; unknown and finished ids are ignored. Never blocks.
  virtual void cancel(RequestId id) = 0;

  virtual EngineStats stats() const = 0;

  // kStalled when work has been queued and no step has ended for `stall_limit`.
  virtual Health health(std::chrono::duration<double> stall_limit) const = 0;

  // From now on submit() is refused; running and waiting requests go on.
  virtual void begin_drain() = 0;

  // Blocks until no request is left or `limit` has passed; true if none is left.
  virtual bool wait_drained(std::chrono::duration<double> limit) = 0;

  // Ends every request (kCancelled) and the threads; idempotent. Blocks. The destructor calls it.
  virtual void stop() = 0;
};

// Loads the model and starts the engine. Blocks for the length of the load. Errors: those of the
// checkpoint, of the memory plan (with the numbers), of the options (with param()).
Result<std::unique_ptr<Engine>> create_engine(const EngineOptions& options,
                                              const LoadProgress& progress = nullptr);

}  // namespace spin
