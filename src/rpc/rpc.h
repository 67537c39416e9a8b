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
  /// Served sessions in the order of their opening, until their client is known to have been heard.
  base::IntrusiveList<&ServerSession::unheard> unheard;
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

// In rpc.cc.
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

/// Our end of a session, for the peer.
wire::SessionEnd local_session_end(const Rpc& r, std::uint32_t name, std::uint32_t window,
                                   std::uint32_t first) noexcept;

// In transport/datagram_receive.cc.
/// Handles the completions of the port's queue pair, from the first up to one of another queue
/// pair. Returns where it stopped, and adds to the number of events. Hot.
const ibv_wc* process_completions(Rpc& r, const ibv_wc* wcs, const ibv_wc* end,
                                  std::uint32_t& events) noexcept;

// In client_session.cc.
/// Sends the server a datagram about the session itself, if datagrams are its transport.
void send_control(Rpc& r, const ClientSession& c, wire::RpcKind kind,
                  std::uint32_t number = 0) noexcept;
/// Makes the record of a session that is being opened; null if rpc.sessions are open. May throw.
ClientSession* make_client_session(Rpc& r, std::uint32_t window);
/// The first call number of a session that is being opened.
inline std::uint32_t first_call_number(const ClientSession& c) noexcept {
  return c.slots[0].number - c.window;
}
/// The server has answered: the session is ready, or will be when its connection is.
void set_peer(Rpc& r, ClientSession& c, const wire::SessionEnd& peer,
              PeerAddress* peer_address) noexcept;
void mark_ready(Rpc& r, ClientSession& c) noexcept;
/// Ends a session at once: its calls end with the status, or `flushed` if that is ok; then
/// on_closed runs.
void fail_session(Rpc& r, ClientSession& c, const Error& why) noexcept;
void fail_session(Rpc& r, ClientSession& c, Status status, const char* found) noexcept;
/// Ends a session that was closed in order: calls end with `flushed`, on_closed gets ok.
void close_session(Rpc& r, ClientSession& c) noexcept;
inline ClientSession* find_client(Rpc& r, std::uint32_t name) noexcept {
  ClientSession* const c = r.clients.find(wire::RpcName::index(name));
  return c != nullptr && c->name == name ? c : nullptr;
}
/// The value of a session's handle; it repeats after 2^32 uses of a record.
inline std::uint64_t id_of(const ClientSession& c) noexcept {
  return c.name | std::uint64_t{c.generation} << 32;
}
/// Has the session's timer fire at `tick` or before.
inline void schedule_check(Rpc& r, ClientSession& c, std::uint64_t tick) noexcept {
  if (!c.timer.scheduled() || c.timer.deadline > tick) [[unlikely]]
    r.context.timers.reschedule(c.timer, tick);
}
/// Sets send_window from the server's window and cwnd: 0 if calls cannot go out as datagrams now.
inline void update_send_window(ClientSession& c) noexcept {
  if (c.state != SessionState::ready || c.transport != Transport::datagram) {
    c.send_window = 0;
    return;
  }
  const std::uint32_t flow =
      c.congestion.max_cwnd == 0 ? c.server_window : std::max(1u, c.congestion.cwnd / kCwndPerCall);
  const std::uint32_t most = c.congestion.next_send != 0 ? 0 : flow;
  c.send_window = static_cast<std::uint16_t>(std::min<std::uint32_t>(c.server_window, most));
}
// In congestion.cc.
/// Adjusts cwnd after a round trip of `trip` ticks. Cold unless congested.
[[gnu::cold]] void adjust_cwnd(Rpc& r, ClientSession& c, std::uint64_t trip,
                               std::uint16_t held) noexcept;
/// A request or its reply got lost.
[[gnu::cold]] void on_loss(Rpc& r, ClientSession& c) noexcept;
/// How long the server had the request, ticks; a lower bound for kServerTimeMax.
[[nodiscard]] inline std::uint64_t server_time_ticks(const Rpc& r, std::uint16_t held) noexcept {
  return r.context.clock.ticks(Nanoseconds(std::int64_t{held} << kServerTimeShift));
}

// In retransmission.cc.
/// Makes room in the retransmission queue.
[[gnu::cold]] void grow_retransmission_queue(Rpc& r) noexcept;
/// A session without calls in flight sends one.
[[gnu::always_inline]] inline void queue_for_retransmission(Rpc& r, ClientSession& c,
                                                            std::uint64_t now) noexcept {
  if (r.retransmission_queue.full()) [[unlikely]]
    grow_retransmission_queue(r);
  c.retransmission_place = r.retransmission_queue.add(now, c.name);
  if (!r.retransmission_timer.scheduled()) [[unlikely]]
    r.context.timers.schedule(r.retransmission_timer, now + r.min_rto);
}
/// Has the session's timer check a call that is due before the retransmission timer.
[[gnu::cold, gnu::noinline]] void schedule_early_check(Rpc& r, ClientSession& c,
                                                       ClientSlot& call) noexcept;
