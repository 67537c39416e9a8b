#include "control/epoll_set.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/error.h"
#include "control/socket.h"

namespace spinwire::control {
namespace {

std::uint32_t to_mask(Interest interest) noexcept {
  const auto bits = static_cast<unsigned>(interest);
  return ((bits & 1u) != 0 ? EPOLLIN : 0u) | ((bits & 2u) != 0 ? EPOLLOUT : 0u) |
         ((bits & 4u) != 0 ? EPOLLRDHUP : 0u);
}

}  // namespace

Result<EpollSet> EpollSet::open() {
  base::UniqueFd fd(epoll_create1(EPOLL_CLOEXEC));
  if (fd.get() < 0)
    return tl::make_unexpected(system_error("watch sockets", "epoll_create1", errno));
  EpollSet set;
  set.fd_ = std::move(fd);
  return set;
}

Result<void> EpollSet::control(int operation, int fd, std::uint64_t token, Interest interest) {
  epoll_event event{};
  event.events = to_mask(interest);
  event.data.u64 = token;
  has_changed_ = true;
  if (epoll_ctl(fd_.get(), operation, fd, &event) == 0) return {};
  const int reason = errno;
  Error error = system_error(base::format("watch descriptor {}", fd), "epoll_ctl", reason);
  if (reason == EEXIST) error.status = Status::in_use;
  if (reason == ENOENT) error.status = Status::invalid_argument;
  if (reason == ENOSPC) {
    error.status = Status::limit;
    error.remedy = "raise fs.epoll.max_user_watches with sysctl";
  }
  return tl::make_unexpected(std::move(error));
}

Result<void> EpollSet::add(int fd, std::uint64_t token, Interest interest) {
  return control(EPOLL_CTL_ADD, fd, token, interest);
}

Result<void> EpollSet::modify(int fd, std::uint64_t token, Interest interest) {
  return control(EPOLL_CTL_MOD, fd, token, interest);
}

void EpollSet::remove(int fd) noexcept { epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, nullptr); }

std::size_t EpollSet::wait(std::span<Event> out) noexcept {
  std::array<epoll_event, kEventsMax> ready;
  const int limit = static_cast<int>(std::min(out.size(), ready.size()));
  if (limit == 0) return 0;
  if (changes_ != nullptr) {
    if (!has_changed_ && seen_ == *changes_) return 0;
    seen_ = *changes_;
  }
  // A failure (a signal, no set) counts as no events; pending events are reported by the next call.
  const int count = epoll_wait(fd_.get(), ready.data(), limit, 0);
  has_changed_ = count != 0;
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    const std::uint32_t mask = ready[at].events;
    out[at] = {ready[at].data.u64, (mask & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0,
               (mask & (EPOLLOUT | EPOLLERR)) != 0,
               (mask & (EPOLLHUP | EPOLLERR | EPOLLRDHUP)) != 0};
  }
  return count > 0 ? static_cast<std::size_t>(count) : 0;
}

}  // namespace spinwire::control
