// Memory for tables: large_memory.h.
#include "base/large_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace base_test::large_memory {

using spinwire::base::kHugePage;

std::size_t resident_pages(std::byte* at, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> in_memory(bytes / page);
  EXPECT_EQ(::mincore(at, bytes, in_memory.data()), 0);
  return static_cast<std::size_t>(
      std::ranges::count_if(in_memory, [](unsigned char flags) { return (flags & 1) != 0; }));
}

TEST(BaseLargeMemory, ASparseTableTakesWhatIsTouched) {
  const auto memory = spinwire::base::sparse_memory(kHugePage + 1);
  std::byte* const at = memory.get();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(at) % kHugePage, 0u);
  EXPECT_EQ(resident_pages(at, 2 * kHugePage), 0u);
  at[5] = std::byte{1};
  EXPECT_EQ(resident_pages(at, kHugePage), 1u);  // the first part is in ordinary pages
  EXPECT_EQ(at[6], std::byte{0});
  EXPECT_EQ(at[kHugePage], std::byte{0});
  at[kHugePage] = std::byte{1};
  EXPECT_EQ(resident_pages(at, kHugePage), 1u);
}

}  // namespace base_test::large_memory
