#include "memory/hugepages.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/memlock.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "memory/hugepage_setting.h"
#include "memory/poison.h"
#include "own_process.h"
#include "spinwire/log.h"

namespace hugepages_test {

using spinwire::Error;
using spinwire::HugepagePolicy;
using spinwire::LockPolicy;
using spinwire::LogLevel;
using spinwire::Status;
using spinwire::base::LockLimits;
using spinwire::base::LockUse;
using spinwire::base::SharedMemory;
using spinwire::memory::HugepageSize;
using spinwire::memory::map_pages;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kGiB = std::size_t{1} << 30;

using hugepage_setting::kNrHugepages;
using hugepage_setting::Lock;
using hugepage_setting::read_text;
using hugepage_setting::Setting;

/// Collects warnings during its lifetime.
class Warnings {
 public:
  Warnings() {
    spinwire::memory::rearm_fallback_warning();
    spinwire::set_log([this](LogLevel level, std::string_view message) {
      if (level == LogLevel::warning) texts.emplace_back(message);
    });
  }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  ~Warnings() { spinwire::set_log({}); }

  std::vector<std::string> texts;
};

/// More bytes than the hugepages of any size, in whole pages of 2 MiB; 0 if that is too much for
/// ordinary pages. Pages in use count: another process may give them back at any moment.
std::size_t more_than_there_is() {
  std::size_t most = 0;
  for (const HugepageSize& size : spinwire::memory::hugepage_sizes()) {
    most = std::max(most, (size.total + size.growth) * size.bytes);
  }
  return most <= kGiB / 2 ? most + 6 * kMiB : 0;
}

const HugepageSize* default_size(const std::vector<HugepageSize>& sizes) {
  for (const HugepageSize& size : sizes) {
    if (size.is_default) return &size;
  }
  return nullptr;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool is_resident(const SharedMemory& memory) {
  std::vector<unsigned char> pages(memory.size() / 4096);
  if (mincore(memory.data(), memory.size(), pages.data()) != 0) return false;
  for (const unsigned char page : pages) {
    if ((page & 1) == 0) return false;
  }
  return true;
}

/// A field of the mapping at this address in /proc/self/smaps, in kB; -1 if it is missing.
long smaps_field(const std::byte* address, const std::string& field) {
  char start[32];
  std::snprintf(start, sizeof start, "%lx-", reinterpret_cast<unsigned long>(address));
  std::ifstream file("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, std::string(start).size(), start) == 0) {
      inside = true;
    } else if (inside && line.compare(0, field.size() + 1, field + ':') == 0) {
      return std::stol(line.substr(field.size() + 1));
    }
  }
  return -1;
}

long smaps_field(const SharedMemory& memory, const std::string& field) {
  return smaps_field(memory.data(), field);
}

/// Runs `body` in a child without CAP_IPC_LOCK and with this limit on locked memory. Returns its
/// result, or a description of the failure.
std::string without_privilege(rlim_t bytes, const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const spinwire::base::UniqueFd in(ends[0]);
  spinwire::base::UniqueFd out(ends[1]);
  const pid_t child = fork();
  if (child == 0) {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct data[2]{};
    std::string text;
    const rlimit limit{bytes, bytes};
    if (syscall(SYS_capset, &header, data) != 0) {
      text = "cannot give up capabilities";
    } else if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
      text = "cannot lower the limit";
    } else {
      text = body();
    }
    const ssize_t n = write(out.get(), text.data(), text.size());
    _exit(n == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  out.reset();
  std::string text;
  char part[512];
  for (ssize_t n = 0; (n = read(in.get(), part, sizeof part)) > 0;) {
    text.append(part, static_cast<std::size_t>(n));
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? text : text + " (child failed)";
}

TEST(HugepagesTest, ListsTheSizesThatTheSystemHas) {
  const Lock lock;
  const std::string folder = "/sys/kernel/mm/hugepages";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "this kernel offers no hugepages";
  const auto sizes = spinwire::memory::hugepage_sizes();
  std::size_t folders = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    ++folders;
    const std::string path = entry.path();
    const std::size_t bytes =
        std::stoul(entry.path().filename().string().substr(std::string("hugepages-").size())) *
        1024;
    const auto at = std::find_if(sizes.begin(), sizes.end(),
                                 [&](const HugepageSize& s) { return s.bytes == bytes; });
    ASSERT_NE(at, sizes.end()) << bytes;
    EXPECT_EQ(at->total, std::stoul(read_text(path + "/nr_hugepages")));
    EXPECT_EQ(at->free, std::stoul(read_text(path + "/free_hugepages")));
  }
  EXPECT_EQ(sizes.size(), folders);
  EXPECT_TRUE(std::is_sorted(sizes.begin(), sizes.end(),
                             [](const auto& a, const auto& b) { return a.bytes < b.bytes; }));
  const HugepageSize* standard = default_size(sizes);
  ASSERT_NE(standard, nullptr);
  EXPECT_EQ(standard->bytes, own_process::number_in("/proc/meminfo", "Hugepagesize").value() << 10);
}

HugepageSize size_of(std::size_t bytes, std::uint64_t free, bool is_default) {
  HugepageSize size;
  size.bytes = bytes;
  size.total = size.free = free;
  size.is_default = is_default;
  return size;
}

std::vector<std::size_t> fitting(const std::vector<HugepageSize>& sizes, std::size_t bytes) {
  std::vector<std::size_t> found;
  for (const auto& size : spinwire::memory::fitting_sizes(sizes, bytes)) {
    found.push_back(size.bytes);
  }
  return found;
}

TEST(HugepagesTest, TriesLargePagesFirstUnlessTheyWasteMemory) {
  const std::vector<HugepageSize> sizes = {size_of(2 * kMiB, 5000, true), size_of(kGiB, 4, false)};
  using Found = std::vector<std::size_t>;
  EXPECT_EQ(fitting(sizes, 4 * kGiB), (Found{kGiB, 2 * kMiB}));
  EXPECT_EQ(fitting(sizes, 4 * kGiB - kGiB / 4), (Found{kGiB, 2 * kMiB}));
  EXPECT_EQ(fitting(sizes, 64 * kMiB), Found{2 * kMiB}) << "1 GiB would waste most of a page";
  EXPECT_EQ(fitting(sizes, 4 * kGiB + 1), Found{2 * kMiB}) << "needs a fifth";
  EXPECT_EQ(fitting(sizes, 1), Found{2 * kMiB});
  EXPECT_EQ(fitting(sizes, 20 * kGiB), Found{});
  EXPECT_EQ(fitting({}, kMiB), Found{});
}

TEST(HugepagesTest, PagesReservedByOthersAreNotFree) {
  HugepageSize size = size_of(2 * kMiB, 10, true);
  size.reserved = 4;
  EXPECT_EQ(size.available(), 6u);
  size.growth = 3;
  EXPECT_EQ(size.available(), 9u);
  EXPECT_EQ(fitting({size}, 18 * kMiB).size(), 1u);
  EXPECT_EQ(fitting({size}, 18 * kMiB + 1).size(), 0u);
}

TEST(HugepagesTest, ErrorNamesPagesAndTheCommand) {
  HugepageSize small = size_of(2 * kMiB, 10, true);
  small.total = 25;  // 15 in use
  const HugepageSize large = size_of(kGiB, 0, false);
  const std::vector<HugepageSize> sizes = {small, large};
  Error error = spinwire::memory::missing_hugepages(sizes, 64 * kMiB);
  EXPECT_EQ(error.status, Status::no_memory);
  EXPECT_TRUE(contains(error.found, "32 pages of 2MiB are needed, 10 are free")) << error.found;
  EXPECT_TRUE(contains(error.remedy, "sysctl -w vm.nr_hugepages=47")) << error.remedy;

  // vm.nr_hugepages counts pages of the default size; each other size has its own file.
  std::vector<HugepageSize> other = sizes;
  other[0].is_default = false;
  other[1].is_default = true;
  error = spinwire::memory::missing_hugepages(other, 64 * kMiB);
  EXPECT_TRUE(
      contains(error.remedy, "echo 47 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"))
      << error.remedy;
  error = spinwire::memory::missing_hugepages({}, 64 * kMiB);
  EXPECT_TRUE(contains(error.found, "no hugepages")) << error.found;
}

TEST(HugepagesTest, OffTakesOrdinaryPagesSilently) {
  Warnings warnings;
  auto memory = map_pages(3 * kMiB, HugepagePolicy::off, LockPolicy::off, "off");
  ASSERT_TRUE(memory.has_value()) << memory.error().message();
  EXPECT_FALSE(spinwire::memory::is_hugetlb(*memory));
  EXPECT_EQ(memory->size(), 3 * kMiB);
  EXPECT_TRUE(is_resident(*memory));
  const int seals = fcntl(memory->fd(), F_GET_SEALS);
  EXPECT_EQ(seals & (F_SEAL_SHRINK | F_SEAL_GROW), F_SEAL_SHRINK | F_SEAL_GROW);
  EXPECT_TRUE(warnings.texts.empty());
}

TEST(HugepagesTest, NothingIsAnErrorAndNoFallback) {
  Warnings warnings;
  for (const auto policy : {HugepagePolicy::require, HugepagePolicy::prefer, HugepagePolicy::off}) {
    auto memory = map_pages(0, policy, LockPolicy::off, "none");
    ASSERT_FALSE(memory.has_value());
    EXPECT_EQ(memory.error().status, Status::invalid_argument);
  }
  EXPECT_TRUE(warnings.texts.empty());
}

TEST(HugepagesTest, PreferFallsBackWithOneWarningThatNamesTheCommand) {
  const Lock lock;
  const std::size_t bytes = more_than_there_is();
  if (bytes == 0) GTEST_SKIP() << "so many hugepages are free that running out takes too much";
  // Without a log callback the warning must wait until there is one.
  spinwire::memory::rearm_fallback_warning();
  ASSERT_TRUE(map_pages(bytes, HugepagePolicy::prefer, LockPolicy::off, "x").has_value());
  Warnings warnings;
  for (int i = 0; i < 3; ++i) {
    auto memory = map_pages(bytes, HugepagePolicy::prefer, LockPolicy::off, "prefer");
    ASSERT_TRUE(memory.has_value()) << memory.error().message();
    EXPECT_FALSE(spinwire::memory::is_hugetlb(*memory));
    EXPECT_TRUE(is_resident(*memory));
  }
  ASSERT_EQ(warnings.texts.size(), 1u);
  EXPECT_TRUE(contains(warnings.texts[0], "nr_hugepages")) << warnings.texts[0];
  EXPECT_TRUE(contains(warnings.texts[0], "are needed")) << warnings.texts[0];
}

TEST(HugepagesTest, RequireIsAnErrorWhoseCommandHelps) {
  const Lock lock;
  const std::size_t bytes = more_than_there_is();
  if (bytes == 0) GTEST_SKIP() << "so many hugepages are free that running out takes too much";
  Warnings warnings;
  auto none = map_pages(bytes, HugepagePolicy::require, LockPolicy::off, "require");
  ASSERT_FALSE(none.has_value());
  EXPECT_TRUE(warnings.texts.empty());
  EXPECT_EQ(none.error().status, Status::no_memory);
  EXPECT_TRUE(contains(none.error().found, std::to_string(bytes / (2 * kMiB)) + " pages of 2MiB"))
      << none.error().message();
  const std::string command = "sysctl -w vm.nr_hugepages=";
  const std::size_t at = none.error().remedy.find(command);
  ASSERT_NE(at, std::string::npos) << none.error().remedy;

  const std::string number = none.error().remedy.substr(at + command.size());
  const Setting setting(kNrHugepages, read_text(kNrHugepages), number);
  if (!setting || std::stoul(read_text(kNrHugepages)) < std::stoul(number)) {
    GTEST_SKIP() << "cannot reserve " << number << " hugepages here (not root, or none to be had)";
  }
  auto memory = map_pages(bytes, HugepagePolicy::require, LockPolicy::off, "require");
  EXPECT_TRUE(memory.has_value()) << memory.error().message();
}

TEST(HugepagesTest, ReservedHugepagesAreUsedAndGivenBack) {
  const Lock lock;
  const auto before = spinwire::memory::hugepage_sizes();
  const HugepageSize* standard = default_size(before);
  if (standard == nullptr || standard->bytes > 2 * kMiB) {
    GTEST_SKIP() << "no hugepages of moderate size here";
  }
  const std::size_t page = standard->bytes;
  // The test needs 3. Other processes may take some first.
  const std::string more = std::to_string(standard->total + 64);
  const Setting setting(kNrHugepages, read_text(kNrHugepages), more);
  if (!setting || read_text(kNrHugepages) != more + "\n") {
    GTEST_SKIP() << "cannot reserve 64 more hugepages here (not root, or none to be had)";
  }
  Warnings warnings;
  for (const auto policy : {HugepagePolicy::require, HugepagePolicy::prefer}) {
    auto memory = map_pages(3 * page - 5, policy, LockPolicy::off, "huge");
    ASSERT_TRUE(memory.has_value()) << memory.error().message();
    EXPECT_TRUE(spinwire::memory::is_hugetlb(*memory));
    EXPECT_EQ(memory->size(), 3 * page);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->data()) % page, 0u);
    const auto kib = [page](std::size_t pages) { return static_cast<long>(pages * page / 1024); };
    EXPECT_EQ(smaps_field(*memory, "KernelPageSize"), kib(1));
    EXPECT_EQ(smaps_field(*memory, "Private_Hugetlb") + smaps_field(*memory, "Shared_Hugetlb"),
              kib(3))
        << "populated, not only reserved";
    const std::byte* const start = memory->data();
    const int fd = memory->fd();
    memory = SharedMemory();
    EXPECT_EQ(smaps_field(start, "KernelPageSize"), -1) << "still mapped";
    EXPECT_EQ(fcntl(fd, F_GETFD), -1) << "still open";
  }
  // Hugepages are never swapped, so a required lock costs nothing.
  const std::string text = without_privilege(0, [page] {
    auto memory = map_pages(page, HugepagePolicy::require, LockPolicy::require, "huge");
    return memory ? "taken" : memory.error().message();
  });
  EXPECT_EQ(text, "taken");
  EXPECT_TRUE(warnings.texts.empty());
}

