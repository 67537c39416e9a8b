#include "base/available_memory.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace available_memory_test {
namespace {

using spinwire::Status;
using spinwire::base::available_memory;
using spinwire::base::AvailableMemory;
using spinwire::base::check_available_memory;
using spinwire::base::MemoryFiles;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// Folders in which a test writes what the kernel tells.
class AvailableMemoryFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "available-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    files.proc = folder_ / "proc";
    files.cgroup = folder_ / "cgroup";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path whole = folder_ / path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  /// A machine of 1000 MiB, 400 of which are available.
  void write_machine(const std::string& swap = "SwapFree: 0 kB\n") {
    write("proc/meminfo", "MemTotal: 1024000 kB\nMemFree: 1 kB\nMemAvailable: 409600 kB\n" + swap);
  }
  /// A cgroup of version 1.
  void write_group1(const std::string& name, std::uint64_t most, std::uint64_t used) {
    const std::string folder = "cgroup/memory" + name;
    write(folder + "/memory.limit_in_bytes", std::to_string(most) + "\n");
    write(folder + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    write(folder + "/memory.stat", "cache 9\ntotal_inactive_file 1048576\ntotal_active_file 0\n");
  }
  [[nodiscard]] std::uint64_t available() const { return available_memory(files).bytes; }

  MemoryFiles files;

 private:
  std::filesystem::path folder_;
};

TEST_F(AvailableMemoryFiles, AreNotNeeded) {
  EXPECT_EQ(available(), AvailableMemory::kUnlimited);
  EXPECT_TRUE(check_available_memory(~std::uint64_t{0}, "take all", "", files));
}

TEST_F(AvailableMemoryFiles, TellWhatTheMachineHas) {
  write_machine();
  EXPECT_EQ(available(), 400 * kMiB);
  EXPECT_EQ(available_memory(files).found,
            "the machine has 1000MiB of memory, of which 400MiB can be taken");
  write_machine("SwapFree: 102400 kB\n");
  EXPECT_EQ(available(), 500 * kMiB) << "other processes can be swapped";
  write_machine("SwapFree: 9999999 kB\n");
  EXPECT_EQ(available(), 1000 * kMiB) << "swap space makes the memory no larger";
}

TEST_F(AvailableMemoryFiles, TellTheLimitOfACgroupOfVersion1) {
  write_machine();
  write("proc/self/cgroup", "3:cpuset:/\n4:memory:/a/b\n0::/\n");
  write_group1("/a/b", 300 * kMiB, 100 * kMiB);
  EXPECT_EQ(available(), 201 * kMiB) << "its caches count as available";
  EXPECT_EQ(available_memory(files).found,
            "the cgroup /a/b may have 300MiB of memory, of which 201MiB can be taken");
  write_group1("/a", 150 * kMiB, 100 * kMiB);
  EXPECT_EQ(available(), 51 * kMiB) << "the group above has less";
  write_group1("", 20 * kMiB, 20 * kMiB);
  EXPECT_EQ(available(), 1 * kMiB) << "the root, which a container may see as its own";
  write_group1("", 20 * kMiB, 30 * kMiB);
  EXPECT_EQ(available(), 1 * kMiB) << "more is used than allowed";
}

TEST_F(AvailableMemoryFiles, TellTheLimitOfACgroupOfVersion2) {
  write_machine();
  write("proc/self/cgroup", "0::/x\n");
  write("cgroup/x/memory.max", "max\n");
  write("cgroup/x/memory.current", "5\n");
  EXPECT_EQ(available(), 400 * kMiB) << "no limit";
  write("cgroup/x/memory.max", std::to_string(100 * kMiB));
  write("cgroup/x/memory.current", std::to_string(80 * kMiB));
  EXPECT_EQ(available(), 20 * kMiB);
  write("cgroup/x/memory.stat",
        "anon 7\nfile 99999999\ninactive_file 1048576\nactive_file 1048576\n");
  EXPECT_EQ(available(), 22 * kMiB);
  write("cgroup/x/memory.swap.max", "0\n");
  write("cgroup/x/memory.swap.current", "0\n");
  EXPECT_EQ(available(), 22 * kMiB) << "it may not swap";
  write("cgroup/x/memory.swap.max", std::to_string(8 * kMiB));
  write("cgroup/x/memory.swap.current", std::to_string(3 * kMiB));
  EXPECT_EQ(available(), 27 * kMiB);
  write("cgroup/x/memory.swap.max", "max\n");
  EXPECT_EQ(available(), 100 * kMiB);
}

TEST_F(AvailableMemoryFiles, AnErrorNamesTheLimit) {
  write_machine();
  EXPECT_TRUE(check_available_memory(400 * kMiB, "take it", "ask for less", files));
  const auto refused = check_available_memory(400 * kMiB + 1, "take it", "ask for less", files);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().status, Status::no_memory);
  EXPECT_EQ(
      refused.error().message(),
      "take it: the machine has 1000MiB of memory, of which 400MiB can be taken; ask for less");
}

TEST(AvailableMemory, OfThisMachineIsRead) {
  const AvailableMemory now = available_memory();
  EXPECT_NE(now.bytes, AvailableMemory::kUnlimited);
  EXPECT_GT(now.bytes, 0u);
  EXPECT_FALSE(now.found.empty());
}

}  // namespace
}  // namespace available_memory_test
