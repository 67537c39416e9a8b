// The clients of a doctor that serves another one. Each is told so, and how many are before it, if
// it has said in its facts that it understands that.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

#include "doctor/link.h"
#include "doctor/run_program.h"

namespace spinwire::doctor {

/// The fact by which a client says that it waits while `busy` frames come. Others get none: they
/// would take it for a frame that does not belong there.
inline constexpr const char* kWaitsFact = "waits";
/// In a busy frame: how many are served before this client.
inline constexpr const char* kAheadFact = "ahead";
inline constexpr std::uint32_t kMostAhead = 100000;

/// Accepts clients in a thread of its own, because what one of them wants may take an hour.
class WaitingRoom {
 public:
  explicit WaitingRoom(const Link& listener) : listener_(listener), thread_([this] { run(); }) {}
  WaitingRoom(const WaitingRoom&) = delete;
  WaitingRoom& operator=(const WaitingRoom&) = delete;
  ~WaitingRoom();

  /// The next client, which is served until the next call. Nothing: none came within `limit`.
  std::optional<Link> next(Link::Limit limit);

 private:
  struct Client {
    Link link;
    bool understands = false;  ///< busy frames
    std::uint32_t ahead = 0;   ///< that it was told; 0: nothing yet
    SteadyTime next_report{};
  };

  void run();
  /// Tells the clients what has changed, and drops those that have left.
  void look_after_clients();
  /// False: the client has left, or takes nothing any more.
  static bool tell(Client& client, std::uint32_t ahead);

  const Link& listener_;
  std::mutex mutex_;  ///< of all below but the thread
  std::condition_variable came_;
  std::list<Client> clients_;
  bool is_serving_ = false;
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

}  // namespace spinwire::doctor
