// Where every benchmark, counting program and comparator begins: engines that are connected.
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

/// Ends the program: a measurement that cannot be set up has nothing to tell.
[[noreturn]] void give_up(std::string_view why);

template <typename T>
T must(Result<T> result) {
  if (!result) give_up(result.error().message());
  return std::move(*result);
}

/// What servers of calls answer by echoing.
inline constexpr Method kEcho = 1;

/// The defaults, with the control step left to the caller, so that what is measured is the hot path
/// alone.
Config hot_path_config();

/// Opens an engine with the real clock, or with stepped time once step_time() was called.
Engine open_engine(const Config& config);

/// From now on, engines are opened with a clock that only advance_time() moves. Instruction counts
/// then do not depend on how busy the machine is. Set-up.
void step_time();
inline std::uint64_t stepped_time = 0;  ///< nanoseconds
inline void advance_time() noexcept { stepped_time += 1000; }

/// A poll, and a control step where the configuration leaves that to the caller. Set-up.
void drive(Engine& engine);

/// Repeats `step` until `done()`; gives up after ten seconds, naming what it waited for. Set-up.
template <typename Step, typename Done>
void run_until(std::string_view what, Step&& step, Done&& done);

/// Two engines of this thread with connections from `near` to `far`. No messages are taken.
class Pair {
 public:
  explicit Pair(const Config& config, std::uint32_t connections = 1);
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;

  Engine near;
  Engine far;
  std::vector<Connection> connections;

 private:
  Listener listener_;
  std::uint32_t ready_ = 0;
};

/// Calls `work` so many times. tools/dev/check_counts.sh counts what runs inside of this function
/// and nothing else, so it has to stay a function of its own.
template <typename Work>
#if defined(__clang__)
__attribute__((noinline))
#else
__attribute__((noipa))
#endif
void measured(std::uint64_t times, Work& work) {
  for (; times != 0; --times) work();
}

/// The number of operations that a counting program was asked for: its last argument.
std::uint64_t operations_asked(int argc, char** argv);

// ---- implementation ---------------------------------------------------------------------------

/// A point in time after which waiting is given up.
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

}  // namespace spinwire::bench
