// spinwire-perf's test of remote calls. The dialogue of its two ends consists of calls, too:
//
//   client                        server
//   kPerfAsk (what to measure)  →
//                               ← CallAdmission, or a refusal; if both call, once the server can
//                               call
//   the admission's method      ⇄ replies; if both call, kPerfCallBack the other way
//   kPerfEnd (the admission)    →
//                               ← what the server served and called
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/perf_calls.h"
#include "common/perf_options.h"
#include "common/perf_served.h"
#include "common/spin.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

struct CallAsk {
  static constexpr std::uint16_t kKind = 5;

  PerfHead head{.kind = kKind};
  CallShape shape;
  std::array<char, 172> caller{};  ///< address for the server's calls; empty: the server makes none
};

/// Which of the server's clients this is.
struct CallAdmission {
  static constexpr std::uint16_t kKind = 7;

  PerfHead head{.kind = kKind};
  Method method = 0;  ///< of its calls: kPerfCall plus the client's place
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
  /// When the first measured call started, in ticks.
  [[nodiscard]] std::uint64_t began() const noexcept { return caller_.began(); }
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
  CallAdmission admission_;
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

/// One client of the server below.
class ServedCaller {
 public:
  /// It must stay where it is, and engine and news must outlive it.
  ServedCaller(Engine& engine, PerfNews& news, Method method) noexcept
      : engine_(engine),
        news_(news),
        admission_{.method = method},
        answerer_(engine),
        step_deadline_(engine.clock(), Nanoseconds::zero()) {}
  ServedCaller(const ServedCaller&) = delete;
  ServedCaller& operator=(const ServedCaller&) = delete;

  void begin(Request& request, const CallAsk& ask);
  /// A measured call. Hot.
  void take(Request& request) {
    if (state_ == State::idle) [[unlikely]]
      return static_cast<void>(request.refuse("no measurement was begun"));
    answerer_.take(request);
  }
  void finish(Request& request);
  /// Call it after each poll until it is idle. Hot.
  void turn();

  [[nodiscard]] bool idle() const noexcept { return state_ == State::idle; }
  /// Whether the last client failed.
  [[nodiscard]] bool failed() const noexcept { return failed_; }

 private:
  enum class State : std::uint8_t {
    idle,
    calling_back,  ///< until our own sessions are open
    running,       ///< until the client ends it
    stopping,      ///< until our own calls have ended
    closing,       ///< until our own sessions are closed
  };

  void call_back();
  void check_progress();
  void report_counts();
  void end(const std::string& how);

  Engine& engine_;
  PerfNews& news_;
  CallAdmission admission_;
  State state_ = State::idle;
  PerfAnswerer answerer_;
  std::unique_ptr<PerfCaller> caller_;
  CallShape shape_;
  ServedSession client_;  ///< that has begun the measurement, and alone may end it
  PendingCall waiting_;   ///< the client's request, answered once we can call back
  std::uint32_t turns_ = 0;
  std::uint64_t seen_ = 0;  ///< calls at the last check for progress
  Deadline step_deadline_;
  bool failed_ = false;
};

/// Serves callers beside the clients of connections.
class RpcPerfServer {
 public:
  RpcPerfServer(Engine& engine, PerfNews& news) noexcept : engine_(engine), news_(news) {}
  RpcPerfServer(const RpcPerfServer&) = delete;
  RpcPerfServer& operator=(const RpcPerfServer&) = delete;

  /// For up to `places` callers, as long as the server `has_room`. Errors: those of
  /// Engine::serve(), as when the pools are too small for remote calls.
  Result<void> serve(std::uint32_t places, std::function<bool()> has_room);
  /// Call it after each poll.
  void turn() {
    if (!running_.empty()) go_on();
  }
  /// Clients that are being measured.
  [[nodiscard]] std::size_t running() const noexcept { return running_.size(); }
  /// Clients that have gone, and how many of them failed.
  [[nodiscard]] std::uint64_t served() const noexcept { return served_; }
  [[nodiscard]] std::uint64_t failed() const noexcept { return failed_; }

 private:
  void on_ask(Request& request);
  void on_end(Request& request);
  void go_on();

  Engine& engine_;
  PerfNews& news_;
  std::vector<std::unique_ptr<ServedCaller>> places_;
  std::vector<ServedCaller*> running_;
  std::function<bool()> has_room_;
  std::uint64_t served_ = 0;
  std::uint64_t failed_ = 0;
};

}  // namespace spinwire::tools
