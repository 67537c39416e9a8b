// spinwire-perf's test of remote calls. The dialogue of its two ends consists of calls, too:
//
//   client                        server
//   kPerfAsk (what to measure)  →
//                               ← empty, or a refusal; if both call, once the server can call
//   kPerfCall                   ⇄ replies; if both call, kPerfCall the other way as well
//   kPerfEnd                    →
//                               ← what the server served and called
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "common/perf_calls.h"
#include "common/perf_options.h"
#include "common/spin.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

struct CallAsk {
  static constexpr std::uint16_t kKind = 5;

  PerfHead head{.kind = kKind};
  CallShape shape;
  std::array<char, 172> caller{};  ///< address for the server's calls; empty: the server makes none
};

/// The server's counts at the end.
struct CallTally {
  static constexpr std::uint16_t kKind = 6;

  PerfHead head{.kind = kKind};
  CallBooks served;
  std::uint64_t called = 0;  ///< calls of its own that got the right reply
  std::uint64_t called_sum = 0;
  std::array<char, 172> fault{};  ///< error in its own calls; empty: none
};

class RpcPerfClient {
 public:
  /// Begins to open sessions. The client must stay where it is.
  RpcPerfClient(Engine engine, const PerfOptions& options, std::string address);
  RpcPerfClient(const RpcPerfClient&) = delete;
  RpcPerfClient& operator=(const RpcPerfClient&) = delete;
  ~RpcPerfClient() {
    leave();
    listener_ = {};
    engine_ = Engine();  // runs callbacks, so it happens while all members exist
  }

  /// Polls and acts on the result. Returns what Engine::poll() returns. Hot while it measures.
  int turn();
  [[nodiscard]] bool over() const noexcept { return state_ == State::over; }
  [[nodiscard]] const Engine& engine() const noexcept { return engine_; }
  [[nodiscard]] const std::string& fault() const noexcept { return fault_; }
  /// Calls that have ended, of options.warmup + options.count.
  [[nodiscard]] std::uint64_t finished() const noexcept { return caller_.finished_calls(); }
  [[nodiscard]] const Histogram& durations() const noexcept { return caller_.durations(); }
  [[nodiscard]] double seconds() const noexcept { return caller_.seconds(); }
  /// The server's calls that were served between our first measured call and our last.
  [[nodiscard]] std::uint64_t served() const noexcept { return served_; }

 private:
  enum class State : std::uint8_t {
    opening,  ///< until all sessions are open and the server is free
    asking,   ///< until the server is ready
    running,  ///< until the last call has ended
    ending,   ///< until the server's counts have arrived
    closing,
    over,
  };

  Result<void> serve(const CallShape& shape);
  void cold_turn();
  void retry();
  void ask();
  void finish();
  void on_books(const Reply& reply);
  void enter(State state);
  void leave();
  void give_up(std::string why);
  [[nodiscard]] std::string find_fault(const CallTally& tally) const;

  Engine engine_;
  // Hot.
  State state_ = State::opening;
  bool prepared_ = false;
  PerfAnswerer answerer_;
  PerfCaller caller_;
  IdleCare idle_care_;
  std::uint64_t served_before_ = ~std::uint64_t{0};
  std::uint64_t served_ = 0;
  // Cold.
  const PerfOptions& options_;
  std::string address_;
  Listener listener_;
  Deadline wait_;      ///< for the server to come up
  Deadline retry_at_;  ///< the next attempt to open a session
  Deadline step_deadline_;
  std::string fault_;
};

/// Runs in a server beside the tests of connections.
class RpcPerfServer {
 public:
  explicit RpcPerfServer(Engine& engine) noexcept
      : engine_(engine), answerer_(engine), step_deadline_(engine.clock(), Nanoseconds::zero()) {}
  RpcPerfServer(const RpcPerfServer&) = delete;
  RpcPerfServer& operator=(const RpcPerfServer&) = delete;

  /// Errors: those of Engine::serve(), as when the pools are too small for remote calls.
  Result<void> serve();
  /// Call it after each poll.
  void turn() {
    if (state_ != State::idle) [[unlikely]]
      go_on();
  }
  [[nodiscard]] bool running() const noexcept { return state_ != State::idle; }
  /// While busy, the server measures another kind of test and refuses clients.
  void set_busy(bool busy) noexcept { busy_ = busy; }
  [[nodiscard]] std::uint64_t begun() const noexcept { return begun_; }
  [[nodiscard]] std::uint64_t served() const noexcept { return served_; }
  [[nodiscard]] std::uint64_t failed() const noexcept { return failed_; }
  /// One line about how the last client ended.
  [[nodiscard]] const std::string& last() const noexcept { return last_; }

 private:
  enum class State : std::uint8_t {
    idle,
    calling_back,  ///< until our own sessions are open
    running,       ///< until the client ends it
    stopping,      ///< until our own calls have ended
    closing,       ///< until our own sessions are closed
  };

  void on_ask(Request& request);
  void on_end(Request& request);
  void go_on();
  void call_back();
  void check_progress();
  void report_counts();
  void end(const std::string& how);

  Engine& engine_;
  State state_ = State::idle;
  bool busy_ = false;
  PerfAnswerer answerer_;
  std::unique_ptr<PerfCaller> caller_;
  CallShape shape_;
  PendingCall waiting_;  ///< the client's request, answered once we can call back
  std::uint32_t turns_ = 0;
  std::uint64_t seen_ = 0;  ///< calls at the last check for progress
  Deadline step_deadline_;
  std::uint64_t begun_ = 0;
  std::uint64_t served_ = 0;
  std::uint64_t failed_ = 0;
  std::string last_;
};

}  // namespace spinwire::tools
