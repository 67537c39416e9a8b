// Measured remote calls: the calling end, the answering end, and their counts.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/histogram.h"
#include "common/perf_protocol.h"
#include "spinwire/engine.h"

namespace spinwire::tools {

/// The measured calls. A request is stamped with its number and filled like a message; its reply is
/// stamped with the next number.
struct CallShape {
  std::uint64_t size = 0;        ///< bytes of a request
  std::uint64_t reply_size = 0;  ///< bytes of a reply
  std::uint64_t total = 0;       ///< calls, warm-up included
  std::uint64_t warmup = 0;
  std::uint64_t seed = 0;
  std::uint32_t window = 0;    ///< calls in flight, over all sessions
  std::uint32_t batch = 1;     ///< calls that are sent together
  std::uint32_t sessions = 1;  ///< sessions that share the calls

  static constexpr std::uint32_t kSessionWindow = 64;  ///< most calls in flight on a session
  static constexpr std::uint32_t kMostSessions = 1048575;
  [[nodiscard]] bool valid() const noexcept {
    return size >= 1 && size <= PerfRequest::kLongest && reply_size >= 1 &&
           reply_size <= PerfRequest::kLongest && window >= 1 && window <= PerfRequest::kWidest &&
           batch >= 1 && batch <= window && sessions >= 1 && sessions <= kMostSessions &&
           std::uint64_t{sessions} * kSessionWindow >= window;
  }
  /// The window of each session: a power of two.
  [[nodiscard]] std::uint32_t session_window() const noexcept {
    return std::bit_ceil((window + sessions - 1) / sessions);
  }
};

/// The methods of spinwire-perf.
inline constexpr Method kPerfCallBack = 1;  ///< the measured call of a server to its client
inline constexpr Method kPerfAsk = 2;
inline constexpr Method kPerfEnd = 3;
inline constexpr Method kPerfCall = 16;  ///< the measured call; each client of a server has its own

/// A longer request or reply travels over its session's connection on any device.
inline constexpr std::uint64_t kPerfShort = 4096;

/// Counts of answered calls.
struct CallBooks {
  std::uint64_t calls = 0;
  std::uint64_t sum = 0;  ///< of the call numbers: shows one lost and another served twice
  std::uint64_t wrong = 0;
};

/// The part of a stamp that `size` bytes can hold.
constexpr std::uint64_t perf_value(std::uint64_t value, std::uint64_t size) noexcept {
  return size >= sizeof value ? value : value & ((std::uint64_t{1} << size * 8) - 1);
}

/// Answers calls and checks them.
class PerfAnswerer {
 public:
  /// The engine must outlive the answerer.
  explicit PerfAnswerer(Engine& engine) noexcept : engine_(engine) {}
  /// Sets the shape of the calls to come and clears the counts.
  void expect(const CallShape& shape);
  /// Frees the reply buffers: no more calls are expected.
  void release() noexcept;
  /// Hot.
  void take(Request& request) noexcept;
  [[nodiscard]] const CallBooks& books() const noexcept { return books_; }

 private:
  Status answer(Request& request, std::uint64_t value) noexcept;
  Buffer* free_reply() noexcept;

  Engine& engine_;
  CallShape shape_;
  std::vector<std::byte> reply_;
  /// Reply buffers for replies that the library does not copy: as many as were ever in use at once,
  /// and the index of the next.
  std::vector<Buffer> replies_;
  std::size_t next_reply_ = 0;
  CallBooks books_;
};

/// Opens sessions and keeps a window of calls in flight on them.
class PerfCaller {
 public:
  /// The caller must stay where it is and outlive the engine.
  explicit PerfCaller(Engine& engine) noexcept : engine_(engine), clock_(engine.clock()) {}
  PerfCaller(const PerfCaller&) = delete;
  PerfCaller& operator=(const PerfCaller&) = delete;

