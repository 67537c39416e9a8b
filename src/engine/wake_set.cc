#include "engine/wake_set.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "control/socket.h"

namespace spinwire::engine {

Result<void> WakeSet::open(int control, int device) {
  if (is_open()) return {};
  auto set = control::EpollSet::open();
  if (!set) return tl::unexpected(set.error());
  base::UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event)
    return tl::unexpected(control::system_error("be woken by other threads", "eventfd", errno));
  for (const int fd : {event.get(), control, device}) {
    if (fd < 0) continue;
    if (auto added = set->add(fd, 0, control::Interest::read); !added) return added;
  }
  set_ = std::move(*set);
  event_fd_ = std::move(event);
  event_.store(event_fd_.get());
  return {};
}

void WakeSet::wake() noexcept {
  if (woken_.exchange(true)) return;
  // Not open yet: take_wake() sees `woken_`.
  const int fd = event_.load();
  if (fd < 0) return;
  const int saved = errno;
  const std::uint64_t one = 1;
  (void)!::write(fd, &one, sizeof one);
  errno = saved;
}

/// The descriptor is read first: a thread that finds `woken_` cleared afterwards writes again.
bool WakeSet::take_wake() noexcept {
  std::uint64_t count = 0;
  if (is_open()) (void)!::read(event_fd_.get(), &count, sizeof count);
  return woken_.exchange(false);
}

bool WakeSet::sleep(Nanoseconds timeout) const noexcept {
  const Nanoseconds time = std::max(timeout, Nanoseconds(0));
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
  timespec spec{};
  spec.tv_sec = static_cast<time_t>(seconds.count());
  spec.tv_nsec = static_cast<long>((time - seconds).count());
  pollfd set{set_.descriptor(), POLLIN, 0};
  return ::ppoll(&set, 1, &spec, nullptr) != 0;
}

}  // namespace spinwire::engine
