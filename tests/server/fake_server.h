// SPDX-License-Identifier: Apache-2.0
// A server with the fake engine behind it: the real scheduler, sampler and pages, a model of
// hashes. Thread: the test's.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "engine/fake_engine.h"
#include "server/server.h"
#include "tests/support/raw_http.h"

namespace spin::server {

class FakeServer {
 public:
  explicit FakeServer(const engine::FakeModelOptions& model = {},
                      const EngineOptions& engine_options = {},
                      ServerOptions options = {}) {
    auto engine = engine::create_fake_engine(model, engine_options);
    EXPECT_TRUE(engine.ok()) << engine.status().to_string();
    if (!engine.ok()) std::abort();
    engine_ = std::move(engine).value();
    options.port = 0;
    auto server = Server::start(options);
    EXPECT_TRUE(server.ok()) << server.status().to_string();
    if (!server.ok()) std::abort();
    server_ = std::move(server).value();
    server_->attach(*engine_);
  }
  ~FakeServer() { server_->stop(); }

  Engine& engine() { return *engine_; }
  Server& server() { return *server_; }
  uint16_t port() const { return server_->port(); }

  testing::RawResponse post(std::string_view path, const nlohmann::json& body) const {
    return testing::fetch(
        port(), testing::post_text(
                    path, body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)));
  }

  // Nothing of any request is left in the engine or in the front end.
  bool idle() const {
    const EngineStats stats = engine_->stats();
    return stats.requests_running == 0 && stats.requests_waiting == 0 &&
           stats.kv_pages_in_use == 0 && server_->stats().requests_active == 0;
  }

 private:
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Server> server_;
};

}  // namespace spin::server
