// The records of sessions, of their slots, and of the calls that wait for a slot. Hot fields first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "agent/engine_context.h"
#include "base/intrusive_list.h"
#include "base/timer_wheel.h"
#include "control/owners.h"
#include "rpc/peer_address.h"
#include "spinwire/rpc.h"
#include "wire/handshake.h"

namespace spinwire::rpc {

using detail::Block;

inline constexpr std::uint32_t kNone = agent::kNone;
inline constexpr std::uint32_t kWindowMax = wire::kSessionWindowMax;

/// A payload: up to kShortCall bytes, or a reference to the block of a longer one. All of `text`
/// may be sent whatever the size, so it only ever holds bytes that the peer may see.
struct Payload {
  Block* block = nullptr;  ///< null: short
  union {
    const std::byte* data;
    std::byte text[kShortCall];
    std::uint64_t arrived_at;  ///< tick; of a request that is not answered yet
  };
  Payload() noexcept : text{} {}
};

/// A client's slot: one of the calls that a session may have in flight.
struct alignas(64) ClientSlot {
  std::uint32_t number = 0;  ///< of the present call, or else the next; its low bits are the slot
  Method method = 0;
  std::uint16_t size = 0;
  std::uint64_t sent_at = 0;
  std::uint64_t deadline = 0;  ///< tick
  ReplyCallback done;
  std::uint32_t id = 0;           ///< CallId::number
  std::uint8_t resends = 0;       ///< times sent again
  bool on_session_timer = false;  ///< it is due before the retransmission timer
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
/// A reply tells how long the server had the request, in units of 2^kServerTimeShift ns;
/// kServerTimeMax: that long or longer.
inline constexpr unsigned kServerTimeShift = 10;
inline constexpr std::uint16_t kServerTimeMax = UINT16_MAX - 1;
/// In a reply that is sent again.
inline constexpr std::uint16_t kServerTimeUnknown = UINT16_MAX;

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

/// A call that waits for its session's window or for room in the engine.
struct BackloggedCall {
  Method method = 0;
  std::uint32_t size = 0;
  std::uint32_t id = 0;
  std::uint64_t deadline = 0;
  ReplyCallback done;
  std::optional<Status> outcome;  ///< as ClientSlot::outcome
  Payload payload;
};
/// The place of entry `i` of a ring of `room`; i <= room.
inline std::uint32_t place_in_ring(std::uint32_t room, std::uint32_t first,
                                   std::uint32_t i) noexcept {
  const std::uint32_t place = first + i;
  return place < room ? place : place - room;
}
/// Closes the gap that entry `i` of the `count` in a ring leaves: the entries behind it move up.
template <typename Entry>
void erase_from_ring(Entry* ring, std::uint32_t room, std::uint32_t& first, std::uint32_t& count,
                     std::uint32_t i) noexcept {
  --count;
  if (i == 0) {
    first = place_in_ring(room, first, 1);
    return;
  }
  for (; i != count; ++i)
    ring[place_in_ring(room, first, i)] =
        std::exchange(ring[place_in_ring(room, first, i + 1)], {});
}

// The ends of a session's connection, see transport/connection_transport.h.
struct ConnectionEnd;
ConnectionEnd*& next_queued(ConnectionEnd& end) noexcept;
struct ConnectionClient;
struct ConnectionServer;
struct ConnectionDeleter {
  void operator()(ConnectionClient* connection) const noexcept;
  void operator()(ConnectionServer* connection) const noexcept;
};

/// A client's session. A call reads the first cacheline, its reply the second as well.
struct alignas(64) ClientSession {
  static constexpr std::size_t kHotBytes = 128;
  PeerAddress* peer_address = nullptr;  ///< the server; null until it has answered
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
  std::uint16_t server_window = 1;  ///< calls that the server has receives for
  SessionState state = SessionState::closed;
  bool is_blocked = false;  ///< in Rpc::blocked_sessions

