#include "memory/hugepages.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

extern "C" {  // missing in the header
#include <hugetlbfs.h>
}

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <utility>

#include "base/available_memory.h"
#include "base/error.h"
#include "base/log_message.h"
#include "base/memlock.h"
#include "base/units.h"

// Some supported C libraries are older than this constant.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace spinwire::memory {
namespace {

std::atomic<bool> fallback_logged{false};

std::string sysfs_folder(std::size_t page) {
  return base::format("/sys/kernel/mm/hugepages/hugepages-{}kB", page / 1024);
}

/// Reads a number from a one-line file; 0 if it cannot be read.
std::uint64_t read_number(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             &std::fclose);
  unsigned long long value = 0;
  if (file == nullptr || std::fscanf(file.get(), "%llu", &value) != 1) return 0;  // NOLINT
  return value;
}

HugepageSize read_size(std::size_t page, bool is_default) {
  const std::string folder = sysfs_folder(page);
  const auto count = [&](const char* file) { return read_number(folder + '/' + file); };
  HugepageSize size;
  size.bytes = page;
  size.total = count("nr_hugepages");
  size.free = count("free_hugepages");
  size.reserved = count("resv_hugepages");
  const std::uint64_t surplus = count("surplus_hugepages");
  const std::uint64_t overcommit = count("nr_overcommit_hugepages");
  size.growth = overcommit > surplus ? overcommit - surplus : 0;
  size.is_default = is_default;
  const char* mount = ::hugetlbfs_find_path_for_size(static_cast<long>(page));
  if (mount != nullptr) size.mount = mount;
  return size;
}

bool wastes_little(const HugepageSize& page, std::size_t size) noexcept {
  return page.pages_for(size) * page.bytes - size <= size / 8;
}

/// The page size to recommend to the administrator: the default, unless its pages are too large for
/// `size` bytes.
const HugepageSize& size_to_provide(std::span<const HugepageSize> sizes, std::size_t size) {
  for (const HugepageSize& page : sizes) {
    if (page.is_default && wastes_little(page, size)) return page;
  }
  return sizes.front();
}

std::string command_for(const HugepageSize& page, std::uint64_t pages) {
  if (page.is_default) return base::format("sysctl -w vm.nr_hugepages={}", pages);
  return base::format("echo {} > {}/nr_hugepages", pages, sysfs_folder(page.bytes));
}

std::string asked_text(std::size_t size) {
  return base::format("take {} of memory in hugepages", base::bytes_text(size));
}

Result<base::SharedMemory> map_hugepages(std::size_t size, const std::string& name) {
  const std::vector<HugepageSize> sizes = hugepage_sizes();
  tl::unexpected<Error> failure(missing_hugepages(sizes, size));
  for (const HugepageSize& page : fitting_sizes(sizes, size)) {
    base::SharedMemoryOptions options;
    options.name = name;
    options.page_size = page.bytes;
    Result<base::SharedMemory> memory = base::SharedMemory::create(size, options);
    if (memory) return memory;
    failure = tl::unexpected(std::move(memory.error()));
  }
  return failure;
}

