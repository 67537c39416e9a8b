// Finds callbacks, polls and pauses between polls that take too long. A poll reads the clock once,
// at its start: what the detector sees of it are gaps between two polls. A gap with callbacks in
// its poll may be the poll's or the application's. After a long gap the detector watches for a
// while: polls then read the clock at their end, too, which tells both apart.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "observe/metric_tables.h"
#include "spinwire/clock.h"
#include "spinwire/config.h"

namespace spinwire::detail {
class EngineCore;
}

namespace spinwire::engine {

class StallDetector {
 public:
  /// A gap that is never reached. Steps back of the clock exceed it.
  static constexpr std::uint64_t kNoGap = std::uint64_t{1} << 63;

  /// Sets the limits. Until then, no gap is long.
  void open(detail::EngineCore& core) noexcept;
  /// A poll begins at `now`; the one before it began at EngineContext::now. Not after a sleep.
  void on_gap(detail::EngineCore& core, std::uint64_t now) noexcept;
  /// The poll that began at EngineContext::now has ended.
  void on_poll_end(detail::EngineCore& core, std::uint64_t now) noexcept;
  /// Whether polls report their end.
  [[nodiscard]] bool is_watching() const noexcept { return watch_end_ != 0; }
  /// A control step took from `begin` to `end`.
  void on_control_step(detail::EngineCore& core, std::uint64_t begin, std::uint64_t end) noexcept {
    // The next poll finds out that the clock went back.
    if (end > begin && end - begin >= shortest_limit_) [[unlikely]]
      on_slow_step(core, begin, end);
  }
  [[nodiscard]] const observe::StallLevels& levels() const noexcept { return levels_; }

 private:
  /// Whose callbacks a poll ran, in words.
  struct Ran {
    std::uint32_t subjects = 0;
    std::array<char, 64> text{};
    std::size_t size = 0;
    [[nodiscard]] std::string_view view() const noexcept { return {text.data(), size}; }
  };

  static Ran find_ran(const detail::EngineCore& core, std::uint64_t tick) noexcept;
  [[gnu::cold, gnu::noinline]] void on_slow_step(detail::EngineCore& core, std::uint64_t begin,
                                                 std::uint64_t end) noexcept;
  void note_pause(detail::EngineCore& core, std::uint64_t ticks) noexcept;
  void note_poll(detail::EngineCore& core, std::uint64_t ticks, const Ran& ran,
                 bool with_pause) noexcept;
  void set_reported_gap(detail::EngineCore& core) const noexcept;

  // Limits in ticks; kNoGap: none.
  std::uint64_t longest_poll_ = kNoGap;
  std::uint64_t longest_callback_ = kNoGap;
  std::uint64_t longest_pause_ = kNoGap;
  std::uint64_t shortest_limit_ = kNoGap;
  std::uint64_t longest_gap_ = 0;
  std::uint64_t watch_ticks_ = 0;
  std::uint64_t watch_end_ = 0;  ///< tick; 0: not watching
  std::uint64_t poll_end_ = 0;   ///< tick; of the last poll, while watching
  /// The longest pause of the last watch: the application may do that after each poll. Gaps that
  /// are not longer are not reported until known_until_.
  std::uint64_t known_pause_ = 0;
  std::uint64_t known_until_ = 0;  ///< tick
  observe::StallLevels levels_;
  Ran slowest_poll_;
  Ran slowest_callback_;
};

}  // namespace spinwire::engine
