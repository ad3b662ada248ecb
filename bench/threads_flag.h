// SPDX-License-Identifier: Apache-2.0
// The one flag of our own that benchmarks take. Thread: start of main().
#pragma once

#include <cstdint>
#include <string>

#include "base/parse_number.h"

namespace spin::bench {

// Takes --threads=N out of the arguments; 0 if it is not there.
inline uint32_t take_threads(int& argc, char** argv) {
  const std::string prefix = "--threads=";
  uint32_t threads = 0;
  int kept = 0;
  for (int i = 0; i < argc; ++i) {
    const std::string text = argv[i];
    if (text.compare(0, prefix.size(), prefix) != 0) {
      argv[kept++] = argv[i];
      continue;
    }
    threads = static_cast<uint32_t>(base::parse_decimal(text.substr(prefix.size())).value_or(0));
  }
  argc = kept;
  return threads;
}

}  // namespace spin::bench
