// A file descriptor that closes itself.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace spinwire::base {

/// Owns a file descriptor, or none (-1). Move-only.
class UniqueFd {
 public:
  UniqueFd() noexcept = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }

  [[nodiscard]] int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  /// Releases the descriptor; the caller closes it.
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
  /// Closes the descriptor and owns `fd` from now on. Does not change errno.
  void reset(int fd = -1) noexcept {
    const int old = std::exchange(fd_, fd);
    if (old < 0) return;
    const int saved = errno;
    ::close(old);  // Never repeated: the kernel has freed the number even if it says EINTR.
    errno = saved;
  }

 private:
  int fd_ = -1;
};

}  // namespace spinwire::base