TEST(HugepagesTest, FallbackAsksTheKernelToMergePages) {
  const Lock lock;
  const std::string path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
  const std::size_t bytes = more_than_there_is();
  if (bytes == 0) GTEST_SKIP() << "so many hugepages are free that running out takes too much";
  const std::string text = read_text(path);
  const std::size_t open = text.find('[');
  if (open == std::string::npos) GTEST_SKIP() << "this kernel does not merge shared pages";
  const std::string before = text.substr(open + 1, text.find(']') - open - 1);
  const Setting setting(path, before, "advise");
  if (!setting) GTEST_SKIP() << "cannot let the kernel merge shared pages on advice (not root)";
  auto merged = map_pages(bytes, HugepagePolicy::prefer, LockPolicy::off, "merged");
  auto plain = map_pages(bytes, HugepagePolicy::off, LockPolicy::off, "plain");
  ASSERT_TRUE(merged.has_value() && plain.has_value());
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(merged->data()) % (2 * kMiB), 0u);
  EXPECT_GT(smaps_field(*merged, "ShmemPmdMapped"), 0);
  EXPECT_EQ(smaps_field(*plain, "ShmemPmdMapped"), 0);
}

/// Needs a system on which locking works.
class MemlockRealTest : public testing::Test {
 protected:
  void SetUp() override {
#if SPINWIRE_ASAN
    GTEST_SKIP() << "AddressSanitizer makes mlock do nothing";
#endif
  }
};

