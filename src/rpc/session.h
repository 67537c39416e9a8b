// The records of sessions, of their slots, and of the calls that wait for a slot. Hot fields first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "agent/engine_context.h"
#include "base/timer_wheel.h"
#include "rpc/peer_address.h"
#include "spinwire/rpc.h"
#include "wire/handshake.h"

namespace spinwire::rpc {

using detail::Block;

inline constexpr std::uint32_t kNone = agent::kNone;
inline constexpr std::uint32_t kWindowMax = wire::kSessionWindowMax;

/// A payload of up to kShortCall bytes, or where a longer one lies, with a reference to its block.
/// The peer may see all of `text`, whatever the size: nothing is ever in it but what it was sent
/// before, or may know.
struct Payload {
  Block* block = nullptr;  ///< null: short
  union {
    const std::byte* data;
    std::byte text[kShortCall];
    std::uint64_t arrived_at;  ///< tick at which a request came that is not answered yet
  };
  Payload() noexcept : text{} {}
};

/// One of the calls that a session may have under way.
struct alignas(64) ClientSlot {
  std::uint32_t number = 0;  ///< of this one, or the next; its low bits are the slot
  Method method = 0;
  std::uint16_t size = 0;
  std::uint64_t sent_at = 0;
  std::uint64_t deadline = 0;  ///< tick
  ReplyCallback done;
  std::uint32_t id = 0;      ///< as the application calls it
  std::uint8_t resends = 0;  ///< times sent again
  bool on_session_timer =
      false;  ///< the session's timer looks at it, too: it is due before the watch
  Payload payload;
};
static_assert(sizeof(ClientSlot) == 128);

/// What a session may send, as congestion.cc has it; in parts of a call.
inline constexpr std::uint32_t kCwndPerCall = 256;
struct CongestionWindow {
  std::uint32_t cwnd = 0;
  std::uint32_t max_cwnd = 0;       ///< what it may grow to; 0: nobody asks for congestion control
  std::uint64_t last_decrease = 0;  ///< tick
  std::uint64_t next_send = 0;      ///< tick before which no call goes out; 0: none such
};
/// So often the patience with a call is doubled at most.
inline constexpr unsigned kMaxBackoffShift = 6;
/// How long a server had a request is told in so many nanoseconds, shifted; kHeldMost: or longer.
inline constexpr unsigned kServerTimeShift = 10;
inline constexpr std::uint16_t kServerTimeMax = UINT16_MAX - 1;
/// Of an answer that is sent again.
inline constexpr std::uint16_t kServerTimeUnknown = UINT16_MAX;

/// One that waits for its turn.
struct BackloggedCall {
  Method method = 0;
  std::uint32_t size = 0;
  std::uint32_t id = 0;
  std::uint64_t deadline = 0;
  ReplyCallback done;
  Payload payload;
};
/// Takes number `i` of the `count` that wait in a ring out of it; those behind it move up.
template <typename Entry>
Entry remove_from_ring(Entry* ring, std::uint32_t room, std::uint32_t& first, std::uint32_t& count,
                       std::uint32_t i) noexcept {
  Entry taken = std::exchange(ring[(first + i) % room], {});
  --count;
  if (i == 0) {
    first = (first + 1) % room;
  } else {
    for (; i != count; ++i)
      ring[(first + i) % room] = std::exchange(ring[(first + i + 1) % room], {});
  }
  return taken;
}

// Calls that are longer than a datagram, or that no datagrams are there for, see bulk.h.
struct ConnectionEnd;
struct ConnectionClient;
struct ConnectionServer;
struct ConnectionDeleter {
  void operator()(ConnectionClient* connection) const noexcept;
  void operator()(ConnectionServer* connection) const noexcept;
};

/// The first cacheline is what a call needs, the second what its reply needs besides.
struct alignas(64) ClientSession {
  static constexpr std::size_t kHotBytes = 128;
  PeerAddress* peer_address = nullptr;  ///< the server; null until it has answered
  std::uint32_t name = 0;               ///< what we call it; 0: a free record
  std::uint32_t generation = 0;         ///< and which use of the record this is, for handles
  std::uint64_t free_slots = 0;         ///< slots without a call
  std::uint64_t last_heard = 0;         ///< tick of the last reply; see last_sign()
  ClientSlot* slots = nullptr;          ///< right behind this record
  std::uint32_t backlog_count = 0;
  std::uint32_t last_call_id = 0;
  std::uint32_t peer_session = 0;  ///< what the server calls it
  std::uint16_t max_inline_call = 0;
  std::uint16_t window = 0;
  std::uint16_t in_flight = 0;      ///< calls active
  std::uint16_t send_window = 0;    ///< of `window`, now; 0 unless ready: see allow()
  std::uint16_t server_window = 1;  ///< of `window`, as the server has room for
  SessionState state = SessionState::closed;
  bool is_blocked = false;  ///< in Rpc::stalled

