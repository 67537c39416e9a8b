// Which bytes of the process are mapped.
#include "base/mapped_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <thread>

namespace {

using spinwire::base::is_mapped;

TEST(MappedMemory, IsFoundWithItsRights) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  auto* const begin = static_cast<std::byte*>(
      ::mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(static_cast<void*>(begin), MAP_FAILED);
  EXPECT_TRUE(is_mapped(begin, 4 * page, true));
  ASSERT_EQ(::mprotect(begin + page, page, PROT_READ), 0);  // three mappings now
  EXPECT_TRUE(is_mapped(begin, 4 * page, false));
  EXPECT_TRUE(is_mapped(begin + 7, page - 7, true));
  EXPECT_FALSE(is_mapped(begin, page + 1, true));
  EXPECT_TRUE(is_mapped(begin + 2 * page, 2 * page, true));
  ASSERT_EQ(::mprotect(begin + page, page, PROT_NONE), 0);
  EXPECT_FALSE(is_mapped(begin, 4 * page, false));
  ASSERT_EQ(::munmap(begin + page, page), 0);
  EXPECT_FALSE(is_mapped(begin, 4 * page, false));
  EXPECT_FALSE(is_mapped(begin + page, 1, false));
  EXPECT_TRUE(is_mapped(begin + page - 1, 1, true));
  EXPECT_TRUE(is_mapped(begin + 2 * page, 1, true));
  ASSERT_EQ(::munmap(begin, 4 * page), 0);
  EXPECT_FALSE(is_mapped(begin, 1, false));
  const int local = 0;
  EXPECT_TRUE(is_mapped(&local, sizeof local, true));
}

/// Whether the kernel still lists mappings for the main thread, which it does until that thread has
/// ended.
bool main_thread_has_mappings() {
  const int list = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  char first = 0;
  const bool any = ::read(list, &first, 1) == 1;
  ::close(list);
  return any;
}

TEST(MappedMemory, IsFoundWhenTheMainThreadHasEnded) {
  static const int kLocal = 0;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::thread([] {
      while (main_thread_has_mappings()) ::sched_yield();
      const bool right = is_mapped(&kLocal, sizeof kLocal, false) && !is_mapped(nullptr, 1, false);
      ::_exit(right ? 0 : 1);
    }).detach();
    ::syscall(SYS_exit, 0);  // ends this thread only
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
