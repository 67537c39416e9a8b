#include "base/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"

namespace shared_memory_test {
namespace {

using spinwire::Status;
using spinwire::base::find_shared_memory;
using spinwire::base::SharedMemory;
using spinwire::base::SharedMemoryOptions;
using spinwire::base::UniqueFd;

std::size_t page() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

SharedMemory make(std::size_t size, const SharedMemoryOptions& options = {}) {
  auto memory = SharedMemory::create(size, options);
  EXPECT_TRUE(memory) << memory.error().message();
  return std::move(memory).value();  // Throws if there is none.
}

std::size_t resident_pages(const SharedMemory& memory) {
  std::vector<unsigned char> pages(memory.size() / page());
  EXPECT_EQ(::mincore(memory.data(), memory.size(), pages.data()), 0);
  return static_cast<std::size_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; }));
}

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

TEST(UniqueFd, ClosesWhatItOwnsOnce) {
  const int raw = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  {
    UniqueFd fd(raw);
    EXPECT_TRUE(fd);
    UniqueFd moved = std::move(fd);
    EXPECT_FALSE(fd);
    EXPECT_EQ(moved.get(), raw);
    EXPECT_TRUE(is_open(raw));
  }
  EXPECT_FALSE(is_open(raw));
}

TEST(UniqueFd, ReleaseGivesAwayAndAssignmentClosesTheOld) {
  UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int first = fd.get();
  UniqueFd other(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int second = other.get();
  fd = std::move(other);
  EXPECT_FALSE(is_open(first));
  EXPECT_EQ(fd.release(), second);
  EXPECT_FALSE(fd);
  EXPECT_TRUE(is_open(second));
  fd.reset(second);
  errno = EXDEV;
  fd.reset();
  EXPECT_EQ(errno, EXDEV);
  EXPECT_FALSE(is_open(second));
}

TEST(SharedMemory, IsZeroedWritableAndRoundedUpToPages) {
  SharedMemory memory = make(page() + 1);
  EXPECT_EQ(memory.size(), 2 * page());
  EXPECT_EQ(memory.page_size(), page());
  EXPECT_TRUE(std::all_of(memory.data(), memory.data() + memory.size(),
                          [](std::byte b) { return b == std::byte{0}; }));
  memory.data()[memory.size() - 1] = std::byte{7};
  std::byte last{};
  ASSERT_EQ(::pread(memory.fd(), &last, 1, static_cast<off_t>(memory.size() - 1)), 1);
  EXPECT_EQ(last, std::byte{7});
}

TEST(SharedMemory, CannotBeShrunkGrownOrSealedFurther) {
  const SharedMemory memory = make(2 * page());
  EXPECT_EQ(::ftruncate(memory.fd(), static_cast<off_t>(page())), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(memory.fd(), static_cast<off_t>(3 * page())), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::fcntl(memory.fd(), F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_NE(::fcntl(memory.fd(), F_GETFD) & FD_CLOEXEC, 0);
}

TEST(SharedMemory, PopulatesUnlessSparse) {
  constexpr std::size_t kPages = 16;
  EXPECT_EQ(resident_pages(make(kPages * page())), kPages);
  EXPECT_EQ(resident_pages(make(kPages * page(), {.populate = false})), 0u);
  const SharedMemory old_kernel = make(kPages * page(), {.kernel_populates = false});
  EXPECT_EQ(resident_pages(old_kernel), kPages);
}

TEST(SharedMemory, SparseMemoryMayBeFarLargerThanTheMachine) {
  const SharedMemory memory = make(std::size_t{1} << 38, {.populate = false});
  memory.data()[memory.size() / 2] = std::byte{1};
  struct stat file {};
  ASSERT_EQ(::fstat(memory.fd(), &file), 0);
  EXPECT_LE(file.st_blocks * 512, 4 << 20);
}

TEST(SharedMemory, AnotherProcessMapsItThroughProc) {
  const SharedMemory memory = make(page());
  const std::string path =
      "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(memory.fd());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // Inherited memory does not count.
    ::munmap(memory.data(), memory.size());
    ::close(memory.fd());
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    void* data = ::mmap(nullptr, page(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || data == MAP_FAILED) ::_exit(1);
    static_cast<char*>(data)[5] = 'x';
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(memory.data()[5], std::byte{'x'});
}

TEST(SharedMemory, DestructionUnmapsAndCloses) {
  int fd = -1;
  std::byte* data = nullptr;
  {
    const SharedMemory memory = make(page());
    fd = memory.fd();
    data = memory.data();
  }
  EXPECT_FALSE(is_open(fd));
  EXPECT_EQ(::msync(data, page(), MS_ASYNC), -1);
  EXPECT_EQ(errno, ENOMEM);
}

TEST(SharedMemory, MovesWithoutMovingTheMapping) {
  SharedMemory first = make(page());
  std::byte* const data = first.data();
  SharedMemory second = std::move(first);
  EXPECT_FALSE(first);
  EXPECT_EQ(first.size(), 0u);
  EXPECT_EQ(second.data(), data);
  EXPECT_TRUE(find_shared_memory(data, 1));

  SharedMemory third = make(page());
  std::byte* const dropped = third.data();
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_TRUE(find_shared_memory(data, page()));
  EXPECT_FALSE(find_shared_memory(dropped, 1));
}

TEST(SharedMemory, RefusesSizesAndPagesThatCannotBe) {
  const auto status = [](std::size_t size, std::size_t page_size) {
    const auto memory = SharedMemory::create(size, {.page_size = page_size});
    return memory ? Status::ok : memory.error().status;
  };
  EXPECT_EQ(status(0, 0), Status::invalid_argument);
  EXPECT_EQ(status(std::numeric_limits<std::size_t>::max(), 0), Status::invalid_argument);
  EXPECT_EQ(status(page(), 3 * page()), Status::invalid_argument);
  EXPECT_EQ(status(page(), page() / 2), Status::invalid_argument);
  EXPECT_EQ(status(page(), page()), Status::ok);
}

TEST(SharedMemory, WantingMoreThanTheAddressSpaceIsAnError) {
  const auto memory = SharedMemory::create(std::size_t{1} << 60, {.populate = false});
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().status, Status::no_memory);
  EXPECT_NE(memory.error().asked.find("1048576TiB"), std::string::npos) << memory.error().asked;
}

TEST(SharedMemory, UnknownHugepageSizeIsNamed) {
  const auto memory = SharedMemory::create(1, {.page_size = std::size_t{1} << 27});
  ASSERT_FALSE(memory);
  EXPECT_EQ(memory.error().status, Status::no_memory);
  EXPECT_NE(memory.error().asked.find("128MiB"), std::string::npos) << memory.error().asked;
  EXPECT_NE(memory.error().found.find("no pages of that size"), std::string::npos)
      << memory.error().found;
}

TEST(SharedMemory, HugepagesComeOrTheErrorNamesTheCommand) {
  constexpr std::size_t kHuge = 2u << 20;
  const std::string folder = "/sys/kernel/mm/hugepages/hugepages-2048kB";
  if (!std::filesystem::exists(folder)) GTEST_SKIP() << "this kernel has no 2 MiB hugepages";
  const auto memory = SharedMemory::create(3 * kHuge + 1, {.page_size = kHuge});
  if (memory) {
    EXPECT_EQ(memory->size(), 4 * kHuge);
    EXPECT_EQ(memory->page_size(), kHuge);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory->data()) % kHuge, 0u);
    EXPECT_EQ(::ftruncate(memory->fd(), kHuge), -1);
    EXPECT_EQ(errno, EPERM);
    EXPECT_TRUE(find_shared_memory(memory->data() + 3 * kHuge, kHuge));
  } else {
    EXPECT_EQ(memory.error().status, Status::no_memory);
    EXPECT_NE(memory.error().found.find("4 are needed"), std::string::npos)
        << memory.error().message();
    EXPECT_NE(memory.error().remedy.find(folder + "/nr_hugepages"), std::string::npos)
        << memory.error().message();
  }
}

TEST(SharedMemoryRegistry, FindsRangesThatLieWhollyInOneMapping) {
  const SharedMemory memory = make(4 * page());
  const auto ref = find_shared_memory(memory.data() + 100, page());
  ASSERT_TRUE(ref);
  EXPECT_EQ(ref->fd, memory.fd());
  EXPECT_EQ(ref->offset, 100u);
  EXPECT_EQ(ref->base, memory.data());
  EXPECT_EQ(ref->size, memory.size());

  EXPECT_TRUE(find_shared_memory(memory.data(), memory.size()));
  EXPECT_TRUE(find_shared_memory(memory.data() + memory.size() - 1, 1));
  EXPECT_TRUE(find_shared_memory(memory.data() + 8, 0));
  EXPECT_FALSE(find_shared_memory(memory.data() + 1, memory.size()));
  EXPECT_FALSE(find_shared_memory(memory.data() - 1, 2));
  EXPECT_FALSE(find_shared_memory(memory.data() + memory.size(), 0));
  EXPECT_FALSE(find_shared_memory(memory.data() + 1, std::numeric_limits<std::size_t>::max()));
}

TEST(SharedMemoryRegistry, DoesNotKnowOtherMemory) {
  const SharedMemory memory = make(page());
  const int on_stack = 0;
  const auto on_heap = std::vector<int>(3);
  EXPECT_FALSE(find_shared_memory(&on_stack, sizeof on_stack));
  EXPECT_FALSE(find_shared_memory(on_heap.data(), sizeof(int)));
  EXPECT_FALSE(find_shared_memory(nullptr, 1));
}

TEST(SharedMemoryRegistry, TellsManyMappingsApartAndForgetsTheDead) {
  std::vector<SharedMemory> memories;
  for (int i = 0; i < 20; ++i) memories.push_back(make(page()));
  std::vector<std::byte*> dead;
  for (std::size_t i = 0; i < memories.size(); i += 2) {
    dead.push_back(memories[i].data());
    memories[i] = SharedMemory();
  }
  for (std::size_t i = 1; i < memories.size(); i += 2) {
    const auto ref = find_shared_memory(memories[i].data() + 1, page() - 1);
    ASSERT_TRUE(ref);
    EXPECT_EQ(ref->fd, memories[i].fd());
    EXPECT_EQ(ref->base, memories[i].data());
  }
  for (std::byte* address : dead) EXPECT_FALSE(find_shared_memory(address, 1));
}

}  // namespace
}  // namespace shared_memory_test
