#include "observe/page_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <new>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/process_wide.h"
#include "base/unique_fd.h"
#include "observe/engine_paths.h"
#include "observe/page_layout.h"
#include "observe/whole_write.h"
#include "spinwire/version.h"

namespace spinwire::observe {
namespace {

constexpr const char* kRemedy =
    "give observability.directory a folder of a file system in memory, or make it empty: then the "
    "engine has no file";

const char* remedy_of(int error) noexcept {
  switch (error) {
    case ENOSPC:
    case ENOMEM:
    case EDQUOT:
      return "free memory there, lower observability.rows, or make observability.directory empty: "
             "then the engine has no file";
    default:
      return kRemedy;
  }
}

/// A fork waits while another thread makes a file: the child would keep its descriptor, or a
/// mapping not yet kept from children, and with it the lock.
struct FilesBeingMade : base::ProcessWide {};

/// Tables of rows, of events and of latencies.
constexpr std::size_t kDescriptors = kTables + kEventSubjects + 2;

constexpr std::size_t align_line(std::size_t bytes) noexcept {
  constexpr std::size_t kLine = 64;
  return (bytes + kLine - 1) & ~(kLine - 1);
}

template <std::size_t N>
void copy_text(std::array<char, N>& to, std::string_view from) noexcept {
  std::memcpy(to.data(), from.data(), std::min(from.size(), N - 1));
}

/// A store to a page of a file on a disk may wait for the disk, and polls store there.
Result<void> expect_memory(int fd, const std::string& asked) {
  struct statfs system {};
  if (::fstatfs(fd, &system) != 0)
    return base::fail_errno(Status::system, asked, "fstatfs", errno, kRemedy);
  const auto type = static_cast<std::uint64_t>(system.f_type);
  if (type == TMPFS_MAGIC || type == RAMFS_MAGIC) return {};
  return base::fail(Status::unsupported, asked,
                    base::format("its file system is not in memory (type {:#x})", type), kRemedy);
}

/// An unnamed file of the folder with all blocks allocated, locked for as long as it is mapped.
Result<base::UniqueFd> make_file(const std::string& directory, std::size_t size) {
  const std::string asked = base::format("make the engine's file in {}", directory);
  // Above this limit the kernel would send SIGXFSZ, not just refuse.
  rlimit largest{};
  if (::getrlimit(RLIMIT_FSIZE, &largest) == 0 && size > largest.rlim_cur) {
    return base::fail(
        Status::limit, asked,
        base::format("it takes {} bytes, and files are limited to {}", size, largest.rlim_cur),
        "raise the limit of file size (ulimit -f), or lower observability.rows");
  }
  // Mode 0400 refuses other processes of the user that would write or truncate the file by mistake.
  base::UniqueFd fd(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0400));
  if (!fd)
    return base::fail_errno(Status::system, asked, "open(O_TMPFILE)", errno, remedy_of(errno));
  if (auto in_memory = expect_memory(fd.get(), asked); !in_memory)
    return tl::unexpected(in_memory.error());
  int result = 0;
  do {
    result = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(size));
  } while (result != 0 && errno == EINTR);
  if (result != 0)
    return base::fail_errno(Status::no_memory, asked, "fallocate", errno, remedy_of(errno));
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0)
    return base::fail_errno(Status::system, asked, "flock", errno, kRemedy);
  return fd;
}

