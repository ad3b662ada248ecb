// SPDX-License-Identifier: Apache-2.0
// An engine on the fake model, for tests. Thread: any.
#pragma once

#include <memory>

#include "base/clock.h"
#include "engine/fake_model.h"
#include "spin/engine.h"
#include "spin/options.h"

namespace spin::engine {

// Of EngineOptions, `model`, `tokenizer`, `dtype` and `threads` play no part; the model is served
// as "fake" unless served_model_name says otherwise, and its chat format is ChatML unless
// chat_format is "none". `clock`: null for the machine's own; outlives the engine. Errors: as
// create_engine.
Result<std::unique_ptr<Engine>> create_fake_engine(const FakeModelOptions& model,
                                                   const EngineOptions& options,
                                                   const base::Clock* clock = nullptr);

}  // namespace spin::engine
