// The base of every benchmark, counting program and comparator: connected engines.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "spinwire/config.h"
#include "spinwire/connection.h"
#include "spinwire/engine.h"
#include "spinwire/status.h"

namespace spinwire::bench {

/// Prints the reason and ends the program.
[[noreturn]] void give_up(std::string_view why);

template <typename T>
T must(Result<T> result) {
  if (!result) give_up(result.error().message());
  return std::move(*result);
}

/// The method that echoes calls.
inline constexpr Method kEcho = 1;

/// The defaults, but the caller takes control steps, so that only the hot path is measured.
Config hot_path_config();

/// The same for so many connections.
Config many_connections_config(std::uint32_t connections);

/// Opens an engine with the real clock, or with stepped time once step_time() was called.
Engine open_engine(const Config& config);

/// From now on, engines are opened with a clock that only advance_time() moves. Instruction counts
/// then do not depend on how busy the machine is. Set-up.
void step_time();
inline std::uint64_t stepped_time = 0;  ///< nanoseconds
inline void advance_time() noexcept { stepped_time += 1000; }

/// Polls, and takes a control step if the configuration leaves it to the caller. Set-up.
void drive(Engine& engine);

/// Repeats `step` until `done()`. Gives up after a minute and prints `what`. Set-up.
template <typename Step, typename Done>
void run_until(std::string_view what, Step&& step, Done&& done);

/// Has the engine prepare to sleep, and polls it again, so that what follows is counted of an
/// engine that sleeps at times. `step` drives all engines. Set-up.
template <typename Step>
void sleep_once(Engine& engine, Step&& step);

/// Two engines on one thread with connections from `near` to `far`. `far` counts the messages that
/// arrive.
class Pair {
 public:
  explicit Pair(const Config& config, std::uint32_t connections = 1);
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  /// Sends a message from `far` to `near`, on the last connection. The lane of `near` that has
  /// slept is awake then, as in an engine that has never slept.
  void send_back();

  Engine near;
  Engine far;
  std::vector<Connection> connections;
  std::uint64_t arrived = 0;

 private:
  Listener listener_;
  Connection accepted_;
  std::uint64_t answered_ = 0;
  std::uint32_t ready_ = 0;
};

#if defined(__clang__)
#define BENCH_APART __attribute__((noinline))
#else
#define BENCH_APART __attribute__((noipa))
#endif

/// Calls `work` `times` times. The only call, so that the compiler inlines `work` here.
template <typename Work>
BENCH_APART void repeat(std::uint64_t times, Work& work) {
  for (; times != 0; --times) work();
}

/// tools/dev/check_counts.sh counts only what runs inside this function, so it must not be inlined.
template <typename Work>
BENCH_APART void counted(std::uint64_t times, Work& work) {
  repeat(times, work);
}

/// Calls `work` `times` times uncounted, so that caches and pools are as in a long run, and as
/// often counted.
template <typename Work>
void measured(std::uint64_t times, Work& work) {
  repeat(times, work);
  counted(times, work);
}

/// The number of operations to do: the last argument of a counting program.
std::uint64_t operations_asked(int argc, char** argv);

// ---- implementation ---------------------------------------------------------------------------

/// A limit on waiting.
class WaitLimit {
 public:
  WaitLimit() noexcept;
  [[nodiscard]] bool over() const noexcept;

 private:
  Clock clock_;
  std::uint64_t end_;
};

template <typename Step, typename Done>
void run_until(std::string_view what, Step&& step, Done&& done) {
  for (const WaitLimit limit; !done(); step()) {
    if (limit.over()) give_up(what);
  }
}

template <typename Step>
void sleep_once(Engine& engine, Step&& step) {
  run_until("an engine does not sleep", step, [&] { return engine.arm(); });
  for (int i = 0; i < 100; ++i) step();
}

}  // namespace spinwire::bench
