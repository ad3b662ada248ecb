// SPDX-License-Identifier: Apache-2.0
#include "cli/terminal.h"

#include <csignal>
#include <string>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "cli/progress_bar.h"
#include "cli/prompt_source.h"
#include "tests/support/test_data.h"

namespace spin::cli {
namespace {

using ::testing::HasSubstr;

struct Pipe {
  Pipe() { EXPECT_EQ(::pipe(fds), 0); }
  ~Pipe() {
    close_read();
    close_write();
  }
  void close_read() { close_one(fds[0]); }
  void close_write() { close_one(fds[1]); }
  static void close_one(int& fd) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  int fds[2] = {-1, -1};
};

TEST(Terminal, WritesMoreThanAPipeHolds) {
  Pipe pipe;
  const std::string text(1u << 20, 'x');
  std::thread writer([&] {
    EXPECT_TRUE(write_all(pipe.fds[1], text).ok());
    pipe.close_write();
  });
  const Result<std::string> got = read_all(pipe.fds[0], text.size(), -1);
  writer.join();
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(*got, text);
}

TEST(Terminal, WaitsForANonBlockingDescriptor) {
  Pipe pipe;
  ::fcntl(pipe.fds[1], F_SETFL, O_NONBLOCK);
  const std::string text(1u << 20, 'y');
  std::thread writer([&] {
    EXPECT_TRUE(write_all(pipe.fds[1], text).ok());
    pipe.close_write();
  });
  EXPECT_EQ(read_all(pipe.fds[0], text.size(), -1).value(), text);
  writer.join();
}

TEST(Terminal, AClosedReaderIsAnError) {
  std::signal(SIGPIPE, SIG_IGN);
  Pipe pipe;
  pipe.close_read();
  const Status status = write_all(pipe.fds[1], "x");
  EXPECT_EQ(status.code(), StatusCode::kIoError);
  EXPECT_THAT(status.message(), HasSubstr("closed the pipe"));
}

TEST(Terminal, AFullDeviceIsAnError) {
  const int fd = ::open("/dev/full", O_WRONLY);
  ASSERT_GE(fd, 0);
  EXPECT_THAT(write_all(fd, "x").message(), HasSubstr("no space left"));
  ::close(fd);
}

TEST(Terminal, AnEndlessInputIsRefusedAtTheLimit) {
  const int fd = ::open("/dev/zero", O_RDONLY);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(read_all(fd, 1u << 20, -1).status().code(), StatusCode::kResourceExhausted);
  LineReader reader(fd);
  EXPECT_EQ(reader.next(1u << 20, -1).status().code(), StatusCode::kResourceExhausted);
  ::close(fd);
}

TEST(Terminal, ReadingEndsWhenItIsCancelled) {
  Pipe input;
  Pipe cancel;
  ASSERT_EQ(::write(cancel.fds[1], "x", 1), 1);
  EXPECT_EQ(read_all(input.fds[0], 10, cancel.fds[0]).status().code(), StatusCode::kCancelled);
}

TEST(LineReader, GivesLinesAndTheUnfinishedRest) {
  Pipe pipe;
  ASSERT_TRUE(write_all(pipe.fds[1], "one\n\ntwo").ok());
  pipe.close_write();
  LineReader reader(pipe.fds[0]);
  EXPECT_EQ(reader.next(100, -1)->text, "one");
  EXPECT_EQ(reader.next(100, -1)->text, "");
  EXPECT_EQ(reader.next(100, -1)->text, "two");
  EXPECT_TRUE(reader.next(100, -1)->end_of_input);
  EXPECT_TRUE(reader.next(100, -1)->end_of_input);
}

TEST(PromptSource, ChecksUtf8AndSaysWhere) {
  EXPECT_TRUE(check_utf8(std::string("a\0\xC3\xA9", 4), "x").ok());
  EXPECT_EQ(check_utf8("ab\xff", "the prompt").message(),
            "the prompt must be UTF-8; byte 2 is not (0xff)");
  EXPECT_FALSE(check_utf8("a\xC3", "x").ok());
  EXPECT_FALSE(check_utf8("\xED\xA0\x80", "x").ok());  // a surrogate
}

TEST(PromptSource, TakesAFileByteForByte) {
  const spin::testing::TempDir dir;
  const std::string content("line\n\0 \xE2\x82\xAC\n", 11);
  GenerateOptions options;
  options.prompt_file = dir.write("p.txt", content).string();
  EXPECT_EQ(read_prompt(options, -1).value(), content);
}

TEST(PromptSource, SaysWhyAFileCannotBeRead) {
  const spin::testing::TempDir dir;
  GenerateOptions options;
  options.prompt_file = (dir.path() / "absent").string();
  EXPECT_EQ(read_prompt(options, -1).status().code(), StatusCode::kNotFound);
  options.prompt_file = dir.path().string();
  EXPECT_EQ(read_prompt(options, -1).status().code(), StatusCode::kIoError);
  options.prompt_file = "/dev/zero";
  const Status endless = read_prompt(options, -1).status();
  EXPECT_EQ(endless.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(endless.message(), HasSubstr("--prompt-file"));
}

TEST(ProgressBar, DrawsTheFraction) {
  EXPECT_EQ(progress_line("Load", 0), "Load [..............................]   0 %");
  EXPECT_EQ(progress_line("Load", 0.5), "Load [###############...............]  50 %");
  EXPECT_EQ(progress_line("Load", 1), "Load [##############################] 100 %");
  EXPECT_EQ(progress_line("Load", 7), progress_line("Load", 1));
  EXPECT_EQ(progress_line("Load", -1), progress_line("Load", 0));
  EXPECT_EQ(progress_line("Load", 0.0 / 0.0), progress_line("Load", 0));
}

std::string drawn(bool enabled) {
  Pipe pipe;
  {
    ProgressBar bar(pipe.fds[1], enabled);
    bar.update("a", 0.25);
    for (int i = 0; i < 1000; ++i) bar.update("a", 0.5);  // too soon after the first
    bar.update("b", 0.75);
    bar.clear();
    bar.clear();
  }
  pipe.close_write();
  return read_all(pipe.fds[0], 1u << 20, -1).value();
}

TEST(ProgressBar, IsSilentWithoutATerminal) { EXPECT_EQ(drawn(false), ""); }

TEST(ProgressBar, RedrawsSeldomAndErasesItself) {
  const std::string text = drawn(true);
  EXPECT_THAT(text, HasSubstr("a ["));
  EXPECT_THAT(text, HasSubstr("b ["));
  EXPECT_LT(text.size(), 100u * 60);  // far fewer than 1000 lines
  EXPECT_EQ(text.substr(text.size() - 4), "\r\x1b[K");
}

}  // namespace
}  // namespace spin::cli