TEST_F(MemlockRealTest, RequiredLockBeyondTheLimitNamesTheLimits) {
  const std::string text = without_privilege(128 * 1024, [] {
    auto memory = map_pages(kMiB, HugepagePolicy::off, LockPolicy::require, "lock");
    return memory ? "locked" : memory.error().message();
  });
  EXPECT_TRUE(contains(text, "lock 1MiB")) << text;
  EXPECT_TRUE(contains(text, "1MiB asked")) << text;
  EXPECT_TRUE(contains(text, "RLIMIT_MEMLOCK is 128KiB soft, 128KiB hard")) << text;
  EXPECT_TRUE(contains(text, "locked (VmLck)")) << text;
  EXPECT_TRUE(contains(text, "ulimit -l 1024 ")) << text;
  EXPECT_TRUE(contains(text, "limits.conf")) << text;
  EXPECT_TRUE(contains(text, "LimitMEMLOCK=1024K")) << text;
  EXPECT_TRUE(contains(text, "CAP_IPC_LOCK")) << text;
  EXPECT_FALSE(contains(text, "possible cause")) << text;
}

TEST_F(MemlockRealTest, WhatIsLockedAlreadyCounts) {
  const std::string text = without_privilege(256 * 1024, [] {
    auto first = map_pages(192 * 1024, HugepagePolicy::off, LockPolicy::require, "first");
    if (!first) return first.error().message();
    auto second = map_pages(128 * 1024, HugepagePolicy::off, LockPolicy::require, "second");
    return second ? "locked" : second.error().message();
  });
  EXPECT_TRUE(contains(text, "128KiB asked, 192KiB locked (VmLck)")) << text;
  EXPECT_TRUE(contains(text, "ulimit -l 320 ")) << text;
}

