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

PeerFile refuse(int error) noexcept {
  errno = error;
  return {};
}

}  // namespace

PeerFile open_peer_file(std::uint32_t pid, std::uint32_t fd, PeerFileKind kind) noexcept {
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%u/fd/%u", pid, fd);
  // O_PATH opens nothing, but pins the file: the file that is checked is the file that is opened.
  const base::UniqueFd handle(::open(path, O_PATH | O_CLOEXEC));
  if (!handle) return {};
  struct statx file {};
  if (!stat_unasked(handle.get(), file)) return {};
  if (!S_ISREG(file.stx_mode)) return refuse(ENODEV);
  if (file.stx_uid != ::geteuid()) return refuse(EPERM);
  const bool hugepages = !lies_with_memfd(file, 0);
  if (hugepages && (kind == PeerFileKind::ordinary_pages || !is_hugepage_memfd(file)))
    return refuse(ENODEV);
  std::snprintf(path, sizeof path, "/proc/self/fd/%d", handle.get());
  PeerFile opened;
  // O_NONBLOCK: do not wait for a lease on the file.
  opened.fd.reset(::open(path, O_RDWR | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
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

}  // namespace spinwire::softverbs
