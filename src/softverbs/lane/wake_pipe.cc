#include "softverbs/lane/wake_pipe.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "softverbs/lane/segment.h"
#include "softverbs/memory/peer_file.h"

namespace spinwire::softverbs {
namespace {

/// The kernel's smallest pipe.
constexpr int kPipeBytes = 4096;

/// A full pipe is readable, too.
void write_byte(int fd) noexcept {
  const int saved = errno;
  const char byte = 0;
  (void)!::write(fd, &byte, 1);
  errno = saved;
}

/// Whether the descriptor is not that of a pipe of this user, which it never becomes. Other errors
/// may pass: descriptors are used up, or the process may not be looked at while it executes another
/// program.
bool is_final(int error) noexcept { return error == ENODEV || error == EPERM; }

}  // namespace

WakePipe::~WakePipe() {
  if (const int writer = writer_.load(); writer >= 0) ::close(writer);
}

bool WakePipe::open(Segment& segment) noexcept {
  if (reader_) return true;
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) return false;
  base::UniqueFd reader(ends[0]);
  base::UniqueFd writer(ends[1]);
  struct stat file {};
  if (::fstat(writer.get(), &file) != 0) return false;
  (void)::fcntl(writer.get(), F_SETPIPE_SZ, kPipeBytes);  // a larger one works, too
  segment.wake_fd.store(static_cast<std::uint32_t>(writer.get()), std::memory_order_relaxed);
  segment.wake_inode.store(file.st_ino, std::memory_order_release);
  reader_ = std::move(reader);
  writer_.store(writer.release());
  return true;
}

void WakePipe::write() const noexcept {
  if (const int writer = writer_.load(); writer >= 0) write_byte(writer);
}

bool WakePipe::drain() const noexcept {
  char bytes[kPipeBytes];
  return ::read(reader_.get(), bytes, sizeof bytes) > 0;
}

bool PeerWake::write(std::uint32_t pid, const Segment& segment) noexcept {
  if (!fd_ && !is_refused_) {
    const std::uint64_t inode = segment.wake_inode.load(std::memory_order_acquire);
    fd_ = open_peer_pipe(pid, segment.wake_fd.load(std::memory_order_relaxed), inode);
    is_refused_ = !fd_ && is_final(errno);
  }
  if (fd_) write_byte(fd_.get());
  return static_cast<bool>(fd_);
}

}  // namespace spinwire::softverbs
