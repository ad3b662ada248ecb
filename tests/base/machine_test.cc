// SPDX-License-Identifier: Apache-2.0
#include "base/machine.h"

#include <gtest/gtest.h>

#include "tests/support/test_data.h"

namespace spin::base {
namespace {

class Machine : public ::testing::Test {
 protected:
  // A made-up machine with 1 GiB of memory.
  void SetUp() override {
    write("proc/meminfo", "MemTotal:        1048576 kB\nMemFree:          12 kB\n");
    paths_.proc = (folder_.path() / "proc").string();
    paths_.cgroup = (folder_.path() / "cgroup").string();
  }
  void write(const std::string& name, const std::string& content) {
    std::filesystem::create_directories((folder_.path() / name).parent_path());
    folder_.write(name, content);
  }

  spin::testing::TempDir folder_;
  MachinePaths paths_;
};

TEST_F(Machine, MemoryIsTheTotalWithoutControlGroups) {
  EXPECT_EQ(usable_memory_bytes(paths_), uint64_t{1} << 30);
}

TEST_F(Machine, MemoryIsTheSmallestLimitUpToTheRootOfVersion2) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.max", "max\n");
  write("cgroup/a/memory.max", "300000000\n");
  write("cgroup/memory.max", "400000000\n");
  EXPECT_EQ(usable_memory_bytes(paths_), 300000000u);
}

TEST_F(Machine, MemoryLimitOfVersion1CountsAndItsUnlimitedValueDoesNot) {
  write("proc/self/cgroup", "5:cpuset:/\n4:memory:/job\n");
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(usable_memory_bytes(paths_), uint64_t{1} << 30);
  write("cgroup/memory/job/memory.limit_in_bytes", "123456789\n");
  EXPECT_EQ(usable_memory_bytes(paths_), 123456789u);
}

TEST_F(Machine, GroupInvisibleInsideAContainerFallsThroughToTheMount) {
  write("proc/self/cgroup", "0::/../../outside\n");
  write("cgroup/memory.max", "5000\n");
  EXPECT_EQ(usable_memory_bytes(paths_), 5000u);
}

TEST_F(Machine, BrokenFilesAreNoLimit) {
  write("proc/meminfo", "MemTotal: lots\n");
  write("proc/self/cgroup", "nonsense\n::\n0::/x\n");
  write("cgroup/x/memory.max", "-5\n");
  write("cgroup/x/cpu.max", "1 0\n");
  EXPECT_EQ(usable_memory_bytes(paths_), 0u);
  EXPECT_GE(usable_cpus(paths_), 1u);
}

TEST_F(Machine, CpuQuotaIsRoundedUpAndNeverZero) {
  write("proc/self/cgroup", "0::/x\n");
  write("cgroup/x/cpu.max", "1000 100000\n");
  EXPECT_EQ(usable_cpus(paths_), 1u);
  write("cgroup/x/cpu.max", "max 100000\n");
  const uint32_t all = usable_cpus(paths_);
  write("cgroup/x/cpu.max", "100001 100000\n");
  EXPECT_EQ(usable_cpus(paths_), std::min(all, 2u));
}

TEST(MachineHere, ReportsSomethingUsable) {
  EXPECT_GE(usable_cpus(), 1u);
  EXPECT_GT(usable_memory_bytes(), uint64_t{64} << 20);
  EXPECT_FALSE(cpu_model_name().empty());
}

}  // namespace
}  // namespace spin::base
