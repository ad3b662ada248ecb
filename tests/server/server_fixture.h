// SPDX-License-Identifier: Apache-2.0
// A server on a free port with a scripted engine behind it. Thread: the test's.
#pragma once

#include <memory>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "server/server.h"
#include "tests/server/scripted_engine.h"
#include "tests/support/raw_http.h"

namespace spin::server {

class ServerFixture {
 public:
  explicit ServerFixture(ScriptedOptions engine_options = {}, ServerOptions options = {})
      : engine_(std::make_unique<ScriptedEngine>(engine_options)) {
    options.port = 0;
    auto server = Server::start(options);
    EXPECT_TRUE(server.ok()) << server.status().to_string();
    if (!server.ok()) return;
    server_ = std::move(server).value();
    server_->attach(*engine_);
  }
  ~ServerFixture() {
    if (server_) server_->stop();
  }

  Server& server() { return *server_; }
  ScriptedEngine& engine() { return *engine_; }
  uint16_t port() const { return server_->port(); }

  testing::RawResponse get(std::string_view path, std::string_view fields = "") const {
    return testing::fetch(port(), testing::get_text(path, fields));
  }
  testing::RawResponse post(std::string_view path,
                            const nlohmann::json& body,
                            std::string_view fields = "") const {
    return testing::fetch(port(), testing::post_text(path, body.dump(), fields));
  }
  testing::RawResponse post_raw(std::string_view path, std::string_view body) const {
    return testing::fetch(port(), testing::post_text(path, body));
  }

 private:
  std::unique_ptr<ScriptedEngine> engine_;
  std::unique_ptr<Server> server_;
};

inline nlohmann::json parse(const testing::RawResponse& response) {
  return nlohmann::json::parse(response.body, nullptr, false);
}

}  // namespace spin::server
