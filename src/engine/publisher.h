// Shows the engine to other programs: each control step writes its counters and a few rows into
// the engine's file (observe/page_file.h). Cold. Nothing is read back.
#pragma once

#include <cstdint>

#include "engine/subject_rows.h"
#include "observe/page_file.h"
#include "spinwire/clock.h"

namespace spinwire::detail {
class EngineCore;
}
namespace spinwire::agent {
struct EngineContext;
}

namespace spinwire::engine {

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
  void write_pool(const detail::EngineCore& core) noexcept;
  /// Writes a histogram that has changed.
  void write_latency(agent::EngineContext& context) noexcept;
  void scan_connections(detail::EngineCore& core) noexcept;
  void scan_sessions(detail::EngineCore& core) noexcept;
  void scan_served_sessions(const detail::EngineCore& core) noexcept;
  /// Null: the subject has no row.
  SubjectRows::Subject* claim_row(observe::Table table, SubjectRows& rows,
                                  const SubjectRows::Visit& visit) noexcept;
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
  SubjectRows connections_;
  SubjectRows sessions_;
  SubjectRows served_;
  // The system's clocks were read at this tick.
  std::uint64_t clocks_tick_ = 0;
  Nanoseconds realtime_{0};
  Nanoseconds uptime_{0};
};

}  // namespace spinwire::engine