  alignas(64) CongestionWindow congestion;
  std::uint16_t retransmission_place = 0;  ///< its place in Rpc::watch, while calls are under way
  // Ticks; see measure().
  std::uint64_t srtt = 0;
  std::uint64_t rttvar = 0;
  std::uint64_t rto = 0;      ///< until a request is sent again, the first time
  std::uint64_t min_rtt = 0;  ///< round trip; see congestion.cc
  // Cold. Those that wait: a ring of `backlog` entries, in a block that is there while it is
  // needed.
  BackloggedCall* backlog = nullptr;
  Block* backlog_block = nullptr;
  std::uint32_t backlog_first = 0;
  std::uint32_t next_blocked = kNone;
  base::Timer timer;
  std::uint64_t slow_since = 0;  ///< tick since when no more than one call was under way, and slow
  std::uint64_t recent_min_rtt = 0;       ///< the shortest round trip since then
  std::uint64_t last_control = 0;         ///< tick at which anything else was heard
  std::uint64_t deadline = 0;             ///< tick; of opening or closing
  std::uint64_t last_liveness_check = 0;  ///< tick of the timer's last look
  std::uint64_t silent_ticks = 0;  ///< ticks of silence seen while something was to be answered
  Callback<void(Session)> on_ready;
  Callback<void(Session, const Error&)> on_closed;
  std::uint32_t handshake = kNone;  ///< the engine's exchange that opens it
  std::uint32_t aligned_at_call =
      kNone;  ///< last_call when all slots were seen to have as many uses
  std::string address;
  Transport transport = Transport::datagram;                        ///< known with peer_address
  std::unique_ptr<ConnectionClient, ConnectionDeleter> connection;  ///< once it was needed
};
static_assert(offsetof(ClientSession, congestion) == 64);

enum class ServerSlotState : std::uint8_t { none, running, answered };

/// The server's end of a slot: what it was last asked, and the answer.
struct alignas(64) ServerSlot {
  std::uint32_t number = 0;
  ServerSlotState state = ServerSlotState::none;
  Status status = Status::ok;
  std::uint16_t size = 0;
  Payload payload;
};
static_assert(sizeof(ServerSlot) == 64);

/// Memory that a reply is written into where it is sent from.
struct ReplyBuffer {
  Block* block = nullptr;    ///< stays, for the next call in the same place, until it is idle
  std::uint32_t number = 0;  ///< of the call that has asked
  std::uint32_t size = 0;    ///< for so many bytes
};
inline void release_reply_buffer(ReplyBuffer& space) noexcept {
  if (space.block != nullptr) detail::release(std::exchange(space.block, nullptr));
}

struct alignas(64) ServerSession {
  static constexpr std::size_t kHotBytes = 64;
  PeerAddress* peer_address = nullptr;  ///< to the client
  std::uint32_t peer_session = 0;       ///< what the client calls it
  std::uint32_t name = 0;               ///< what we do; 0: a free record
  std::uint32_t window = 0;
  std::uint32_t advertised_window = 1;  ///< calls at once that there are receives for
  std::uint32_t mtu = 0;
  ServerSlot* slots = nullptr;                   ///< right behind this record
  std::uint64_t last_heard = 0;                  ///< tick of the last request; see last_sign()
  std::unique_ptr<ReplyBuffer[]> reply_buffers;  ///< once asked for: of each service
  // Cold.
  base::Timer timer;
  std::uint64_t last_control = 0;  ///< tick at which anything else was heard
  std::uint64_t last_liveness_check = 0;
  std::uint64_t silent_ticks = 0;
  Transport transport = Transport::datagram;
  std::uint32_t forgotten = 0;  ///< calls below this number are, see forget_calls()
  std::unique_ptr<ConnectionServer, ConnectionDeleter>
      connection;  ///< while the client has a connection for that
};

/// The call whose handler runs: most are answered there.
struct CurrentCall {
  std::uint64_t call = 0;  ///< name_of() it; 0: none
  ServerSession* session = nullptr;
  ServerSlot* service = nullptr;
};
constexpr std::uint64_t call_key(std::uint32_t session, std::uint32_t number) noexcept {
  return session | std::uint64_t{number} << 32;
}

/// When the peer was there. Pings tell that, and nothing about calls.
template <typename Session>
std::uint64_t last_heard_from(const Session& s) noexcept {
  return std::max(s.last_heard, s.last_control);
}

/// A session that a server has forgotten, for when its client is heard again.
struct ForgottenSession {
  std::uint32_t name = 0;  ///< as it was called here; 0: none
  std::uint32_t peer_session = 0;
  PeerAddress* peer_address = nullptr;  ///< used by this
  std::uint64_t notified_at = 0;        ///< tick
};
/// By their names: of more than these, some are not remembered.
using ForgottenSessions = std::array<ForgottenSession, 4096>;

}  // namespace spinwire::rpc