/// Populates a mapping by calls that can fail: touching an unavailable page raises SIGBUS.
int populate(const base::SharedMemory& memory) noexcept {
  int result = 0;
  do {
    result = ::madvise(memory.data(), memory.size(), MADV_POPULATE_WRITE);
  } while (result != 0 && (errno == EINTR || errno == EAGAIN));
  if (result == 0) return 0;
  if (errno != EINVAL) return errno;
  // Kernels before 5.14 have no MADV_POPULATE_WRITE.
  do {
    result = ::fallocate(memory.fd(), 0, 0, static_cast<off_t>(memory.size()));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return errno;
  for (std::size_t at = 0; at < memory.size(); at += memory.page_size()) {
    *reinterpret_cast<volatile std::byte*>(memory.data() + at) = std::byte{0};
  }
  return 0;
}

Result<base::SharedMemory> map_ordinary_pages(std::size_t size, const std::string& name,
                                              bool merge) {
  if (auto there = base::check_available_memory(
          size, base::format("take {} of memory for the pools", base::bytes_text(size)),
          "lower memory.send_bytes, receive_bytes, lease_bytes or rendezvous_bytes, or free memory "
          "of this machine or its cgroup");
      !there)
    return tl::unexpected(std::move(there.error()));
  base::SharedMemoryOptions options;
  options.name = name;
  // The advice must come before the pages are populated. The kernel then also aligns the mapping.
  options.populate = !merge;
  Result<base::SharedMemory> memory = base::SharedMemory::create(size, options);
  if (!memory || !merge) return memory;
  ::madvise(memory->data(), memory->size(), MADV_HUGEPAGE);  // only a hint
  if (const int error = populate(*memory); error != 0) {
    return base::fail_errno(Status::no_memory,
                            base::format("take {} of memory", base::bytes_text(size)), "madvise",
                            error, "ask for less, or free memory of this machine or its cgroup");
  }
  return memory;
}

void warn_of_fallback(const Error& why) {
  // A warning that no callback received does not count.
  if (!base::log_enabled(LogLevel::warning) || fallback_logged.exchange(true)) return;
  base::log(LogLevel::warning, "using ordinary pages, which are slower: {}", why.message());
}

Result<void> lock(const base::SharedMemory& memory, LockPolicy policy) {
  if (policy == LockPolicy::off || is_hugetlb(memory)) return {};
  if (::mlock(memory.data(), memory.size()) == 0) return {};
  const int error = errno;
  Error failure = base::lock_error(
      base::format("lock {} of memory (memory.lock)", base::bytes_text(memory.size())), "mlock",
      error, memory.size(), base::LockUse::lock, base::lock_limits());
  if (policy == LockPolicy::require) return tl::unexpected(std::move(failure));
  base::log(LogLevel::warning, "memory stays unlocked: {}", failure.message());
  return {};
}

}  // namespace

std::vector<HugepageSize> hugepage_sizes() {
  const int count = ::gethugepagesizes(nullptr, 0);
  if (count <= 0) return {};
  std::vector<long> pages(static_cast<std::size_t>(count));
  const int got = ::gethugepagesizes(pages.data(), count);
  if (got <= 0) return {};
  pages.resize(static_cast<std::size_t>(std::min(got, count)));
  std::sort(pages.begin(), pages.end());
  const long standard = ::gethugepagesize();
  std::vector<HugepageSize> sizes;
  for (const long page : pages) {
    if (page > 0) sizes.push_back(read_size(static_cast<std::size_t>(page), page == standard));
  }
  return sizes;
}

std::vector<HugepageSize> fitting_sizes(std::span<const HugepageSize> sizes, std::size_t size) {
  std::vector<HugepageSize> fitting;
  for (const HugepageSize& page : sizes) {
    const bool smallest = page.bytes == sizes.front().bytes;
    if (page.available() >= page.pages_for(size) && (smallest || wastes_little(page, size))) {
      fitting.insert(fitting.begin(), page);
    }
  }
  return fitting;
}

Error missing_hugepages(std::span<const HugepageSize> sizes, std::size_t size) {
  if (sizes.empty()) {
    return base::make_error(Status::no_memory, asked_text(size), "this kernel offers no hugepages",
                            "use a kernel with hugetlbfs, or set memory.hugepages to \"off\"");
  }
  const HugepageSize& page = size_to_provide(sizes, size);
  const std::uint64_t needed = page.pages_for(size);
  const std::uint64_t free = page.available();
  const std::uint64_t missing = needed > free ? needed - free : 0;
  return base::make_error(Status::no_memory, asked_text(size),
                          base::format("{} pages of {} are needed, {} are free", needed,
                                       base::bytes_text(page.bytes), free),
                          base::format("run as root: {}", command_for(page, page.total + missing)));
}

bool is_hugetlb(const base::SharedMemory& memory) noexcept {
  return memory.page_size() > static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

void rearm_fallback_warning() noexcept { fallback_logged = false; }

Result<base::SharedMemory> map_pages(std::size_t size, HugepagePolicy hugepages,
                                     LockPolicy lock_policy, const std::string& name) {
  return base::no_throw("take memory", [&]() -> Result<base::SharedMemory> {
    Result<base::SharedMemory> memory;
    if (hugepages == HugepagePolicy::off || size == 0) {
      memory = map_ordinary_pages(size, name, false);
    } else {
      memory = map_hugepages(size, name);
      if (!memory && hugepages == HugepagePolicy::prefer) {
        warn_of_fallback(memory.error());
        memory = map_ordinary_pages(size, name, true);
      }
    }
    if (!memory) return memory;
    if (auto locked = lock(*memory, lock_policy); !locked) return tl::unexpected(locked.error());
    return memory;
  });
}

}  // namespace spinwire::memory
