// Remote calls of one engine: the state that its sessions share, and the functions between files of
// rpc/. Hot fields first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "agent/engine_context.h"
#include "base/intrusive_list.h"
#include "base/random.h"
#include "base/timer_wheel.h"
#include "control/owners.h"
#include "rpc/copy_blocks.h"
#include "rpc/kept_replies.h"
#include "rpc/retransmission_queue.h"
#include "rpc/session.h"
#include "rpc/session_dialogues.h"
#include "rpc/session_table.h"
#include "rpc/transport/datagram_port.h"
#include "spinwire/rpc.h"
#include "wire/handshake.h"
#include "wire/rpc_datagram.h"

namespace spinwire::rpc {

/// A session's name holds the generation of its record modulo these. That of a server's session
/// must fit into a CallRef.
inline constexpr std::uint32_t kClientGenerations = ~0u >> wire::RpcName::kIndexBits;
inline constexpr std::uint32_t kServerGenerations =
    (1u << (CallRef::kSessionBits - wire::RpcName::kIndexBits)) - 1;
/// The name of a session; never 0, which is a free record.
constexpr std::uint32_t make_name(std::uint32_t index, std::uint32_t generation,
                                  std::uint32_t generations) noexcept {
  return wire::RpcName::make(index, generation % generations + 1);
}

/// Timers of sessions, by Timer::kind; the kinds of agents and handshakes are lower.
inline constexpr std::uint16_t kClientTimer = 32;
inline constexpr std::uint16_t kServerTimer = 33;
inline constexpr std::uint16_t kRetransmissionTimer =
    34;  ///< one for the engine, see retransmission.cc

/// This engine's address for the peers of its sessions.
struct LocalAddress {
  std::uint32_t qp_num = 0;  ///< 0: no datagrams
  std::uint32_t qkey = 0;
  std::uint32_t mtu = 0;
};

/// In ticks.
struct Timeouts {
  std::uint64_t idle = 0;  ///< then a server takes back its reservations
  std::uint64_t keepalive = 0;
  std::uint64_t peer = 0;
  std::uint64_t close = 0;
  std::uint64_t call = 0;
};

/// The records of more sessions do not stay in the caches, and are prefetched.
inline constexpr std::uint32_t kManySessions = 128;

/// Rpc::oldest_arrival of what has ended a sleep.
inline constexpr std::uint64_t kUnknownArrival = ~std::uint64_t{0};

/// What answers that were refused for want of memory wait for; see room_for_calls.h.
struct RoomForReplies {
  std::size_t block_bytes = 0;  ///< the shortest block that one of them needs; 0: none waits
  /// The shortest block of each power of two that one of them needs; 0: none. A block of another
  /// size class may not serve it, though it is longer.
  std::array<std::size_t, 33> each_width{};
  ReplyWritableCallback on_writable;

  void wait_for_nothing() noexcept {
    block_bytes = 0;
    each_width = {};
  }
};

struct Rpc {
  Rpc(agent::EngineContext& ctx, control::ControlPort& control,
      control::ConnectionOwner& connections, EngineServices& engine);
  Rpc(const Rpc&) = delete;
  Rpc& operator=(const Rpc&) = delete;
  ~Rpc();

