// Resolves addresses by a verb that waits, each in a thread that exists only while it does. Unlike
// rdma_cm, the verb leaves by the port and the GID that the connection uses. Cold.
//
// Peers that name the same address share a thread. One source (IPv4 address, IPv6 /64) has a part
// of the threads, and all inbound peers leave some to those that this engine connects to; a thread
// counts until it ends, also if its peer has left before.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "control/address_resolver.h"
#include "control/helper_thread.h"

namespace spinwire::control {

/// Waits until the kernel knows the neighbour at `gid`, as seen from `from`. Returns 0 or an errno
/// value. Several threads call it at once.
using WaitForNeighbour = std::function<int(const verbs::Place& from, const Gid& gid)>;

/// start_helper_thread(), or what a test has in its place.
using StartThread =
    std::function<Result<pthread_t>(const char*, void* (*)(void*), void*, std::size_t)>;

class ThreadedResolver final : public AddressResolver, public DescriptorOwner {
 public:
  static constexpr std::size_t kMost = 128;  ///< threads at once; further resolutions wait
  static constexpr std::size_t kMostInbound = 112;
  static constexpr std::size_t kMostOfSource = 16;

  ThreadedResolver(ControlPort& port, WaitForNeighbour wait,
                   StartThread start = start_helper_thread);
  ThreadedResolver(const ThreadedResolver&) = delete;
  ThreadedResolver& operator=(const ThreadedResolver&) = delete;
  /// Waits for the verbs under way, because they use the device.
  ~ThreadedResolver() override;

  Result<bool> begin(const Resolution& what, const Gid& gid, GidType type,
                     const verbs::Place* from) override;
  void cancel(const Resolution& what) noexcept override;
  void on_readable() override;

  /// Threads that wait. For tests.
  [[nodiscard]] std::size_t running() const noexcept { return running_; }

 private:
  struct Job;

  Result<void> open();
  /// Whether a peer of this source may have one more thread.
  [[nodiscard]] bool has_room(const std::optional<Source>& source) const noexcept;
  /// Starts the jobs that may have a thread, the oldest first.
  void start_waiting();
  /// False: there is no thread.
  bool start(Job& job) noexcept;
  void uncount(const Source& source) noexcept;
  /// The oldest that is over; null: there is none.
  [[nodiscard]] Job* find_over() const noexcept;
  void erase(const Job& job) noexcept;

  ControlPort& port_;
  const WaitForNeighbour wait_;
  const StartThread start_thread_;
  std::atomic<bool> is_closing_{false};
  HelperEvent event_;
  std::vector<std::unique_ptr<Job>> jobs_;  ///< the oldest first
  std::size_t running_ = 0;
  std::size_t running_inbound_ = 0;
  SourceCounts running_of_;  ///< of inbound ones
  bool has_worked_ = false;  ///< the verb has resolved an address
  bool is_unable_ = false;   ///< it does not on this device
};

}  // namespace spinwire::control
