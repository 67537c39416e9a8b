// Shows the engine to other programs: each control step writes its counters and a few rows into
// the engine's file (observe/page_file.h). Cold. Nothing is read back.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "observe/page_file.h"
#include "spinwire/clock.h"

namespace spinwire::detail {
class EngineCore;
}
namespace spinwire::agent {
struct EngineContext;
}

namespace spinwire::engine {

/// Which subjects have rows in a table of the file: that with index `i` has row `i` modulo the
/// number of rows, unless another one has it.
class SubjectRows {
 public:
  static constexpr std::uint32_t kNobody = ~0u;
  struct Subject {
    std::uint32_t index = kNobody;
    std::uint32_t generation = 0;
    std::uint64_t seen_at = 0;     ///< tick
    std::uint64_t blocked_at = 0;  ///< tick when `blocker` was first seen
    std::uint8_t blocker = 0;      ///< 0: nothing
    bool is_block_recorded = false;
  };

  /// May throw std::bad_alloc. Set-up.
  void open(std::uint32_t rows) { subjects_.resize(rows); }
  /// The row of a subject. Null: there is none for it.
  Subject* claim(std::uint32_t index, std::uint32_t generation, std::uint64_t now) noexcept;
  /// The row of a subject that is gone becomes free. False: it had none.
  bool release(std::uint32_t index) noexcept;
  [[nodiscard]] std::uint32_t row_of(const Subject& subject) const noexcept {
    return static_cast<std::uint32_t>(&subject - subjects_.data());
  }
  [[nodiscard]] std::uint32_t row_of(std::uint32_t index) const noexcept {
    return index % static_cast<std::uint32_t>(subjects_.size());
  }

 private:
  std::vector<Subject> subjects_;
};

class Publisher {
 public:
  /// Makes the file, unless observability.directory is empty. Without it, the engine works all the
  /// same, and the log says why. Set-up. May throw std::bad_alloc.
  void open(detail::EngineCore& core);
  /// Removes the file, and ends the recorder.
  void close(detail::EngineCore& core) noexcept;
  /// A control step; every few hundred microseconds, it writes. Takes time that does not depend on
  /// how much exists: it looks at kSlotsPerStep places, and kRowsPerStep subjects, of each table.
  void step(detail::EngineCore& core) noexcept;

 private:
  void write_engine(const detail::EngineCore& core) noexcept;
  [[nodiscard]] observe::SessionLevels session_levels() const noexcept;
  void write_pool(const detail::EngineCore& core) noexcept;
  /// Writes a histogram that has changed.
  void write_latency(agent::EngineContext& context) noexcept;
  void scan_connections(detail::EngineCore& core) noexcept;
  void scan_sessions(detail::EngineCore& core) noexcept;
  void scan_served_sessions(const detail::EngineCore& core) noexcept;
  void drop_row(observe::Table table, SubjectRows& rows, std::uint32_t index) noexcept;
  void read_clocks(detail::EngineCore& core) noexcept;
  /// May throw std::bad_alloc.
  void open_recorder(agent::EngineContext& context);

  observe::PageFile file_;
  observe::RowWords row_{};
  std::uint64_t interval_ = 0;    ///< ticks between two writes
  std::uint64_t next_write_ = 0;  ///< tick
  std::uint64_t last_step_ = 0;   ///< tick
  std::uint64_t writes_ = 0;
  std::uint32_t next_pool_ = 0;
  std::uint32_t next_latency_ = 0;
  // Where the rounds go on.
  std::uint32_t next_connection_ = 0;
  std::uint32_t next_session_ = 0;
  std::uint32_t next_served_ = 0;
  // Sessions by what blocks them (SessionBlocker): of the round that goes on, and of the last one.
  std::array<std::uint32_t, 8> round_by_blocker_{};
  std::array<std::uint32_t, 8> sessions_by_blocker_{};
  SubjectRows connections_;
  SubjectRows sessions_;
  SubjectRows served_;
  // The system's clocks were read at this tick.
  std::uint64_t clocks_tick_ = 0;
  Nanoseconds realtime_{0};
  Nanoseconds uptime_{0};
};

}  // namespace spinwire::engine
