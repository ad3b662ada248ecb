// SPDX-License-Identifier: Apache-2.0
// The HTTP layer under handlers that fail, and its worker threads.
#include "server/http_server.h"

#include <atomic>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include <gtest/gtest.h>

#include "server/shard.h"
#include "server/worker_pool.h"
#include "tests/support/raw_http.h"

namespace spin::server {
namespace {

// Answers 200, except that /throw runs out of memory.
class ThrowingHandler final : public HttpHandler {
 public:
  std::optional<HttpResponse> check_head(const RequestHead&) override { return std::nullopt; }
  void handle(HttpRequest request, std::shared_ptr<Exchange> exchange) override {
    if (request.head.path == "/throw") throw std::bad_alloc();
    exchange->respond({});
  }
  HttpResponse make_error(int status, std::string_view) override {
    HttpResponse response;
    response.status = status;
    return response;
  }
  void on_refused(const RequestHead*, int) override {}
};

TEST(HttpServer, AHandlerThatRunsOutOfMemoryCostsItsOwnConnectionOnly) {
  ThrowingHandler handler;
  HttpServer server(handler, {}, 1);
  ASSERT_TRUE(server.listen("127.0.0.1", 0).ok());
  ASSERT_TRUE(server.start().ok());
  testing::RawClient neighbour(server.port());
  ASSERT_TRUE(neighbour.send(testing::get_text("/")));
  EXPECT_EQ(neighbour.read_response().status, 200);
  for (int i = 0; i < 3; ++i) {
    testing::RawClient unlucky(server.port());
    ASSERT_TRUE(unlucky.send(testing::get_text("/throw")));
    ASSERT_TRUE(neighbour.send(testing::get_text("/")));
    EXPECT_EQ(neighbour.read_response().status, 200);
  }
  neighbour.close();
  EXPECT_TRUE(testing::eventually([&] { return server.counters().connections_open.load() == 0; }));
  server.stop();
}

TEST(WorkerPool, ATaskThatThrowsEndsAlone) {
  WorkerPool pool(16);
  ASSERT_TRUE(pool.start(1).ok());
  std::atomic<int> ran = 0;
  ASSERT_TRUE(pool.try_post(Task([] { throw std::bad_alloc(); })));
  ASSERT_TRUE(pool.try_post(Task([&ran] { ++ran; })));
  EXPECT_TRUE(testing::eventually([&ran] { return ran == 1; }));
}

}  // namespace
}  // namespace spin::server
