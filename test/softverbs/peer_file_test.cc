// A descriptor number that another process names may be anything. Only shared memory of this user
// that cannot shrink is opened. Everything else is refused without calling its driver.

#include "softverbs/memory/peer_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>

namespace {

using spinwire::base::UniqueFd;
using spinwire::softverbs::open_peer_file;
using spinwire::softverbs::PeerFile;
using spinwire::softverbs::PeerFileKind;

constexpr std::size_t kBytes = 8192;

UniqueFd memfd(int seals, unsigned flags = 0) {
  UniqueFd fd(memfd_create("peer-file-test", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags));
  EXPECT_TRUE(fd) << errno;
  EXPECT_EQ(ftruncate(fd.get(), kBytes), 0);
  EXPECT_EQ(seals == 0 ? 0 : fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

PeerFile open_own(const UniqueFd& fd, PeerFileKind kind = PeerFileKind::any_pages) {
  errno = 0;
  return open_peer_file(static_cast<std::uint32_t>(getpid()), static_cast<std::uint32_t>(fd.get()),
                        kind);
}

void expect_refused(const UniqueFd& fd, int error) {
  ASSERT_TRUE(fd) << errno;
  EXPECT_FALSE(open_own(fd).fd);
  EXPECT_EQ(errno, error);
}

/// An open() through /proc could block, send signals or take a terminal, so the tests below also
/// check the time and the process.
class PeerFileTest : public testing::Test {
 protected:
  void TearDown() override {
    const auto took = std::chrono::steady_clock::now() - began_;
    // A file lease would block the opener for /proc/sys/fs/lease-break-time, 45 s.
    EXPECT_LT(took, std::chrono::seconds(20));
  }

 private:
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

TEST_F(PeerFileTest, SealedMemoryIsOpenedWithItsSizeAndInode) {
  const UniqueFd fd = memfd(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  const PeerFile file = open_own(fd, PeerFileKind::ordinary_pages);
  ASSERT_TRUE(file.fd) << errno;
  struct stat st {};
  ASSERT_EQ(fstat(fd.get(), &st), 0);
  EXPECT_EQ(file.size, kBytes);
  EXPECT_EQ(file.inode, st.st_ino);
  void* at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd.get(), 0);
  ASSERT_NE(at, MAP_FAILED);
  EXPECT_EQ(munmap(at, kBytes), 0);
}

TEST_F(PeerFileTest, MemoryThatCanShrinkIsRefused) {
  expect_refused(memfd(0), ENODEV);
  expect_refused(memfd(F_SEAL_GROW), ENODEV);
}

TEST_F(PeerFileTest, OrdinaryFilesAreRefused) {
  for (const char* folder : {"/dev/shm", "/tmp"}) {
    std::string name = std::string(folder) + "/peer-file-XXXXXX";
    const UniqueFd fd(mkostemp(name.data(), O_CLOEXEC));
    ASSERT_TRUE(fd) << name;
    EXPECT_EQ(unlink(name.c_str()), 0);
    ASSERT_EQ(ftruncate(fd.get(), kBytes), 0);
    expect_refused(fd, ENODEV);
  }
}

TEST_F(PeerFileTest, PipesDevicesAndFoldersAreRefused) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  expect_refused(reader, ENODEV);
  expect_refused(UniqueFd(open("/dev/zero", O_RDWR | O_CLOEXEC)), ENODEV);
  expect_refused(UniqueFd(open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC)), ENODEV);
}

TEST_F(PeerFileTest, ATerminalIsNotTaken) {
  const UniqueFd controller(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(controller);
  ASSERT_EQ(grantpt(controller.get()), 0);
  ASSERT_EQ(unlockpt(controller.get()), 0);
  char name[128];
  ASSERT_EQ(ptsname_r(controller.get(), name, sizeof name), 0);
  const UniqueFd terminal(open(name, O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal);
  // A daemon: the leader of a session without a terminal, which the next opened terminal would
  // become.
  const pid_t owner = getpid();
  const pid_t daemon = fork();
  ASSERT_GE(daemon, 0);
  if (daemon == 0) {
    if (setsid() < 0) _exit(2);
    const PeerFile file =
        open_peer_file(static_cast<std::uint32_t>(owner),
                       static_cast<std::uint32_t>(terminal.get()), PeerFileKind::any_pages);
    if (file.fd) _exit(3);
    const UniqueFd mine(open("/dev/tty", O_RDWR | O_CLOEXEC));
    _exit(mine ? 4 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(daemon, &status, 0), daemon);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "2: setsid failed, 3: opened, 4: has a terminal";
}

/// The kernel tells the holder of a lease by SIGIO that others want the file.
class LeasedPeerFileTest : public PeerFileTest {
 protected:
  void SetUp() override {
    struct sigaction ignore {};
    ignore.sa_handler = SIG_IGN;
    ASSERT_EQ(sigaction(SIGIO, &ignore, &before_), 0);
  }
  void TearDown() override {
    EXPECT_EQ(sigaction(SIGIO, &before_, nullptr), 0);
    PeerFileTest::TearDown();
  }

 private:
  struct sigaction before_ {};
};

TEST_F(LeasedPeerFileTest, IsNotWaitedFor) {
  // An open() of a leased file waits until the holder gives up the lease. The kernel grants one to
  // a process that alone has opened the file, and does not count the descriptor of memfd_create().
  UniqueFd fd = memfd(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  fd = UniqueFd(open(("/proc/self/fd/" + std::to_string(fd.get())).c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(fd) << errno;
  if (fcntl(fd.get(), F_SETLEASE, F_WRLCK) != 0)
    GTEST_SKIP() << "this kernel grants no lease of shared memory, error " << errno;
  EXPECT_FALSE(open_own(fd).fd);
  EXPECT_EQ(errno, EWOULDBLOCK);
  EXPECT_EQ(fcntl(fd.get(), F_SETLEASE, F_UNLCK), 0);
}

TEST_F(LeasedPeerFileTest, OnDiskIsNotOpenedSoThatItsLeaseIsNotBroken) {
  std::string name = "/tmp/peer-file-XXXXXX";
  const UniqueFd leased(mkostemp(name.data(), O_CLOEXEC));
  ASSERT_TRUE(leased);
  EXPECT_EQ(unlink(name.c_str()), 0);
  if (fcntl(leased.get(), F_SETLEASE, F_WRLCK) != 0)
    GTEST_SKIP() << "the file system of /tmp grants no lease, error " << errno;
  expect_refused(leased, ENODEV);
  EXPECT_EQ(fcntl(leased.get(), F_GETLEASE), F_WRLCK) << "the lease was broken";
}

TEST_F(PeerFileTest, MemoryOfAnotherUserIsRefusedEvenByRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd from_child(ends[0]);
  UniqueFd to_parent(ends[1]);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(2);
    const UniqueFd fd = memfd(F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    const int number = fd.get();
    if (write(to_parent.get(), &number, sizeof number) != sizeof number) _exit(3);
    pause();
    _exit(0);
  }
  to_parent.reset();
  int number = -1;
  const ssize_t got = read(from_child.get(), &number, sizeof number);
  EXPECT_EQ(got, static_cast<ssize_t>(sizeof number));
  if (got == static_cast<ssize_t>(sizeof number)) {
    const PeerFile file =
        open_peer_file(static_cast<std::uint32_t>(child), static_cast<std::uint32_t>(number),
                       PeerFileKind::any_pages);
    EXPECT_FALSE(file.fd);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(kill(child, SIGKILL), 0);
  EXPECT_EQ(waitpid(child, nullptr, 0), child);
}

TEST_F(PeerFileTest, WhatIsNotThereIsReportedAsSuch) {
  EXPECT_FALSE(
      open_peer_file(static_cast<std::uint32_t>(getpid()), 0xffffffu, PeerFileKind::any_pages).fd);
  EXPECT_EQ(errno, ENOENT);
}

TEST_F(PeerFileTest, HugepagesAreOpenedOnlyWhereTheyAreAllowed) {
  UniqueFd fd(
      memfd_create("peer-file-test", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | (21u << 26)));
  if (!fd) GTEST_SKIP() << "this kernel has no hugepages of 2 MiB";
  ASSERT_EQ(ftruncate(fd.get(), 1 << 21), 0);
  ASSERT_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_TRUE(open_own(fd, PeerFileKind::any_pages).fd);
  EXPECT_FALSE(open_own(fd, PeerFileKind::ordinary_pages).fd);
  EXPECT_EQ(errno, ENODEV);
}

}  // namespace
