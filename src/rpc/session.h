// The records of sessions, their slots, and the calls that wait for a slot. Hot fields first.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "agent/engine_context.h"
#include "agent/reconnect_plan.h"
#include "base/intrusive_list.h"
#include "base/timer_wheel.h"
#include "control/address.h"
#include "control/owners.h"
#include "control/source_share.h"
#include "rpc/peer_address.h"
#include "spinwire/rpc.h"
#include "wire/handshake.h"
#include "wire/rpc_datagram.h"

namespace spinwire::rpc {

using detail::Block;
using detail::CallRef;

inline constexpr std::uint32_t kNone = agent::kNone;
inline constexpr std::uint32_t kWindowMax = wire::kSessionWindowMax;

/// A payload: up to kSlotPayloadBytes, or a reference to the block of a longer one. All of `text`
/// may be sent whatever the size, so `text` must only hold bytes that the peer may see.
struct Payload {
  struct Reference {
    const std::byte* data;
    std::uint64_t is_copy;  ///< 1: the block is ours, not the application's; no padding follows
  };
  Block* block = nullptr;  ///< null: the payload is in `text`
  union {
    Reference in;
    std::byte text[kSlotPayloadBytes];
    std::uint64_t arrived_at;  ///< tick; while a request is not answered
  };
  Payload() noexcept : text{} {}
};

/// ClientSlot::resends of a request that has found no room yet.
inline constexpr std::uint8_t kNotSent = UINT8_MAX;

// ClientSlot::flags.
inline constexpr std::uint8_t kOnSessionTimer = 1;  ///< due before the retransmission timer
/// CallOptions::when_not_ready of the call differs from the session's.
inline constexpr std::uint8_t kOverridesSession = 2;

/// A client's slot: one of the calls that a session may have in flight.
struct alignas(64) ClientSlot {
  std::uint32_t number = 0;  ///< of the present call, else the next; low bits: the slot
  Method method = 0;
  std::uint16_t size = 0;
  std::uint64_t sent_at = 0;
  std::uint64_t deadline = 0;  ///< tick
  ReplyCallback done;
  std::uint32_t id = 0;      ///< CallId::number
  std::uint8_t resends = 0;  ///< times sent again, or kNotSent
  std::uint8_t flags = 0;    ///< kOnSessionTimer, kOverridesSession
  std::optional<Status>
      outcome;  ///< set: the call is over, and its callback is due; see call_cancel.h
  Payload payload;
};
static_assert(sizeof(ClientSlot) == 128);

/// The congestion window, in fractions of a call; see congestion.cc.
inline constexpr std::uint32_t kCwndPerCall = 256;
struct CongestionWindow {
  std::uint32_t cwnd = 0;
  std::uint32_t max_cwnd = 0;       ///< 0: no congestion control
  std::uint64_t last_decrease = 0;  ///< tick
  std::uint64_t next_send = 0;      ///< tick before which no call goes out; 0: no pacing
};
/// The RTO of a call doubles with each resend, at most this many times.
inline constexpr unsigned kMaxBackoffShift = 6;
/// A reply carries the time for which the server had the request, in units of 2^kServerTimeShift
/// ns. kServerTimeMax means that long or longer, or that the server slept when the request came.
inline constexpr unsigned kServerTimeShift = 10;
inline constexpr std::uint16_t kServerTimeMax = UINT16_MAX - 1;
/// The server's time in a reply that is sent again.
inline constexpr std::uint16_t kServerTimeUnknown = UINT16_MAX;

/// A call as the application makes it. Passed by value, so that it stays in registers on the hot
/// path.
struct CallRequest {
  Method method;
  const std::byte* data;
  std::size_t size;
  Block* block;            ///< null: copy the data
  std::uint64_t now;       ///< tick
  std::uint64_t deadline;  ///< tick
};

/// A call that waits: for its session's window, for room in the engine, or for the connection.
struct BackloggedCall {
  Method method = 0;
  std::uint32_t size = 0;
  std::uint32_t id = 0;
  bool waits_until_ready = false;  ///< stays if its session is interrupted
  std::uint64_t deadline = 0;
  ReplyCallback done;
  std::optional<Status> outcome;  ///< see ClientSlot::outcome
  Payload payload;
};

// The ends of a session's connection; see transport/connection_transport.h.
struct ConnectionEnd;
ConnectionEnd*& next_queued(ConnectionEnd& end) noexcept;
base::IntrusiveLinks<ConnectionEnd>& blocked_links(ConnectionEnd& end) noexcept;
struct ConnectionClient;
base::IntrusiveLinks<ConnectionClient>& request_links(ConnectionClient& client) noexcept;
struct ConnectionServer;
struct ConnectionDeleter {
  void operator()(ConnectionClient* connection) const noexcept;
  void operator()(ConnectionServer* connection) const noexcept;
};

/// Why a session ends; none: it was closed in order.
using EndReason = std::optional<Error>;
/// How calls that may have been sent end with their session. Other statuses would say whether the
/// handlers have run.
inline Status status_of_calls(const Error& why) noexcept {
  return why.status == Status::flushed ? Status::flushed : Status::peer_lost;
}
inline Status status_of_calls(const EndReason& why) noexcept {
  return why ? status_of_calls(*why) : Status::flushed;
}

/// How the calls end that were never sent. `was_ready`: the session.
inline Status status_of_unsent_calls(const EndReason& why, bool was_ready) noexcept {
  return !why || was_ready ? status_of_calls(why) : Status::not_connected;
}

/// What the handshake has shown of a session's peer.
struct SessionPeer {
  control::AddressText address;
  control::KeyName key{};                       ///< that it has proved
  std::unique_ptr<PrivateData> private_data{};  ///< null: it gave none
};
inline PeerIdentity identity_of(const std::unique_ptr<SessionPeer>& peer) noexcept {
  if (peer == nullptr) return {};
  PeerIdentity identity{peer->address.view(), peer->key.view(), {}};
  if (peer->private_data != nullptr) identity.private_data = peer->private_data->bytes();
  return identity;
}

/// A session's view of a silent peer, beside `last_heard`.
struct Liveness {
  /// Tick when the peer's last ping, pong, goodbye or close came. While a client's session awaits
  /// the proof: tick of our last ping, or of a malformed answer; the latter is that of the poll's
  /// begin, which may be before our ping.
  std::uint64_t last_ping_or_close = 0;
  std::uint64_t last_check = 0;    ///< tick
  std::uint64_t silent_ticks = 0;  ///< silence while an answer was due
};

/// State that a client's session keeps between attempts to open it; see session_reconnect.h.
struct SessionReconnect {
  agent::ReconnectPlan plan;
  Callback<void(Session, const Error&)> on_interrupted;
  /// Port and GID of the connection that the present attempt uses for all calls; none: the engine's
  /// own, and datagrams.
  std::optional<verbs::Place> place{};
  Error first{Status::ok, {}, {}, {}};  ///< why the session was lost; ok while it is ready
  std::uint64_t ready_at = 0;           ///< tick
  bool backing_off = false;             ///< the next attempt waits for ClientSession::deadline
  bool is_over = false;                 ///< the engine drains: there is no further attempt
  bool returns = false;                 ///< it is leaving, and will be opened again
  /// Tick of the first call that the server refused because the session ends, before it has said
  /// goodbye; 0: none. See refused_calls.h.
  std::uint64_t refused_at = 0;
};

/// What a session waits for before on_writable runs; see room_for_calls.h.
struct RoomForCalls {
  std::size_t block_bytes = 0;  ///< of the send pool; 0: none is needed
  bool is_waiting = false;      ///< in Rpc::room_waiters
  bool inline_calls = false;    ///< their backlog was full
  bool long_calls = false;
};

/// The slots of a session whose datagrams found no room; see unsent.h.
template <typename Session>
struct Unsent {
  base::IntrusiveLinks<Session> links;  ///< in a list of the peer's
  std::uint64_t slots = 0;              ///< a bit for each; none: the session is in no list
  std::uint32_t turn = 0;               ///< the slot from which the next one is looked for
};

inline constexpr std::uint64_t kProbeUnderWay = ~std::uint64_t{0};
/// Probes of a session's server at the address that the session dialled; see session_liveness.h.
struct ServerProbes {
  std::uint64_t next_at = 0;  ///< tick, or kProbeUnderWay
  control::ProbeOutcome last = control::ProbeOutcome::none;
};

/// A client's session. A call reads the first cacheline, its reply also the second.
struct alignas(64) ClientSession {
  static constexpr std::size_t kHotBytes = 128;
  PeerAddress* peer_address = nullptr;  ///< the server; null until the server has answered
  std::uint32_t name = 0;               ///< our name of the session; 0: a free record
  std::uint32_t generation = 0;         ///< of the record, for handles
  std::uint64_t free_slots = 0;         ///< a bit for each slot without a call
  std::uint64_t last_heard = 0;         ///< tick of the last reply; see last_heard_from()
  ClientSlot* slots = nullptr;          ///< right behind this record
  std::uint32_t backlog_count = 0;
  std::uint32_t last_call_id = 0;
  std::uint32_t peer_session = 0;  ///< the server's name of the session
  std::uint16_t max_inline_call = 0;
  std::uint16_t window = 0;
  std::uint16_t in_flight = 0;  ///< calls in slots
  std::uint16_t send_window =
      0;  ///< calls that may be in flight as datagrams; see update_send_window()
  std::uint16_t server_window = 1;  ///< calls for which the server has receives
  SessionState state = SessionState::closed;
  bool is_blocked = false;  ///< in Rpc::blocked_sessions

