// The tables of metrics. One row of code for each member of the public statistics; a test proves
// that none is missing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "observe/metric.h"
#include "spinwire/connection_state.h"
#include "spinwire/engine.h"
#include "spinwire/rpc.h"

namespace spinwire::observe {

/// What the stall detector has found; see engine/stall_detector.h. The texts say what ran.
struct StallLevels {
  std::uint64_t slow_polls = 0;
  std::uint64_t slow_callbacks = 0;
  std::uint64_t pauses = 0;
  Nanoseconds longest_poll{0};
  std::string_view longest_poll_ran;
  Nanoseconds longest_callback{0};
  std::string_view longest_callback_ran;
  Nanoseconds longest_pause{0};
};

/// Connections by what blocks them, as their last visits found them.
struct ConnectionLevels {
  std::uint32_t not_ready = 0;
  std::uint32_t send_queue_full = 0;
  std::uint32_t lacking_operations = 0;
  std::uint32_t lacking_credit = 0;
  std::uint32_t lacking_windows = 0;
};
/// Sessions by what blocks them, as their last visits found them.
struct SessionLevels {
  std::uint32_t not_ready = 0;
  std::uint32_t window_full = 0;
  std::uint32_t server_window_full = 0;
  std::uint32_t congestion_window_full = 0;
  std::uint32_t lacking_receives = 0;
  std::uint32_t send_queue_full = 0;
  std::uint32_t connection_blocked = 0;
};

/// What the engine's row has besides its statistics.
struct EngineLevels {
  Nanoseconds written_at{0};      ///< since the Unix epoch
  Nanoseconds written_uptime{0};  ///< by CLOCK_MONOTONIC
  std::uint64_t writes = 0;
  Nanoseconds keepalive_interval{0};
  Nanoseconds peer_timeout{0};
  bool draining = false;
  ConnectionLevels connections;
  SessionLevels sessions;
  // Those that have no row.
  ConnectionLevels connections_without_row;
  SessionLevels sessions_without_row;
  std::uint32_t silent_connections_without_row = 0;
  std::uint32_t silent_sessions_without_row = 0;
  StallLevels stalls;
};

/// What rows of connections and sessions have besides their statistics.
struct Subject {
  std::string_view id;  ///< names it among the subjects of its table, living or gone
  std::string_view peer;
  std::string_view key;  ///< name of the key that the peer has proved
  Nanoseconds age{0};
  Nanoseconds blocked_for{0};
  Nanoseconds silent_for{0};  ///< while a sign of life was due
};
struct PoolName {
  std::string_view pool;
};
struct ServedSessionLevels {
  std::uint32_t calls = 0;
  std::uint32_t window = 0;
  Nanoseconds since_last_heard{0};
  bool is_leaving = false;
};

enum class Table : std::uint8_t { engine, pool, connection, session, served_session };
inline constexpr std::size_t kTables = 5;

/// The columns of a table, in the order in which the fill_…_row() functions write them.
struct TableColumns {
  const char* name;
  std::span<const Column> columns;
  std::size_t row_bytes;  ///< including the RowHeader
};
const TableColumns& table_columns(Table table) noexcept;

/// The longest row, in words.
inline constexpr std::size_t kRowWordsMax = 128;
using RowWords = std::array<std::uint64_t, kRowWordsMax>;
// Write the columns of a row; return how many words.
std::size_t fill_engine_row(RowWords& row, const EngineLevels& levels, const EngineStats& stats,
                            const RpcStats& calls) noexcept;
std::size_t fill_pool_row(RowWords& row, std::string_view pool, const MemoryStats& stats) noexcept;
std::size_t fill_connection_row(RowWords& row, const Subject& subject,
                                const ConnectionSnapshot& snapshot) noexcept;
std::size_t fill_session_row(RowWords& row, const Subject& subject,
                             const SessionSnapshot& snapshot) noexcept;
std::size_t fill_served_session_row(RowWords& row, const Subject& subject,
                                    const ServedSessionLevels& levels) noexcept;

/// How many members of each statistics record have a column; for the test that none is missing.
struct MembersShown {
  std::size_t engine, authentication, calls, memory, connection, connection_snapshot, session;
};
MembersShown members_shown() noexcept;

}  // namespace spinwire::observe
