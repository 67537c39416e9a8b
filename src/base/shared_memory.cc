#include "base/shared_memory.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/memory_store.h"
#include "base/process_wide.h"
#include "base/units.h"

// Some supported C libraries are older than these constants.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MFD_HUGE_SHIFT
#define MFD_HUGE_SHIFT 26
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace spinwire::base {
namespace {

/// Living mappings by their first address.
struct Registry : ProcessWide {
  struct Entry {
    int fd;
    std::size_t size;
  };
  std::map<std::uintptr_t, Entry> entries;
};

Registry& registry() noexcept { return process_wide<Registry>(); }

std::size_t ordinary_page() noexcept { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

/// Reads the count `what` of a hugepage size from sysfs; -1 if it cannot be read.
long long hugepage_count(std::size_t page_size, const char* what) {
  const std::string path =
      fmt::format("/sys/kernel/mm/hugepages/hugepages-{}kB/{}", page_size / 1024, what);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             &std::fclose);
  char line[32] = {};
  if (file == nullptr || std::fgets(line, sizeof line, file.get()) == nullptr) return -1;
  std::string_view text(line);
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  return parse_integer(text).value_or(-1);
}

/// The memory to make.
struct Request {
  std::size_t size;
  std::size_t page_size;
  bool huge;

  [[nodiscard]] std::string asked() const {
    return fmt::format("take {} of shared memory in pages of {}", bytes_text(size),
                       bytes_text(page_size));
  }
  [[nodiscard]] std::size_t pages() const { return size / page_size; }
};

tl::unexpected<Error> fail_hugepages(const Request& request, std::string_view call, int error) {
  const long long total = hugepage_count(request.page_size, "nr_hugepages");
  const long long free = hugepage_count(request.page_size, "free_hugepages");
  const long long reserved = hugepage_count(request.page_size, "resv_hugepages");
  if (total < 0 || free < 0 || reserved < 0) {
    return fail(
        Status::no_memory, request.asked(),
        fmt::format("{}: {}; this kernel has no pages of that size", call, errno_text(error)),
        "use a page size listed in /sys/kernel/mm/hugepages, or no hugepages");
  }
  const auto wanted = static_cast<long long>(request.pages());
  const long long missing = wanted - (free - reserved);
  if (missing <= 0) {
    return fail(
        Status::no_memory, request.asked(),
        fmt::format("{}: {}, though {} pages are free", call, errno_text(error), free - reserved),
        "raise the hugetlb limit of this process's cgroup, or use no hugepages");
  }
  return fail(Status::no_memory, request.asked(),
              fmt::format("{}: {}; {} pages are free, {} are needed", call, errno_text(error),
                          free - reserved, wanted),
              fmt::format("as root: echo {} > /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
                          total + missing, request.page_size / 1024));
}

tl::unexpected<Error> fail_memory(const Request& request, std::string_view call, int error) {
  if (request.huge) return fail_hugepages(request, call, error);
  return fail_errno(Status::no_memory, request.asked(), call, error,
                    "ask for less, or free memory of this machine or its cgroup");
}

Result<Request> check_request(std::size_t size, std::size_t page_size) {
  const std::size_t page = page_size == 0 ? ordinary_page() : page_size;
  const std::string asked =
      fmt::format("take {} of shared memory in pages of {}", bytes_text(size), bytes_text(page));
  if (!std::has_single_bit(page) || page < ordinary_page()) {
    return fail(Status::invalid_argument, asked, "no page has that size",
                "give a size listed in /sys/kernel/mm/hugepages, or 0 for ordinary pages");
  }
  constexpr auto kMost = static_cast<std::size_t>(std::numeric_limits<off_t>::max());
  if (size == 0 || size > kMost - (page - 1)) {
    return fail(Status::invalid_argument, asked, "the size is not in the range of a file's",
                fmt::format("give a size from 1 to {} bytes", kMost - (page - 1)));
  }
  return Request{(size + page - 1) & ~(page - 1), page, page != ordinary_page()};
}

Result<UniqueFd> open_memfd(const Request& request, const std::string& name) {
  unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  if (request.huge) {
    flags |= MFD_HUGETLB | static_cast<unsigned>(std::countr_zero(request.page_size))
                               << MFD_HUGE_SHIFT;
  }
  // Above this limit the kernel would send SIGXFSZ, not just refuse.
  rlimit largest{};
  if (::getrlimit(RLIMIT_FSIZE, &largest) == 0 && request.size > largest.rlim_cur) {
    return fail(Status::limit, request.asked(),
                fmt::format("files are limited to {} bytes", largest.rlim_cur),
                "raise the limit of file size (ulimit -f)");
  }
  // Some systems refuse executable memfds; older kernels do not know the flag.
  UniqueFd fd(::memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd.reset(::memfd_create(name.c_str(), flags));
  if (!fd) return fail_memory(request, "memfd_create", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(request.size)) != 0) {
    return fail_memory(request, "ftruncate", errno);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return fail_errno(Status::system, request.asked(), "fcntl(F_ADD_SEALS)", errno,
                      "use a kernel that seals such files: 3.17, for hugepages 4.16");
  }
  return fd;
}

/// Allocates all pages. Touching a page that cannot be allocated raises SIGBUS, so kernels without
/// MADV_POPULATE_WRITE first allocate the file's pages with fallocate, which can fail.
Result<void> populate(const Request& request, int fd, std::byte* data, bool kernel_populates) {
  if (kernel_populates) {
    int result = 0;
    do {
      result = ::madvise(data, request.size, MADV_POPULATE_WRITE);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return {};
    if (errno != EINVAL) return fail_memory(request, "madvise(MADV_POPULATE_WRITE)", errno);
  }
  int result = 0;
  do {
    result = ::fallocate(fd, 0, 0, static_cast<off_t>(request.size));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return fail_memory(request, "fallocate", errno);
  for (std::size_t at = 0; at < request.size; at += request.page_size) {
    *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  }
  return {};
}

}  // namespace

Result<SharedMemory> SharedMemory::create(std::size_t size, const SharedMemoryOptions& options) {
  return no_throw("take shared memory", [&]() -> Result<SharedMemory> {
    const Result<Request> request = check_request(size, options.page_size);
    if (!request) return tl::unexpected(request.error());
    const std::shared_ptr<MemoryStore> store =
        options.populate || request->huge ? nullptr : MemoryStore::of_thread();
    if (store != nullptr) {
      if (SharedMemory kept = store->take(request->size)) return kept;
    }
    Result<UniqueFd> fd = open_memfd(*request, options.name);
    if (!fd) return tl::unexpected(fd.error());

    SharedMemory memory;
    memory.store_ = store;
    memory.fd_ = std::move(*fd);
    void* data = ::mmap(nullptr, request->size, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd(), 0);
    if (data == MAP_FAILED) return fail_memory(*request, "mmap", errno);
    memory.mapping_ = {static_cast<std::byte*>(data), request->size, request->page_size};
    if (options.populate) {
      auto done = populate(*request, memory.fd(), memory.data(), options.kernel_populates);
      if (!done) return tl::unexpected(done.error());
    }

    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.entries.emplace(reinterpret_cast<std::uintptr_t>(data),
                        Registry::Entry{memory.fd(), memory.size()});
    memory.mapping_.registered = true;
    return memory;
  });
}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::move(other.fd_);
    mapping_ = std::exchange(other.mapping_, {});
    store_ = std::move(other.store_);
  }
  return *this;
}

SharedMemory::~SharedMemory() { reset(); }

void SharedMemory::reset() noexcept {
  if (const auto store = store_.lock(); store != nullptr && *this && store->keep(*this)) return;
  if (mapping_.registered) {
    // The entry goes before the address can be used again.
    Registry& all = registry();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.entries.erase(reinterpret_cast<std::uintptr_t>(mapping_.data));
  }
  if (mapping_.data != nullptr) ::munmap(mapping_.data, mapping_.size);
  mapping_ = {};
  fd_.reset();
}

std::optional<SharedMemoryRef> find_shared_memory(const void* address,
                                                  std::size_t length) noexcept {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  Registry& all = registry();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto entry = all.entries.upper_bound(at);
  if (entry == all.entries.begin()) return std::nullopt;
  --entry;
  const std::size_t size = entry->second.size;
  const std::size_t offset = at - entry->first;
  if (offset >= size || length > size - offset) return std::nullopt;
  return SharedMemoryRef{entry->second.fd, offset, reinterpret_cast<std::byte*>(entry->first),
                         size};
}

}  // namespace spinwire::base