  agent::EngineContext& context;
  std::unique_ptr<DatagramPort> port;  ///< null: this engine has no datagrams
  std::vector<MethodHandler> handlers;
  std::uint32_t method_count = 0;  ///< handlers.size(), without a division
  SessionTable<ClientSession, ClientSlot> clients;
  SessionTable<ServerSession, ServerSlot> servers;
  /// Earliest arrival of this poll's datagrams: the poll's own tick unless the process was
  /// descheduled; kUnknownArrival after a sleep.
  std::uint64_t oldest_arrival = 0;
  std::uint64_t target_rtt = ~std::uint64_t{0};  ///< ticks; longer round trips are congestion
  std::uint64_t min_rto = 0;                     ///< ticks
  std::uint32_t reserved_receives = 0;           ///< for expected replies and requests
  std::uint32_t posted_receives = 0;             ///< reservations covered by posted receives
  std::uint32_t receive_budget = 0;              ///< receives that may be reserved
  std::uint32_t server_reserved_receives = 0;    ///< the part for served sessions
  bool has_many_sessions = false;                ///< at the last control step: see kManySessions
  // Work for the end of a poll; see finish_poll().
  bool may_have_deferred_work = false;  ///< set with each record that the lists here get
  /// Sessions whose backlog waits for receives or send entries.
  base::IntrusiveQueue<&ClientSession::next_blocked> blocked_sessions;
  /// Sessions with cancelled calls whose callbacks have not run.
  base::RoundQueue<&ClientSession::next_pending> pending_cancellations;
  /// Peers with datagrams that found no room; see unsent.h.
  base::IntrusiveQueue<&PeerAddress::next_waiting> waiting_peers;
  /// Connections with something to send: each has a turn in the next poll.
  base::RoundQueue<next_queued> connection_queue;
  /// Connections that could send nothing in their last turn: a few have one in each poll.
  base::IntrusiveList<blocked_links> blocked_connections;
  /// Sessions whose on_writable is due once they have room.
  base::IntrusiveQueue<&ClientSession::next_room_waiter> room_waiters;
  CurrentCall current_call;
  CopyBlocks copy_blocks;
  RpcStats stats;
  RetransmissionQueue retransmission_queue;
  base::Timer retransmission_timer;
  // Cold.
  std::array<CallSample, 16> samples;
  std::uint64_t calls_at_upkeep = 0;                       ///< made and served
  bool stays_awake = false;                                ///< see keep_awake()
  base::RoundQueue<next_due> due_completions;              ///< replies whose callbacks have to run
  bool has_aborted = false;                                ///< there are no callbacks any more
  base::IntrusiveList<request_links> connection_requests;  ///< of sessions that have none yet
  RoomForReplies room_for_replies;
  SessionDialogues dialogues;
  LocalAddress local;
  base::Random numbers;  ///< source of first call numbers
  PeerAddresses peer_addresses;
  SessionTombstones tombstones;
  ReplyReclaimer reply_reclaimer{*this};
  std::map<control::Source, SessionSource> sources;  ///< of the served sessions
  std::uint32_t never_used = 0;                      ///< served sessions in the lists of `sources`
  control::SourceShare share;                        ///< of the served sessions
  Timeouts timeouts;
};

/// The first call number of a session is random: names repeat after some thousand sessions, and an
/// old PendingCall must not match a call of another session.
inline std::uint32_t random_call_number(Rpc& r) noexcept {
  return static_cast<std::uint32_t>(r.numbers.next()) & ~(kWindowMax - 1);
}

/// Whether this engine uses datagrams.
inline bool uses_datagrams(const agent::EngineContext& ctx) noexcept {
  return ctx.config.rpc.transport != RpcTransport::connection && ctx.device->info().datagrams;
}
/// Opens the datagram port if the engine uses datagrams. `connections` owns the handshakes of the
/// sessions' connections. Errors: unsupported, limit, no_device, those of random_secret() and of
/// DatagramPort::open().
Result<std::unique_ptr<Rpc>> open(agent::EngineContext& ctx, control::ControlPort& control,
                                  control::ConnectionOwner& connections, EngineServices& engine);
/// Sets the callback of Engine::set_reply_writable_handler(). In room_for_calls.cc.
void set_reply_writable_handler(Rpc& r, const ReplyWritableCallback& handler) noexcept;
/// Sets the handler of a method. May throw.
void serve(Rpc& r, Method method, const MethodHandler& handler);
/// Opens a session. Errors: those of Engine::open_session().
Result<Session> open_session(Rpc& r, std::string_view address, const SessionOptions& options);
// For listeners: a peer opens a session, or connects for the calls of one. Errors are sent to it.
/// `ours` is for the client's application.
Result<control::AcceptedSession> on_open_session(Rpc& r, control::HandshakeId handshake,
                                                 const control::Address& from,
                                                 const wire::SessionEnd& client,
                                                 const PrivateData& ours);
/// Whether a method was ever served.
[[nodiscard]] inline bool serves(const Rpc& r) noexcept { return !r.handlers.empty(); }
JoinOutcome on_join_session(Rpc& r, control::HandshakeId handshake, const control::Address& from,
                            const wire::JoinSession& join);
/// Closes all sessions: calls end with `flushed`, each on_closed runs, and peers are notified.
void end(Rpc& r, const Goodbye& goodbye) noexcept;
/// The time-out of calls that give none, in ticks.
[[nodiscard]] inline std::uint64_t call_timeout(const Rpc& r) noexcept { return r.timeouts.call; }
/// Null: the device has no datagrams.
[[nodiscard]] inline DatagramPort* datagram_port(const Rpc& r) noexcept { return r.port.get(); }
/// Drops all of the application's callbacks, as if its process had died. Cold.
void abort(Rpc& r) noexcept;
/// Whether the next control step begins connections.
inline bool wants_connections(const Rpc& r) noexcept { return !r.connection_requests.empty(); }
/// When an idle session checks its peer next. Early by a quarter of the interval at most: the
/// checks of many sessions lie on a grid, so that they wake a sleeping engine together.
[[nodiscard]] inline std::uint64_t next_keepalive(const Rpc& r, std::uint64_t now) noexcept {
  return base::align_down(now + r.timeouts.keepalive, r.timeouts.keepalive / 4);
}
inline bool has_unsent(const Rpc& r) noexcept { return !r.waiting_peers.empty(); }
/// Whether a connection waits for its turn to send.
inline bool has_queued_connections(const Rpc& r) noexcept {
  return !r.connection_queue.empty() || !r.blocked_connections.empty();
}
/// Whether on_writable of a session, or of replies, is due once there is room.
inline bool awaits_room(const Rpc& r) noexcept {
  return !r.room_waiters.empty() || r.room_for_replies.block_bytes != 0;
}
/// Whether the end of the poll has work besides posting datagrams.
[[nodiscard]] inline bool has_deferred_work(const Rpc& r) noexcept {
  return !r.pending_cancellations.empty() || !r.blocked_sessions.empty() ||
         has_queued_connections(r) || has_unsent(r) || awaits_room(r) ||
         !r.due_completions.empty() || r.stays_awake;
}
/// Whether callbacks run in the next poll, whatever it finds.
[[nodiscard]] inline bool has_callbacks_due(const Rpc& r) noexcept {
  return !r.pending_cancellations.empty() || !r.due_completions.empty();
}
/// Whether something is awaited that no event announces: room for datagrams, receives, send
/// entries, credit of connections.
[[nodiscard]] inline bool awaits_unannounced(const Rpc& r) noexcept {
  return has_deferred_work(r) || wants_connections(r) || (r.port != nullptr && r.port->is_short());
}
/// Runs the callbacks of cancelled calls and sends calls that waited for room. Returns whether work
/// is left for the next poll.
[[gnu::cold]] bool run_deferred_work(Rpc& r) noexcept;
/// Makes run_deferred_work() answer from now on that work is left.
inline void keep_awake(Rpc& r) noexcept { r.stays_awake = r.may_have_deferred_work = true; }
/// Posts the datagrams sent since the last flush. Hot; the engine must use datagrams.
inline void post_datagrams(Rpc& r) noexcept { r.port->flush(); }
inline void flush(Rpc& r) noexcept {
  if (r.port != nullptr) post_datagrams(r);
}
/// Sends deferred calls while there is room. Runs no callback.
void post_connection_queue(Rpc& r) noexcept;
/// Posts what calls have deferred to the end of the poll. Runs no callback.
inline void post_deferred_calls(Rpc& r) noexcept {
  if (!r.connection_queue.empty()) [[unlikely]]
    post_connection_queue(r);
  flush(r);
}
/// The beginning of a poll; see Rpc::oldest_arrival. Hot.
inline void begin_poll(Rpc& r, std::uint64_t oldest_arrival) noexcept {
  r.oldest_arrival = oldest_arrival;
}
/// The end of a poll, before flush(). Returns like run_deferred_work(). Hot.
inline bool finish_poll(Rpc& r) noexcept {
  return r.may_have_deferred_work && run_deferred_work(r);
}
/// Posts receives for all reservations and one more, within the budget. Cold, because each time at
/// least doubles the posted receives.
void post_reserved_receives(Rpc& r) noexcept;
/// The sessions' part of the control step.
void upkeep(Rpc& r) noexcept;
/// The link of a local port has gone down: sessions that can go on through another port are lost at
/// once. In session_failover.cc.
void on_port_down(Rpc& r, std::uint8_t port) noexcept;
inline bool is_session_timer(const base::Timer& timer) noexcept {
  return timer.kind >= kClientTimer && timer.kind <= kRetransmissionTimer;
}
void on_timer(Rpc& r, base::Timer& timer) noexcept;
/// Number of the queue pair of datagrams; 0: none.
inline std::uint32_t datagram_qp_num(const Rpc& r) noexcept { return r.local.qp_num; }
[[nodiscard]] Result<void> audit(Rpc& r);
[[nodiscard]] RpcStats stats(const Rpc& r) noexcept;

/// Our end of a session, for the peer. Without datagrams it contains no address.
wire::SessionEnd local_session_end(const Rpc& r, std::uint32_t name, std::uint32_t window,
                                   std::uint32_t first, bool datagrams = true) noexcept;

/// A block of the send pool; null if the pool is empty.
[[gnu::cold, gnu::noinline]] Block* allocate_to_send(Rpc& r, std::size_t size) noexcept;
/// The longest datagram between this engine and an end of a session, in bytes.
std::uint32_t longest_datagram(const Rpc& r, const wire::SessionEnd& peer,
                               const PeerAddress& address) noexcept;

/// Releases the memory that is kept for later calls. Returns false if there was none to copy to.
inline bool release_spares(Rpc& r) noexcept {
  if (r.port != nullptr) r.port->release_long_spare();
  return r.copy_blocks.release_all();
}
/// An engine without sessions keeps none.
inline void release_spares_without_sessions(Rpc& r) noexcept {
  if (r.clients.size() + r.servers.size() == 0) (void)release_spares(r);
}
/// Copies bytes into a block of the send pool; null if the pool is empty.
Block* copy_to_send_block(Rpc& r, const std::byte* data, std::size_t size) noexcept;
/// Sends header and payload. Returns false, and sends nothing, if there is no room now.
bool send(Rpc& r, const verbs::DatagramAddress& to, const wire::RpcHeader& header,
          const Payload& payload) noexcept;
/// Sends the peer a datagram about the session itself, if the session uses datagrams.
template <typename Session>
void send_session_datagram(Rpc& r, const Session& s, wire::RpcKind kind,
                           std::uint32_t number = 0) noexcept {
  if (s.transport == Transport::datagram)
    (void)send(r, s.peer_address->destination,
               wire::session_header(s.peer_session, number, kind, wire::session_proof(s.token)),
               {});
}

}  // namespace spinwire::rpc
