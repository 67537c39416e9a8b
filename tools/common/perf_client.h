// The measuring end of spinwire-perf.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/dialer.h"
#include "common/histogram.h"
#include "common/perf_options.h"
#include "common/spin.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

class PerfClient {
 public:
  /// Begins to connect. The client must stay where it is.
  PerfClient(Engine engine, const PerfOptions& options, std::string address);
  PerfClient(const PerfClient&) = delete;
  PerfClient& operator=(const PerfClient&) = delete;
  /// Closing the engine runs the callbacks of outstanding operations, so it happens while all
  /// members exist.
  ~PerfClient() { engine_ = Engine(); }

  /// Polls and acts on the result. Returns what Engine::poll() returns. Hot while it measures.
  int turn();
  [[nodiscard]] bool over() const noexcept { return state_ == State::over; }
  [[nodiscard]] bool measuring() const noexcept { return state_ == State::running; }
  [[nodiscard]] const Engine& engine() const noexcept { return engine_; }
  /// The first error; empty if there is none.
  [[nodiscard]] const std::string& fault() const noexcept { return fault_; }

  /// Operations that are done, of options.warmup + options.count.
  [[nodiscard]] std::uint64_t finished() const noexcept { return finished_; }
  /// Durations of the measured operations in ticks of the engine's clock.
  [[nodiscard]] const Histogram& durations() const noexcept { return histogram_; }
  /// When the first measured operation started, in ticks.
  [[nodiscard]] std::uint64_t began() const noexcept { return begin_; }
  /// From then to the end of the last.
  [[nodiscard]] double seconds() const noexcept;

 private:
  enum class State : std::uint8_t {
    dialing,  ///< until the connection is ready
    asking,   ///< until the server's offer has arrived
    running,  ///< until the last operation is complete
    ending,   ///< until the verdict has arrived
    closing,  ///< until the connection is closed
    over,
  };

  void run_turn(int events);
  void post_more();
  Status post(std::uint32_t slot);
  void on_complete(const Completion& completion);
  void on_found(const Completion& completion);
  void on_reply(const Message& reply);
  void look_for_write();
  void finish_up_to(std::uint64_t count, std::uint64_t now);
  void check_progress();

  void enter(State state);
  void on_message(Message& message);
  void on_offer(const PerfOffer& offer);
  bool allocate_buffers();
  bool expose_reply();
  void ask();
  void on_closed(const Error& error);
  void say(std::span<const std::byte> message);
  [[nodiscard]] std::string find_fault() const;
  void break_off(std::string why);
  [[nodiscard]] std::uint32_t next(std::uint32_t slot, std::uint32_t slots) const noexcept {
    return slot + 1 == slots ? 0 : slot + 1;
  }

  Engine engine_;
  // Hot.
  State state_ = State::dialing;
  PerfOp op_;
  bool exact_;                           ///< the callback reads the clock at each operation's end
  bool echoed_;                          ///< an operation ends with the server's reply
  bool pong_;                            ///< the reply is a write
  const std::byte* reply_at_ = nullptr;  ///< pong: where the reply arrives
  Clock clock_;
  Connection server_;
  std::uint64_t size_;
  std::uint64_t seed_;
  std::uint64_t total_;
  std::uint64_t warmup_;
  std::uint32_t window_;
  Post post_;
  std::uint32_t places_ = 0;         ///< places for operations in our memory
  std::uint32_t remote_places_ = 0;  ///< places in the server's memory
  std::uint64_t posted_ = 0;
  std::uint64_t completed_ = 0;  ///< by the device
  std::uint64_t replied_ = 0;    ///< by the server
  std::uint64_t finished_ = 0;   ///< recorded as well
  std::uint32_t post_place_ = 0;
  std::uint32_t remote_place_ = 0;
  std::uint32_t finish_place_ = 0;
  std::uint32_t finish_remote_ = 0;
  std::vector<BufferSlice> local_;
  std::vector<RemoteRegion> remote_;
  std::vector<std::uint64_t> started_;  ///< ticks, by place
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
  IdleCare idle_care_;
  std::uint32_t idle_turns_ = 0;
  std::uint64_t progress_at_ = 0;  ///< when `progress_` was last seen to change
  std::uint64_t progress_seen_ = 0;
  std::uint64_t wrong_ = 0;  ///< replies, reads and atomics with wrong data
  std::uint64_t first_wrong_ = 0;
  Status refused_ = Status::ok;  ///< why the library refused an operation
  Status failed_ = Status::ok;   ///< status of an operation that failed
  Histogram histogram_;
  // Cold.
  const PerfOptions& options_;
  std::optional<Dialer> dialer_;
  Deadline step_deadline_;
  std::vector<Buffer> buffers_;
  Buffer reply_memory_;  ///< pong: memory that the server writes
  RemoteRegion reply_;
  std::vector<std::byte> said_;  ///< a message of the dialogue that has to wait
  std::string fault_;
};

}  // namespace spinwire::tools
