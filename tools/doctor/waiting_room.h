// Clients of a doctor that serves another one. The doctor reports to each how many are served
// before it, if the client has said in its facts that it understands that. A client that sends no
// facts loses its place, because places are few.
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
  /// `facts_limit`: for a client to send its facts.
  WaitingRoom(const Link& listener, Link::Limit facts_limit);
  WaitingRoom(const WaitingRoom&) = delete;
  WaitingRoom& operator=(const WaitingRoom&) = delete;
  ~WaitingRoom();

  /// The next client, which is served until the next call. Nothing: none came within `limit`.
  std::optional<Link> next(Link::Limit limit);

 private:
  struct Client {
    Link link;
    SteadyTime facts_deadline;
    bool has_sent_facts = false;
    bool understands_busy = false;
    std::uint32_t ahead = 0;  ///< as last reported; 0: not yet
    SteadyTime next_report{};
  };

  void run() noexcept;
  /// Accepts a client, or waits for one, and updates all.
  void run_round();
  /// Reports to the clients how many are before them, and drops some.
  void update_clients();
  /// False: the client has left, takes nothing any more, or has sent no facts in time.
  static bool update_client(Client& client, std::uint32_t ahead);

  const Link& listener_;
  const Link::Limit facts_limit_;
  bool is_full_ = false;  ///< the thread's
  std::mutex mutex_;      ///< guards all below but the thread
  std::condition_variable came_;
  std::list<Client> clients_;
  bool is_serving_ = false;
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

}  // namespace spinwire::doctor
