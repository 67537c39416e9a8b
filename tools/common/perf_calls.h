// Measured remote calls: the end that calls, the end that answers, and what they have counted.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/histogram.h"
#include "common/perf_protocol.h"
#include "spinwire/config.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

/// What is measured. The bytes of a call are stamped with its number and filled as messages are;
/// the answer's are stamped with the next number.
struct CallShape {
  std::uint64_t size = 0;        ///< bytes of a request
  std::uint64_t reply_size = 0;  ///< and of a reply
  std::uint64_t total = 0;       ///< calls, warm-up included
  std::uint64_t warmup = 0;
  std::uint64_t seed = 0;
  std::uint32_t window = 0;    ///< calls under way, over all sessions
  std::uint32_t batch = 1;     ///< calls that go out together
  std::uint32_t sessions = 1;  ///< that they are spread over

  static constexpr std::uint32_t kSessionWindow = 64;  ///< the most that a session has under way
  static constexpr std::uint32_t kMostSessions = 1048575;
  [[nodiscard]] bool valid() const noexcept {
    return size >= 1 && size <= PerfRequest::kLongest && reply_size >= 1 &&
           reply_size <= PerfRequest::kLongest && window >= 1 && window <= PerfRequest::kWidest &&
           batch >= 1 && batch <= window && sessions >= 1 && sessions <= kMostSessions &&
           std::uint64_t{sessions} * kSessionWindow >= window;
  }
  /// Of each session: a power of two.
  [[nodiscard]] std::uint32_t session_window() const noexcept {
    return std::bit_ceil((window + sessions - 1) / sessions);
  }
};

/// The methods of spinwire-perf's servers.
inline constexpr Method kPerfCall = 1;  ///< what is measured
inline constexpr Method kPerfAsk = 2;
inline constexpr Method kPerfEnd = 3;

/// A request or reply of more bytes goes over its session's connection on any device.
inline constexpr std::uint64_t kPerfShort = 4096;
/// Raises the pools of an engine that makes such calls, and of one that takes them.
void make_room_for_calls(Config& config, std::uint64_t size, std::uint64_t reply_size,
                         std::uint32_t window);

/// Calls that have been answered.
struct CallBooks {
  std::uint64_t calls = 0;
  std::uint64_t sum = 0;  ///< of their numbers, so that one lost and one twice are no two
  std::uint64_t wrong = 0;
};

/// As much of a stamp as `size` bytes hold.
constexpr std::uint64_t perf_value(std::uint64_t value, std::uint64_t size) noexcept {
  return size >= sizeof value ? value : value & ((std::uint64_t{1} << size * 8) - 1);
}

/// Answers calls, and checks them.
class PerfAnswerer {
 public:
  /// The answerer goes before the engine.
  explicit PerfAnswerer(Engine& engine) noexcept : engine_(engine) {}
  /// From now on calls are like this; the books are empty.
  void expect(const CallShape& shape);
  /// Hot.
  void take(Request& request) noexcept;
  [[nodiscard]] const CallBooks& books() const noexcept { return books_; }

 private:
  Status answer(Request& request, std::uint64_t value) noexcept;
  Buffer* free_reply() noexcept;

  Engine& engine_;
  CallShape shape_;
  std::vector<std::byte> reply_;
  /// Replies that the library does not copy: as many as have been on their way at once, and which
  /// is the next.
  std::vector<Buffer> replies_;
  std::size_t next_reply_ = 0;
  CallBooks books_;
};

/// Opens sessions, and keeps a window of calls under way on them.
class PerfCaller {
 public:
  /// The caller stays where it is, and outlives the engine.
  explicit PerfCaller(Engine& engine) noexcept : engine_(engine), clock_(engine.clock()) {}
  PerfCaller(const PerfCaller&) = delete;
  PerfCaller& operator=(const PerfCaller&) = delete;

  /// Opens shape.sessions sessions, a few at a time: turn() until ready() or there is a fault().
  void open(const CallShape& shape, const std::string& address);
  [[nodiscard]] bool ready() const noexcept { return ready_ == shape_.sessions; }
  /// When ready: takes the memory; false, and a fault(), if calls of that shape cannot be made.
  bool prepare();
  /// Begins to call, when prepared.
  void start() noexcept { running_ = true; }
  /// No further calls; turn() until idle().
  void stop() noexcept { running_ = false; }
  [[nodiscard]] bool idle() const noexcept { return free_.size() == started_.size(); }
  /// All calls have ended.
  [[nodiscard]] bool finished() const noexcept { return running_ && finished_ == shape_.total; }
  /// Begins to close the sessions: turn() until closed().
  void close();
  [[nodiscard]] bool closed() const noexcept { return open_ == 0; }

  /// What follows a poll. Hot.
  void turn() {
    if (running_ || !ended_.empty()) [[likely]]
      return go_on();
    if (!closing_ && !ready()) open_more();
  }

  [[nodiscard]] Session session() const noexcept { return sessions_.front(); }
  [[nodiscard]] const CallShape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t finished_calls() const noexcept { return finished_; }
  /// The first measured call is being made, or was.
  [[nodiscard]] bool warm() const noexcept { return posted_ > shape_.warmup; }
  /// Sum of the numbers of the calls that were made, as CallBooks has it.
  [[nodiscard]] std::uint64_t sum() const noexcept { return sum_; }
  /// Durations of the measured calls, ticks.
  [[nodiscard]] const Histogram& durations() const noexcept { return histogram_; }
  [[nodiscard]] double seconds() const noexcept {
    return static_cast<double>(end_ - begin_) / clock_.ticks_per_ns() / 1e9;
  }
  /// What went wrong; empty if nothing did.
  [[nodiscard]] const std::string& fault() const noexcept { return fault_; }
  /// No session could be opened, as the server may not be up yet.
  [[nodiscard]] bool worth_another_try() const noexcept { return nobody_there_; }

 private:
  void open_more();
  void on_closed(const Error& error);
  std::string find_excess() const;
  bool take_memory();
  void go_on();
  void call_more();
  Status call(std::uint32_t slot);
  void on_reply(std::uint32_t slot, const Reply& reply);
  void record(std::uint32_t slot, std::uint64_t now) noexcept;
  void fail(std::string why);

  Engine& engine_;
  Clock clock_;
  // Hot.
  bool running_ = false;
  bool exact_ = false;  ///< window 1: a call's end is read from the clock in its callback
  bool closing_ = false;
  CallShape shape_;
  std::uint64_t posted_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t sum_ = 0;
  std::uint32_t next_session_ = 0;
  std::vector<Session> sessions_;
  std::vector<BufferSlice> requests_;   ///< by slot
  std::vector<BufferSlice> replies_;    ///< by slot, of those longer than a datagram takes; or none
  std::vector<std::uint64_t> started_;  ///< ticks, by slot
  std::vector<std::uint64_t> numbers_;
  std::vector<std::uint32_t> free_;   ///< slots
  std::vector<std::uint32_t> ended_;  ///< slots whose calls have ended since the last look
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
  Histogram histogram_;
  // Cold.
  std::string address_;
  std::uint32_t asked_ = 0;  ///< sessions, so far
  std::uint32_t ready_ = 0;
  std::uint32_t open_ = 0;  ///< those that on_closed has to tell of
  bool nobody_there_ = false;
  std::vector<Buffer> buffers_;
  std::string fault_;
};

}  // namespace spinwire::tools
