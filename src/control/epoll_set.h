// Polls many descriptors with one system call. Never blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/unique_fd.h"
#include "spinwire/status.h"

namespace spinwire::control {

/// The events to report; errors, and the end of both directions, are always reported. `end`: the
/// peer has ended its direction.
enum class Interest : std::uint8_t { none = 0, read = 1, write = 2, read_write = 3, end = 4 };

struct Event {
  std::uint64_t token = 0;  ///< as given to add()
  bool readable = false;    ///< bytes, a connection or the end of the stream
  bool writable = false;
  bool failed = false;  ///< error, both directions shut, or Interest::end; reading shows which
};

/// Level-triggered: an event is reported until its cause is gone, so a control step may leave an
/// event to the next. Ready descriptors take turns if `out` does not hold all.
class EpollSet {
 public:
  /// Most events that one wait() reports.
  static constexpr std::size_t kEventsMax = 64;

  /// Errors: limit (descriptors), no_memory, system.
  static Result<EpollSet> open();

  /// An empty set: add() answers an error, and wait() no events.
  EpollSet() noexcept = default;

  /// Errors: in_use (already in the set), limit, no_memory, system.
  Result<void> add(int fd, std::uint64_t token, Interest interest);
  /// Errors: invalid_argument (not in the set), system.
  Result<void> modify(int fd, std::uint64_t token, Interest interest);
  /// Removes a descriptor, if it is in the set. Call it before closing `fd`.
  void remove(int fd) noexcept;

  /// Readable when wait() has events; -1 for an empty set.
  [[nodiscard]] int descriptor() const noexcept { return fd_.get(); }
  /// Fills `out` with the present events and answers their number. One system call, no waiting. If
  /// an event's handling removes the descriptor of a later event in `out`, that event stays in
  /// `out`: let tokens carry a generation.
  std::size_t wait(std::span<Event> out) noexcept;

  /// For a set that only its user and a simulated network change: if neither `*changes` nor the set
  /// has changed since a wait() without events, wait() makes no system call. `changes` must outlive
  /// the set.
  void follow(const std::uint64_t* changes) noexcept { changes_ = changes; }

 private:
  Result<void> control(int operation, int fd, std::uint64_t token, Interest interest);

  base::UniqueFd fd_;
  const std::uint64_t* changes_ = nullptr;
  std::uint64_t seen_ = 0;   ///< value of `*changes_` at the last wait()
  bool has_changed_ = true;  ///< the last wait() found events, or the set has changed since
};

}  // namespace spinwire::control