  alignas(64) CongestionWindow congestion;
  std::uint16_t retransmission_place = 0;  ///< while calls are in flight
  // Ticks; see update_rto().
  std::uint64_t srtt = 0;
  std::uint64_t rttvar = 0;
  std::uint64_t rto = 0;      ///< retransmission time-out
  std::uint64_t min_rtt = 0;  ///< see congestion.cc
  // Cold. The backlog: a ring of `rpc.backlog` entries, in a block that exists while calls wait.
  BackloggedCall* backlog = nullptr;
  Block* backlog_block = nullptr;
  std::uint32_t backlog_first = 0;
  ClientSession* next_blocked = nullptr;
  ClientSession* next_pending = nullptr;
  bool cancellation_pending = false;  ///< in Rpc::pending_cancellations
  base::Timer timer;
  std::uint64_t slow_since = 0;           ///< tick since when at most one, slow, call was in flight
  std::uint64_t recent_min_rtt = 0;       ///< since slow_since
  std::uint64_t last_control = 0;         ///< tick of the last ping, pong or close
  std::uint64_t deadline = 0;             ///< tick; of opening or closing; 0: nothing to wait for
  std::uint64_t last_liveness_check = 0;  ///< tick
  std::uint64_t silent_ticks = 0;         ///< of silence while an answer was due
  Callback<void(Session)> on_ready;
  Callback<void(Session, const Error&)> on_closed;
  control::HandshakeId handshake;         ///< that opens it; may be over
  std::uint32_t aligned_at_call = kNone;  ///< last_call_id when all slots had equally many uses
  std::uint64_t join_token = 0;           ///< the server's, for a connection of this session
  std::string address;
  Transport transport = Transport::datagram;                        ///< known with peer_address
  std::unique_ptr<ConnectionClient, ConnectionDeleter> connection;  ///< null: not needed so far
};
static_assert(offsetof(ClientSession, congestion) == 64);

enum class ServerSlotState : std::uint8_t { none, running, answered };

/// A server's slot: the last call and its reply.
struct alignas(64) ServerSlot {
  std::uint32_t number = 0;
  ServerSlotState state = ServerSlotState::none;
  Status status = Status::ok;
  std::uint16_t size = 0;
  Payload payload;
};
static_assert(sizeof(ServerSlot) == 64);

/// Memory that a handler writes its reply into; it is sent from there.
struct ReplyBuffer {
  Block* block = nullptr;    ///< kept for the slot's next call until the session is idle
  std::uint32_t number = 0;  ///< of the call that reserved it
  std::uint32_t size = 0;    ///< reserved bytes
};
inline void release_reply_buffer(ReplyBuffer& space) noexcept {
  if (space.block != nullptr) detail::release(std::exchange(space.block, nullptr));
}

struct alignas(64) ServerSession {
  static constexpr std::size_t kHotBytes = 64;
  PeerAddress* peer_address = nullptr;  ///< to the client
  std::uint32_t peer_session = 0;       ///< the client's name of the session
  std::uint32_t name = 0;               ///< our name of the session; 0: a free record
  std::uint32_t window = 0;
  std::uint32_t advertised_window =
      1;  ///< calls that receives are reserved for; 1: none are reserved
  std::uint32_t mtu = 0;
  ServerSlot* slots = nullptr;   ///< right behind this record
  std::uint64_t last_heard = 0;  ///< tick of the last request; see last_heard_from()
  std::unique_ptr<ReplyBuffer[]> reply_buffers;  ///< of each slot; null: no handler reserved one
  // Cold.
  base::Timer timer;
  std::uint64_t last_control = 0;  ///< tick of the last ping, pong or close
  std::uint64_t last_liveness_check = 0;
  std::uint64_t silent_ticks = 0;
  std::uint64_t opened_at = 0;   ///< tick
  std::uint64_t join_token = 0;  ///< what a connection of the client's shows
  base::IntrusiveLinks<ServerSession> unheard;
  /// In Rpc::sources; null: its client runs on this host.
  control::SourceCounts::value_type* source = nullptr;
  Transport transport = Transport::datagram;
  bool is_unheard = false;      ///< in Rpc::unheard
  std::uint32_t forgotten = 0;  ///< calls below this number; see forget_calls_below()
  std::unique_ptr<ConnectionServer, ConnectionDeleter> connection;  ///< null: the client has none
};

/// The call whose handler runs. Most calls are answered there, so it is at hand.
struct CurrentCall {
  std::uint64_t call = 0;  ///< call_key(); 0: no handler runs
  ServerSession* session = nullptr;
  ServerSlot* service = nullptr;
};
constexpr std::uint64_t call_key(std::uint32_t session, std::uint32_t number) noexcept {
  return session | std::uint64_t{number} << 32;
}

/// Tick at which the peer was last heard, in calls or pings.
template <typename Session>
std::uint64_t last_heard_from(const Session& s) noexcept {
  return std::max(s.last_heard, s.last_control);
}

/// A session that a silent client had. The client is told if it is heard again, until its process
/// has ended, as far as the device knows, or kRememberedFor has passed.
struct ForgottenSession {
  std::uint32_t name = 0;  ///< our name; 0: a free entry
  std::uint32_t peer_session = 0;
  PeerAddress* peer_address = nullptr;  ///< holds a reference
  std::uint64_t forgotten_at = 0;       ///< tick
  std::uint64_t notified_at = 0;        ///< tick
};
inline constexpr Nanoseconds kRememberedFor = std::chrono::minutes(10);
/// By name; a newer session replaces an older one in the same entry.
using ForgottenSessions = std::array<ForgottenSession, 4096>;

}  // namespace spinwire::rpc