TEST_F(MemlockRealTest, PreferredLockBeyondTheLimitIsAWarning) {
  const std::string text = without_privilege(128 * 1024, [] {
    const Warnings warnings;
    auto memory = map_pages(kMiB, HugepagePolicy::off, LockPolicy::prefer, "lock");
    if (!memory) return memory.error().message();
    return warnings.texts.size() == 1 ? "warned: " + warnings.texts[0] : "no warning";
  });
  EXPECT_TRUE(contains(text, "warned: ")) << text;
  EXPECT_TRUE(contains(text, "RLIMIT_MEMLOCK is 128KiB soft")) << text;
}

TEST_F(MemlockRealTest, LockingWithinTheLimitLocks) {
  const std::string text = without_privilege(256 * 1024, [] {
    const Warnings warnings;
    const std::uint64_t before = spinwire::base::lock_limits().locked;
    auto off = map_pages(64 * 1024, HugepagePolicy::off, LockPolicy::off, "off");
    auto memory = map_pages(128 * 1024, HugepagePolicy::off, LockPolicy::require, "lock");
    auto preferred = map_pages(64 * 1024, HugepagePolicy::off, LockPolicy::prefer, "prefer");
    if (!off || !memory || !preferred) return std::string("refused");
    const LockLimits limits = spinwire::base::lock_limits();
    return std::to_string(limits.locked - before) + (limits.privileged ? " privileged" : "") +
           (warnings.texts.empty() ? "" : " warned");
  });
  EXPECT_EQ(text, std::to_string(192 * 1024));
}

