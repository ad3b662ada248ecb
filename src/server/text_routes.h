// SPDX-License-Identifier: Apache-2.0
// /tokenize and /detokenize in vLLM's shapes, and the description of the model.
// Thread: any; the first two on workers, since they may take long.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "server/http_message.h"
#include "spin/engine.h"

namespace spin::server {

HttpResponse answer_tokenize(const Engine& engine, std::string_view body, uint64_t max_body_bytes);
HttpResponse answer_detokenize(const Engine& engine,
                               std::string_view body,
                               uint64_t max_body_bytes);

// One entry of /v1/models.
std::string model_json(const ModelInfo& model);

}  // namespace spin::server
