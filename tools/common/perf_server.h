// The serving end of spinwire-perf: one client after another.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/perf_options.h"
#include "common/perf_rpc.h"
#include "common/spin.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

class PerfServer {
 public:
  /// The server must stay where it is from listen() on.
  explicit PerfServer(Engine engine)
      : engine_(std::move(engine)),
        clock_(engine_.clock()),
        calls_(engine_),
        step_deadline_(clock_, Nanoseconds::zero()) {}
  PerfServer(const PerfServer&) = delete;
  PerfServer& operator=(const PerfServer&) = delete;
  /// Closing the engine runs the callbacks of outstanding operations, so it happens while all
  /// members exist.
  ~PerfServer() {
    listener_ = {};
    engine_ = Engine();
  }

  Result<void> listen(const std::string& address);
  [[nodiscard]] std::string address() const { return listener_.address(); }

  /// Polls and acts on the result. Returns what Engine::poll() returns. Hot while a client
  /// measures.
  int turn();
  [[nodiscard]] const Clock& clock() const noexcept { return clock_; }
  [[nodiscard]] Engine& engine() noexcept { return engine_; }
  /// Whether a client is being measured, so that every turn counts.
  [[nodiscard]] bool measuring() const noexcept {
    return state_ == State::running || calls_.running();
  }
  /// Whether remote calls can be measured, or the reason why not.
  [[nodiscard]] const Result<void>& serves_calls() const noexcept { return serves_calls_; }
  /// Clients that were measured or are being measured, and the current one's address.
  [[nodiscard]] std::uint64_t begun() const noexcept { return begun_ + calls_.begun(); }
  [[nodiscard]] std::string peer() const { return calls_.running() ? "a caller" : peer_; }
  /// Clients that have gone, and how many of them failed.
  [[nodiscard]] std::uint64_t served() const noexcept { return served_ + calls_.served(); }
  [[nodiscard]] std::uint64_t failed() const noexcept { return failed_ + calls_.failed(); }
  /// One line about how the last client ended.
  [[nodiscard]] const std::string& last() const noexcept { return last_; }

 private:
  enum class State : std::uint8_t {
    idle,     ///< nobody is connected
    waiting,  ///< for the request
    running,  ///< until all messages and then Finish have arrived
    leaving,  ///< the verdict is sent; the client closes
    tidying,  ///< the connection is closed; its memory is to be freed
  };

  void enter(State state);
  void on_accept(Connection client);
  void on_message(Message& message);
  void on_data(Message& message);
  void on_closed(const Error& error);
  void on_request(const PerfRequest& request);
  void on_finish();
  bool offer_memory(PerfOffer& offer);
  void offer_slots(std::uint32_t slots, PerfOffer& offer);
  [[nodiscard]] std::string find_fault() const;
  void reply(Buffer message);
  void look_for_write();
  bool prepare_writes(PerfOffer& offer);
  void send_pending();
  void say(std::span<const std::byte> message);
  void break_off(std::string why);
  void tidy();

  Engine engine_;
  Clock clock_;
  Listener listener_;
  // Hot.
  State state_ = State::idle;
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
  IdleCare idle_care_;
  RpcPerfServer calls_;
  // Cold.
  Deadline step_deadline_;  ///< for the client's next step
  Buffer memory_;           ///< memory that the client writes or reads
  RemoteRegion exposed_;
  Buffer answers_;                     ///< pong: two places, used in turn as the source of writes
  std::uint64_t answers_posted_ = 0;   ///< one for each write of the client that has arrived
  std::uint64_t answers_written_ = 0;  ///< completed
  std::uint32_t slots_ = 0;
  std::vector<std::byte> said_;  ///< a message of the dialogue that has to wait
  std::string peer_;
  std::string fault_;
  std::string last_;
  Result<void> serves_calls_;
  std::uint64_t calls_told_ = 0;  ///< clients of calls_ that last_ has reported
  std::uint64_t begun_ = 0;
  std::uint64_t served_ = 0;
  std::uint64_t failed_ = 0;
};

}  // namespace spinwire::tools
