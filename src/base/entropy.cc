// SPDX-License-Identifier: Apache-2.0
#include "base/entropy.h"

#include <chrono>
#include <exception>
#include <random>

namespace spin::base {

uint64_t system_entropy() {
  try {
    std::random_device device;
    return (uint64_t{device()} << 32) | device();
  } catch (const std::exception&) {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
}

}  // namespace spin::base
