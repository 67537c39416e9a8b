// The pipe by which peers wake a context that sleeps. Peers in other processes open its write end
// through /proc/<pid>/fd, as they open the segment; an eventfd cannot be opened so. Cold.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/unique_fd.h"

namespace spinwire::softverbs {

struct Segment;

/// A context's own pipe, shared with the contexts of its process. open() and drain() are the
/// owner's; write() is for any thread.
class WakePipe {
 public:
  WakePipe() noexcept = default;
  WakePipe(const WakePipe&) = delete;
  WakePipe& operator=(const WakePipe&) = delete;
  ~WakePipe();

  /// Makes the pipe and publishes it in the owner's segment; a no-op the second time. False and
  /// errno if the system refuses.
  [[nodiscard]] bool open(Segment& segment) noexcept;
  [[nodiscard]] int reader() const noexcept { return reader_.get(); }
  /// Makes reader() readable. Never blocks.
  void write() const noexcept;
  /// Empties the pipe, by one read: peers that go on writing make no owner read for ever. Returns
  /// whether it held something.
  bool drain() const noexcept;

 private:
  base::UniqueFd reader_;
  std::atomic<int> writer_{-1};
};

/// The pipe of a peer in another process, which is opened when the peer is first woken.
class PeerWake {
 public:
  /// Makes the pipe that the segment names readable. False: it could not be opened; call again. A
  /// descriptor that is not the pipe that the segment describes is never written to, and not tried
  /// again.
  [[nodiscard]] bool write(std::uint32_t pid, const Segment& segment) noexcept;
  /// The segment names no pipe of its owner: to call write() again is in vain.
  [[nodiscard]] bool is_refused() const noexcept { return is_refused_; }

 private:
  base::UniqueFd fd_;
  bool is_refused_ = false;
};

}  // namespace spinwire::softverbs
