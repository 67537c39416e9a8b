// Which bytes of the process are mapped.
#include "base/mapped_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

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

}  // namespace