  alignas(64) CongestionWindow congestion;
  std::uint16_t retransmission_place = 0;  ///< while calls are in flight
  // Ticks; see update_rto().
  std::uint64_t srtt = 0;
  std::uint64_t rttvar = 0;
  std::uint64_t rto = 0;      ///< retransmission time-out
  std::uint64_t min_rtt = 0;  ///< see congestion.cc
  // Cold. The backlog: a ring in a block that exists while calls wait.
  BackloggedCall* backlog = nullptr;
  Block* backlog_block = nullptr;
  std::uint32_t backlog_first = 0;
  std::uint32_t backlog_room = 0;  ///< entries of the ring
  ClientSession* next_blocked = nullptr;
  Unsent<ClientSession> unsent;  ///< requests
  ClientSession* next_pending = nullptr;
  ClientSession* next_room_waiter = nullptr;
  RoomForCalls room;
  bool cancellation_pending = false;  ///< in Rpc::pending_cancellations
  base::Timer timer;
  std::uint32_t retransmissions = 0;  ///< requests sent again
  std::uint64_t slow_since = 0;       ///< tick since when at most one, slow, call was in flight
  std::uint64_t recent_min_rtt = 0;   ///< since slow_since
  /// Tick when opening or closing ends, or the next attempt to open begins; 0: none.
  std::uint64_t deadline = 0;
  /// Tick since when the server may be lost: its connection for long calls was lost or refused. 0:
  /// no such reason. See check_doubt().
  std::uint64_t doubted_since = 0;
  bool is_leaving = false;  ///< makes no new calls; see session_goodbye.h
  Goodbye goodbye;          ///< of the server
  Liveness liveness;
  ServerProbes probes;
  Callback<void(Session)> on_ready;
  Callback<void(Session, const Error&)> on_closed;
  Callback<void(Session)> on_writable;
  control::HandshakeId handshake;         ///< opens the session; may be over
  std::uint32_t aligned_at_call = kNone;  ///< last_call_id when all slots had equally many uses
  /// The server's token; while the session is being opened, ours. See wire::SessionEnd::token.
  std::uint64_t token = 0;
  std::string address;                        ///< of the present attempt
  observe::EventSource event_source{};        ///< of that address
  std::unique_ptr<PrivateData> private_data;  ///< for the server; null: none
  std::unique_ptr<SessionPeer> peer;          ///< null until the server has answered
  Nanoseconds timeout{0};                     ///< of each attempt
  WhenNotReady when_not_ready = WhenNotReady::fail;
  std::unique_ptr<SessionReconnect> reconnect;                      ///< null: it is opened once
  Transport transport = Transport::datagram;                        ///< known with peer_address
  std::unique_ptr<ConnectionClient, ConnectionDeleter> connection;  ///< null: not needed yet
};
static_assert(offsetof(ClientSession, congestion) == 64);

/// unsent: answered, but the reply has found no room yet.
enum class ServerSlotState : std::uint8_t { none, running, answered, unsent };

/// A server's slot: the last call and its reply.
struct alignas(64) ServerSlot {
  std::uint32_t number = 0;
  ServerSlotState state = ServerSlotState::none;
  std::uint8_t status = 0;  ///< as in wire::RpcHeader
  std::uint16_t size = 0;
  Payload payload;
};
static_assert(sizeof(ServerSlot) == 64);

/// Memory in which a handler builds its reply. The reply is sent from there.
struct ReplyBuffer {
  Block* block = nullptr;    ///< kept for the slot's next call until the session is idle
  std::uint32_t number = 0;  ///< the call that reserved the memory
  std::uint32_t size = 0;    ///< reserved bytes
};
inline void release_reply_buffer(ReplyBuffer& buffer) noexcept {
  if (buffer.block != nullptr) detail::release(std::exchange(buffer.block, nullptr));
}

struct SessionSource;

// A reply with a callback; see reply_completion.h.
struct ReplyCompletion;
base::IntrusiveLinks<ReplyCompletion>& links_in_session(ReplyCompletion& completion) noexcept;
ReplyCompletion*& next_due(ReplyCompletion& completion) noexcept;

/// Bit of ServerSession::advertised_window above what travels: requests of a session that is
/// leaving then take the cold path.
inline constexpr std::uint32_t kTakesNoCalls = 1u << 16;
/// A served session that ends in order; see session_goodbye.h. Ticks.
struct ServedLeaving {
  Goodbye goodbye;
  std::uint64_t deadline = 0;    ///< then it ends, whatever is in progress
  std::uint64_t idle_since = 0;  ///< no call is in progress; 0: one is
  std::uint64_t interval = 0;    ///< until the client is told again
  bool is_told = false;          ///< over the present connection
};

inline base::IntrusiveLinks<ClientSession>& unsent_request_links(ClientSession& c) noexcept {
  return c.unsent.links;
}

struct alignas(64) ServerSession {
  static constexpr std::size_t kHotBytes = 64;
  PeerAddress* peer_address = nullptr;  ///< the client
  std::uint32_t peer_session = 0;       ///< the client's name of the session
  std::uint32_t name = 0;               ///< our name of the session; 0: a free record
  std::uint32_t window = 0;
  /// Calls that receives are reserved for: the window, or a part of it while others need them; 1:
  /// none are reserved; 0: there was no request yet. May have kTakesNoCalls.
  std::uint32_t advertised_window = 0;
  std::uint32_t longest_datagram = 0;  ///< that it may be sent, bytes
  ServerSlot* slots = nullptr;         ///< right behind this record
  std::uint64_t last_heard = 0;        ///< tick of the last request; see last_heard_from()
  std::unique_ptr<ReplyBuffer[]> reply_buffers;  ///< one per slot; null: no handler reserved one
  // Cold.
  Unsent<ServerSession> unsent;  ///< replies
  base::Timer timer;
  Liveness liveness;
  std::uint64_t opened_at = 0;     ///< tick
  std::uint64_t token = 0;         ///< ours; see wire::SessionEnd::token
  std::uint32_t client_proof = 0;  ///< of the client's token, for path challenges
  base::IntrusiveLinks<ServerSession> never_used;
  SessionSource* source = nullptr;  ///< in Rpc::sources
  Transport transport = Transport::datagram;
  bool in_never_used_list = false;     ///< of its source
  bool is_path_validated = false;      ///< the client receives datagrams at its address
  bool takes_goodbyes = false;         ///< the client understands RpcKind::goodbye
  bool takes_refusal_codes = false;    ///< the client understands wire::kHasCode
  ServedLeaving leaving;               ///< while is_leaving()
  control::SourceShare::Place share;   ///< in Rpc::share
  std::uint32_t calls_over_below = 0;  ///< calls below this number; see drop_replies_below()
  std::uint32_t kept_replies = 0;      ///< when they were last counted; see kept_replies.cc
  /// Tick of the last count, if it found neither a kept reply nor a call in progress; else 0.
  std::uint64_t empty_at = 0;
  std::unique_ptr<SessionPeer> peer;
  base::IntrusiveList<links_in_session> completions;                ///< that are not due
  std::unique_ptr<ConnectionServer, ConnectionDeleter> connection;  ///< null: no connection
};

inline bool is_leaving(const ServerSession& s) noexcept {
  return (s.advertised_window & kTakesNoCalls) != 0;
}
inline base::IntrusiveLinks<ServerSession>& unsent_reply_links(ServerSession& s) noexcept {
  return s.unsent.links;
}

/// The served sessions of one peer host.
struct SessionSource {
  control::Source address{};
  observe::EventSource event_source{};
  std::uint32_t sessions = 0;
  std::uint32_t unused = 0;             ///< in `never_used`
  std::uint32_t kept_replies = 0;       ///< when they were last counted; see kept_replies.cc
  std::uint32_t reserved_receives = 0;  ///< of its sessions
  bool has_share = false;               ///< of what sessions share; false: it may have all
  /// The oldest first. A session leaves it with its first request or ping, or when its connection
  /// is known to have heard the client.
  base::IntrusiveList<&ServerSession::never_used> never_used;
};

/// A call whose latency is measured; see call_samples.h.
struct CallSample {
  ReplyCallback done;          ///< the application's
  std::uint64_t accepted = 0;  ///< tick
  Method method = 0;
  bool in_use = false;
};

/// The inline call whose handler is running. Most calls are answered inside their handler.
struct CurrentCall {
  CallRef call;  ///< of session 0: no handler runs
  ServerSession* session = nullptr;
  ServerSlot* slot = nullptr;
  Method method = 0;
};
static_assert(sizeof(CallRef) == sizeof(std::uint64_t));
inline bool is_same(CallRef a, CallRef b) noexcept {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}
/// The call of a request; its datagram begins with the CallRef. The session must exist here.
inline CallRef call_of(const wire::RpcWords& request) noexcept {
  return std::bit_cast<CallRef>(request.low);
}

/// Tick at which the peer was last heard, by a call or a ping.
template <typename Session>
std::uint64_t last_heard_from(const Session& s) noexcept {
  return std::max(s.last_heard, s.liveness.last_ping_or_close);
}

/// Remembers a session that the server released. The server notifies the client if it is heard
/// again, until the device reports the client's process dead, or kRememberedFor has passed. Only
/// sessions whose client has shown that it receives datagrams at its address have one.
struct SessionTombstone {
  std::uint32_t name = 0;  ///< our name; 0: a free entry
  std::uint32_t peer_session = 0;
  std::uint32_t proof = 0;              ///< of the session's token
  PeerAddress* peer_address = nullptr;  ///< holds a reference
  std::uint64_t released_at = 0;        ///< tick
  std::uint64_t notified_at = 0;        ///< tick
  bool has_left = false;                ///< the server ended the session, with this goodbye
  std::uint32_t goodbye = 0;
};
inline constexpr Nanoseconds kRememberedFor = std::chrono::minutes(10);
struct SessionTombstones {
  /// Indexed by name; a newer session replaces an older one in its entry. Allocated at the first
  /// forgotten session.
  std::unique_ptr<std::array<SessionTombstone, 4096>> entries;
  std::uint32_t next_review = 0;  ///< see review_tombstone()
};

}  // namespace spinwire::rpc