/// Gives the file a name that no other has. Never replaces a file.
/// Stores the number of the engine, by which the name differs, in the header first.
Result<std::string> name_file(int fd, const std::string& directory, FileHeader& header) {
  static std::atomic<std::uint32_t> next_engine{0};
  constexpr int kTries = 1000;
  constexpr int kTriesInOrder = 8;  // files of dead processes with our number
  const std::string from = fmt::format("/proc/self/fd/{}", fd);
  for (int i = 0; i < kTries; ++i) {
    header.engine = next_engine.fetch_add(1, std::memory_order_relaxed);
    // In a folder that all users write to, another one may have taken the names that come next.
    if (i >= kTriesInOrder && ::getrandom(&header.engine, sizeof header.engine, 0) < 0) break;
    std::string path = directory + '/' + file_name(::geteuid(), header.pid, header.engine);
    if (::linkat(AT_FDCWD, from.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0)
      return path;
    if (errno != EEXIST) break;
  }
  return base::fail_errno(Status::system, base::format("name the engine's file in {}", directory),
                          "linkat", errno, kRemedy);
}

std::string program_name() {
  const base::UniqueFd fd(::open("/proc/self/comm", O_RDONLY | O_CLOEXEC));
  std::array<char, 64> bytes{};
  const ssize_t got = fd ? ::read(fd.get(), bytes.data(), bytes.size()) : 0;
  std::string_view text(bytes.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  if (text.ends_with('\n')) text.remove_suffix(1);
  return std::string(text);
}

/// The events that a ring of such a subject keeps.
constexpr std::uint32_t ring_length(std::size_t subject) noexcept {
  if (subject == static_cast<std::size_t>(EventSubject::engine)) return kEventsOfEngine;
  if (subject == static_cast<std::size_t>(EventSubject::stranger)) return kEventsOfStrangers;
  return kEventsOfSubject;
}

}  // namespace

void PageFile::lay_out(const PageFileOptions& options) {
  std::size_t columns = 0;
  for (std::size_t i = 0; i < kTables; ++i)
    columns += table_columns(static_cast<Table>(i)).columns.size();
  std::size_t at = align_line(sizeof(FileHeader) + kDescriptors * sizeof(TableDescriptor) +
                              columns * sizeof(ColumnDescriptor));
  for (std::size_t i = 0; i < kTables; ++i) {
    const std::size_t row_bytes = table_columns(static_cast<Table>(i)).row_bytes;
    places_[i] = {at, row_bytes, options.rows[i]};
    at = align_line(at + row_bytes * options.rows[i]);
  }
  for (std::size_t i = 0; i < events_.size(); ++i) {
    const bool is_all = i == kEventSubjects;
    events_[i] = {at, is_all ? 1 : options.event_rings[i],
                  is_all ? options.events : ring_length(i)};
    at += std::size_t{events_[i].rings} * events_[i].length * sizeof(EventRecord);
  }
  latencies_ = {at, sizeof(LatencyRecord), options.latencies};
  at += std::size_t{latencies_.rows} * latencies_.row_bytes;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  size_ = (at + page - 1) & ~(page - 1);
}

FileHeader PageFile::describe(const PageFileOptions& options) {
  FileHeader header;
  header.file_bytes = size_;
  header.pid = static_cast<std::uint32_t>(::getpid());
  header.process_start = process_start();
  header.opened_ns =
      std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  header.ticks_per_ns = options.ticks_per_ns;
  header.opened_tick = options.opened_tick;
  header.table_count = kDescriptors;
  header.table_bytes = sizeof(TableDescriptor);
  header.column_bytes = sizeof(ColumnDescriptor);
  header.tables_offset = sizeof(FileHeader);
  copy_text(header.release, version());
  copy_text(header.program, program_name());
  copy_text(header.device, options.device);
  std::size_t at = sizeof header + kDescriptors * sizeof(TableDescriptor);
  for (std::size_t i = 0; i < kTables; ++i) {
    const TableColumns& shape = table_columns(static_cast<Table>(i));
    TableDescriptor table;
    copy_text(table.name, shape.name);
    table.column_count = static_cast<std::uint32_t>(shape.columns.size());
    table.columns_offset = at;
    table.rows_offset = places_[i].offset;
    table.row_bytes = static_cast<std::uint32_t>(places_[i].row_bytes);
    table.row_count = places_[i].rows;
    std::memcpy(data_ + sizeof header + i * sizeof table, &table, sizeof table);
    std::uint32_t offset = sizeof(RowHeader);
    for (const Column& each : shape.columns) {
      ColumnDescriptor column;
      copy_text(column.name, each.name);
      copy_text(column.unit, each.unit);
      copy_text(column.help, each.help);
      column.kind = static_cast<std::uint32_t>(each.kind);
      column.per_unit = each.per_unit;
      column.offset = offset;
      column.bytes = each.bytes;
      std::memcpy(data_ + at, &column, sizeof column);
      at += sizeof column;
      offset += each.bytes;
    }
  }
  for (std::size_t i = 0; i < events_.size(); ++i) {
    TableDescriptor table;
    const std::string_view subject = name_of(static_cast<EventSubject>(i));
    copy_text(table.name, fmt::format("{}{}events", subject, subject.empty() ? "" : "_"));
    table.kind = kEventTable;
    table.rows_offset = events_[i].offset;
    table.row_bytes = sizeof(EventRecord);
    table.row_count = events_[i].rings * events_[i].length;
    std::memcpy(data_ + sizeof header + (kTables + i) * sizeof table, &table, sizeof table);
  }
  TableDescriptor latencies;
  copy_text(latencies.name, "latencies");
  latencies.kind = kLatencyTable;
  latencies.rows_offset = latencies_.offset;
  latencies.row_bytes = sizeof(LatencyRecord);
  latencies.row_count = latencies_.rows;
  std::memcpy(data_ + sizeof header + (kDescriptors - 1) * sizeof latencies, &latencies,
              sizeof latencies);
  return header;
}

Result<PageFile> PageFile::create(const PageFileOptions& options) {
  return base::no_throw("make the engine's file", [&]() -> Result<PageFile> {
    (void)remove_dead_engines(kDeadFilesKept, options.directory);
    PageFile file;
    file.lay_out(options);
    auto& being_made = base::process_wide<FilesBeingMade>();
    if (being_made.atfork_error != 0) {
      return base::fail_errno(Status::system, "make the engine's file", "pthread_atfork",
                              being_made.atfork_error, "free memory of this process");
    }
    const std::lock_guard lock(being_made.mutex);
    auto fd = make_file(options.directory, file.size_);
    if (!fd) return tl::unexpected(fd.error());
    void* const data =
        ::mmap(nullptr, file.size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd->get(), 0);
    if (data == MAP_FAILED) {
      return base::fail_errno(Status::no_memory, "map the engine's file", "mmap", errno, kRemedy);
    }
    file.data_ = static_cast<std::byte*>(data);
    // The mapping holds the lock. A child that had it, too, would keep a dead engine alive.
    if (::madvise(data, file.size_, MADV_DONTFORK) != 0) {
      return base::fail_errno(Status::system, "keep the engine's file from children",
                              "madvise(MADV_DONTFORK)", errno, kRemedy);
    }
    auto path = name_file(fd->get(), options.directory,
                          *new (file.data_) FileHeader(file.describe(options)));
    if (!path) return tl::unexpected(path.error());
    file.path_ = std::move(*path);
    return file;
  });
}

PageFile& PageFile::operator=(PageFile&& other) noexcept {
  if (this == &other) return *this;
  close();
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  places_ = other.places_;
  events_ = other.events_;
  latencies_ = other.latencies_;
  sequence_ = other.sequence_;
  path_ = std::exchange(other.path_, {});
  return *this;
}

void PageFile::close() noexcept {
  if (data_ == nullptr) return;
  if (!path_.empty()) (void)::unlink(path_.c_str());
  (void)::munmap(std::exchange(data_, nullptr), size_);
}

void PageFile::write_row(Table table, std::uint32_t index, bool in_use,
                         std::span<const std::uint64_t> words) noexcept {
  const Place& where = place(table);
  std::byte* const at = data_ + where.offset + index * where.row_bytes;
  const std::uint64_t is_used = in_use ? 1 : 0;
  write_whole(at, sequence_, [&](std::byte* behind) {
    (void)store_words(store_words(behind, {&is_used, 1}), words);
  });
}

void PageFile::write(std::uint32_t index, const LatencyRecord& latency) noexcept {
  std::byte* const at = data_ + latencies_.offset + index * latencies_.row_bytes;
  write_whole(at, sequence_, [&](std::byte* behind) {
    const auto words =
        std::bit_cast<std::array<std::uint64_t, sizeof latency / sizeof(std::uint64_t)>>(latency);
    (void)store_words(behind, std::span(words).subspan(1));
  });
}

}  // namespace spinwire::observe
