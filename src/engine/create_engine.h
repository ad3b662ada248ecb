// SPDX-License-Identifier: Apache-2.0
// create_engine() with settings that nobody has to choose; tests do, to reach rare states often.
// Thread: any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "backend/device.h"
#include "engine/scheduler.h"
#include "spin/engine.h"
#include "spin/options.h"
#include "spin/status.h"

namespace spin::engine {

struct EngineTuning {
  uint32_t min_decoded_tokens = SchedulerOptions{}.min_decoded_tokens;
  // Makes the device instead of the one that the options name; empty: that one.
  std::function<Result<std::unique_ptr<backend::Device>>()> make_device;
};

// As spin::create_engine().
Result<std::unique_ptr<Engine>> create_tuned_engine(const EngineOptions& options,
                                                    const EngineTuning& tuning,
                                                    const LoadProgress& progress = nullptr);

}  // namespace spin::engine
