// SPDX-License-Identifier: Apache-2.0
#include "base/machine.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include <sched.h>

#include "base/checked_math.h"
#include "base/parse_number.h"

namespace spin::base {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// The words of `line`, split at spaces and tabs.
std::vector<std::string_view> words(std::string_view line) {
  std::vector<std::string_view> out;
  while (true) {
    const size_t begin = line.find_first_not_of(" \t");
    if (begin == std::string_view::npos) return out;
    const size_t end = std::min(line.find_first_of(" \t", begin), line.size());
    out.push_back(line.substr(begin, end - begin));
    line.remove_prefix(end);
  }
}

// One line of /proc/self/cgroup: "4:memory:/docker/ab" (v1) or "0::/user.slice" (v2).
struct Membership {
  std::string controllers;
  std::string path;
};

std::vector<Membership> memberships(const MachinePaths& paths) {
  std::vector<Membership> out;
  std::ifstream file(paths.proc + "/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const size_t first = line.find(':');
    if (first == std::string::npos) continue;
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    out.push_back({line.substr(first + 1, second - first - 1), line.substr(second + 1)});
  }
  return out;
}

bool names_controller(std::string_view list, std::string_view name) {
  while (!list.empty()) {
    const size_t comma = std::min(list.find(','), list.size());
    if (list.substr(0, comma) == name) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

// The smallest read(folder) over the group's folder and its ancestors up to the mount. A group path
// that is not visible here (a container sees only its own subtree) falls through to the mount.
template <typename Read>
uint64_t smallest_up_to_root(const std::string& mount, std::string path, const Read& read) {
  uint64_t smallest = kUnlimited;
  while (true) {
    smallest = std::min(smallest, read(mount + (path == "/" ? "" : path)));
    if (path.empty() || path == "/") return smallest;
    path.resize(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
}

uint64_t number_or_unlimited(const std::string& text) {
  return parse_decimal(text).value_or(kUnlimited);  // "max", or no such file
}

// CPUs that quota/period allows, rounded up.
uint64_t quota_cpus(std::string_view quota, std::string_view period) {
  const auto quota_us = parse_decimal(quota);
  const auto period_us = parse_decimal(period);
  if (!quota_us || !period_us || *period_us == 0) return kUnlimited;  // "max" or -1
  return std::max<uint64_t>(1, ceil_div(*quota_us, *period_us));
}

uint64_t cpu_quota_v2(const std::string& folder) {
  const std::string line = first_line(folder + "/cpu.max");
  const auto fields = words(line);
  return fields.size() == 2 ? quota_cpus(fields[0], fields[1]) : kUnlimited;
}

uint64_t cpu_quota_v1(const std::string& folder) {
  return quota_cpus(first_line(folder + "/cpu.cfs_quota_us"),
                    first_line(folder + "/cpu.cfs_period_us"));
}

uint64_t memory_total(const MachinePaths& paths) {
  std::ifstream file(paths.proc + "/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    const auto fields = words(line);
    if (fields.size() < 2 || fields[0] != "MemTotal:") continue;
    const auto kib = parse_decimal(fields[1]);
    if (!kib) return kUnlimited;
    return checked_mul(*kib, uint64_t{1024}).value_or(kUnlimited);
  }
  return kUnlimited;
}

uint32_t affinity_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  // Fails on machines with more than 1024 CPUs, where the quota and the caller's own choice remain.
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return CPU_SETSIZE;
  return static_cast<uint32_t>(std::max(1, CPU_COUNT(&set)));
}

}  // namespace

uint64_t usable_memory_bytes(const MachinePaths& paths) {
  uint64_t limit = memory_total(paths);
  for (const Membership& group : memberships(paths)) {
    if (group.controllers.empty()) {
      limit = std::min(limit, smallest_up_to_root(paths.cgroup, group.path, [](const auto& folder) {
                         return number_or_unlimited(first_line(folder + "/memory.max"));
                       }));
    } else if (names_controller(group.controllers, "memory")) {
      limit = std::min(
          limit, smallest_up_to_root(paths.cgroup + "/memory", group.path, [](const auto& folder) {
            return number_or_unlimited(first_line(folder + "/memory.limit_in_bytes"));
          }));
    }
  }
  return limit == kUnlimited ? 0 : limit;
}

uint32_t usable_cpus(const MachinePaths& paths) {
  uint64_t limit = affinity_cpus();
  for (const Membership& group : memberships(paths)) {
    if (group.controllers.empty()) {
      limit = std::min(limit, smallest_up_to_root(paths.cgroup, group.path, cpu_quota_v2));
    } else if (names_controller(group.controllers, "cpu")) {
      limit = std::min(limit, smallest_up_to_root(paths.cgroup + "/cpu", group.path, cpu_quota_v1));
    }
  }
  return static_cast<uint32_t>(limit);
}

std::string cpu_model_name(const MachinePaths& paths) {
  std::ifstream file(paths.proc + "/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

}  // namespace spin::base
