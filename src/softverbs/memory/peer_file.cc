#include "softverbs/memory/peer_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstdio>

#ifndef MFD_HUGE_SHIFT
#define MFD_HUGE_SHIFT 26
#endif

namespace spinwire::softverbs {
namespace {

/// Reads the attributes that the kernel has cached: without AT_STATX_DONT_SYNC the call may wait
/// for a remote or user-space file system for ever.
bool stat_unasked(int fd, struct statx& out) noexcept {
  return ::statx(fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT,
                 STATX_TYPE | STATX_UID | STATX_SIZE | STATX_INO, &out) == 0;
}

/// Whether a file is in the kernel's file system for memfds made with these flags.
bool lies_with_memfd(const struct statx& file, unsigned flags) noexcept {
  const base::UniqueFd memfd(::memfd_create("spinwire-compare", flags | MFD_CLOEXEC));
  struct statx own {};
  return memfd && stat_unasked(memfd.get(), own) && own.stx_dev_major == file.stx_dev_major &&
         own.stx_dev_minor == file.stx_dev_minor;
}

bool is_hugepage_memfd(const struct statx& file) noexcept {
  // Each hugepage size has its own file system, whose blocks have that size.
  if (!std::has_single_bit(file.stx_blksize)) return false;
  const auto size_flag = static_cast<unsigned>(std::countr_zero(file.stx_blksize))
                         << MFD_HUGE_SHIFT;
  return lies_with_memfd(file, MFD_HUGETLB | size_flag);
}

/// Whether a file is in the kernel's file system for pipes.
bool lies_with_pipes(const struct statx& file) noexcept {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) return false;
  const base::UniqueFd reader(ends[0]);
  const base::UniqueFd writer(ends[1]);
  struct statx own {};
  if (!stat_unasked(reader.get(), own)) return false;
  errno = 0;
  return own.stx_dev_major == file.stx_dev_major && own.stx_dev_minor == file.stx_dev_minor;
}

PeerFile refuse(int error) noexcept {
  errno = error;
  return {};
}

/// Pins descriptor `fd` of process `pid`, and opens nothing: the file that is checked is the file
/// that is opened.
base::UniqueFd pin(std::uint32_t pid, std::uint32_t fd) noexcept {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%u/fd/%u", pid, fd);
  return base::UniqueFd(::open(path, O_PATH | O_CLOEXEC));
}

/// O_NONBLOCK: do not wait for a lease on the file, nor for room in a pipe. Opened for reading, a
/// pipe without another reader raises no SIGPIPE.
base::UniqueFd open_pinned(const base::UniqueFd& handle) noexcept {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", handle.get());
  return base::UniqueFd(::open(path, O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

}  // namespace

PeerFile open_peer_file(std::uint32_t pid, std::uint32_t fd, PeerFileKind kind) noexcept {
  const base::UniqueFd handle = pin(pid, fd);
  if (!handle) return {};
  struct statx file {};
  if (!stat_unasked(handle.get(), file)) return {};
  if (!S_ISREG(file.stx_mode)) return refuse(ENODEV);
  if (file.stx_uid != ::geteuid()) return refuse(EPERM);
  const bool hugepages = !lies_with_memfd(file, 0);
  if (hugepages && (kind == PeerFileKind::ordinary_pages || !is_hugepage_memfd(file)))
    return refuse(ENODEV);
  PeerFile opened;
  opened.fd = open_pinned(handle);
  if (!opened.fd) return {};
  const int seals = ::fcntl(opened.fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) return refuse(ENODEV);
  // Read after the check of the seal: the size can no longer shrink.
  if (!stat_unasked(opened.fd.get(), file)) return {};
  opened.size = file.stx_size;
  opened.inode = file.stx_ino;
  opened.hugepage = hugepages ? file.stx_blksize : 0;
  return opened;
}

base::UniqueFd open_peer_pipe(std::uint32_t pid, std::uint32_t fd, std::uint64_t inode) noexcept {
  const base::UniqueFd handle = pin(pid, fd);
  struct statx file {};
  if (!handle || !stat_unasked(handle.get(), file)) return {};
  if (S_ISFIFO(file.stx_mode) && file.stx_uid != ::geteuid())
    return errno = EPERM, base::UniqueFd();
  errno = 0;
  if (!S_ISFIFO(file.stx_mode) || file.stx_ino != inode || !lies_with_pipes(file)) {
    if (errno == 0) errno = ENODEV;
    return {};
  }
  return open_pinned(handle);
}

}  // namespace spinwire::softverbs
