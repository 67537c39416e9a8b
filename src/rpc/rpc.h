// Remote calls of one engine: what its sessions share, and the functions between files of rpc/. Hot
// fields first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/engine_context.h"
#include "base/intrusive_list.h"
#include "base/random.h"
#include "base/timer_wheel.h"
#include "control/owners.h"
#include "rpc/retransmission_queue.h"
#include "rpc/session.h"
#include "rpc/session_dialogues.h"
#include "rpc/session_table.h"
#include "rpc/transport/datagram_port.h"
#include "spinwire/rpc.h"
#include "wire/handshake.h"
#include "wire/rpc_datagram.h"

namespace spinwire::rpc {

/// A bit of PendingCall's session name: the call came over a connection. Session names do not have
/// it.
inline constexpr std::uint32_t kConnectionCall = 0x80000000;

/// The timers of sessions, told apart by Timer::kind; those of agents and handshakes are lower.
inline constexpr std::uint16_t kClientTimer = 32;
inline constexpr std::uint16_t kServerTimer = 33;
inline constexpr std::uint16_t kRetransmissionTimer =
    34;  ///< one for the engine, see retransmission.cc

/// How this engine names itself to the peers of its sessions.
struct LocalAddress {
  std::uint32_t qp_num = 0;  ///< 0: no datagrams
  std::uint32_t qkey = 0;
  std::uint32_t mtu = 0;
};

struct Rpc {
  Rpc(agent::EngineContext& s, control::ControlPort& control, control::ConnectionOwner& connections,
      Host& host);
  Rpc(const Rpc&) = delete;
  Rpc& operator=(const Rpc&) = delete;
  ~Rpc();

  agent::EngineContext& context;
  std::unique_ptr<DatagramPort> port;  ///< null: this engine has no datagrams
  std::vector<MethodHandler> handlers;
  std::uint32_t method_count = 0;  ///< handlers.size(), without a division
  SessionTable<ClientSession, ClientSlot> clients;
  SessionTable<ServerSession, ServerSlot> servers;
  /// Tick since when the datagrams of this poll may have waited: the poll's own unless the process
  /// was descheduled.
  std::uint64_t oldest_arrival = 0;
  std::uint64_t target_rtt = ~std::uint64_t{0};  ///< ticks: a longer round trip is congestion
  std::uint64_t min_rto = 0;                     ///< ticks
  std::uint32_t reserved_receives = 0;           ///< for replies and requests that may come
  std::uint32_t posted_receives = 0;             ///< reservations that posted receives cover
  std::uint32_t receive_budget = 0;              ///< receives that may be reserved
  std::uint32_t server_reserved_receives = 0;    ///< of the reserved, for served sessions
  // What the end of a poll looks after, see finish_poll().
  /// Sessions whose backlog waits for receives or send entries.
  base::IntrusiveQueue<&ClientSession::next_blocked> blocked_sessions;
  /// Sessions with calls that the application has ended, and whose callbacks have not run.
  base::IntrusiveQueue<&ClientSession::next_pending> pending_cancellations;
  base::IntrusiveQueue<next_queued> connection_queue;  ///< connections with something to send
  CurrentCall current_call;
  RpcStats stats;
  RetransmissionQueue retransmission_queue;
  base::Timer retransmission_timer;
  // Cold.
  std::uint32_t connections_wanted = 0;  ///< sessions that want a connection for long calls
  SessionDialogues dialogues;
  LocalAddress local;
  base::Random numbers;  ///< source of first call numbers
  std::vector<std::unique_ptr<PeerAddress>> peer_addresses;
  std::unique_ptr<ForgottenSessions> forgotten;  ///< once there are any
  std::uint32_t next_forgotten = 0;              ///< the entry that upkeep() looks at next
  /// Served sessions in the order of their opening, until their client is known to have been heard.
  base::IntrusiveList<&ServerSession::unheard> unheard;
  control::SourceCounts sources;      ///< of the served sessions of other hosts
  std::uint32_t share_of_source = 0;  ///< served sessions that one of them may have
  // Ticks.
  std::uint64_t idle_timeout = 0;  ///< after which a server takes back its reservations
  std::uint64_t keepalive_interval = 0;
  std::uint64_t peer_timeout = 0;
  std::uint64_t close_timeout = 0;
  std::uint64_t call_timeout = 0;
};

/// The first number of a session's calls is random: names come again after some thousand sessions,
/// and an old PendingCall must not fit a call of another session.
inline std::uint32_t random_call_number(Rpc& r) noexcept {
  return static_cast<std::uint32_t>(r.numbers.next()) & ~(kWindowMax - 1);
}

/// Whether this engine uses datagrams.
inline bool uses_datagrams(const agent::EngineContext& s) noexcept {
  return s.config.rpc.transport != RpcTransport::connection && s.device->info().datagrams;
}
/// Opens the datagram port if the engine uses datagrams. `connections` owns the handshakes of the
/// sessions' connections. Errors: unsupported, limit, no_device, and those of DatagramPort::open().
Result<std::unique_ptr<Rpc>> open(agent::EngineContext& s, control::ControlPort& control,
                                  control::ConnectionOwner& connections, Host& host);
/// Sets the handler of a method. May throw.
void serve(Rpc& r, Method method, const MethodHandler& handler);
/// Closes all sessions: calls end with `flushed`, each on_closed runs, and peers are told.
void end(Rpc& r) noexcept;
/// Drops all of the application's callbacks, as if its process had died. Cold.
void abort(Rpc& r) noexcept;
/// Whether the end of the poll has anything to do beside posting datagrams.
[[nodiscard]] inline bool has_deferred_work(const Rpc& r) noexcept {
  return !r.pending_cancellations.empty() || !r.blocked_sessions.empty() ||
         !r.connection_queue.empty();
}
/// Runs the callbacks of cancelled calls and sends what waited for room. Returns whether the next
/// poll has to go on.
[[gnu::cold]] bool run_deferred_work(Rpc& r) noexcept;
/// Posts the datagrams that were sent since the last time.
void flush(Rpc& r) noexcept;
/// The end of a poll. Returns as run_deferred_work(). Hot.
inline bool finish_poll(Rpc& r) noexcept {
  const bool more = has_deferred_work(r) && run_deferred_work(r);
  flush(r);
  return more;
}
/// Posts receives for all reservations and one more, within the budget. Cold: the number of posted
/// receives at least doubles each time.
void post_reserved_receives(Rpc& r) noexcept;
/// A part of the control step.
void upkeep(Rpc& r) noexcept;
void on_timer(Rpc& r, base::Timer& timer) noexcept;
[[nodiscard]] Result<void> audit(Rpc& r);
[[nodiscard]] RpcStats stats(const Rpc& r) noexcept;

/// Our end of a session, for the peer. Without datagrams it tells no address.
wire::SessionEnd local_session_end(const Rpc& r, std::uint32_t name, std::uint32_t window,
                                   std::uint32_t first, bool datagrams = true) noexcept;

/// Copies bytes into a block of the send pool; null if the pool is empty.
Block* copy_to_send_block(Rpc& r, const std::byte* data, std::size_t size) noexcept;
/// Sends header and payload; false, and nothing sent, if the port is full.
bool send(Rpc& r, const verbs::DatagramAddress& to, const wire::RpcHeader& header,
          const Payload& payload) noexcept;

}  // namespace spinwire::rpc
