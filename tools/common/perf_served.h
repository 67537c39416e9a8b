// One client of a serving spinwire-perf: its dialogue, and what the server does for it.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "common/perf_options.h"
#include "common/spin.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

/// What a server has to tell its user, one line for each event.
using PerfNews = std::deque<std::string>;

class ServedClient {
 public:
  /// Begins the dialogue with a client that was accepted. It must stay where it is, and engine and
  /// news must outlive it.
  ServedClient(Engine& engine, Connection client, PerfNews& news);
  ServedClient(const ServedClient&) = delete;
  ServedClient& operator=(const ServedClient&) = delete;

  /// Call it after each poll. Hot while the client measures.
  void turn() {
    if (pending_count_ != 0) [[unlikely]]
      send_pending();
    if (pong_) look_for_write();
    if (state_ != State::running || !said_.empty()) [[unlikely]]
      cold_turn();
  }
  /// Call it now and then. A client that measures by messages or answered writes, and stops
  /// sending, keeps its place only for a while. The server sees nothing of other writes and of
  /// reads.
  void check_progress();
  /// Whether the client is being measured, so that every turn counts.
  [[nodiscard]] bool measuring() const noexcept { return state_ == State::running; }
  /// The client has gone, and no callback of it is to come.
  [[nodiscard]] bool over() const noexcept { return state_ == State::over; }
  [[nodiscard]] bool failed() const noexcept { return !fault_.empty(); }

 private:
  enum class State : std::uint8_t {
    waiting,  ///< for the request
    running,  ///< until all messages and then Finish have arrived
    leaving,  ///< the verdict is sent; the client closes
    tidying,  ///< the connection is closed; its memory is to be freed
    over,
  };

  void enter(State state);
  void cold_turn();
  void on_message(Message& message);
  void on_data(Message& message);
  void on_closed(const Error& error);
  void on_request(const PerfRequest& request);
  void on_finish();
  bool offer_memory(PerfOffer& offer);
  void offer_slots(std::uint32_t slots, PerfOffer& offer);
  [[nodiscard]] std::string find_wrong_sum() const;
  [[nodiscard]] std::string find_fault() const;
  void reply(Buffer message);
  void look_for_write();
  bool prepare_writes(PerfOffer& offer);
  void send_pending();
  void say(std::span<const std::byte> message);
  void break_off(std::string why);
  void tidy();

  Engine& engine_;
  Clock clock_;
  PerfNews& news_;
  // Hot.
  State state_ = State::waiting;
  bool echo_ = false;
  bool pong_ = false;  ///< writes are answered with writes
  Connection client_;
  std::uint64_t received_ = 0;
  std::uint64_t expected_ = 0;  ///< messages that are data
  std::uint64_t wrong_ = 0;     ///< messages with wrong data
  std::uint64_t first_wrong_ = 0;
  PerfRequest request_;
  std::vector<Buffer> pending_;  ///< replies that have to wait: a ring of `window` places
  std::size_t pending_first_ = 0;
  std::size_t pending_count_ = 0;
  // Cold.
  Deadline step_deadline_;  ///< for the client's next step
  std::uint64_t seen_ = 0;  ///< messages and answered writes at the last check for progress
  Buffer memory_;           ///< memory that the client writes or reads
  RemoteRegion exposed_;
  Buffer answers_;                     ///< pong: two places, used in turn as the source of writes
  std::uint64_t answers_posted_ = 0;   ///< one for each write of the client that has arrived
  std::uint64_t answers_written_ = 0;  ///< completed, whatever the status
  std::uint32_t slots_ = 0;
  std::vector<std::byte> said_;  ///< a message of the dialogue that has to wait
  std::string peer_;
  std::string fault_;
};

}  // namespace spinwire::tools
