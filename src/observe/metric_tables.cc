#include "observe/metric_tables.h"

#include <algorithm>
#include <type_traits>

#include "observe/page_layout.h"

namespace spinwire::observe {
namespace {

// clang-format off
constexpr ColumnOf<EngineLevels> kLevels[] = {
    gauge<&EngineLevels::written_at>("spinwire_written_timestamp_seconds", "Unix time of the last control step that wrote"),
    gauge<&EngineLevels::written_uptime>("spinwire_written_monotonic_seconds", "time of that step by CLOCK_MONOTONIC"),
    counter<&EngineLevels::writes>("spinwire_writes_total", "control steps that wrote"),
    gauge<&EngineLevels::keepalive_interval>("spinwire_keepalive_interval_seconds", "setting connections.keepalive_interval"),
    gauge<&EngineLevels::peer_timeout>("spinwire_peer_timeout_seconds", "setting connections.peer_timeout"),
    gauge<&EngineLevels::draining>("spinwire_draining", "1 while Engine::drain() is under way"),
    gauge<&EngineLevels::silent_connections_without_row>("spinwire_connections_without_row_silent", "connections without a row whose peers have missed signs of life"),
    gauge<&EngineLevels::silent_sessions_without_row>("spinwire_rpc_sessions_without_row_silent", "sessions without a row whose servers have missed signs of life"),
};

constexpr ColumnOf<ConnectionLevels> kConnectionLevels[] = {
    gauge<&ConnectionLevels::not_ready>("spinwire_connections_not_ready", "connections in another state than ready"),
    gauge<&ConnectionLevels::send_queue_full>("spinwire_connections_send_queue_full", "connections whose send queue is full"),
    gauge<&ConnectionLevels::lacking_operations>("spinwire_connections_lacking_operations", "connections that lack a free operation of the engine"),
    gauge<&ConnectionLevels::lacking_credit>("spinwire_connections_lacking_credit", "connections whose peers grant no credit"),
    gauge<&ConnectionLevels::lacking_windows>("spinwire_connections_lacking_windows", "connections that can offer no long message now"),
};
constexpr ColumnOf<ConnectionLevels> kConnectionsWithoutRow[] = {
    gauge<&ConnectionLevels::not_ready>("spinwire_connections_without_row_not_ready", "connections without a row in another state than ready"),
    gauge<&ConnectionLevels::send_queue_full>("spinwire_connections_without_row_send_queue_full", "connections without a row whose send queue is full"),
    gauge<&ConnectionLevels::lacking_operations>("spinwire_connections_without_row_lacking_operations", "connections without a row that lack a free operation of the engine"),
    gauge<&ConnectionLevels::lacking_credit>("spinwire_connections_without_row_lacking_credit", "connections without a row whose peers grant no credit"),
    gauge<&ConnectionLevels::lacking_windows>("spinwire_connections_without_row_lacking_windows", "connections without a row that can offer no long message now"),
};

constexpr ColumnOf<SessionLevels> kSessionLevels[] = {
    gauge<&SessionLevels::not_ready>("spinwire_rpc_sessions_not_ready", "sessions in another state than ready"),
    gauge<&SessionLevels::window_full>("spinwire_rpc_sessions_window_full", "sessions whose window is full"),
    gauge<&SessionLevels::server_window_full>("spinwire_rpc_sessions_server_window_full", "sessions whose servers have receives for no further call"),
    gauge<&SessionLevels::congestion_window_full>("spinwire_rpc_sessions_congestion_window_full", "sessions whose congestion window is full"),
    gauge<&SessionLevels::lacking_receives>("spinwire_rpc_sessions_lacking_receives", "sessions that lack receives of the engine for replies"),
    gauge<&SessionLevels::send_queue_full>("spinwire_rpc_sessions_send_queue_full", "sessions that the datagram send queue has no room for"),
    gauge<&SessionLevels::connection_blocked>("spinwire_rpc_sessions_connection_blocked", "sessions whose connection is blocked or not ready"),
};

constexpr ColumnOf<SessionLevels> kSessionsWithoutRow[] = {
    gauge<&SessionLevels::not_ready>("spinwire_rpc_sessions_without_row_not_ready", "sessions without a row in another state than ready"),
    gauge<&SessionLevels::window_full>("spinwire_rpc_sessions_without_row_window_full", "sessions without a row whose window is full"),
    gauge<&SessionLevels::server_window_full>("spinwire_rpc_sessions_without_row_server_window_full", "sessions without a row whose servers have receives for no further call"),
    gauge<&SessionLevels::congestion_window_full>("spinwire_rpc_sessions_without_row_congestion_window_full", "sessions without a row whose congestion window is full"),
    gauge<&SessionLevels::lacking_receives>("spinwire_rpc_sessions_without_row_lacking_receives", "sessions without a row that lack receives of the engine for replies"),
    gauge<&SessionLevels::send_queue_full>("spinwire_rpc_sessions_without_row_send_queue_full", "sessions without a row that the datagram send queue has no room for"),
    gauge<&SessionLevels::connection_blocked>("spinwire_rpc_sessions_without_row_connection_blocked", "sessions without a row whose connection is blocked or not ready"),
};

// A text of what ran, such as "method 7 of served session 3-1".
constexpr std::uint32_t kRanBytes = 64;
constexpr ColumnOf<StallLevels> kStalls[] = {
    counter<&StallLevels::slow_polls>("spinwire_slow_polls_total", "polls that took longer than observability.longest_poll, with the pause behind them where both are not told apart"),
    counter<&StallLevels::slow_callbacks>("spinwire_slow_callbacks_total", "polls whose callbacks of one subject took longer than observability.longest_callback"),
    counter<&StallLevels::pauses>("spinwire_pauses_total", "times without a poll that were longer than observability.longest_pause"),
    gauge<&StallLevels::longest_poll>("spinwire_longest_poll_seconds", "longest poll with callbacks, with the pause behind it where both are not told apart"),
    text<&StallLevels::longest_poll_ran>(MetricKind::state, "spinwire_longest_poll_ran", "whose callbacks it ran", kRanBytes),
    gauge<&StallLevels::longest_callback>("spinwire_longest_callback_seconds", "longest callbacks of one subject in a watched poll, or work of a control step"),
    text<&StallLevels::longest_callback_ran>(MetricKind::state, "spinwire_longest_callback_ran", "whose callbacks they were", kRanBytes),
    gauge<&StallLevels::longest_pause>("spinwire_longest_pause_seconds", "longest time without a poll"),
};

constexpr ColumnOf<EngineStats> kEngine[] = {
    counter<&EngineStats::polls>("spinwire_polls_total", "completed poll() calls"),
    counter<&EngineStats::control_steps>("spinwire_control_steps_total", "control steps"),
    counter<&EngineStats::sleeps>("spinwire_sleeps_total", "times that wait() slept"),
    counter<&EngineStats::completions>("spinwire_completions_total", "drained completions"),
    counter<&EngineStats::stale_completions>("spinwire_stale_completions_total", "completions of operations that had ended"),
    counter<&EngineStats::messages_sent>("spinwire_messages_sent_total", "messages sent"),
    counter<&EngineStats::messages_received>("spinwire_messages_received_total", "messages received"),
    counter<&EngineStats::unkept_messages>("spinwire_unkept_messages_total", "Message::take() without a block of the rendezvous pool"),
    counter<&EngineStats::bad_messages>("spinwire_bad_messages_total", "violations of the protocol by peers"),
    counter<&EngineStats::doorbells>("spinwire_doorbells_total", "posts of send work requests"),
    counter<&EngineStats::receives_posted>("spinwire_receives_posted_total", "receives given to the device"),
    counter<&EngineStats::accepted>("spinwire_connections_accepted_total", "inbound connections that became ready"),
    counter<&EngineStats::connected>("spinwire_connections_connected_total", "outbound connections that became ready"),
    counter<&EngineStats::handshakes_refused>("spinwire_handshakes_refused_total", "inbound handshakes that failed"),
    counter<&EngineStats::peers_lost>("spinwire_peers_lost_total", "connections that ended because their peer was lost"),
    counter<&EngineStats::closed>("spinwire_connections_closed_total", "connections that ended"),
    gauge<&EngineStats::connections>("spinwire_connections", "connections in any state"),
    gauge<&EngineStats::operations>("spinwire_operations", "operations in flight"),
    gauge<&EngineStats::receives>("spinwire_receives", "posted receives"),
    gauge<&EngineStats::reserved_receives>("spinwire_reserved_receives", "receives reserved for peers"),
    gauge<&EngineStats::windows_free>("spinwire_windows_free", "unused memory windows"),
    gauge<&EngineStats::own_domains>("spinwire_own_domains", "connections' own protection domains"),
    gauge<&EngineStats::registrations>("spinwire_registrations", "registrations of memory besides the pools"),
};

constexpr ColumnOf<AuthenticationStats> kAuthentication[] = {
    counter<&AuthenticationStats::authenticated>("spinwire_handshakes_authenticated_total", "handshakes whose peer has proved a key"),
    counter<&AuthenticationStats::no_proof>("spinwire_handshakes_no_proof_total", "inbound handshakes without a proof"),
    counter<&AuthenticationStats::unknown_key>("spinwire_handshakes_unknown_key_total", "inbound proofs of an unknown key"),
    counter<&AuthenticationStats::wrong_proof>("spinwire_handshakes_wrong_proof_total", "inbound proofs that are wrong"),
    counter<&AuthenticationStats::unconfirmed_proof>("spinwire_handshakes_unconfirmed_proof_total", "inbound proofs that may have been recorded"),
    counter<&AuthenticationStats::unproven_servers>("spinwire_handshakes_unproven_servers_total", "servers that did not prove the key"),
    counter<&AuthenticationStats::altered_frames>("spinwire_handshakes_altered_frames_total", "altered frames behind a proof"),
};

constexpr ColumnOf<RpcStats> kCalls[] = {
    counter<&RpcStats::calls>("spinwire_rpc_calls_total", "accepted calls of sessions opened here"),
    counter<&RpcStats::replies>("spinwire_rpc_replies_total", "calls that ended by a reply or a refusal"),
    counter<&RpcStats::retransmitted_requests>("spinwire_rpc_retransmitted_requests_total", "requests sent again"),
    counter<&RpcStats::served>("spinwire_rpc_served_total", "handlers that ran"),
    counter<&RpcStats::retransmitted_replies>("spinwire_rpc_retransmitted_replies_total", "replies sent again"),
    counter<&RpcStats::dropped_replies>("spinwire_rpc_dropped_replies_total", "kept replies that were dropped"),
    counter<&RpcStats::duplicates>("spinwire_rpc_duplicates_total", "requests dropped as duplicates"),
    counter<&RpcStats::late_replies>("spinwire_rpc_late_replies_total", "replies dropped as late"),
    counter<&RpcStats::bad_datagrams>("spinwire_rpc_bad_datagrams_total", "malformed or unknown datagrams"),
    counter<&RpcStats::unkept_datagrams>("spinwire_rpc_unkept_datagrams_total", "long datagrams without a block of the rendezvous pool"),
    counter<&RpcStats::cwnd_reductions>("spinwire_rpc_cwnd_reductions_total", "reductions of congestion windows"),
    counter<&RpcStats::send_queue_full>("spinwire_rpc_send_queue_full_total", "attempts to send into a full send queue"),
    counter<&RpcStats::long_calls>("spinwire_rpc_long_calls_total", "calls over connections"),
    counter<&RpcStats::bad_long_calls>("spinwire_rpc_bad_long_calls_total", "violations of the protocol on connections for calls"),
    gauge<&RpcStats::sessions>("spinwire_rpc_sessions", "sessions opened here"),
    gauge<&RpcStats::served_sessions>("spinwire_rpc_served_sessions", "sessions opened by peers"),
};

constexpr ColumnOf<PoolName> kPoolName[] = {
    text<&PoolName::pool>(MetricKind::label, "pool", "name of the pool", 16),
};
constexpr ColumnOf<MemoryStats> kMemory[] = {
    gauge<&MemoryStats::pool_bytes>("spinwire_pool_bytes", "size of the pool", "bytes"),
    gauge<&MemoryStats::free_bytes>("spinwire_pool_free_bytes", "memory in chunks without a size class", "bytes"),
    gauge<&MemoryStats::blocks_used>("spinwire_pool_blocks_used", "blocks in use"),
    counter<&MemoryStats::allocations>("spinwire_pool_allocations_total", "allocations"),
    counter<&MemoryStats::refusals>("spinwire_pool_refusals_total", "allocations that answered no_buffer"),
};

// In the file, labels have the name of the label, and rows of different tables the same ones.
constexpr std::uint32_t kIdBytes = 24;
constexpr std::uint32_t kPeerBytes = 72;
constexpr std::uint32_t kKeyBytes = 32;
constexpr std::uint32_t kStateBytes = 16;

constexpr ColumnOf<Subject> kConnectionSubject[] = {
    text<&Subject::id>(MetricKind::label, "connection", "names the connection in its engine", kIdBytes),
    text<&Subject::peer>(MetricKind::label, "peer", "address of the peer", kPeerBytes),
    text<&Subject::key>(MetricKind::label, "key", "name of the key that the peer has proved", kKeyBytes),
    gauge<&Subject::age>("spinwire_connection_age_seconds", "time since the connection was first seen"),
    gauge<&Subject::blocked_for>("spinwire_connection_blocked_seconds", "time since the cause that blocks it was first seen; 0: it is not blocked"),
    gauge<&Subject::silent_for>("spinwire_connection_silent_seconds", "time for which the peer gave no sign of life that was due"),
};
constexpr ColumnOf<ConnectionSnapshot> kConnectionSnapshot[] = {
    text<&ConnectionSnapshot::state>(MetricKind::state, "spinwire_connection_state", "state of the connection", kStateBytes),
    text<&ConnectionSnapshot::blocked_by>(MetricKind::state, "spinwire_connection_blocked_by", "why the next send would not be accepted", kStateBytes),
    gauge<&ConnectionSnapshot::since_last_heard>("spinwire_connection_last_heard_seconds", "time since the peer was heard"),
    gauge<&ConnectionSnapshot::messages>("spinwire_connection_outstanding_messages", "messages that have not ended"),
    gauge<&ConnectionSnapshot::writes>("spinwire_connection_outstanding_writes", "WRITEs that have not ended"),
    gauge<&ConnectionSnapshot::reads>("spinwire_connection_outstanding_reads", "READs that have not ended"),
    gauge<&ConnectionSnapshot::atomics>("spinwire_connection_outstanding_atomics", "atomics that have not ended"),
    gauge<&ConnectionSnapshot::control>("spinwire_connection_outstanding_control", "the connection's own requests"),
    gauge<&ConnectionSnapshot::receives>("spinwire_connection_receives", "posted receives of a raw connection"),
    gauge<&ConnectionSnapshot::leased_out>("spinwire_connection_leases_granted", "leases granted to the peer"),
    gauge<&ConnectionSnapshot::leased_out_bytes>("spinwire_connection_leases_granted_bytes", "memory leased to the peer", "bytes"),
    gauge<&ConnectionSnapshot::leases_held>("spinwire_connection_leases_held", "leases of the peer's memory"),
    gauge<&ConnectionSnapshot::leases_held_bytes>("spinwire_connection_leases_held_bytes", "memory leased from the peer", "bytes"),
};
constexpr ColumnOf<ConnectionStats> kConnection[] = {
    counter<&ConnectionStats::messages_sent>("spinwire_connection_messages_sent_total", "messages sent"),
    counter<&ConnectionStats::messages_received>("spinwire_connection_messages_received_total", "messages received"),
    counter<&ConnectionStats::bytes_sent>("spinwire_connection_sent_bytes_total", "bytes of messages sent", "bytes"),
    counter<&ConnectionStats::bytes_received>("spinwire_connection_received_bytes_total", "bytes of messages received", "bytes"),
    counter<&ConnectionStats::writes>("spinwire_connection_writes_total", "WRITEs"),
    counter<&ConnectionStats::reads>("spinwire_connection_reads_total", "READs"),
    counter<&ConnectionStats::bytes_written>("spinwire_connection_written_bytes_total", "bytes of WRITEs", "bytes"),
    counter<&ConnectionStats::bytes_read>("spinwire_connection_read_bytes_total", "bytes of READs", "bytes"),
    counter<&ConnectionStats::atomics>("spinwire_connection_atomics_total", "atomics"),
    gauge<&ConnectionStats::outstanding>("spinwire_connection_outstanding", "operations that have not ended"),
    gauge<&ConnectionStats::send_credits>("spinwire_connection_send_credits", "messages that may be sent now"),
    gauge<&ConnectionStats::granted_credits>("spinwire_connection_granted_credits", "messages that the peer may send now"),
};

constexpr ColumnOf<Subject> kSessionSubject[] = {
    text<&Subject::id>(MetricKind::label, "session", "names the session in its engine", kIdBytes),
    text<&Subject::peer>(MetricKind::label, "peer", "address of the server", kPeerBytes),
    text<&Subject::key>(MetricKind::label, "key", "name of the key that the server has proved", kKeyBytes),
    gauge<&Subject::age>("spinwire_session_age_seconds", "time since the session was first seen"),
    gauge<&Subject::blocked_for>("spinwire_session_blocked_seconds", "time since the cause that blocks it was first seen; 0: it is not blocked"),
    gauge<&Subject::silent_for>("spinwire_session_silent_seconds", "time for which the server answered no ping; 0 if its connection checks that"),
};
constexpr ColumnOf<SessionSnapshot> kSession[] = {
    text<&SessionSnapshot::state>(MetricKind::state, "spinwire_session_state", "state of the session", kStateBytes),
    text<&SessionSnapshot::blocked_by>(MetricKind::state, "spinwire_session_blocked_by", "why the next call would not be sent at once", kStateBytes),
    gauge<&SessionSnapshot::backlog_full>("spinwire_session_backlog_full", "1: a call that has to wait answers would_block"),
    gauge<&SessionSnapshot::since_last_heard>("spinwire_session_last_heard_seconds", "time since the server was heard"),
    counter<&SessionSnapshot::calls>("spinwire_session_calls_total", "accepted calls, modulo 2^32"),
    gauge<&SessionSnapshot::in_flight>("spinwire_session_in_flight", "inline calls under way"),
    gauge<&SessionSnapshot::long_calls>("spinwire_session_long_calls", "calls under way over the session's connection"),
    gauge<&SessionSnapshot::backlog>("spinwire_session_backlog", "calls that wait"),
    gauge<&SessionSnapshot::window>("spinwire_session_window", "window of calls"),
    gauge<&SessionSnapshot::server_window>("spinwire_session_server_window", "calls for which the server has receives"),
    gauge<&SessionSnapshot::congestion_window>("spinwire_session_congestion_window", "calls that congestion control allows; 0: it is off"),
    counter<&SessionSnapshot::retransmissions>("spinwire_session_retransmissions_total", "requests sent again, modulo 2^32"),
    gauge<&SessionSnapshot::srtt>("spinwire_session_srtt_seconds", "smoothed round trip"),
    gauge<&SessionSnapshot::rto>("spinwire_session_rto_seconds", "retransmission time-out"),
};

constexpr ColumnOf<Subject> kServedSubject[] = {
    text<&Subject::id>(MetricKind::label, "session", "names the session in its engine", kIdBytes),
    text<&Subject::peer>(MetricKind::label, "peer", "address of the client", kPeerBytes),
    text<&Subject::key>(MetricKind::label, "key", "name of the key that the client has proved", kKeyBytes),
    gauge<&Subject::age>("spinwire_served_session_age_seconds", "time since the session was first seen"),
};
constexpr ColumnOf<ServedSessionLevels> kServed[] = {
    gauge<&ServedSessionLevels::calls>("spinwire_served_session_calls", "calls whose handlers run or have deferred them"),
    gauge<&ServedSessionLevels::window>("spinwire_served_session_window", "calls that the client may have under way"),
    gauge<&ServedSessionLevels::since_last_heard>("spinwire_served_session_last_heard_seconds", "time since the client was heard"),
    gauge<&ServedSessionLevels::is_leaving>("spinwire_served_session_leaving", "1: the session ends in order"),
};
// clang-format on

/// The columns of a table, from those of its records.
template <typename... Parts>
constexpr auto join(const Parts&... parts) noexcept {
  std::array<Column, (std::extent_v<Parts> + ...)> all{};
  std::size_t count = 0;
  const auto append = [&](const auto& part) {
    for (const auto& each : part) all[count++] = each;
  };
  (append(parts), ...);
  return all;
}
constexpr auto kEngineColumns =
    join(kLevels, kConnectionLevels, kSessionLevels, kConnectionsWithoutRow, kSessionsWithoutRow,
         kStalls, kEngine, kAuthentication, kCalls);
constexpr auto kPoolColumns = join(kPoolName, kMemory);
constexpr auto kConnectionColumns = join(kConnectionSubject, kConnectionSnapshot, kConnection);
constexpr auto kSessionColumns = join(kSessionSubject, kSession);
constexpr auto kServedColumns = join(kServedSubject, kServed);

constexpr TableColumns describe(const char* name, std::span<const Column> columns) noexcept {
  TableColumns table{name, columns, sizeof(RowHeader)};
  for (const Column& column : columns) table.row_bytes += column.bytes;
  return table;
}
constexpr std::array<TableColumns, kTables> kAllTables = {
    describe("engine", kEngineColumns), describe("pool", kPoolColumns),
    describe("connection", kConnectionColumns), describe("session", kSessionColumns),
    describe("served_session", kServedColumns)};
static_assert(std::all_of(kAllTables.begin(), kAllTables.end(), [](const TableColumns& table) {
  return table.row_bytes <= sizeof(RowHeader) + sizeof(RowWords);
}));

std::size_t count(const RowWords& row, const std::uint64_t* end) noexcept {
  return static_cast<std::size_t>(end - row.data());
}

}  // namespace

const TableColumns& table_columns(Table table) noexcept {
  return kAllTables[static_cast<std::size_t>(table)];
}

std::size_t fill_engine_row(RowWords& row, const EngineLevels& levels, const EngineStats& stats,
                            const RpcStats& calls) noexcept {
  std::uint64_t* at = fill(row.data(), kLevels, levels);
  at = fill(at, kConnectionLevels, levels.connections);
  at = fill(at, kSessionLevels, levels.sessions);
  at = fill(at, kConnectionsWithoutRow, levels.connections_without_row);
  at = fill(at, kSessionsWithoutRow, levels.sessions_without_row);
  at = fill(at, kStalls, levels.stalls);
  at = fill(at, kEngine, stats);
  at = fill(at, kAuthentication, stats.authentication);
  return count(row, fill(at, kCalls, calls));
}

std::size_t fill_pool_row(RowWords& row, std::string_view pool, const MemoryStats& stats) noexcept {
  return count(row, fill(fill(row.data(), kPoolName, PoolName{pool}), kMemory, stats));
}

std::size_t fill_connection_row(RowWords& row, const Subject& subject,
                                const ConnectionSnapshot& snapshot) noexcept {
  std::uint64_t* at = fill(row.data(), kConnectionSubject, subject);
  at = fill(at, kConnectionSnapshot, snapshot);
  return count(row, fill(at, kConnection, snapshot.stats));
}

std::size_t fill_session_row(RowWords& row, const Subject& subject,
                             const SessionSnapshot& snapshot) noexcept {
  return count(row, fill(fill(row.data(), kSessionSubject, subject), kSession, snapshot));
}

std::size_t fill_served_session_row(RowWords& row, const Subject& subject,
                                    const ServedSessionLevels& levels) noexcept {
  return count(row, fill(fill(row.data(), kServedSubject, subject), kServed, levels));
}

MembersShown members_shown() noexcept {
  return {std::size(kEngine), std::size(kAuthentication), std::size(kCalls),
          std::size(kMemory), std::size(kConnection),     std::size(kConnectionSnapshot),
          std::size(kSession)};
}

}  // namespace spinwire::observe
