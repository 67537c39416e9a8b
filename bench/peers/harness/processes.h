// What the two processes of a measurement share, and how the second one is made.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "peers/harness/placement.h"

namespace spinwire::bench {

/// Shared memory of both processes.
struct Board {
  LonelyWord ping;
  LonelyWord pong;
  LonelyWord stop;
  LonelyWord ready;      ///< the second process takes its turns
  LonelyWord done;       ///< operations of the second process
  LonelyWord preempted;  ///< how often the second process was, as of its last probe
};

/// Zeroed memory that a forked process shares.
void* map_shared(std::size_t bytes);
template <typename T>
T& map_shared() {
  return *static_cast<T*>(map_shared(sizeof(T)));
}

void pin_to_cpu(int cpu);
/// How often something else was given the calling thread's processor.
std::uint64_t times_preempted();

/// Strings as one, for an address that has several parts.
std::string join_parts(const std::vector<std::string>& parts);
std::vector<std::string> split_parts(const std::string& joined);

/// A second process. It is killed if this one ends first.
class SecondProcess {
 public:
  /// Forks; the child runs `work` with its end of the socket and ends with what that returns.
  explicit SecondProcess(const std::function<int(int socket)>& work);
  SecondProcess(const SecondProcess&) = delete;
  SecondProcess& operator=(const SecondProcess&) = delete;

  [[nodiscard]] int socket() const noexcept { return socket_; }
  /// Gives up if the process has ended.
  void check_alive();
  /// Waits for its end; returns whether it ended with 0.
  bool wait();

 private:
  pid_t pid_ = -1;
  int socket_ = -1;
};

/// Sends our address to the other end of the socket and returns the other end's.
std::string exchange_addresses(int socket, const std::string& ours);

}  // namespace spinwire::bench