/// Ends a call whose deadline passed, or sends it again after its RTO. Returns the tick of the next
/// check, or the end of time if the retransmission timer checks it in time. The session may be gone
/// afterwards.
std::uint64_t check_slot(Rpc& r, ClientSession& c, std::uint32_t slot, std::uint64_t now) noexcept;
void on_retransmission_timer(Rpc& r) noexcept;

// In client_session.cc.
/// A call as the application makes it. Passed by value, so that it stays in registers on the hot
/// path.
struct CallRequest {
  Method method;
  const std::byte* data;
  std::size_t size;
  Block* block;            ///< null: to be copied
  std::uint64_t now;       ///< tick
  std::uint64_t deadline;  ///< tick
};
Status close(Rpc& r, ClientSession& c) noexcept;
void on_server_control(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept;
void on_client_timer(Rpc& r, ClientSession& c) noexcept;
/// Ends the silent sessions with an engine that another one has replaced.
void fail_silent_sessions(Rpc& r, std::uint64_t incarnation) noexcept;

// In backlog.cc.
inline BackloggedCall& backlog_at(const Rpc& r, const ClientSession& c, std::uint32_t i) noexcept {
  return c.backlog[place_in_ring(r.context.config.rpc.backlog, c.backlog_first, i)];
}
/// Keeps a call until it can be sent. Errors: not_connected, would_block (rpc.backlog calls wait),
/// no_buffer. Cold unless the window is full.
Status enqueue_call(Rpc& r, ClientSession& c, CallRequest call, const ReplyCallback& done) noexcept;
/// Sends calls from the backlog while the session and the engine have room.
void send_backlog(Rpc& r, ClientSession& c) noexcept;
/// Ends entry `i` of the backlog, with its own outcome if it has one.
void end_backlogged(Rpc& r, ClientSession& c, std::uint32_t i, Status status) noexcept;
/// Sends from the backlogs of sessions that waited for receives or send entries of the engine.
[[gnu::cold, gnu::noinline]] void resume_blocked_sessions(Rpc& r) noexcept;

// In session_liveness.cc.
/// Sends a ping to a silent server, asks for its probe, or ends the session: then false.
bool check_server_liveness(Rpc& r, ClientSession& c, std::uint64_t now) noexcept;

// In receive_reservation.cc.
/// Receives for pings, and for datagrams that come late or twice.
inline constexpr std::uint32_t kUnsolicitedReceives = 24;
/// Reserves as many receives as the session may send requests at once, if there are any left.
[[gnu::cold, gnu::noinline]] void reserve_window_receives(Rpc& r, ServerSession& s) noexcept;
void return_receives(Rpc& r, ServerSession& s) noexcept;

// In server_session.cc.
/// Memory of the call's slot to write a reply into; empty if there is none.
std::span<std::byte> reserve_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                   std::size_t size) noexcept;
/// Prepares a reply buffer in a block of `most` bytes, at `offset`.
std::span<std::byte> prepare_reply_buffer(Rpc& r, ReplyBuffer& space, std::uint32_t number,
                                          std::size_t size, std::size_t most,
                                          std::size_t offset) noexcept;
/// A reserved reply.
struct ReservedReply {
  Block* block = nullptr;
  const std::byte* data = nullptr;
};
/// The memory that the call reserved; no block if it reserved less than `size` bytes.
ReservedReply find_reserved_reply(Rpc& r, std::uint32_t session, std::uint32_t number,
                                  std::size_t size) noexcept;
/// Makes the server's record of a session. A full server forgets the oldest one whose client was
/// never heard. Null if the clients of all rpc.sessions were. May throw.
ServerSession* accept_session(Rpc& r, const wire::SessionEnd& peer, PeerAddress* peer_address);
inline ServerSession* find_server(Rpc& r, std::uint32_t name) noexcept {
  ServerSession* const s = r.servers.find(wire::RpcName::index(name));
  return s != nullptr && s->name == name ? s : nullptr;
}
void release_server_session(Rpc& r, ServerSession& s) noexcept;
/// Releases the session of a silent client, which is told if it is heard again.
void forget_session(Rpc& r, ServerSession& s) noexcept;
/// A datagram of a session that does not exist here.
[[gnu::cold]] void on_unknown_session(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                                      const std::byte* grh) noexcept;
void on_client_control(Rpc& r, const wire::RpcHeader& header, const ibv_wc& wc,
                       const std::byte* grh) noexcept;
void on_server_timer(Rpc& r, ServerSession& s) noexcept;

/// Copies bytes into a block of the send pool; null if the pool is empty.
Block* copy_to_send_block(Rpc& r, const std::byte* data, std::size_t size) noexcept;
/// Sends header and payload; false, and nothing sent, if the port is full.
bool send(Rpc& r, const verbs::DatagramAddress& to, const wire::RpcHeader& header,
          const Payload& payload) noexcept;

}  // namespace spinwire::rpc
