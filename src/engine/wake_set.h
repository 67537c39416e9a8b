// The descriptor on which an idle engine sleeps: readable when a socket, the device or another
// thread has something for it. Cold.
#pragma once

#include <atomic>

#include "base/unique_fd.h"
#include "control/epoll_set.h"
#include "spinwire/clock.h"
#include "spinwire/status.h"

namespace spinwire::engine {

class WakeSet {
 public:
  WakeSet() noexcept = default;
  WakeSet(const WakeSet&) = delete;
  WakeSet& operator=(const WakeSet&) = delete;

  /// Opens the set with these descriptors; a no-op the second time. `device` is below 0 if there is
  /// none. Errors: limit, no_memory, system.
  Result<void> open(int control, int device);
  [[nodiscard]] bool is_open() const noexcept { return event_ >= 0; }
  [[nodiscard]] int descriptor() const noexcept { return set_.descriptor(); }

  /// Makes the next take_wake() true, and the set readable until then. Any thread, and signal
  /// handlers.
  void wake() noexcept;
  /// Whether take_wake() will be true.
  [[nodiscard]] bool is_woken() const noexcept { return woken_.load(std::memory_order_relaxed); }
  /// Whether wake() was called since the last call; several calls count once.
  [[nodiscard]] bool take_wake() noexcept;
  /// Sleeps until the set is readable, a signal comes, or the time has passed. True unless only
  /// time has passed.
  [[nodiscard]] bool sleep(Nanoseconds timeout) const noexcept;

 private:
  control::EpollSet set_;
  base::UniqueFd event_fd_;
  std::atomic<int> event_{-1};      ///< `event_fd_`, for other threads
  std::atomic<bool> woken_{false};  ///< the thread that sets it writes to the descriptor
};

}  // namespace spinwire::engine
