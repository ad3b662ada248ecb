// SPDX-License-Identifier: Apache-2.0
// The device that an engine or an evaluation runs on. The only place that knows which backends this
// build has. Thread: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "backend/device.h"
#include "spin/status.h"

namespace spin::engine {

// `name` as EngineOptions::device; `threads` as EngineOptions::threads, for the CPU only.
// Errors: kInvalidArgument and kUnsupported (no such backend in this build, no such GPU) with
// param() "device"; those of the backend.
Result<std::unique_ptr<backend::Device>> create_device(const std::string& name, uint32_t threads);

}  // namespace spin::engine
