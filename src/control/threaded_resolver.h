// Resolves addresses by a verb that waits, each in a thread that exists only while it does. Unlike
// rdma_cm, the verb leaves by the port and the GID that the connection uses. Peers that name the
// same address share a thread, so that one host cannot hold many by its own. Cold.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "control/address_resolver.h"
#include "control/helper_thread.h"

namespace spinwire::control {

/// Waits until the kernel knows the neighbour at `gid`, as seen from `from`. Returns 0 or an errno
/// value. Several threads call it at once.
using WaitForNeighbour = std::function<int(const verbs::Place& from, const Gid& gid)>;

class ThreadedResolver final : public AddressResolver, public DescriptorOwner {
 public:
  /// Threads at once; further resolutions wait for one. More than strangers may have under way
  /// (ResolutionLimits::kOfAll, and those that they give up), so that others find one.
  static constexpr std::size_t kMost = 128;

  ThreadedResolver(ControlPort& port, WaitForNeighbour wait);
  ThreadedResolver(const ThreadedResolver&) = delete;
  ThreadedResolver& operator=(const ThreadedResolver&) = delete;
  /// Waits for the verbs under way, which use the device: a second at most.
  ~ThreadedResolver() override;

  Result<bool> begin(const Resolution& what, const Gid& gid, GidType type,
                     const verbs::Place* from) override;
  void cancel(const Resolution& what) noexcept override;
  void on_readable() override;

  /// Threads that wait. For tests.
  [[nodiscard]] std::size_t running() const noexcept { return running_; }

 private:
  struct Job;

  Result<void> start(Job& job);
  void start_waiting();
  /// The oldest that is over; null: there is none.
  [[nodiscard]] Job* find_over() const noexcept;
  void erase(const Job& job) noexcept;

  ControlPort& port_;
  const WaitForNeighbour wait_;
  const pid_t process_;  ///< that has the threads; a forked child has none
  std::atomic<bool> is_closing_{false};
  HelperEvent event_;
  std::vector<std::unique_ptr<Job>> jobs_;  ///< the oldest first
  std::size_t running_ = 0;
};

}  // namespace spinwire::control
