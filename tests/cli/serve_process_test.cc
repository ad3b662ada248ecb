// SPDX-License-Identifier: Apache-2.0
// `spin serve` as operators run it: start, address, keys, and how it ends.
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/parse_number.h"
#include "cli/exit_codes.h"
#include "tests/cli/program.h"
#include "tests/support/test_data.h"

namespace spin::cli {
namespace {

using spin::testing::source_path;
using spin::testing::test_data;
using ::testing::HasSubstr;
using ::testing::StartsWith;

int connect_to(uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) return fd;
  ::close(fd);
  return -1;
}

void send_all(int fd, const std::string& text) {
  ASSERT_EQ(::send(fd, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
}

// Reads until the peer closes, or until `until` is there.
std::string receive(int fd, const std::string& until = "") {
  std::string text;
  char block[4096];
  while (until.empty() || text.find(until) == std::string::npos) {
    const ssize_t got = ::recv(fd, block, sizeof(block), 0);
    if (got <= 0) break;
    text.append(block, static_cast<size_t>(got));
  }
  return text;
}

std::string message(const std::string& head, const std::string& body = "") {
  std::string text = head + " HTTP/1.1\r\nHost: localhost\r\n";
  if (!body.empty()) {
    text +=
        "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) + "\r\n";
  }
  return text;
}

// One request on a connection of its own; the whole response, "" without a connection.
std::string ask(uint16_t port,
                const std::string& head,
                const std::string& fields = "",
                const std::string& body = "") {
  const int fd = connect_to(port);
  if (fd < 0) return "";
  send_all(fd, message(head, body) + fields + "Connection: close\r\n\r\n" + body);
  const std::string text = receive(fd);
  ::close(fd);
  return text;
}

class Server {
 public:
  explicit Server(std::vector<std::string> more, const std::string& model = tiny())
      : program_(setup(std::move(more), model)) {
    if (!program_.wait_for_error("listening on http://127.0.0.1:")) return;
    if (!program_.wait_for_error("ready: ")) return;
    constexpr std::string_view kMark = "http://127.0.0.1:";
    std::string_view text = program_.error();
    text.remove_prefix(text.find(kMark) + kMark.size());
    port_ = static_cast<uint16_t>(base::parse_decimal(text.substr(0, text.find('\n'))).value_or(0));
  }

  static std::string tiny() { return test_data("tiny/qwen3-default/qwen3-default.gguf").string(); }
  uint16_t port() const { return port_; }
  Program& program() { return program_; }

 private:
  static Program::Setup setup(std::vector<std::string> more, const std::string& model) {
    more.insert(more.begin(), {"serve", model, "--port", "0", "--dtype", "float32"});
    return {more};
  }

  Program program_;
  uint16_t port_ = 0;
};

TEST(ServeProcess, TellsItsAddressAnswersAndEndsCleanly) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Server server({});
    ASSERT_NE(server.port(), 0);
    EXPECT_THAT(server.program().error(), HasSubstr("KV cache of"));
    EXPECT_THAT(ask(server.port(), "GET /health"), StartsWith("HTTP/1.1 200"));
    const std::string answer =
        ask(server.port(), "POST /v1/completions", "", R"({"prompt":"Hi","max_tokens":3})");
    EXPECT_THAT(answer, StartsWith("HTTP/1.1 200"));
    EXPECT_THAT(answer, HasSubstr("\"completion_tokens\":"));
    server.program().signal(signal);
    EXPECT_EQ(server.program().wait(), kExitOk) << server.program().error();
    EXPECT_LT(connect_to(server.port()), 0);
  }
}

// Right after it listens the model is being loaded, or just has been: the exit is clean either way.
TEST(ServeProcess, EndsCleanlyWhileItLoads) {
  Program program({{"serve", source_path("models/needle-29m").string(), "--port", "0"}});
  ASSERT_TRUE(program.wait_for_error("listening on "));
  program.signal(SIGTERM);
  EXPECT_EQ(program.wait(), kExitOk) << program.error();
}

TEST(ServeProcess, UsesTheNameItIsGiven) {
  Server server({"--served-model-name", "little"});
  EXPECT_THAT(ask(server.port(), "GET /v1/models"), HasSubstr("\"little\""));
  EXPECT_THAT(server.program().error(), HasSubstr("model little (qwen3)"));
}

TEST(ServeProcess, AsksForTheKey) {
  Server server({"--api-key", "first", "--api-key", "second"});
  EXPECT_THAT(ask(server.port(), "GET /health"), StartsWith("HTTP/1.1 200"));
  EXPECT_THAT(ask(server.port(), "GET /v1/models"), StartsWith("HTTP/1.1 401"));
  EXPECT_THAT(ask(server.port(), "GET /v1/models", "Authorization: Bearer wrong\r\n"),
              StartsWith("HTTP/1.1 401"));
  for (const char* key : {"first", "second"}) {
    EXPECT_THAT(
        ask(server.port(), "GET /v1/models", std::string("Authorization: Bearer ") + key + "\r\n"),
        StartsWith("HTTP/1.1 200"));
  }
}

TEST(ServeProcess, TheBodyLimitIsTheFlags) {
  Server server({"--max-body-bytes", "2k"});
  EXPECT_THAT(ask(server.port(), "POST /v1/completions", "", std::string(2001, ' ')),
              StartsWith("HTTP/1.1 413"));
  EXPECT_THAT(ask(server.port(), "POST /v1/completions", "", std::string(2000, ' ')),
              StartsWith("HTTP/1.1 400"));
}

TEST(ServeProcess, APortInUseIsAClearError) {
  Server server({});
  const Finished second =
      run_program({{"serve", Server::tiny(), "--port", std::to_string(server.port())}});
  EXPECT_EQ(second.code, kExitFailure);
  EXPECT_THAT(second.error, HasSubstr("in use"));
  EXPECT_THAT(second.error, HasSubstr("--port"));
}

TEST(ServeProcess, AnAddressThatIsNoneIsAnError) {
  const Finished done = run_program({{"serve", Server::tiny(), "--host", "no.such.host"}});
  EXPECT_EQ(done.code, kExitFailure);
  EXPECT_THAT(done.error, StartsWith("spin: "));
}

TEST(ServeProcess, AModelThatIsMissingIsAnError) {
  const spin::testing::TempDir dir;
  const Finished done = run_program({{"serve", (dir.path() / "absent").string(), "--port", "0"}});
  EXPECT_EQ(done.code, kExitFailure);
  EXPECT_THAT(done.error, HasSubstr("spin: "));
}

TEST(ServeProcess, AccessLinesAreLoggedUnlessSwitchedOff) {
  Server loud({});
  ask(loud.port(), "GET /v1/models");
  loud.program().signal(SIGTERM);
  loud.program().wait();
  EXPECT_THAT(loud.program().error(), HasSubstr("/v1/models"));
  for (const char* flag : {"--no-access-log", "--log-level=warning"}) {
    Server quiet({flag});
    ask(quiet.port(), "GET /v1/models");
    quiet.program().signal(SIGTERM);
    quiet.program().wait();
    EXPECT_THAT(quiet.program().error(), ::testing::Not(HasSubstr("/v1/models")));
  }
}

// A stream that runs for long, with its first bytes read.
int open_stream(uint16_t port) {
  const int fd = connect_to(port);
  EXPECT_GE(fd, 0);
  const std::string body =
      R"({"prompt":"The grass is green.","max_tokens":8000,"ignore_eos":true,"stream":true})";
  send_all(fd, message("POST /v1/completions", body) + "\r\n" + body);
  EXPECT_THAT(receive(fd, "data: "), StartsWith("HTTP/1.1 200"));
  return fd;
}

std::string needle() { return source_path("models/needle-29m").string(); }

TEST(ServeProcess, TheDrainLimitEndsRunningRequests) {
  Server server({"--drain-seconds", "0.2", "--max-model-len", "8100"}, needle());
  const int stream = open_stream(server.port());
  server.program().signal(SIGTERM);
  const std::string rest = receive(stream);
  ::close(stream);
  EXPECT_THAT(rest, HasSubstr("error"));
  EXPECT_EQ(server.program().wait(), kExitOk);
}

TEST(ServeProcess, WhileDrainingNewRequestsGet503AndASecondSignalEndsItAtOnce) {
  Server server({"--drain-seconds", "600", "--max-model-len", "8100"}, needle());
  const int stream = open_stream(server.port());
  server.program().signal(SIGTERM);
  // The drain has begun when the log says so.
  ASSERT_TRUE(server.program().wait_for_error("draining"));
  std::string health;
  for (int i = 0; i < 200 && health.rfind("HTTP/1.1 503", 0) != 0; ++i) {
    health = ask(server.port(), "GET /health");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_THAT(health, StartsWith("HTTP/1.1 503"));
  EXPECT_TRUE(server.program().running());
  server.program().signal(SIGTERM);
  EXPECT_EQ(server.program().wait(), 143);
  ::close(stream);
}

}  // namespace
}  // namespace spin::cli
