// Latencies of sampled operations and calls: histograms in the engine's own memory, which control
// steps copy into the engine's file.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "observe/page_layout.h"
#include "spinwire/clock.h"
#include "spinwire/rpc.h"

namespace spinwire::observe {

/// Files have the numbers: new kinds come last.
enum class TimedWork : std::uint8_t {
  message,  ///< up to the eager limit
  write,
  read,
  atomic,
  call,            ///< of a session opened here
  handler,         ///< of a served call
  long_message,    ///< above the eager limit
  write_and_send,  ///< a WRITE and the message behind it
  raw_send,        ///< of a raw connection
};
enum class TimedStage : std::uint8_t {
  total,     ///< accepted until delivered
  posting,   ///< accepted until posted
  transfer,  ///< posted until the poll that found it completed; of a call, from its acceptance on
  delivery,  ///< from the beginning of that poll until the callback
};
inline constexpr std::size_t kTimedWorks = 9;
inline constexpr std::size_t kStages = 4;
std::string_view name_of(TimedWork work) noexcept;
std::string_view name_of(TimedStage stage) noexcept;

/// The bucket of a time. Below 32 ns each nanosecond has one; above, each power of two has sixteen:
/// those of an HdrHistogram with one significant digit. Times from 2^36 ns on are in the last one.
constexpr std::uint32_t bucket_of(std::uint64_t ns) noexcept {
  constexpr std::uint64_t kMost = (std::uint64_t{1} << 36) - 1;
  if (ns > kMost) ns = kMost;
  if (ns < 32) return static_cast<std::uint32_t>(ns);
  const auto shift = static_cast<std::uint32_t>(std::bit_width(ns)) - 5;
  return 16 * shift + static_cast<std::uint32_t>(ns >> shift);
}
static_assert(bucket_of(31) == 31 && bucket_of(32) == 32 && bucket_of(34) == 33 &&
              bucket_of(~std::uint64_t{0}) == kLatencyBuckets - 1);

/// Methods of calls, and of handlers, that have histograms of their own: those sampled first.
inline constexpr std::uint32_t kTimedMethods = 16;
/// Rows: the stages of all works, and the methods of calls and of handlers.
inline constexpr std::uint32_t kLatencyRows =
    static_cast<std::uint32_t>(kTimedWorks * kStages) + 2 * kTimedMethods;

class Latencies {
 public:
  /// May throw std::bad_alloc. Set-up.
  void open() { rows_.resize(kLatencyRows); }
  [[nodiscard]] bool is_open() const noexcept { return !rows_.empty(); }

  void record(TimedWork work, TimedStage stage, Nanoseconds time) noexcept;
  /// Records the total of a call or handler of a method.
  void record(TimedWork work, Method method, Nanoseconds time) noexcept;

  /// The next row from `from` on that has changed since it was asked for; kLatencyRows: none.
  [[nodiscard]] std::uint32_t next_changed(std::uint32_t from) const noexcept;
  /// What the file is to hold of a row, which counts as unchanged from now on.
  const LatencyRecord& publish(std::uint32_t row) noexcept {
    rows_[row].is_changed = false;
    return rows_[row].record;
  }

 private:
  struct Row {
    LatencyRecord record;
    bool is_changed = false;
  };
  void add(Row& row, Nanoseconds time) noexcept;

  std::vector<Row> rows_;
};

}  // namespace spinwire::observe
