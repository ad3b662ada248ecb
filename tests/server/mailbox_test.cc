// SPDX-License-Identifier: Apache-2.0
#include "server/mailbox.h"

#include <new>

#include <gtest/gtest.h>

namespace spin::server {
namespace {

TEST(Mailbox, OneWakeUpServesABatch) {
  int wakes = 0;
  int ran = 0;
  Mailbox box([&] { ++wakes; });
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(box.post(Task([&] { ++ran; })));
  EXPECT_EQ(wakes, 1);
  box.run_all();
  EXPECT_EQ(ran, 3);
  EXPECT_TRUE(box.post(Task([&] { ++ran; })));
  EXPECT_EQ(wakes, 2);
}

TEST(Mailbox, AFailedWakeUpDoesNotSilenceItForEver) {
  bool fails = true;
  int wakes = 0;
  int ran = 0;
  Mailbox box([&] {
    if (fails) throw std::bad_alloc();
    ++wakes;
  });
  EXPECT_THROW(box.post(Task([&] { ++ran; })), std::bad_alloc);
  fails = false;
  EXPECT_TRUE(box.post(Task([&] { ++ran; })));
  EXPECT_EQ(wakes, 1);
  box.run_all();
  EXPECT_EQ(ran, 1);
}

TEST(Mailbox, PostsAfterTheEndVanish) {
  int ran = 0;
  Mailbox box([] {});
  EXPECT_TRUE(box.post(Task([&] { ++ran; })));
  box.close();
  EXPECT_FALSE(box.post(Task([&] { ++ran; })));
  box.run_all();
  EXPECT_EQ(ran, 0);
}

}  // namespace
}  // namespace spin::server
