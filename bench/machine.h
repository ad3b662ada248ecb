// SPDX-License-Identifier: Apache-2.0
// What every micro-benchmark begins with: the flag --threads, a CPU device, a stream.
// Thread: main thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include <benchmark/benchmark.h>

#include "backend/cpu/cpu_device.h"
#include "backend/device.h"
#include "base/check.h"
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

struct Machine {
  std::unique_ptr<backend::Device> device;
  std::unique_ptr<backend::Stream> stream;

  void wait() { SPIN_CHECK(stream->wait_idle().ok()); }
};

// Registers and runs the benchmarks of a program; its exit code.
inline int run_benchmarks(int argc, char** argv, void (*register_all)(Machine&)) {
  backend::cpu::CpuDeviceOptions options;
  options.threads = take_threads(argc, argv);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  auto device = backend::cpu::create_cpu_device(options);
  SPIN_CHECK(device.ok());
  Machine machine;
  machine.device = std::move(device).value();
  auto stream = machine.device->create_stream("bench");
  SPIN_CHECK(stream.ok());
  machine.stream = std::move(stream).value();
  benchmark::AddCustomContext("device", machine.device->properties().name);
  register_all(machine);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace spin::bench