TEST(MemlockTest, LimitThatIsNotExceededIsAPossibleCauseOnly) {
  LockLimits limits;
  limits.soft = limits.hard = 8 * kMiB;
  limits.locked = kMiB;
  limits.pinned = 2 * kMiB;
  const auto text = [&](std::uint64_t bytes, LockUse use) {
    return spinwire::base::lock_error("register memory", "reg_mr", ENOMEM, bytes, use, limits)
        .message();
  };
  EXPECT_TRUE(contains(text(6 * kMiB, LockUse::pin), "possible cause"));
  EXPECT_FALSE(contains(text(6 * kMiB + 1, LockUse::pin), "possible cause"));
  EXPECT_TRUE(contains(text(7 * kMiB, LockUse::lock), "possible cause"));
  EXPECT_FALSE(contains(text(7 * kMiB + 1, LockUse::lock), "possible cause"));
  EXPECT_TRUE(contains(text(kGiB, LockUse::pin), "1MiB locked (VmLck) and 2MiB pinned (VmPin)"));
  limits.privileged = true;
  EXPECT_TRUE(contains(text(kGiB, LockUse::pin), "possible cause"));
  EXPECT_TRUE(contains(text(kGiB, LockUse::pin), "CAP_IPC_LOCK lifts it"));
  limits.privileged = false;
  limits.soft = LockLimits::kUnlimited;
  EXPECT_TRUE(contains(text(kGiB, LockUse::pin), "possible cause"));
  EXPECT_TRUE(contains(text(kGiB, LockUse::pin), "unlimited soft"));
}

}  // namespace hugepages_test
