// SPDX-License-Identifier: Apache-2.0
// What this process may use of the machine: its control groups and CPU affinity count, not only the
// hardware. Thread: pure functions of the file system's state.
#pragma once

#include <cstdint>
#include <string>

namespace spin::base {

// Where the kernel's files are found; tests put a folder of their own here.
struct MachinePaths {
  std::string proc = "/proc";
  std::string cgroup = "/sys/fs/cgroup";
};

// The smaller of MemTotal and every memory limit of the process's control groups (v1 and v2), in
// bytes. 0 if nothing could be read.
uint64_t usable_memory_bytes(const MachinePaths& paths = {});

// CPUs of the process's affinity mask, at most the CPU quota of its control groups rounded up; at
// least 1.
uint32_t usable_cpus(const MachinePaths& paths = {});

// The processor's marketing name, or "unknown processor".
std::string cpu_model_name(const MachinePaths& paths = {});

}  // namespace spin::base