  /// When calls reach the device; and whether the records of the next session are prefetched, if
  /// there are more sessions than the window.
  void set_posting(Post post, bool prefetches) noexcept {
    asked_post_ = post;
    prefetches_ = prefetches;
  }
  /// Opens shape.sessions sessions, a few at a time. Call turn() until ready() or a fault().
  void open(const CallShape& shape, const std::string& address);
  [[nodiscard]] bool ready() const noexcept { return ready_ == shape_.sessions; }
  /// Allocates the memory once ready(). Returns false and sets fault() if such calls cannot be
  /// made.
  bool prepare();
  /// Begins to call this method. Needs prepare().
  void start(Method method) noexcept {
    method_ = method;
    running_ = true;
  }
  /// Stops new calls. Call turn() until idle().
  void stop() noexcept { running_ = false; }
  [[nodiscard]] bool idle() const noexcept { return free_.size() == started_.size(); }
  /// All calls have ended.
  [[nodiscard]] bool finished() const noexcept { return running_ && finished_ == shape_.total; }
  /// Begins to close the sessions. Call turn() until closed().
  void close();
  [[nodiscard]] bool closed() const noexcept { return open_ == 0; }

  /// Call it after each poll. Hot.
  void turn() {
    if (running_ || !ended_.empty()) [[likely]]
      return go_on();
    if (!closing_ && !ready()) open_more();
  }

  [[nodiscard]] Session session() const noexcept { return sessions_.front(); }
  [[nodiscard]] const CallShape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t finished_calls() const noexcept { return finished_; }
  /// Whether the first measured call was posted.
  [[nodiscard]] bool warm() const noexcept { return posted_ > shape_.warmup; }
  /// Sum of the numbers of the posted calls, to compare with CallBooks::sum.
  [[nodiscard]] std::uint64_t sum() const noexcept { return sum_; }
  /// Durations of the measured calls, ticks.
  [[nodiscard]] const Histogram& durations() const noexcept { return histogram_; }
  [[nodiscard]] std::uint64_t began() const noexcept { return begin_; }  ///< ticks
  [[nodiscard]] double seconds() const noexcept {
    return static_cast<double>(end_ - begin_) / clock_.ticks_per_ns() / 1e9;
  }
  /// The first error; empty if there is none.
  [[nodiscard]] const std::string& fault() const noexcept { return fault_; }
  /// Whether no session could be opened, as when the server is not up yet.
  [[nodiscard]] bool worth_another_try() const noexcept { return nobody_there_; }

 private:
  void open_more();
  void on_closed(const Error& error);
  std::string find_excess() const;
  bool allocate_buffers();
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
  bool exact_ = false;  ///< window 1: the callback reads the clock at each call's end
  bool prefetches_ = true;
  bool closing_ = false;
  Post post_ = Post::defer;
  Post asked_post_ = Post::automatic;
  Method method_ = kPerfCall;
  CallShape shape_;
  std::uint64_t posted_ = 0;
  std::uint64_t finished_ = 0;
  std::uint64_t sum_ = 0;
  std::uint32_t next_session_ = 0;
  std::vector<Session> sessions_;
  std::vector<BufferSlice> requests_;   ///< by slot
  std::vector<BufferSlice> replies_;    ///< by slot, for replies longer than a datagram; else empty
  std::vector<std::uint64_t> started_;  ///< ticks, by slot
  std::vector<std::uint64_t> numbers_;
  std::vector<std::uint32_t> free_;   ///< slots
  std::vector<std::uint32_t> ended_;  ///< slots whose calls ended since the last turn
  std::uint64_t begin_ = 0;
  std::uint64_t end_ = 0;
  Histogram histogram_;
  // Cold.
  std::string address_;
  std::uint32_t asked_ = 0;  ///< sessions requested so far
  std::uint32_t ready_ = 0;
  std::uint32_t open_ = 0;  ///< sessions whose on_closed is still to come
  bool nobody_there_ = false;
  std::vector<Buffer> buffers_;
  std::string fault_;
};

}  // namespace spinwire::tools
