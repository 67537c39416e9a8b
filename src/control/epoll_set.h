// Tells with one system call which of many descriptors are worth looking at. Never blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/unique_fd.h"
#include "spinwire/status.h"

namespace spinwire::control {

/// What to be told of; errors and hang-ups always are.
enum class Interest : std::uint8_t { none = 0, read = 1, write = 2, read_write = 3 };

struct Event {
  std::uint64_t token = 0;  ///< as given to add()
  bool readable = false;    ///< bytes, a connection or the end of the stream
  bool writable = false;
  bool failed = false;  ///< error or both directions shut; reading tells which
};

/// Level-triggered: an event is told again until its cause is gone, so one that a control step
/// leaves for the next is not lost. Ready descriptors take turns when `out` does not hold all.
class EpollSet {
 public:
  /// Most events that one wait() tells.
  static constexpr std::size_t kEventsMax = 64;

  /// Errors: limit (descriptors), no_memory, system.
  static Result<EpollSet> open();

  /// An empty set: add() answers an error and wait() nothing.
  EpollSet() noexcept = default;

  /// Errors: in_use (already in the set), limit, no_memory, system.
  Result<void> add(int fd, std::uint64_t token, Interest interest);
  /// Errors: invalid_argument (not in the set), system.
  Result<void> modify(int fd, std::uint64_t token, Interest interest);
  /// Call it before closing `fd`. Of no effect when it is not in the set.
  void remove(int fd) noexcept;

  /// Fills `out` with what is ready now and answers how many; one system call, no waiting. An event
  /// whose descriptor was removed meanwhile, by the handling of an earlier one of the same batch,
  /// is still in `out`: let tokens carry a generation.
  std::size_t wait(std::span<Event> out) noexcept;

  /// For sets of which only its user and a simulated network change anything: while neither this
  /// count nor the set has changed since a wait() that found nothing, there is nothing to be found
  /// and no system call made. `changes` outlives the set.
  void follow(const std::uint64_t* changes) noexcept { changes_ = changes; }

 private:
  Result<void> control(int operation, int fd, std::uint64_t token, Interest interest);

  base::UniqueFd fd_;
  const std::uint64_t* changes_ = nullptr;
  std::uint64_t seen_ = 0;   ///< of `*changes_`, by the last wait()
  bool has_changed_ = true;  ///< it found something, or the set has changed since
};

}  // namespace spinwire::control
